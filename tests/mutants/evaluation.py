"""Evaluation without training, its errors, and what the command makes of them."""

from tests.mutants import Mutant

EVALUATION = "tests/trainers/test_evaluation.py"
ALONE = "tests/trainers/test_only_evaluation.py"
COMMAND = "tests/cli/test_evaluate.py"
HELP = "tests/cli/test_help.py"

MUTANTS = [
    Mutant(
        name="completions-as-draws",
        mistake="a standard error over completions, as if those of one prompt were independent",
        target="rlhf_pg.trainers.evaluator.evaluate",
        old="standard_error(totals, owners.cpu())",
        new="standard_error(totals, torch.arange(len(totals)))",
        killers=(f"{EVALUATION}::test_standard_errors_are_over_prompts",),
    ),
    Mutant(
        name="error-of-few-prompts-too-small",
        mistake="the variance over prompts is divided by P, not by P - 1",
        target="rlhf_pg.trainers.evaluator.standard_error",
        old="* len(names) / (len(names) - 1)",
        new="",
        killers=(
            f"{EVALUATION}::test_standard_error_weighs_prompts_by_their_completions",
            f"{EVALUATION}::test_standard_errors_are_over_prompts",
        ),
    ),
    Mutant(
        name="new-adapter-in-evaluation",
        mistake="an evaluated adapter gets another one beside it, as use_peft of its run says",
        target="rlhf_pg.trainers.evaluation.without_training",
        old="changed = of_adapters.union(IDLE)",
        new="changed = set(IDLE)",
        killers=(
            f"{ALONE}::test_evaluation_of_adapter_adds_no_other",
            f"{COMMAND}::test_run_directory_brings_model_and_keys",
        ),
    ),
    Mutant(
        name="held-out-data-of-recipe-kept",
        mistake="a flag --dataset_name evaluates on what the recipe held out all the same",
        target="rlhf_pg.cli.evaluate.config_of",
        old="args = dataclasses.replace(args, **whole)",
        new="pass",
        killers=(f"{COMMAND}::test_recipe_evaluates_what_it_holds_out",),
    ),
    Mutant(
        name="help-with-default-of-base",
        mistake="--help shows the default of the most general class, not the algorithm's own",
        target="rlhf_pg.cli.keys.groups",
        old="latest[key.name] = key",
        new="latest.setdefault(key.name, key)",
        killers=(f"{HELP}::test_latest_class_says_default_and_text",),
    ),
]
