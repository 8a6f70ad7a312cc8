"""Mistakes in `rlhf_pg/losses/`."""

from tests.mutants import Mutant

POLICY, VALUE, WEIGHTS = (f"rlhf_pg/losses/{name}.py" for name in ("policy", "value", "weights"))
OURS = "tests/test_losses.py::"
FORMULA = "tests/test_policy_losses.py::"
EXACT = "tests/test_policy_gradients.py::"
IS_ITS_FORMULA = (FORMULA + "test_every_loss_is_its_formula",)
KINKS = (FORMULA + "test_both_sides_of_every_kink",)


def mutant(
    name: str, mistake: str, old: str, new: str, *killers: str, file: str = POLICY
) -> Mutant:
    return Mutant(name=name, mistake=mistake, file=file, old=old, new=new, killers=killers)


MUTANTS = [
    # ----------------------------------------------------------------------- the ratio
    mutant(
        "ratio-inverted",
        "importance weight pi_old / pi (a well-known blog)",
        "tokens = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)",
        "tokens = torch.where(mask, old_logprobs.detach() - logprobs, 0.0)",
        OURS + "test_clipped_surrogate_by_hand",
        *IS_ITS_FORMULA,
    ),
    mutant(
        "masked-by-multiplication",
        "masked slots multiplied by 0, so that a NaN in the padding reaches the loss",
        "tokens = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)",
        "tokens = (logprobs - old_logprobs.detach()) * mask",
        OURS + "test_masked_values_reach_neither_loss_nor_gradient_nor_metrics",
    ),
    mutant(
        "overflow-not-held",
        "exp of an unbounded log ratio: infinite loss after one bad token",
        "return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)",
        "return log_ratio",
        OURS + "test_a_huge_ratio_stays_finite_and_is_counted",
    ),
    mutant(
        "overflow-not-counted",
        "a clamp that nobody hears of (verl and OpenRLHF clamp at 10 silently)",
        '"ratio_overflow": (log_ratio.abs() > MAX_LOG_RATIO).to(ratio.dtype)',
        '"ratio_overflow": (held.abs() > MAX_LOG_RATIO).to(ratio.dtype)',
        OURS + "test_a_huge_ratio_stays_finite_and_is_counted",
    ),
    mutant(
        "approx-kl-of-the-wrong-side",
        "rho log rho - rho + 1 under samples of pi_old is no estimate of a KL that is wanted",
        "    return torch.expm1(log_ratio) - log_ratio\n",
        "    return torch.expm1(-log_ratio) + log_ratio\n",
        OURS + "test_approx_kl_is_a_mean_over_the_mask",
        *IS_ITS_FORMULA,
    ),
    mutant(
        "approx-kl-half-the-square",
        "(log rho)^2 / 2 as the penalty: its gradient is no KL's (TRL's PPO logs it)",
        "    return torch.expm1(log_ratio) - log_ratio\n",
        "    return log_ratio**2 / 2\n",
        EXACT + "test_kl_penalty_is_the_gradient_of_kl_old_new_of_whole_completions",
    ),
    mutant(
        "advantage-not-detached",
        "a gradient through the advantage into whatever it was made of",
        "return _Start(held, ratio, torch.where(mask, advantages.detach(), 0.0), metrics)",
        "return _Start(held, ratio, torch.where(mask, advantages, 0.0), metrics)",
        OURS + "test_only_the_first_input_is_trained",
    ),
    # ------------------------------------------------------------------- without a clip
    mutant(
        "vanilla-sign",
        "the log-likelihood minimised instead of its negative",
        "return -advantages * torch.where(mask, logprobs, 0.0), {}",
        "return advantages * torch.where(mask, logprobs, 0.0), {}",
        OURS + "test_vanilla_by_hand",
    ),
    mutant(
        "kl-penalty-reversed",
        "KL(pi || pi_old) in PPO's Eq. 8 (a well-known blog)",
        "penalty = old_kl_coef * _excess(start.log_ratio)",
        "penalty = old_kl_coef * start.ratio * start.log_ratio",
        EXACT + "test_kl_penalty_is_the_gradient_of_kl_old_new_of_whole_completions",
    ),
    mutant(
        "kl-penalty-k1",
        "-log rho alone: right on average, but it pushes every token at rho = 1",
        "penalty = old_kl_coef * _excess(start.log_ratio)",
        "penalty = old_kl_coef * -start.log_ratio",
        OURS + "test_at_ratio_one_the_gradient_is_that_of_reinforce",
    ),
    mutant(
        "mdpo-other-direction",
        "KL(pi_old || pi) in place of mirror descent's KL(pi || pi_old)",
        "penalty = old_kl_coef * (start.ratio * start.log_ratio - torch.expm1(start.log_ratio))",
        "penalty = old_kl_coef * (torch.expm1(start.log_ratio) - start.log_ratio)",
        EXACT + "test_mdpo_is_the_gradient_of_kl_new_old_in_the_states_of_the_old_policy",
    ),
    mutant(
        "mdpo-ratio-detached",
        "log rho weighted by a detached rho: half of the gradient of KL(pi || pi_old) is gone",
        "penalty = old_kl_coef * (start.ratio * start.log_ratio - torch.expm1(start.log_ratio))",
        "penalty = old_kl_coef * (start.ratio.detach() * start.log_ratio)",
        EXACT + "test_mdpo_is_the_gradient_of_kl_new_old_in_the_states_of_the_old_policy",
    ),
    # ---------------------------------------------------------------------- with a clip
    mutant(
        "ppo-sign",
        "mean(min(...)) minimised (a well-known blog)",
        "    per_token = -torch.min(ratio * advantages, clipped * advantages)\n",
        "    per_token = torch.min(ratio * advantages, clipped * advantages)\n",
        OURS + "test_clipped_surrogate_by_hand",
    ),
    mutant(
        "ppo-without-the-minimum",
        "the clipped term alone: a token that went the wrong way is never pulled back",
        "    per_token = -torch.min(ratio * advantages, clipped * advantages)\n",
        "    per_token = -clipped * advantages\n",
        OURS + "test_clipped_surrogate_by_hand",
        *KINKS,
    ),
    mutant(
        "clip-higher-ignored",
        "epsilon on both sides although epsilon_high is given",
        "return 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)",
        "return 1 - epsilon, 1 + epsilon",
        OURS + "test_upper_clip_distance_is_its_own",
    ),
    mutant(
        "clip-counted-whatever-the-sign",
        "clip_frac counts ratios outside the interval whose gradient is alive (Spinning Up)",
        "high = (ratio > high_bound) & (advantages > 0)",
        "high = ratio > high_bound",
        OURS + "test_clip_metrics_count_tokens_that_were_cut_off",
    ),
    mutant(
        "dual-clip-whatever-the-sign",
        "delta applied to A > 0 as well, which turns the loss of a good token round",
        "per_token = torch.where(advantages < 0, capped, per_token)",
        "per_token = capped",
        *IS_ITS_FORMULA,
    ),
    mutant(
        "dual-clip-upside-down",
        "maximum for minimum: delta becomes the least loss of a bad token",
        "per_token.minimum(-delta * advantages)",
        "per_token.maximum(-delta * advantages)",
        *IS_ITS_FORMULA,
        *KINKS,
    ),
    mutant(
        "gspo-sum-for-mean",
        "the product of a row's ratios for their geometric mean: it grows with the length",
        "torch.where(mask, masked_mean(tokens, mask, dim=1)[:, None], 0.0)",
        "torch.where(mask, _row_sum(tokens), 0.0)",
        FORMULA + "test_gspo_by_hand",
    ),
    mutant(
        "gspo-mean-over-padding",
        "the mean of a row's log ratios over the padded width",
        "torch.where(mask, masked_mean(tokens, mask, dim=1)[:, None], 0.0)",
        "torch.where(mask, tokens.mean(dim=1, keepdim=True), 0.0)",
        FORMULA + "test_gspo_by_hand",
        OURS + "test_extra_padding_changes_nothing",
    ),
    mutant(
        "cispo-weight-not-detached",
        "a gradient through CISPO's weight, which adds A log pi grad rho",
        "weight = start.ratio.detach().clamp(low_bound, high_bound)",
        "weight = start.ratio.clamp(low_bound, high_bound)",
        *KINKS,
        FORMULA + "test_every_gradient_is_that_of_its_formula",
    ),
    mutant(
        "cispo-upper-bound-alone",
        "no lower bound, whatever epsilon says (TRL)",
        "weight = start.ratio.detach().clamp(low_bound, high_bound)",
        "weight = start.ratio.detach().clamp(max=high_bound)",
        *IS_ITS_FORMULA,
    ),
    mutant(
        "gmpo-two-sided",
        "both bounds for either sign of A: a token that went the wrong way is not pulled back",
        "clipped = torch.where(low | high, inside, start.log_ratio)",
        "clipped = inside",
        *KINKS,
    ),
    mutant(
        "gmpo-arithmetic-mean",
        "the mean of the ratios in place of their geometric mean",
        "mean = masked_mean(clipped, mask, dim=1)[:, None].exp()",
        "mean = masked_mean(clipped.exp(), mask, dim=1)[:, None]",
        *IS_ITS_FORMULA,
    ),
    mutant(
        "sapo-scale",
        "4 for 4 / tau: the gradient at rho = 1 depends on the temperature",
        "gate = torch.sigmoid(tau * (start.ratio - 1)) * 4 / tau",
        "gate = torch.sigmoid(tau * (start.ratio - 1)) * 4",
        OURS + "test_at_ratio_one_the_gradient_is_that_of_reinforce",
    ),
    mutant(
        "sapo-temperatures-swapped",
        "the temperature of negative advantages at positive ones",
        "masked_fill(start.advantages > 0, sapo",
        "masked_fill(start.advantages < 0, sapo",
        *IS_ITS_FORMULA,
    ),
    mutant(
        "p3o-partner-not-detached",
        "a gradient through the other row's ratio counts every pair twice",
        "gap = rho.detach().T * (score - score.T) * share",
        "gap = rho.T * (score - score.T) * share",
        FORMULA + "test_at_ratio_one_p3o_has_the_gradient_of_rloo",
    ),
    mutant(
        "p3o-partner-without-its-ratio",
        "the other row's ratio left out: a baseline like any other, and no longer a pair",
        "gap = rho.detach().T * (score - score.T) * share",
        "gap = (score - score.T) * share",
        FORMULA + "test_p3o_on_both_sides_of_its_kinks",
    ),
    mutant(
        "p3o-geometric-mean",
        "GSPO's ratio in P3O: a row's probability is only partly corrected",
        'start = _start(logprobs, old_logprobs, advantages, mask, "product")',
        'start = _start(logprobs, old_logprobs, advantages, mask, "sequence")',
        EXACT + "test_p3o_is_unbiased_at_the_old_policy_and_without_a_clip_away_from_it",
    ),
    mutant(
        "p3o-mean-with-itself",
        "1/n for 1/(n-1): the gradient shrinks by (n-1)/n",
        "    pairs.fill_diagonal_(False)\n",
        "",
        FORMULA + "test_at_ratio_one_p3o_has_the_gradient_of_rloo",
    ),
    mutant(
        "p3o-others-of-the-batch",
        "compared with the rest of the batch, not of the prompt (the RLHF book on RLOO)",
        "pairs = (groups[:, None] == groups) & rows[:, None] & rows",
        "pairs = rows[:, None] & rows",
        FORMULA + "test_at_ratio_one_p3o_has_the_gradient_of_rloo",
    ),
    mutant(
        "p3o-shared-over-padding",
        "a row's loss divided by the padded width",
        "lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)",
        "lengths = mask.shape[1]",
        OURS + "test_extra_padding_changes_nothing",
    ),
    # ---------------------------------------------------------------------------- value
    mutant(
        "value-clipped-term-alone",
        "V_c alone: no gradient where V has moved away from R (skrl)",
        "return 0.5 * torch.max(squares, clipped_squares)",
        "return 0.5 * clipped_squares + 0 * squares",
        OURS + "test_value_loss_by_hand",
        file=VALUE,
    ),
    mutant(
        "value-minimum",
        "the smaller of the two squares: the clip becomes a bonus",
        "return 0.5 * torch.max(squares, clipped_squares)",
        "return 0.5 * torch.min(squares, clipped_squares)",
        OURS + "test_value_loss_by_hand",
        file=VALUE,
    ),
    mutant(
        "value-without-the-half",
        "twice the gradient of the PPO papers' code at the same vf_coef",
        "return 0.5 * squares, {}",
        "return squares, {}",
        OURS + "test_value_loss_by_hand",
        file=VALUE,
    ),
    # -------------------------------------------------------------------------- weights
    mutant(
        "mean-of-micro-batch-means",
        "every micro-batch by its own count: an update that depends on the split (open-instruct)",
        "count = own_count if denominator is None else denominator",
        "count = own_count",
        OURS + "test_any_split_into_micro_batches_adds_up_to_the_same",
        file=WEIGHTS,
    ),
    mutant(
        "dr-grpo-by-padded-width",
        "Dr. GRPO's constant taken from the longest completion of the batch (verl)",
        "divisor = divisor * max_completion_length",
        "divisor = divisor * mask.shape[1]",
        OURS + "test_token_weights_by_hand",
        file=WEIGHTS,
    ),
    mutant(
        "sequence-mean-over-rows-without-a-token",
        "rows that no token trains counted in the denominator",
        'return mask.sum() if aggregation == "token_mean" else mask.any(dim=1).sum()',
        'return mask.sum() if aggregation == "token_mean" else torch.tensor(len(mask))',
        OURS + "test_token_weights_by_hand",
        file=WEIGHTS,
    ),
    mutant(
        "sampler-weight-inverted",
        "pi_sampler / pi_old, which doubles the mismatch",
        "old_logprobs.detach() - sampler_logprobs.detach()",
        "sampler_logprobs.detach() - old_logprobs.detach()",
        FORMULA + "test_sampler_weights_by_hand",
        file=WEIGHTS,
    ),
    mutant(
        "sampler-sequence-mean",
        "the geometric mean as the weight of a sequence: no correction of its probability",
        "widen(log_weight).sum(dim=1, keepdim=True).to",
        "widen(log_weight).mean(dim=1, keepdim=True).to",
        EXACT + "test_whole_sequence_weights_without_a_bound_undo_the_mismatch",
        file=WEIGHTS,
    ),
    mutant(
        "sampler-mask-truncates",
        "weights beyond the bound cut to it where they should be dropped",
        "clipped = torch.where(clipped == weight, weight, 0.0)",
        "clipped = torch.where(clipped == weight, weight, clip_max)",
        FORMULA + "test_sampler_weights_by_hand",
        file=WEIGHTS,
    ),
    mutant(
        "sampler-weight-with-a-gradient",
        "a gradient through the correction",
        "old_logprobs.detach() - sampler_logprobs.detach()",
        "old_logprobs - sampler_logprobs",
        FORMULA + "test_sampler_weights_by_hand",
        file=WEIGHTS,
    ),
    Mutant(
        name="sapo-temperatures-in-float32",
        mistake="a temperature as torch's default dtype has it: 1.05 is off by 5e-8",
        file="rlhf_pg/losses/policy.py",
        old="    tau = torch.full_like(start.ratio, sapo_temperature_neg)\n",
        new="    tau = torch.full_like(start.ratio.float(), sapo_temperature_neg)\n",
        killers=(f"{FORMULA}test_sapo_keeps_its_temperatures_in_the_dtype_of_the_ratio",),
    ),
]
