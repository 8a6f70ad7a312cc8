"""Mistakes in training on truncated distributions, and in pass@k and majority votes."""

from tests.mutants import Mutant

TRAINING = "tests/trainers/test_truncated_sampling.py::test_"
SUPPORT = "tests/models/test_support.py::test_"
RECORDS = "tests/data/test_records.py::test_"
EVALUATING = "tests/trainers/test_evaluation.py::test_"
PURE = "tests/report/test_pass_at_k.py::test_"

MUTANTS: list[Mutant] = [
    # ------------------------------------------------------------------------ the saved support
    Mutant(
        name="support-not-for-new",
        mistake="the sampler truncates, and the policy that trains has all tokens (TRL #6789)",
        target="rlhf_pg.trainers.learner.Learner.accumulate",
        old="new: PolicyOutput = self.trained(batch)",
        new="new: PolicyOutput = self.trained(dataclasses.replace(batch, support_ids=None))",
        killers=(f"{TRAINING}gradient_of_truncated_policy_is_exact",),
    ),
    Mutant(
        name="support-not-for-old",
        mistake="the old log-probabilities are not renormalised: a ratio is 1 over the kept mass",
        target="rlhf_pg.trainers.learner.Learner._score_own",
        old="out: PolicyOutput = self.trained(batch)",
        new="out: PolicyOutput = self.trained(dataclasses.replace(batch, support_ids=None))",
        killers=(f"{TRAINING}ratio_of_unchanged_policy_is_one",),
    ),
    Mutant(
        name="support-not-for-the-reference",
        mistake="a truncated policy is compared with a whole reference: the KL is never 0",
        target="rlhf_pg.models.Reference.forward",
        old="logprobs: Tensor = self.policy(batch).logprobs",
        new="import dataclasses\n\n"
        "        whole = dataclasses.replace(batch, support_ids=None)\n"
        "        logprobs: Tensor = self.policy(whole).logprobs",
        killers=(
            f"{SUPPORT}reference_is_renormalized",
            f"{TRAINING}sampler_policy_and_reference_agree_at_first_step",
        ),
    ),
    Mutant(
        name="support-not-for-the-entropy",
        mistake="the entropy, and a bonus for it, is that of all tokens",
        target="rlhf_pg.models.softmax.Law.scores",
        old="everywhere.clamp_(min=IMPOSSIBLE)\n            entropies",
        new="everywhere = (output[rows] * self.slope).log_softmax(-1)\n            entropies",
        killers=(
            f"{TRAINING}entropy_bonus_uses_truncated_policy",
            f"{SUPPORT}scores_are_renormalized_over_kept_tokens",
        ),
    ),
    Mutant(
        name="support-padding-is-a-token",
        mistake="the padding of a support lets token 0 in",
        target="rlhf_pg.models.softmax._within",
        old="torch.where(given, support_ids, vocabulary)",
        new="torch.where(given, support_ids, 0)",
        killers=(f"{SUPPORT}scores_are_renormalized_over_kept_tokens",),
    ),
    Mutant(
        name="support-none-is-nothing",
        mistake="a slot without a support, padding or tool output, has no token at all: NaN",
        target="rlhf_pg.models.softmax._within",
        old=" | ~given.any(dim=1, keepdim=True)",
        new="",
        killers=(f"{SUPPORT}full_vocabulary_support_leaves_scores_unchanged",),
    ),
    Mutant(
        name="support-cut-to-the-first-row",
        mistake="the supports of a micro-batch are cut to the width of its first row",
        target="rlhf_pg.data.records.Rollout.select",
        old=": _widest(value)]",
        new=": _widest(value[:1])]",
        killers=(f"{RECORDS}select_trims_supports_to_widest_left",),
    ),
    Mutant(
        name="support-joined-with-token-zero",
        mistake="supports of another round are padded with the id 0",
        target="rlhf_pg.data.records._joined_supports",
        old="longest - part.shape[1]), value=-1)",
        new="longest - part.shape[1]), value=0)",
        killers=(f"{RECORDS}concat_pads_supports_with_minus_one",),
    ),
    Mutant(
        name="evaluation-from-all-tokens",
        mistake="training samples from the likeliest tokens, evaluation from all",
        target="rlhf_pg.trainers.collector.Collector.sample",
        old="top_k=args.top_k,",
        new="top_k=args.top_k if rows and min(prompt_indices) >= 0 else 0,",
        killers=(f"{TRAINING}top_k_applies_to_sampled_but_not_greedy_evaluation",),
    ),
    # ---------------------------------------------------------------------- several completions
    Mutant(
        name="pass-at-k-with-replacement",
        mistake="pass@k as 1 - (1 - c/n)^k, which draws an attempt twice and is too low",
        target="rlhf_pg.report.pass_at_k.pass_at_k",
        old="((wrong - drawn) / (n - drawn)).prod(dim=1)",
        new="((wrong / n).expand(-1, k)).prod(dim=1)",
        killers=(f"{PURE}pass_at_k_matches_subset_count",),
    ),
    Mutant(
        name="majority-by-the-first",
        mistake="of equally frequent answers the first one wins, and so does the order",
        target="rlhf_pg.report.pass_at_k.majority_score",
        old="if votes[answer] == most]",
        new="if answer == votes.most_common(1)[0][0]]",
        killers=(f"{PURE}majority_by_hand", f"{PURE}majority_is_order_invariant"),
    ),
    Mutant(
        name="majority-is-the-best",
        mistake="the majority vote takes the best score: that is pass@n",
        target="rlhf_pg.report.pass_at_k.majority_score",
        old="sum(winning) / len(winning)",
        new="max(scores)",
        killers=(f"{PURE}majority_by_hand",),
    ),
    Mutant(
        name="right-by-the-trained-reward",
        mistake="penalties, weights and all make an answer right or wrong",
        target="rlhf_pg.trainers.evaluator.evaluate",
        old="paid = _paid(collector.rewards, sum_step_scores(scores))",
        new="paid = sum_step_scores(shaped).nansum(dim=1).double()",
        killers=(f"{EVALUATING}pass_at_k_ignores_penalties_and_clipping",),
    ),
    Mutant(
        name="right-without-the-weights",
        mistake="what makes an answer right is the plain sum of all reward functions",
        target="rlhf_pg.trainers.evaluator._paid",
        old="(raw[:, : len(weights)] * weights)",
        new="raw[:, : len(weights)].double()",
        killers=(f"{EVALUATING}pass_at_k_ignores_penalties_and_clipping",),
    ),
    Mutant(
        name="right-but-for-rounding",
        mistake="rewards that add up to the threshold fall short of it in float32",
        target="rlhf_pg.trainers.evaluator._judged",
        old="(paid > threshold - 1e-6)",
        new="(paid >= threshold)",
        killers=(f"{EVALUATING}float32_rounding_does_not_fail_threshold",),
    ),
    Mutant(
        name="completions-of-other-prompts",
        mistake="the votes of a prompt are counted among completions of others",
        target="rlhf_pg.trainers.evaluator._judged",
        old="answers[i * n : (i + 1) * n]",
        new="answers[i :: len(paid)]",
        killers=(f"{EVALUATING}majority_scores_most_frequent_answer",),
    ),
]
