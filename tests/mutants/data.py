"""Data by name, streams, and what a run is given."""

from tests.mutants import Mutant

SOURCES = "tests/data/test_sources.py"
STREAM = "tests/data/test_stream.py"
INPUTS = "tests/tasks/test_inputs.py"

MUTANTS = [
    Mutant(
        name="share-without-seed",
        mistake="the share that is held out does not depend on the seed",
        target="rlhf_pg.data.sources._split_off",
        old="permutation(len(data), seed)[:count]",
        new="permutation(len(data), 0)[:count]",
        killers=(f"{SOURCES}::test_share_is_split_off_by_the_seed_and_parts_keep_their_order",),
    ),
    Mutant(
        name="held-out-rows-train-too",
        mistake="rows that are held out stay in the training data",
        target="rlhf_pg.data.sources._split_off",
        old="kept = [row for row in range(len(data)) if row not in chosen]",
        new="kept = list(range(len(data)))",
        killers=(f"{SOURCES}::test_share_is_split_off_by_the_seed_and_parts_keep_their_order",),
    ),
    Mutant(
        name="mixture-without-weights",
        mistake="a weighted mixture draws from each dataset alike",
        target="rlhf_pg.data.sources._mixed",
        old="probabilities=[weight / sum(weights) for weight in weights]",
        new="probabilities=[1 / len(weights) for weight in weights]",
        killers=(f"{SOURCES}::test_mixture_takes_every_row_once_or_goes_by_weights",),
    ),
    Mutant(
        name="mixture-ends-early",
        mistake="a weighted mixture ends with its smallest dataset: rows are lost",
        target="rlhf_pg.data.sources._mixed",
        old='stopping_strategy="all_exhausted"',
        new='stopping_strategy="first_exhausted"',
        killers=(f"{SOURCES}::test_mixture_takes_every_row_once_or_goes_by_weights",),
    ),
    Mutant(
        name="template-fills-none",
        mistake='a row without the column gets the prompt "None"',
        target="rlhf_pg.data.sources.PromptMaker._filled",
        old="if row.get(name) is None:",
        new="if False:",
        killers=(f"{SOURCES}::test_prompt_that_cannot_be_made_raises",),
    ),
    Mutant(
        name="stream-in-one-order",
        mistake="a stream comes in the same order in every epoch",
        target="rlhf_pg.data.stream.PromptStream._endless",
        old="self.dataset.set_epoch(epoch)",
        new="self.dataset.set_epoch(0)",
        killers=(f"{STREAM}::test_each_epoch_has_every_row_in_a_new_order_of_the_seed",),
    ),
    Mutant(
        name="stream-goes-on-from-where-it-is",
        mistake="a row of a stream that was forgotten is the next one instead",
        target="rlhf_pg.data.stream.PromptStream._row",
        old="self._restart()",
        new="self._next = number",
        killers=(f"{STREAM}::test_rows_are_the_same_however_they_are_asked_for",),
    ),
    Mutant(
        name="recorded-data-unchecked",
        mistake="a config whose data have changed is run as if they were the same",
        target="rlhf_pg.trainers.datasets.PromptLoader.train",
        old="if wanted is not None and wanted != source.fingerprint:",
        new="if False:",
        killers=(f"{INPUTS}::test_changed_data_are_refused_by_a_recorded_config",),
    ),
    Mutant(
        name="template-arguments-dropped",
        mistake="chat_template_kwargs never reach the template",
        target="rlhf_pg.data.chat.template_arguments",
        old="getattr(tokenizer, ARGUMENTS, None) or {}",
        new="{}",
        killers=(f"{INPUTS}::test_chat_template_arguments_reach_the_prompt",),
    ),
    Mutant(
        name="several-sets-one-reward",
        mistake="eval_reward of several sets is that of the last alone",
        target="rlhf_pg.trainers.evaluator.evaluate_sets",
        old="sum(rewards) / len(rewards)",
        new="rewards[-1]",
        killers=(f"{INPUTS}::test_python_takes_dicts_and_several_evaluation_sets",),
    ),
]
