"""`rlhf-pg eval`: score a model on held-out prompts, like `trainer.evaluate()`."""

import dataclasses
import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rlhf_pg.boundary.output_files import is_replaceable, write_file
from rlhf_pg.boundary.quoted import quote
from rlhf_pg.boundary.terminal import say
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import (
    WITH_REWARDS,
    check_found,
    config_of,
    find_recipe,
    is_recipe,
    model_of_run,
)
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.parse import fail, load, parse, read_flags
from rlhf_pg.models.loading import check_directory
from rlhf_pg.report.evaluation import intervals, tables
from rlhf_pg.report.run_files import finite
from rlhf_pg.trainers.evaluation import Evaluation


def evaluate(flags: Sequence[str]) -> None:
    """Evaluate a model, a run or a recipe; print a table, and write JSON with --json."""
    args, options = parse_flags(flags)
    evaluation = Evaluation(None, (), args)
    if evaluation.runtime.is_main:
        say(evaluation.describe())
        if evaluation.train_prompts.fingerprint == args.dataset_fingerprint:
            print("nothing is held out: these are the prompts that the run was trained on")
    metrics = evaluation.evaluate(temperature=options.temperature)
    if not evaluation.runtime.is_main:
        return
    sampled = f"{args.num_generations_eval} sampled at temperature {args.temperature:g}"
    passes = {"sampled": sampled, "greedy": "one greedy"}
    if options.temperature is not None:
        del passes["greedy" if options.temperature else "sampled"]
    Console().print(*tables(metrics, list(evaluation.eval_sets), list(passes)), sep="\n")
    prompts = {name: len(prompts) for name, prompts in evaluation.eval_sets.items()}
    labels = {name: f" of {name}" if name else "" for name in prompts}
    counts = ", ".join(f"{count} prompts{labels[name]}" for name, count in prompts.items())
    each = ", ".join(passes.values())
    say(f"{counts}; {each}; ± is half of the 95 % interval over prompts")
    for name, label in labels.items():
        head = f"eval_{name}_" if name else "eval_"
        if metrics.get(f"{head}pass@1") == 0:
            say(
                f"pass@k{label}: no completion reaches eval_success_threshold "
                f"{args.eval_success_threshold:g}; the highest weighted sum of scores is "
                f"{metrics[f'{head}highest_score']:.4g}"
            )
    if (out := options.json) is not None:
        results = {
            "model": args.model_name_or_path,
            "prompts": prompts,
            "completions": each,
            "metrics": dict(metrics),
            "confidence_intervals_95": intervals(metrics),
            "config": dataclasses.asdict(evaluation.resolved_args()),
        }
        write_file(out, [json.dumps(finite(results), indent=2).encode(), b"\n"])
        print(f"wrote {quote(str(out))}")


def parse_flags(flags: Sequence[str]) -> tuple[PolicyGradientConfig, Namespace]:
    """Return the config for the model, run or recipe in the flags, and the other options."""
    target = flags[0] if flags and not flags[0].startswith("-") else None
    options, keys = parser_of("eval").parse_known_args(flags[target is not None :])
    out = options.json = None if options.json is None else Path(options.json).absolute()
    if out and not (is_replaceable(out) and os.access(out.parent, os.W_OK)):
        fail(f"--json: {quote(str(out))} cannot be written: name a file in an existing directory")
    values = read_flags(keys)
    keys = ["--truncated_sampling", "ignore", *keys]  # no gradient is computed
    keys += ["--temperature", str(options.temperature)] if options.temperature else []
    if target is not None and is_recipe(target):
        if options.config is not None:
            fail(f"there are two recipes, {quote(target)} and --config {options.config}: give one")
        options.config = target
        target = None
    recipe = None if options.config is None else find_recipe(options.config)
    if target is not None:
        model, of_run = model_of_run(target)
        check_directory(model)
        keys += ["--model_name_or_path", model]
        # The keys of supervised training have no sampling settings.
        if (
            recipe is None
            and of_run is not None
            and load(of_run).get("algorithm") in [*WITH_REWARDS]
        ):
            recipe = of_run
            check_found(of_run, keys, options.trust_run)
    elif recipe is None and "model_name_or_path" not in values:
        fail("eval needs a model: rlhf-pg eval MODEL --dataset_name FILE --reward_funcs NAME")
    if recipe is None:
        return parse(PolicyGradientConfig, keys, "rlhf-pg eval"), options
    in_recipe = load(recipe)
    named = in_recipe.keys() & {"algorithm", "trainer"}  # the numbers are the same for each
    args = config_of([recipe] if named else [recipe, find_recipe("grpo")], keys, "eval")
    share = args.dataset_test_split
    seed = in_recipe.get("seed", type(args).seed)
    if "dataset_name" in values and not {"eval_dataset_name", "dataset_test_split"} & values.keys():
        # Evaluate on this dataset, and not on the recipe's held-out data.
        args = dataclasses.replace(args, eval_dataset_name=(), dataset_test_split=None)
    elif "dataset_name" not in values and isinstance(share, float) and seed != args.seed:
        fail(
            f"--seed {args.seed}: dataset_test_split {share:g} was split off by seed {seed}, and "
            "another's has rows that were trained on: leave --seed out, or set --eval_dataset_name"
        )
    return args, options
