"""Mistakes in what is sampled and which rows train."""

from tests.mutants import Mutant


def _in(file: str) -> str:
    return f"tests/trainers/test_{file}.py::test_"


DYNAMIC, OPTIONS = _in("dynamic_sampling"), _in("sampling_options")

MUTANTS: list[Mutant] = [
    # ---------------------------------------------------------------------- dynamic sampling
    Mutant(
        name="dynamic-sampling-cursor",
        mistake="the data cursor advances by prompts_per_step, so prompts of extra rounds repeat",
        target="rlhf_pg.trainers.PolicyGradientTrainer.finish_step",
        old="state.prompt_index += batch.num_prompts",
        new="state.prompt_index += self.args.prompts_per_step",
        killers=(f"{DYNAMIC}dynamic_sampling_counts_all_draws_and_tokens",),
    ),
    Mutant(
        name="dynamic-sampling-keeps-the-constant",
        mistake="groups without spread are kept, and the others drawn again",
        target="rlhf_pg.trainers.collector.Collector._with_spread",
        old="kept += [index for index in indices if index not in constant]",
        new="kept += [index for index in indices if index in constant]",
        killers=(f"{DYNAMIC}dynamic_sampling_keeps_groups_with_spread",),
    ),
    Mutant(
        name="dynamic-sampling-by-own-rank",
        mistake="each process decides on the groups it sampled: the processes wait for each other",
        target="rlhf_pg.trainers.collector.Collector._constant_groups",
        old=(
            "paid, _ = self.runtime.gather(said)\n        groups, _ = "
            "self.runtime.gather(part.samples.rollout.groups)"
        ),
        new="paid, groups = said, part.samples.rollout.groups",
        killers=(f"{DYNAMIC}two_ranks_keep_same_groups_as_one_process",),
    ),
    Mutant(
        name="dynamic-sampling-by-penalties",
        mistake="spread of the shaped scores keeps groups that are all wrong, by their lengths",
        target="rlhf_pg.trainers.collector.Collector._constant_groups",
        old="self.shaping.judged(part.scores)",
        new="self.shaping(part.scores, part.samples.rollout)",
        killers=(f"{DYNAMIC}penalty_gives_group_of_equal_scores_no_spread",),
    ),
    Mutant(
        name="dynamic-sampling-old-numbers",
        mistake="kept groups keep their draw numbers, so one minibatch gets most of the step",
        target="rlhf_pg.trainers.samples.Samples.renumbered",
        old="numbers = index.new_tensor([groups[own[i]] for i in rows])",
        new="numbers = index.new_tensor([own[i] for i in rows])",
        killers=(
            f"{DYNAMIC}kept_groups_split_evenly_into_minibatches",
            f"{DYNAMIC}groups_are_numbered_from_prompt_index",
        ),
    ),
    Mutant(
        name="dynamic-sampling-batch-not-filled",
        mistake="at the last round what was set aside is dropped, and a step has fewer groups",
        target="rlhf_pg.trainers.collector.Collector._with_spread",
        old="chosen = sorted(kept + aside[: args.prompts_per_step - len(kept)])",
        new="chosen = sorted(kept)",
        killers=(f"{DYNAMIC}dynamic_sampling_keeps_groups_with_spread",),
    ),
    Mutant(
        name="dynamic-sampling-filled-with-the-latest",
        mistake="the batch is filled up with the latest of the groups set aside",
        target="rlhf_pg.trainers.collector.Collector._with_spread",
        old="aside[: args.prompts_per_step - len(kept)]",
        new="aside[::-1][: args.prompts_per_step - len(kept)]",
        killers=(f"{DYNAMIC}dynamic_sampling_keeps_groups_with_spread",),
    ),
    Mutant(
        name="dynamic-sampling-full-rounds",
        mistake="every round draws a whole batch, of which most is thrown away",
        target="rlhf_pg.trainers.collector.Collector._with_spread",
        old="indices = range(end, end + args.prompts_per_step - len(kept))",
        new="indices = range(end, end + args.prompts_per_step)",
        killers=(f"{DYNAMIC}dynamic_sampling_keeps_groups_with_spread",),
    ),
    Mutant(
        name="dynamic-sampling-tokens-not-counted",
        mistake="tokens of the groups set aside are not in num_tokens and the speed",
        target="rlhf_pg.trainers.collector.Collector._with_spread",
        old="other_tokens=sampled - int(runtime.all_reduce_sum(samples.num_tokens)),",
        new="other_tokens=0,",
        killers=(f"{DYNAMIC}dynamic_sampling_counts_all_draws_and_tokens",),
    ),
    Mutant(
        name="dynamic-sampling-by-one-source",
        mistake="spread is looked for in the first reward function, not in the total",
        target="rlhf_pg.trainers.collector.Collector._constant_groups",
        old="scores = total_scores(paid, groups)",
        new="scores = total_scores(paid[:, :1], groups)",
        killers=(f"{DYNAMIC}group_with_equal_weighted_totals_has_no_spread",),
    ),
    Mutant(
        name="concat-pads-prompts-on-the-right",
        mistake="prompts of another round are padded on the right, between prompt and completion",
        target="rlhf_pg.data.records.Rollout.concat",
        old="max(value.shape[1] for value in values), name in _PROMPT_FIELDS",
        new="max(value.shape[1] for value in values), False",
        killers=("tests/data/test_records.py::test_concat_equals_record_of_all_rows",),
    ),
    # ------------------------------------------------------------------ truncated completions
    Mutant(
        name="truncated-mask-cuts-attention",
        mistake="masking completions that were cut off also hides them from attention (TRL's GRPO)",
        target="rlhf_pg.trainers.experience_maker.build_experience",
        old="dataclasses.replace(experience, action_mask=mask)",
        new="dataclasses.replace(experience, action_mask=mask, completion_mask=mask)",
        killers=(f"{OPTIONS}mask_truncated_completions_changes_only_action_mask",),
    ),
    Mutant(
        name="truncated-mask-before-statistics",
        mistake="completions that were cut off are masked before advantages are whitened",
        target="rlhf_pg.trainers.experience_maker.build_experience",
        old="    mask = rollout.action_mask\n",
        new=(
            "    mask = rollout.action_mask\n    mask = mask & "
            "~(rollout.truncated[:, None] & args.mask_truncated_completions)\n"
        ),
        killers=(f"{OPTIONS}mask_truncated_completions_changes_only_action_mask",),
    ),
    Mutant(
        name="truncated-mask-keeps-the-denominator",
        mistake="masked completions still count in the denominator: the others train more slowly",
        target="rlhf_pg.trainers.learner.Learner.accumulate",
        old="weight_count(minibatch.action_mask, args.aggregation)",
        new="weight_count(minibatch.completion_mask, args.aggregation)",
        killers=(f"{OPTIONS}masked_truncated_completions_leave_loss_and_denominator",),
    ),
    # -------------------------------------------------------------------- rows without advantage
    Mutant(
        name="skipped-rows-leave-the-denominator",
        mistake="rows without advantage are skipped and not counted: the others train faster",
        target="rlhf_pg.trainers.learner.Learner.accumulate",
        old="minibatch = minibatch.select(_rows_with_advantage(minibatch))",
        new=(
            "minibatch = minibatch.select(_rows_with_advantage(minibatch))\n"
            "            count = self.runtime.all_reduce_sum("
            "weight_count(minibatch.action_mask, args.aggregation))"
        ),
        killers=(f"{OPTIONS}skip_zero_advantages_leaves_gradient_unchanged",),
    ),
    Mutant(
        name="skipped-rows-leave-no-gradient",
        mistake="a step whose rows are all skipped has no backward pass: momentum stands still",
        target="rlhf_pg.trainers.learner.Learner.micro_batches",
        old="count = max(1, self.runtime.all_reduce_max(len(chunks)))",
        new="count = self.runtime.all_reduce_max(len(chunks))",
        killers=(f"{OPTIONS}skipped_step_of_zero_advantages_still_steps_optimizer",),
    ),
    Mutant(
        name="groups-split-over-micro-batches",
        mistake="a loss that compares the rows of a group sees those of its micro-batch alone",
        target="rlhf_pg.trainers.learner.Learner.micro_batches",
        old="whole_groups = self.compares_rows",
        new="whole_groups = False",
        killers=(f"{OPTIONS}micro_batches_keep_groups_whole_for_p3o",),
    ),
    # ------------------------------------------------------------------ baselines from elsewhere
    Mutant(
        name="remax-baseline-is-sampled",
        mistake="ReMax's baseline is the score of another sample, not of the greedy completion",
        target="rlhf_pg.trainers.collector.Collector._with_greedy",
        old="indices, n=1, temperature=0.0)",
        new="indices, n=1, temperature=self.args.temperature)",
        killers=(f"{OPTIONS}greedy_completions_are_counted_but_not_trained_on",),
    ),
    Mutant(
        name="remax-baseline-of-another-prompt",
        mistake="a row is compared with the greedy completion of another prompt: still unbiased",
        target="rlhf_pg.trainers.experience_maker._of_greedy",
        old="nn.functional.pad(paid[place], (0, 1))",
        new="nn.functional.pad(paid.roll(1, 0)[place], (0, 1))",
        killers=(f"{OPTIONS}greedy_baseline_uses_completion_of_own_prompt",),
    ),
    Mutant(
        name="remax-baseline-without-options",
        mistake="weights and penalties apply to the samples and not to the greedy completion",
        target="rlhf_pg.trainers.experience_maker._of_greedy",
        old="paid = sum_step_scores(shaping(greedy.scores, greedy.samples.rollout))",
        new="paid = sum_step_scores(greedy.scores)",
        killers=(f"{OPTIONS}greedy_baseline_uses_completion_of_own_prompt",),
    ),
    Mutant(
        name="moving-average-updated-before-use",
        mistake="the moving average has this step's own returns in it before it is used: biased",
        target="rlhf_pg.trainers.experience_maker.advantage_inputs",
        old="moving_average=moving_average.value if moving_average else 0.0",
        new=(
            "moving_average=0.9 * moving_average.value + 0.1 * "
            "trained.nansum(1).mean() if moving_average else 0.0"
        ),
        killers=(f"{OPTIONS}moving_average_baseline_is_unbiased",),
    ),
    Mutant(
        name="moving-average-without-the-kl",
        mistake="the moving average follows the scores, while the returns have the KL in them",
        target="rlhf_pg.trainers.experience_maker._baseline_metrics",
        old='metrics["return"] = inputs.scores.nansum(1)',
        new='metrics["return"] = inputs.scores[:, :-1].nansum(1)',
        killers=(f"{OPTIONS}moving_average_baseline_weighs_earlier_returns",),
    ),
    Mutant(
        name="moving-average-not-saved",
        mistake="a resumed run starts its moving average at 0 again",
        target="rlhf_pg.trainers.setup.TrainerSetup.running",
        old='{"moving_average": self.moving_average}',
        new="{}",
        killers=(f"{OPTIONS}resumed_run_matches_uninterrupted_run",),
    ),
]
