"""Mistakes in supervised runs: what is learnt, how it is weighed, what a reward model is told."""

from tests.mutants import Mutant

EXAMPLES = "tests/supervised/test_examples.py::"
SFT = "tests/supervised/test_sft.py::"
PAIRS = "tests/rewards/test_bradley_terry.py::"

MUTANTS: list[Mutant] = [
    Mutant(
        name="prompt-is-learnt",
        mistake="the loss is over the prompt too, which no policy is to say",
        target="rlhf_pg.supervised.examples.ExampleMaker._text",
        old="else len(asked)\n",
        new="else 0\n",
        killers=(EXAMPLES + "test_only_completion_and_eos_are_learnt",),
    ),
    Mutant(
        name="no-eos-is-learnt",
        mistake="completions have no EOS behind them: the model never learns to end",
        target="rlhf_pg.supervised.examples.ExampleMaker._text",
        old="            ids = [*ids, eos]\n",
        new="            ids = [*ids]\n",
        killers=(EXAMPLES + "test_only_completion_and_eos_are_learnt",),
    ),
    Mutant(
        name="prompt-melts-into-its-completion",
        mistake="prompt and completion are tokenized as one text: other tokens than in a rollout",
        target="rlhf_pg.supervised.examples.ExampleMaker._text",
        old="        if ids[: len(asked)] != asked:\n",
        new="        if False:\n",
        killers=(EXAMPLES + "test_prompt_keeps_tokens_that_a_rollout_gives_it",),
    ),
    Mutant(
        name="turn-melts-into-its-opening",
        mistake="a chat is tokenized as one text: an opening that ends in a blank loses it",
        target="rlhf_pg.data.turns._tokenize_turns",
        old="        if more[: len(ids) - first] != ids[first:]:\n",
        new="        if False:\n",
        killers=(EXAMPLES + "test_chat_has_tokens_of_a_rollout_before_each_turn",),
    ),
    Mutant(
        name="turn-without-its-end",
        mistake="the assistant's turn is learnt without the token that ends it",
        target="rlhf_pg.data.turns.encode_turns",
        old="len(chat.text[:end].rstrip())",
        new="len(chat.text[:end].rstrip().removesuffix('<eos>'))",
        killers=(EXAMPLES + "test_assistant_turns_are_learnt_through_eos",),
    ),
    Mutant(
        name="opening-of-a-turn-is-learnt",
        mistake="the header of the assistant's turn is learnt, which the template writes",
        target="rlhf_pg.data.turns._Chat.assistant_turns",
        old="(self.opening(number), self._length",
        new="(self._length(number, closed=True), self._length",
        killers=(EXAMPLES + "test_assistant_turns_are_learnt_through_eos",),
    ),
    Mutant(
        name="rewritten-history-is-learnt",
        mistake="a template that rewrites earlier turns shifts what is taken for the assistant's",
        target="rlhf_pg.data.turns._Chat._length",
        old="        if not self.text.startswith(text):\n",
        new="        if False:\n",
        killers=(EXAMPLES + "test_template_that_rewrites_history_is_refused_by_name",),
    ),
    Mutant(
        name="loss-as-a-mean-of-means",
        mistake="the held-out loss is a mean over texts, so that short ones weigh more by token",
        target="rlhf_pg.supervised.sft._token_means",
        old="    loss, right, learnt = evaluation.predictions.astype(np.float64).sum(0)\n",
        new="    sums = evaluation.predictions.astype(np.float64)\n"
        "    loss, right, learnt = (sums / sums[:, 2:]).mean(0)\n",
        killers=(SFT + "test_held_out_metrics_are_means_over_learnt_tokens",),
    ),
    Mutant(
        name="packed-without-a-look",
        mistake="examples are packed for a model whose attention mixes them",
        target="rlhf_pg.supervised.sft.check_packing",
        old="    if not change <= ROUNDING",
        new="    if not change <= 1e9 * ROUNDING",
        killers=(SFT + "test_packing_is_refused_where_attention_mixes_examples",),
    ),
    Mutant(
        name="resumed-under-another-model",
        mistake="an adapter is resumed on other frozen weights, given in Python",
        target="rlhf_pg.supervised.training.check_resumed",
        old="model is not None and loaded.exists()",
        new="False",
        killers=(SFT + "test_adapter_is_resumed_on_its_own_model_only",),
    ),
    Mutant(
        name="merged-from-a-part",
        mistake="an adapter is merged where each process has a part of the weights",
        target="rlhf_pg.supervised.sft.fit",
        old="    if args.save_merged and (trainer",
        new="    if False and (trainer",
        killers=(SFT + "test_split_weights_are_not_merged",),
    ),
    Mutant(
        name="precision-of-the-launcher",
        mistake="pairs are scored under the launcher's mixed precision, not in the config's dtype",
        target="rlhf_pg.rewards.bradley_terry.train_reward_model",
        old="    check_precision(args.dtype)\n",
        new="",
        killers=(PAIRS + "test_precision_of_the_launcher_is_not_ignored",),
    ),
    Mutant(
        name="margin-is-added",
        mistake="the margin is added to the difference: a clear preference counts for less",
        target="rlhf_pg.rewards.bradley_terry_loss",
        old="chosen - rejected - margin",
        new="chosen - rejected + margin",
        killers=(PAIRS + "test_margin_is_subtracted_from_difference",),
    ),
    Mutant(
        name="centred-difference",
        mistake="centring squares the difference of rewards, which works against the preferences",
        target="rlhf_pg.rewards.bradley_terry.centering_loss",
        old="(chosen + rejected)",
        new="(chosen - rejected)",
        killers=(PAIRS + "test_centering_is_mean_squared_sum",),
    ),
    Mutant(
        name="calibration-of-the-chosen",
        mistake="the confidence is sigmoid(r_chosen - r_rejected), below 1/2 for wrong pairs",
        target="rlhf_pg.rewards.bradley_terry.calibration_error",
        old="torch.sigmoid(apart.abs())",
        new="torch.sigmoid(apart)",
        killers=(PAIRS + "test_calibration_error_by_hand",),
    ),
    Mutant(
        name="mean-of-micro-batches",
        mistake="a micro-batch of pairs counts as the whole batch",
        target="rlhf_pg.rewards.bradley_terry.pair_loss",
        old="loss * len(scores) / num_items_in_batch",
        new="loss",
        killers=(PAIRS + "test_micro_batches_of_pairs_add_up_to_batch",),
    ),
]
