"""Mistakes in advantages, running statistics and masks."""

from tests.mutants import Mutant

ADVANTAGES_TEST = "tests/advantages/test_formulas.py::"
EXACT_TEST = "tests/advantages/test_exact.py::"
LONG_TEST = "tests/advantages/test_long.py::"
MASKING_TEST = "tests/test_masking.py::"
RUNNING_TEST = "tests/test_running_stats.py::"

MUTANTS: list[Mutant] = [
    # ------------------------------------------------------------------------- along a row
    Mutant(
        name="gae-minus-the-next-advantage",
        mistake="delta - gamma lam A_{t+1}: the sign in the documentation of skrl's PPO and A2C",
        target="rlhf_pg.advantages.gae",
        old="_scan(gamma * lam, delta, mask)",
        new="_scan(-gamma * lam, delta, mask)",
        killers=(ADVANTAGES_TEST + "test_gae_by_hand",),
    ),
    Mutant(
        name="gae-without-gamma-on-lam",
        mistake="A_{t+1} decays by lam alone, not by gamma lam",
        target="rlhf_pg.advantages.gae",
        old="_scan(gamma * lam, delta, mask)",
        new="_scan(lam, delta, mask)",
        killers=(ADVANTAGES_TEST + "test_gae_with_discount_and_bootstrap_by_hand",),
    ),
    Mutant(
        name="gae-truncation-is-termination",
        mistake="a cut-off row ends with value 0: `done = terminated or truncated` of a known blog",
        target="rlhf_pg.advantages.gae",
        old="_next(_with_end(wide, bootstrap_value), mask)",
        new="_next(_with_end(wide, None), mask)",
        killers=(ADVANTAGES_TEST + "test_gae_bootstraps_where_the_row_was_cut_off",),
    ),
    Mutant(
        name="gae-bootstraps-with-the-last-state",
        mistake="gamma V(s_t) for gamma V(s_{t+1}) at a time limit: skrl's time_limit_bootstrap",
        target="rlhf_pg.advantages.gae",
        old="_next(_with_end(wide, bootstrap_value), mask)",
        new="_next(_with_end(wide, wide[:, -1]), mask)",
        killers=(
            ADVANTAGES_TEST + "test_gae_by_hand",
            ADVANTAGES_TEST + "test_gae_bootstraps_where_the_row_was_cut_off",
        ),
    ),
    Mutant(
        name="gae-runs-through-padding",
        mistake="a masked slot gives its value to the token before it: verl #2337",
        target="rlhf_pg.advantages.gae",
        old="_next(_with_end(wide, bootstrap_value), mask)",
        new="_with_end(wide, bootstrap_value)[:, 1:]",
        killers=(
            ADVANTAGES_TEST + "test_gae_skips_holes",
            ADVANTAGES_TEST + "test_padding_changes_nothing_and_stays_zero",
        ),
    ),
    Mutant(
        name="gae-value-after-the-token",
        mistake="the baseline is V of the state after the token, which depends on the token",
        target="rlhf_pg.advantages.gae",
        old="delta = rewards + gamma * next_value - wide\n",
        new="delta = rewards + gamma * next_value - next_value\n",
        killers=(EXACT_TEST + "test_expected_gradient", ADVANTAGES_TEST + "test_gae_by_hand"),
    ),
    Mutant(
        name="gae-instant-reward",
        mistake="A = reward - value, the instant reward: the PPO code of the RLHF book",
        target="rlhf_pg.advantages.gae",
        old="_scan(gamma * lam, delta, mask)",
        new="rewards - wide",
        killers=(ADVANTAGES_TEST + "test_gae_by_hand",),
    ),
    Mutant(
        name="gae-returns-are-the-advantages",
        mistake="the critic's target misses the value: returns = advantages",
        target="rlhf_pg.advantages.gae",
        old="returns = torch.where(mask, advantages + wide, 0.0)",
        new="returns = torch.where(mask, advantages, 0.0)",
        killers=(ADVANTAGES_TEST + "test_gae_by_hand",),
    ),
    Mutant(
        name="returns-reset-at-a-hole",
        mistake="a hole of the mask ends the sum, so tool calls get no credit: verl #7278",
        target="rlhf_pg.advantages.per_token._scan",
        old="torch.ones_like(paid).where(~mask, decay)",
        new="torch.zeros_like(paid).where(~mask, decay)",
        killers=(ADVANTAGES_TEST + "test_discounted_returns_count_true_slots_only",),
    ),
    Mutant(
        name="returns-discount-columns",
        mistake="gamma counts columns, holes and padding too, not the policy's own tokens",
        target="rlhf_pg.advantages.per_token._scan",
        old="torch.ones_like(paid).where(~mask, decay)",
        new="torch.ones_like(paid) * decay",
        killers=(ADVANTAGES_TEST + "test_discounted_returns_count_true_slots_only",),
    ),
    Mutant(
        name="n-step-last-return-is-the-value",
        mistake="the last return is V itself, its reward dropped: multi-step A2C of a known blog",
        target="rlhf_pg.advantages.n_step",
        old="    advantages = torch.where(mask, targets - wide, 0.0)\n",
        new="    targets[:, -1] = value[:, -1]\n"
        "    advantages = torch.where(mask, targets - wide, 0.0)\n",
        killers=(
            ADVANTAGES_TEST + "test_n_step_keeps_the_last_reward_of_a_cut_off_episode",
            ADVANTAGES_TEST + "test_n_step_by_hand",
        ),
    ),
    Mutant(
        name="powers-of-gamma-in-single",
        mistake="a power of gamma is squared and squared again in float32, with all of its error",
        target="rlhf_pg.advantages.discounted_returns",
        old="    returns = _scan(gamma, rewards.double(), mask)\n",
        new="    returns = _scan(gamma, rewards.float(), mask)\n",
        killers=(LONG_TEST + "test_a_long_row_loses_no_digits",),
    ),
    Mutant(
        name="advantages-token-by-token",
        mistake="a loop over the tokens: half a second for 8192 of them on a GPU, by its launches",
        target="rlhf_pg.advantages.per_token._scan",
        old="    for bit in range(n.bit_length()):\n",
        new="    for _ in range(n):\n"
        "        x = torch.addcmul(offset, slope, x[:, (columns + 1).clamp(max=width)])\n"
        "    for bit in range(0):\n",
        killers=(LONG_TEST + "test_twice_the_tokens_are_a_step_more_and_rows_are_none",),
    ),
    Mutant(
        name="n-step-rounded-to-a-power-of-two",
        mistake="of n only the highest bit counts",
        target="rlhf_pg.advantages.per_token._scan",
        old="if n >> bit & 1:",
        new="if bit + 1 == n.bit_length():",
        killers=(
            LONG_TEST + "test_n_steps_of_a_long_row",
            ADVANTAGES_TEST + "test_n_step_matches_the_sum",
        ),
    ),
    Mutant(
        name="lam-by-length-unclamped",
        mistake="VAPO's lam is negative for rows shorter than 1 / alpha",
        target="rlhf_pg.advantages.length_adaptive_lam",
        old=".double())).clamp(min=0)",
        new=".double()))",
        killers=(ADVANTAGES_TEST + "test_length_adaptive_lam_by_hand",),
    ),
    Mutant(
        name="lam-by-padded-width",
        mistake="VAPO's length is that of the padded row, so padding changes the advantages",
        target="rlhf_pg.advantages.length_adaptive_lam",
        old="alpha * mask.sum(1).double()",
        new="alpha * torch.ones_like(mask).sum(1).double()",
        killers=(ADVANTAGES_TEST + "test_length_adaptive_lam_by_hand",),
    ),
    # --------------------------------------------------------------------- against the group
    Mutant(
        name="grpo-population-std",
        mistake="std with ddof 0: the paper's sigma leaves it open, peers take ddof 1",
        target="rlhf_pg.advantages.group_stats",
        old="(count - 1).clamp(min=1)).sqrt()",
        new="count.clamp(min=1)).sqrt()",
        killers=(ADVANTAGES_TEST + "test_group_normalized_by_hand",),
    ),
    Mutant(
        name="grpo-equal-scores-scaled-up",
        mistake="no zero for equal scores: the rounding of seven 0.1 in float32, over eps",
        target="rlhf_pg.advantages.group_stats",
        old="    constant = low >= high\n",
        new="    constant = count < 2\n",
        killers=(ADVANTAGES_TEST + "test_a_group_without_spread_gets_exactly_zero",),
    ),
    Mutant(
        name="grpo-single-completion-keeps-its-score",
        mistake="mean 0 and std 1 for a group of one, so the raw score comes through: verl",
        target="rlhf_pg.advantages.group_normalized",
        old="torch.where(valid & ~group.constant, (wide - group.mean) / divisor, 0.0)",
        new="torch.where(valid, (wide - group.mean * (group.count > 1)) / divisor, 0.0)",
        killers=(ADVANTAGES_TEST + "test_a_group_without_spread_gets_exactly_zero",),
    ),
    Mutant(
        name="grpo-std-of-centred-scores",
        mistake='scale "batch" takes the std of what is left after the group means',
        target="rlhf_pg.advantages.group_normalized",
        old="divisor = group_stats(wide, valid, torch.zeros_like(groups)).std + eps",
        new="divisor = group_stats(wide - group.mean, valid, torch.zeros_like(groups)).std + eps",
        killers=(
            ADVANTAGES_TEST + "test_batch_scale_is_the_std_of_all_raw_valid_scores",
            ADVANTAGES_TEST + "test_each_named_estimator_by_hand",
        ),
    ),
    Mutant(
        name="groups-by-position",
        mistake="a group is what stands together, not what has the same id",
        target="rlhf_pg.advantages.per_group._index",
        old="names, index = torch.unique(groups, return_inverse=True)",
        new="names, index = torch.unique_consecutive(groups, return_inverse=True)",
        killers=(
            ADVANTAGES_TEST + "test_leave_one_out_by_hand",
            ADVANTAGES_TEST + "test_group_functions_follow_a_permutation_of_the_rows",
        ),
    ),
    Mutant(
        name="missing-score-counts",
        mistake="a score that does not apply (None) counts in the mean as a 0",
        target="rlhf_pg.advantages.group_stats",
        old="count = zeros.index_add(0, index, valid.to(x.dtype))",
        new="count = zeros.index_add(0, index, torch.ones_like(x))",
        killers=(ADVANTAGES_TEST + "test_a_missing_score_leaves_the_baseline_and_the_count",),
    ),
    Mutant(
        name="rloo-mean-with-self",
        mistake="the baseline counts the row itself: 1 - 1/G of the gradient",
        target="rlhf_pg.advantages.leave_one_out",
        old="advantage = (wide - group.mean) * group.count / (group.count - 1).clamp(min=1)",
        new="advantage = wide - group.mean",
        killers=(
            ADVANTAGES_TEST + "test_leave_one_out_by_hand",
            EXACT_TEST + "test_expected_gradient",
        ),
    ),
    Mutant(
        name="rloo-others-of-the-batch",
        mistake="the others of the whole batch, not of the same prompt: the RLHF book",
        target="rlhf_pg.advantages.estimators.estimate_leave_one_out",
        old="torch.stack([per_group.leave_one_out(c, inputs.groups) for c in columns]).sum(0)",
        new="torch.stack([per_group.leave_one_out(c, 0 * inputs.groups) for c in columns]).sum(0)",
        killers=(ADVANTAGES_TEST + "test_each_named_estimator_by_hand",),
    ),
    Mutant(
        name="opo-with-self",
        mistake="the optimal baseline counts the row itself (OPO's paper, verl's `opo`)",
        target="rlhf_pg.advantages.optimal_baseline",
        old="""total = _group_sum(weights, groups) - weights
    baseline = mean + (_group_sum(moments, groups) - moments) / total""",
        new="""total = _group_sum(weights, groups)
    baseline = mean + _group_sum(moments, groups) / total""",
        killers=(
            ADVANTAGES_TEST + "test_optimal_baseline_by_hand",
            EXACT_TEST + "test_the_others_keep_the_gradient_and_the_row_itself_biases_it",
        ),
    ),
    Mutant(
        name="opo-without-weights",
        mistake="no weights: the mean of the others has not the least variance",
        target="rlhf_pg.advantages.optimal_baseline",
        old="weights = torch.where(valid, weights.to(wide), 0.0)",
        new="weights = torch.where(valid, torch.ones_like(wide), 0.0)",
        killers=(
            EXACT_TEST + "test_the_optimal_constant_has_the_least_variance",
            ADVANTAGES_TEST + "test_optimal_baseline_by_hand",
        ),
    ),
    Mutant(
        name="opo-alone-is-its-own-baseline",
        mistake="a row without others gets its own score as baseline, so its gradient vanishes",
        target="rlhf_pg.advantages.optimal_baseline",
        old="return torch.where(valid & (total > 0), baseline, 0.0).to(",
        new="return torch.where(valid & (total > 0), baseline, mean).to(",
        killers=(
            EXACT_TEST + "test_unbiased_over_prompts_of_different_size_and_sources",
            ADVANTAGES_TEST + "test_a_row_without_others",
        ),
    ),
    Mutant(
        name="process-scores-summed-from-the-start",
        mistake="a token is credited with the steps before it, not with those from it on",
        target="rlhf_pg.advantages.process_group_normalized",
        old="discounted_returns(normal, mask)",
        new="torch.where(mask, normal.cumsum(1), 0.0)",
        killers=(ADVANTAGES_TEST + "test_process_group_normalized_by_hand",),
    ),
    Mutant(
        name="process-scores-normalised-per-row",
        mistake="mean and std of one completion's steps, not of all steps of the group",
        target="rlhf_pg.advantages.process_group_normalized",
        old="each = groups[:, None].expand_as(step_scores).reshape(-1)",
        new="each = torch.arange(len(groups))[:, None].expand_as(step_scores).reshape(-1)",
        killers=(ADVANTAGES_TEST + "test_process_group_normalized_by_hand",),
    ),
    # ----------------------------------------------------------------------- what a config names
    Mutant(
        name="baseline-of-this-process",
        mistake="scores of all processes taken for those of this one, from the first row on",
        target="rlhf_pg.advantages.AdvantageInputs.per_token",
        old="return self.over_tokens(advantages[self.rows])",
        new="return self.over_tokens(advantages[: len(self.mask)])",
        killers=(
            ADVANTAGES_TEST + "test_each_process_computes_its_own_rows_with_the_scores_of_all",
        ),
    ),
    Mutant(
        name="remax-greedy-of-another-source",
        mistake="a reward function that does not apply to the row is still in its ReMax baseline",
        target="rlhf_pg.advantages.estimators.returns_minus_greedy",
        old="torch.where(own.isnan(), 0.0, inputs.greedy_scores).nansum(1)",
        new="inputs.greedy_scores.nansum(1)",
        killers=(
            ADVANTAGES_TEST
            + "test_a_source_that_does_not_apply_to_the_row_or_its_greedy_completion"
            + "_is_in_no_baseline",
        ),
    ),
    Mutant(
        name="moving-average-of-this-step",
        mistake="this step's own scores are in the moving average already",
        target="rlhf_pg.advantages.estimators.returns_minus_moving_average",
        old="new_full(inputs.rewards.shape[:1], inputs.moving_average)",
        new="new_full(inputs.rewards.shape[:1], inputs.scores.nansum(1).mean().item())",
        killers=(EXACT_TEST + "test_expected_gradient",),
    ),
    Mutant(
        name="baseline-on-masked-tokens",
        mistake="the baseline is subtracted in masked slots too, which count in the whitening",
        target="rlhf_pg.advantages.AdvantageInputs.over_tokens",
        old="return torch.where(self.mask, numbers[:, None].to(self.rewards), 0.0)",
        new="return numbers[:, None].to(self.rewards).expand_as(self.mask)",
        killers=(
            ADVANTAGES_TEST
            + "test_named_estimators_give_detached_advantages_that_are_zero_where_masked",
        ),
    ),
    # --------------------------------------------------------------------- running statistics
    Mutant(
        name="running-variance-without-the-shift",
        mistake="variances are averaged, and the distance of the means is forgotten",
        target="rlhf_pg.running_stats.RunningMoments.update",
        old=" + delta**2 * share * (1 - share)",
        new="",
        killers=(
            RUNNING_TEST + "test_two_batches_by_hand",
            RUNNING_TEST + "test_moments_are_those_of_everything_in_any_split",
        ),
    ),
    Mutant(
        name="running-constant-blown-up",
        mistake="a constant is divided by its std of 0 plus rounding",
        target="rlhf_pg.running_stats.RunningMoments.std",
        old="return std if std > ROUNDING * abs(self.mean) else 1.0",
        new="return std + 1e-8",
        killers=(RUNNING_TEST + "test_a_constant_is_shifted_to_zero_and_never_blown_up",),
    ),
    Mutant(
        name="denormalize-without-the-mean",
        mistake="values are scaled back but not shifted back",
        target="rlhf_pg.running_stats.RunningMoments.denormalize",
        old="(widen(x) * self.std + self.mean)",
        new="(widen(x) * self.std)",
        killers=(RUNNING_TEST + "test_normalize_and_denormalize_by_hand",),
    ),
    Mutant(
        name="moving-average-from-zero",
        mistake="the average starts at 0 and is not corrected, so early baselines are too small",
        target="rlhf_pg.running_stats.MovingAverage.value",
        old="self.average / (1 - self.decay**self.updates) if self.updates else 0.0",
        new="self.average",
        killers=(RUNNING_TEST + "test_moving_average_by_hand",),
    ),
    # ------------------------------------------------------------------------------------ masks
    Mutant(
        name="mask-without-eos",
        mistake="pad equals EOS and the mask is ids != pad: EOS is never trained (TRL #4970)",
        target="rlhf_pg.masking.completion_mask",
        old="eos_before = is_eos.cumsum(dim=-1) - is_eos.long()",
        new="eos_before = is_eos.cumsum(dim=-1)",
        killers=(MASKING_TEST + "test_completion_ends_with_its_first_eos",),
    ),
    Mutant(
        name="mask-of-every-eos",
        mistake="padding that looks like EOS stays in: the first EOS does not end the row",
        target="rlhf_pg.masking.completion_mask",
        old="return eos_before == 0",
        new="return (eos_before == 0) | is_eos",
        killers=(MASKING_TEST + "test_completion_ends_with_its_first_eos",),
    ),
    Mutant(
        name="mask-of-one-eos-id",
        mistake="only the first of several EOS ids ends a row",
        target="rlhf_pg.masking.completion_mask",
        old="torch.tensor(stops, dtype",
        new="torch.tensor(stops[:1], dtype",
        killers=(MASKING_TEST + "test_completion_ends_with_its_first_eos",),
    ),
    Mutant(
        name="mean-multiplies-the-mask",
        mistake="x * mask: a NaN in a padded slot times 0 is NaN",
        target="rlhf_pg.masking.masked_mean",
        old="""    wide = torch.where(mask, widen(x), 0.0)
    total, count""",
        new="""    wide = widen(x) * mask
    total, count""",
        killers=(MASKING_TEST + "test_masked_mean_by_hand",),
    ),
    Mutant(
        name="mean-over-the-padded-width",
        mistake="the sum over tokens is divided by all slots, padding included",
        target="rlhf_pg.masking.masked_mean",
        old="(wide.sum(), mask.sum()) if dim is None",
        new="(wide.sum(), torch.ones_like(mask).sum()) if dim is None",
        killers=(
            MASKING_TEST + "test_masked_mean_by_hand",
            MASKING_TEST + "test_extra_padding_changes_nothing",
        ),
    ),
    Mutant(
        name="variance-counts-masked-slots",
        mistake="masked slots, 0 after the `where`, add their squared distance to the mean",
        target="rlhf_pg.masking.masked_var",
        old="squares = torch.where(mask, (wide - mean) ** 2, 0.0).sum()",
        new="squares = ((wide - mean) ** 2).sum()",
        killers=(MASKING_TEST + "test_masked_var_by_hand",),
    ),
    Mutant(
        name="variance-of-one-is-nan",
        mistake="Bessel's correction divides by 0 for one token",
        target="rlhf_pg.masking.masked_var",
        old="(squares / (count - int(unbiased)).clamp(min=1))",
        new="(squares / (count - int(unbiased)))",
        killers=(MASKING_TEST + "test_variance_of_fewer_than_two_slots_is_zero",),
    ),
    Mutant(
        name="whiten-by-own-statistics",
        mistake="every process whitens by its own mean and std: TRL's PPO, slime #2235",
        target="rlhf_pg.masking.whiten",
        old="    if stats is None:\n",
        new="    if True:\n",
        killers=(
            MASKING_TEST + "test_whiten_uses_the_given_statistics",
            MASKING_TEST + "test_processes_that_share_statistics_whiten_like_one",
        ),
    ),
    Mutant(
        name="whiten-rounding-noise",
        mistake="equal advantages are divided by a std that is rounding",
        target="rlhf_pg.masking.whiten",
        old="torch.where(varies, (wide - mean) * scale, 0.0)",
        new="(wide - mean) * scale",
        killers=(
            MASKING_TEST + "test_whiten_without_variance_gives_exactly_zero",
            MASKING_TEST + "test_statistics_without_variance_give_zero_and_not_scaled_up_noise",
        ),
    ),
    Mutant(
        name="whiten-shift-mean-inverted",
        mistake="shift_mean adds the mean back where it should not: torchtune, whose tests pin it",
        target="rlhf_pg.masking.whiten",
        old="if not shift_mean:",
        new="if shift_mean:",
        killers=(MASKING_TEST + "test_whiten_by_hand",),
    ),
    Mutant(
        name="whiten-leaves-masked-slots",
        mistake="masked slots get (0 - mean) / std, and are trained on",
        target="rlhf_pg.masking.whiten",
        old="return torch.where(mask, whitened, 0.0).to(",
        new="return whitened.to(",
        killers=(MASKING_TEST + "test_whiten_by_hand",),
    ),
    Mutant(
        name="group-eps-fixed",
        mistake="the eps of the group's std is a key that reaches one estimator of the two",
        target="rlhf_pg.advantages.estimators.estimate_process_group_normalized",
        old="inputs.mask, scale_rewards_eps\n",
        new="inputs.mask\n",
        killers=("tests/advantages/test_formulas.py::test_what_is_added_to_a_std_is_an_option",),
    ),
    Mutant(
        name="optimal-baseline-by-the-norm",
        mistake="|grad log pi| where its square is meant",
        target="rlhf_pg.trainers.learner.Learner.squared_gradients",
        old="        return squares\n",
        new="        return squares.sqrt()\n",
        killers=(
            "tests/trainers/test_exact_gradients.py::"
            "test_the_weights_of_the_optimal_baseline_are_squared_gradient_norms",
        ),
    ),
    Mutant(
        name="optimal-baseline-alone-in-its-group",
        mistake="one completion per prompt has no others, and silently no baseline",
        target="rlhf_pg.advantages.estimators._minus_optimal",
        old="    if len(torch.unique(groups)) == len(groups):\n",
        new="    if False:\n",
        killers=(
            ADVANTAGES_TEST
            + "test_one_completion_per_prompt_has_the_optimal_baseline_of_the_batch",
        ),
    ),
    Mutant(
        name="total-return-to-go",
        mistake="reward-to-go under the name of the total return",
        target="rlhf_pg.advantages.estimators.total_returns",
        old="    return inputs.over_tokens(to_go.gather(1, first).squeeze(1))\n",
        new="    return to_go\n",
        killers=(
            ADVANTAGES_TEST
            + "test_the_total_return_is_that_of_the_first_token_whatever_was_paid_before",
        ),
    ),
    Mutant(
        name="std-of-huge-scores",
        mistake="squares beyond float32: the std is inf, every advantage 0, and nothing says so",
        target="rlhf_pg.advantages.group_stats",
        old="    unit = _power_of_two(torch.maximum(low.abs(), high.abs()))\n",
        new="    unit = torch.ones_like(low)\n",
        killers=(
            ADVANTAGES_TEST
            + "test_scores_whose_squares_are_beyond_float32_are_normalised_to_the_same_bits",
        ),
    ),
    Mutant(
        name="whitening-of-huge-numbers",
        mistake="a variance beyond float32 whitens everything to 0",
        target="rlhf_pg.masking.whiten",
        old="torch.where(var.isinf(), exact.rsqrt().to(wide.dtype), torch.rsqrt(var + 1e-8))",
        new="torch.rsqrt(var + 1e-8)",
        killers=(
            "tests/test_masking.py::"
            "test_numbers_whose_squares_are_beyond_float32_are_whitened_like_others",
        ),
    ),
]
