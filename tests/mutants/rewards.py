"""Mistakes in rewards: where a score is placed, and how it is shaped."""

from tests.mutants import Mutant

FUNCTIONS_TEST = "tests/rewards/test_functions.py::"
PROCESS_TEST = "tests/rewards/test_process.py::"
PURE_TEST = "tests/rewards/test_scores.py::"
MODEL_TEST = "tests/rewards/test_reward_model.py::"
OPTIONS_TEST = "tests/trainers/test_reward_options.py::"

MUTANTS: list[Mutant] = [
    Mutant(
        name="reward-model-blind-to-eos",
        mistake="a reward model never sees the EOS that was sampled, where papers score",
        target="rlhf_pg.rewards.RewardModel._encode",
        old="        eos = self.sees_eos and bool(ended)\n",
        new="        eos = False\n",
        killers=(MODEL_TEST + "test_sampled_eos_is_scored",),
    ),
    Mutant(
        name="reward-model-closes-cut-turns",
        mistake="the template ends a turn that the policy did not end",
        target="rlhf_pg.rewards.RewardModel._encode",
        old="        cut = truncated and not ended and not self.closes_truncated\n",
        new="        cut = False\n",
        killers=(MODEL_TEST + "test_truncated_chat_turn_is_left_open",),
    ),
    Mutant(
        name="stop-strings-cut-turns-off",
        mistake="a chat turn that a stop string ended counts as cut off, for lack of an EOS",
        target="rlhf_pg.rewards.RewardModel._encode",
        old="        cut = truncated and not ended and not self.closes_truncated\n",
        new="        cut = ended is False and not self.closes_truncated\n",
        killers=(MODEL_TEST + "test_chat_turn_ended_by_stop_string_is_closed",),
    ),
    Mutant(
        name="event-loop-of-one-call",
        mistake="every call has an event loop of its own: a semaphore that rewards keep dies",
        target="rlhf_pg.boundary.user_code.event_loop",
        old="        if not _loops or not _answers(_loops[-1], PATIENCE):\n",
        new="        if True:\n",
        killers=(FUNCTIONS_TEST + "test_loop_bound_object_works_at_every_step",),
    ),
    Mutant(
        name="step-judged-before-its-separator",
        mistake="a process reward model is asked at the last word of a step, where it was not "
        "trained to answer",
        target="rlhf_pg.rewards.ProcessRewardModel._encode",
        old="            places.append(len(ids) - 1)\n",
        new="            places.append(len(ids) - 2)\n",
        killers=(PROCESS_TEST + "test_step_judged_at_separator_is_scored_at_last_token",),
    ),
    Mutant(
        name="steps-of-one-token-lost",
        mistake="of several steps that one token ends, all scores but the last are dropped",
        target="rlhf_pg.rewards.ProcessRewardModel.__call__",
        old="fmean(here)",
        new="here[-1]",
        killers=(PROCESS_TEST + "test_steps_end_at_tokens_of_other_policy_tokenizer",),
    ),
    # --------------------------------------------------------------------- where a score stands
    Mutant(
        name="score-behind-the-last-token",
        mistake="the score is paid in the slot after EOS, where no token is: TRL's PPO",
        target="rlhf_pg.rewards.scores.ends",
        old="    return mask.shape[1] - 1 - mask.flip(1).int().argmax(1)\n",
        new="    return mask.shape[1] - mask.flip(1).int().argmax(1).clamp(min=1)\n",
        killers=(PURE_TEST + "test_end_is_last_action_token",),
    ),
    Mutant(
        name="score-at-the-count-of-tokens",
        mistake="the last token is looked for at sum(mask) - 1: wrong where the mask has holes",
        target="rlhf_pg.rewards.scores.ends",
        old="    return mask.shape[1] - 1 - mask.flip(1).int().argmax(1)\n",
        new="    return mask.sum(1) - 1\n",
        killers=(PURE_TEST + "test_end_is_last_action_token",),
    ),
    Mutant(
        name="score-on-tool-output",
        mistake="the score stands at the last token, be it one that the policy did not choose",
        target="rlhf_pg.rewards.answers.placed",
        old="            table[i, last[i]] = _number(",
        new="            table[i, len(completion_ids[i]) - 1] = _number(",
        killers=(FUNCTIONS_TEST + "test_completion_score_is_at_last_action_token",),
    ),
    Mutant(
        name="step-one-token-late",
        mistake="the score of a step is paid at the first token of the next one",
        target="rlhf_pg.rewards.answers.placed",
        old="            table[i, : len(own)] = torch.tensor(steps, dtype=torch.float64)\n",
        new="            table[i, 1 : len(own)] = torch.tensor(steps, dtype=torch.float64)[:-1]\n",
        killers=(FUNCTIONS_TEST + "test_list_scores_steps_at_their_last_tokens",),
    ),
    Mutant(
        name="steps-summed-at-the-end",
        mistake="step scores are added up and paid as one at the end: a discount takes too much",
        target="rlhf_pg.rewards.answers.placed",
        old="            table[i, : len(own)] = torch.tensor(steps, dtype=torch.float64)\n",
        new="            table[i, last[i]] = sum(step for step in steps if step == step)\n",
        killers=(OPTIONS_TEST + "test_discounted_token_credit_covers_only_later_rewards",),
    ),
    Mutant(
        name="step-on-tool-output-is-taken",
        mistake="a step score on a token that the policy did not choose is lost without a word",
        target="rlhf_pg.rewards.answers._steps",
        old="        if not chosen and not math.isnan(number):\n",
        new="        if False:\n",
        killers=(FUNCTIONS_TEST + "test_score_for_non_action_token_raises",),
    ),
    # ------------------------------------------------------------------------- does not apply
    Mutant(
        name="total-of-nothing-is-0",
        mistake="nansum makes a source that did not apply a score of 0 in the baseline",
        target="rlhf_pg.rewards.sum_step_scores",
        old="    return scores.nansum(1).masked_fill(scores.isnan().all(1), torch.nan)\n",
        new="    return scores.nansum(1)\n",
        killers=(
            PURE_TEST + "test_totals_sum_steps_and_are_nan_without_scores",
            OPTIONS_TEST + "test_none_step_scores_are_left_out_of_baseline",
        ),
    ),
    Mutant(
        name="step-only-where-all-sources-have-one",
        mistake="a step counts for process supervision only if every source scores it",
        target="rlhf_pg.rewards.shaping.Shaping.steps",
        old="~functions.isnan().all(2)",
        new="~functions.isnan().any(2)",
        killers=(OPTIONS_TEST + "test_step_scores_are_paid_at_own_tokens",),
    ),
    Mutant(
        name="no-penalty-is-a-step",
        mistake="a penalty of 0 is one more step, worth 0, in the statistics of the group",
        target="rlhf_pg.rewards.shaping.Shaping.steps",
        old="(penalties.nansum(2) != 0)",
        new="~penalties.isnan().all(2)",
        killers=(OPTIONS_TEST + "test_process_group_normalized_counts_only_scored_steps",),
    ),
    # ---------------------------------------------------------------------- clip and normalise
    Mutant(
        name="clip-after-the-weight",
        mistake="weighted scores are clipped: a weight moves the bounds",
        target="rlhf_pg.rewards.shaping.Shaping.__call__",
        old="        scores = scores * self.weights.to(scores)\n",
        new="        scores = self._clipped(scores * self.weights.to(scores))\n",
        killers=(OPTIONS_TEST + "test_scores_are_clipped_before_weight_and_logged_raw",),
    ),
    Mutant(
        name="clip-of-the-penalties",
        mistake="the bounds of a reward function cut the penalty for a missing EOS too",
        target="rlhf_pg.rewards.shaping.Shaping._clipped",
        old="        return torch.cat([clipped(functions, low, high), penalties], dim=2)\n",
        new="        return clipped(scores, low, high)\n",
        killers=(OPTIONS_TEST + "test_scores_are_clipped_before_weight_and_logged_raw",),
    ),
    Mutant(
        name="normalise-before-the-clip",
        mistake="outliers enter the running std that what is clipped is divided by",
        target="rlhf_pg.rewards.shaping.Shaping.measured",
        old="sum_step_scores(own)",
        new="sum_step_scores(scores[:, :, : self.functions])",
        killers=(OPTIONS_TEST + "test_normalize_rewards_follows_clip",),
    ),
    Mutant(
        name="std-of-the-step",
        mistake="scores are divided by the std of this step alone, as noisy as the step is small",
        target="rlhf_pg.rewards.shaping.Shaping.observe",
        old="                moments.update(len(valid), valid.mean().item(), var)\n",
        new=(
            "                moments.count = 0.0\n"
            "                moments.update(len(valid), valid.mean().item(), var)\n"
        ),
        killers=(OPTIONS_TEST + "test_normalize_rewards_divides_by_running_std",),
    ),
    Mutant(
        name="std-of-the-steps-before",
        mistake="the first step is not normalised, since its scores enter the std after use",
        target="rlhf_pg.trainers.experience_maker._shaped",
        old=(
            "        shaping.observe(runtime.gather(measured)[0])\n    return "
            "shaping(scores, rollout)\n"
        ),
        new=(
            "        shaped = shaping(scores, rollout)\n        "
            "shaping.observe(runtime.gather(measured)[0])\n        return "
            "shaped\n    return shaping(scores, rollout)\n"
        ),
        killers=(OPTIONS_TEST + "test_normalize_rewards_divides_by_running_std",),
    ),
    Mutant(
        name="normalise-subtracts-the-mean",
        mistake="the running mean is subtracted from every step: length is paid, or fined",
        target="rlhf_pg.rewards.shaping.Shaping.__call__",
        old="            scores = scores / scores.new_tensor(stds + ones)\n",
        new=(
            "            means = [m.mean for m in self.moments.values()] + [0.0] * len(ones)\n"
            "            scores = scores - scores.new_tensor(means)\n"
            "            scores = scores / scores.new_tensor(stds + ones)\n"
        ),
        killers=(OPTIONS_TEST + "test_normalize_rewards_divides_by_running_std",),
    ),
    Mutant(
        name="moments-start-again",
        mistake="the running std of the rewards is not in the checkpoint",
        target="rlhf_pg.trainers.setup.TrainerSetup.running",
        old="self.controllers.controllers | self.shaping.moments",
        new="self.controllers.controllers | {}",
        killers=(OPTIONS_TEST + "test_resumed_run_keeps_reward_moments",),
    ),
    # --------------------------------------------------------------------------- for the length
    Mutant(
        name="missing-eos-is-paid",
        mistake="the penalty for a missing EOS is added",
        target="rlhf_pg.rewards.shaping.Shaping.penalized",
        old="added.append(-args.missing_eos_penalty *",
        new="added.append(args.missing_eos_penalty *",
        killers=(OPTIONS_TEST + "test_missing_eos_mode_subtracts_or_replaces",),
    ),
    Mutant(
        name="replace-is-subtract",
        mistake="the penalty is subtracted where it is to stand in place of the score",
        target="rlhf_pg.rewards.shaping.Shaping.__call__",
        old='        if self.args.missing_eos_mode == "replace":\n',
        new="        if False:\n",
        killers=(OPTIONS_TEST + "test_missing_eos_mode_subtracts_or_replaces",),
    ),
    Mutant(
        name="replace-leaves-gaps",
        mistake="a source that did not apply to what was cut off gets the mean of the group again",
        target="rlhf_pg.rewards.scores.replaced",
        old="torch.where(rows[:, None, None] & others, blank, scores)",
        new="torch.where(rows[:, None, None] & others & ~scores.isnan(), blank, scores)",
        killers=(
            PURE_TEST + "test_replaced_row_keeps_only_given_source",
            OPTIONS_TEST + "test_missing_eos_replace_also_replaces_none_scores",
        ),
    ),
    Mutant(
        name="overlong-buffer-off-by-one",
        mistake="the buffer begins one token early, so that the longest pays more than all",
        target="rlhf_pg.rewards.scores.overlong",
        old="    beyond = lengths.double() - (longest - buffer)\n",
        new="    beyond = lengths.double() - (longest - buffer - 1)\n",
        killers=(
            PURE_TEST + "test_overlong_by_hand",
            PURE_TEST + "test_overlong_matches_equation_13",
        ),
    ),
    Mutant(
        name="overlong-is-paid",
        mistake="the soft overlong punishment has the sign of a bonus",
        target="rlhf_pg.rewards.scores.overlong",
        old="    return -penalty * (beyond",
        new="    return penalty * (beyond",
        killers=(PURE_TEST + "test_overlong_by_hand",),
    ),
    # ---------------------------------------------------------------------- whiten, log, evaluate
    Mutant(
        name="whitened-rewards-lose-their-mean",
        mistake="rewards are whitened like advantages, and average 0 however good they are",
        target="rlhf_pg.trainers.experience_maker._whitened",
        old="whiten(rewards, mask, shift_mean=False, stats=stats)",
        new="whiten(rewards, mask, stats=stats)",
        killers=(OPTIONS_TEST + "test_whitened_rewards_have_unit_variance_and_keep_mean",),
    ),
    Mutant(
        name="rewards-whitened-per-process",
        mistake="each process whitens its own rewards: their number changes the update (TRL's PPO)",
        target="rlhf_pg.trainers.experience_maker._whitened",
        old="whiten(rewards, mask, shift_mean=False, stats=stats)",
        new="whiten(rewards, mask, shift_mean=False)",
        killers=(
            "tests/distributed/test_invariance.py::test_gradient_matches_single_process[ddp-2-ppo]",
        ),
    ),
    Mutant(
        name="kl-behind-the-whitening",
        mistake="rewards are whitened before the KL is subtracted, which keeps its own scale",
        target="rlhf_pg.trainers.experience_maker.advantage_inputs",
        old="rewards=_whitened(minus_kl + step_scores, mask, runtime, args)",
        new=("rewards=minus_kl + _whitened(step_scores, mask, runtime, args)"),
        killers=(OPTIONS_TEST + "test_whitened_rewards_have_unit_variance_and_keep_mean",),
    ),
    Mutant(
        name="reward-is-logged-raw",
        mistake="`reward` in the log is not what is trained on",
        target="rlhf_pg.report.metrics.reward_metrics",
        old="means = trained.nanmean(0)",
        new="means = raw.nanmean(0)",
        killers=(
            "tests/report/test_metrics.py::test_reward_uses_trained_scores_and_sources_use_raw",
        ),
    ),
    Mutant(
        name="evaluation-is-normalised",
        mistake="held-out rewards are divided by a std that moves: the best step cannot be told",
        target="rlhf_pg.trainers.evaluator.evaluate",
        old="shaping(scores, samples.rollout, normalize=False)",
        new="shaping(scores, samples.rollout)",
        killers=(OPTIONS_TEST + "test_evaluation_clips_and_penalizes_but_does_not_normalize",),
    ),
    Mutant(
        name="reward-std-of-the-groups",
        mistake="the spread of a source as a population variance's root",
        target="rlhf_pg.report.metrics.reward_metrics",
        old="valid.std().item()",
        new="valid.std(correction=0).item()",
        killers=("tests/report/test_metrics.py::test_rewards_by_hand",),
    ),
    Mutant(
        name="min-max-of-all-sources",
        mistake="one pair of bounds for every source of reward: the small one has no range left",
        target="rlhf_pg.rewards.shaping.Shaping.observe",
        old="self._bounds = low.amin(0), -negated_high.amin(0)",
        new="self._bounds = low.amin(), -negated_high.amin()",
        killers=(f"{OPTIONS_TEST}test_min_max_squash_is_per_function_over_step",),
    ),
    Mutant(
        name="squash-before-the-clip",
        mistake="a sigmoid of what the clip was to cut off",
        target="rlhf_pg.rewards.shaping.Shaping.__call__",
        old="self._squashed(self._clipped(scores), normalize)",
        new="self._clipped(self._squashed(scores, normalize))",
        killers=(f"{OPTIONS_TEST}test_sigmoid_squash_follows_clip",),
    ),
]
