"""The help of all commands."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from rlhf_pg import config
from rlhf_pg.cli.options import USAGE, parser_of
from rlhf_pg.cli.recipes import algorithm_of, find_recipe, is_recipe, presets, split_recipe
from rlhf_pg.config.help import of_config, width
from rlhf_pg.config.parse import load

CONFIGS: dict[str, type] = {
    "grpo": config.GRPOConfig,
    "rloo": config.RLOOConfig,
    "reinforce": config.ReinforceConfig,
    "ppo": config.PPOConfig,
    "sft": config.SFTConfig,
    "reward_model": config.RewardModelConfig,
}
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


def help_of(command: str, flags: Sequence[str]) -> str:
    """Return the help of a command: usage, its own options, and the keys of the config in groups.

    A recipe among the flags decides which config it is, and its values stand in for the defaults.
    """
    others = [flag for flag in flags if flag not in ("-h", "--help")]
    name = split_recipe(others)[0] if command in ("train", "plan", "eval") else None
    named = name is not None and (command != "eval" or is_recipe(name))
    recipe = find_recipe(str(name)) if named else None
    values = {} if recipe is None else load(recipe)
    kind: type = config.GRPOConfig if command == "demo" else config.PolicyGradientConfig
    if recipe is not None:
        kind = CONFIGS[algorithm_of(recipe, CONFIGS)]
    what = USAGE[command][1]
    said = [f"{what[0].upper()}{what[1:]}."]
    if command in ("train", "plan"):
        said.append(f"Presets: {', '.join(presets())}.")
    if command == "eval":
        said.append("A run directory brings its own keys, and its final/ is the model.")
        said.append("A share that dataset_test_split splits off depends on seed: keep the run's.")
    if command in ("train", "plan", "eval", "demo"):
        said.append(SWITCHES)
    about = textwrap.fill(" ".join(said), width())
    blocks = [parser_of(command, name).format_help().strip(), about]
    if command == "eval":

        def evaluates(group: str, field: Any) -> bool:
            return group in OF_EVALUATION or field.name in ALSO_OF_EVALUATION

        blocks.append(of_config(kind, "", values, evaluates))
    elif command in ("train", "plan", "demo"):
        blocks.append(of_config(kind, "", values))
    if command in ("train", "plan") and recipe is None:
        common = {field.name: field.default for field in dataclasses.fields(kind)}

        def differs(_: str, field: Any) -> bool:  # the key, or its default
            return (
                bool(common.get(field.name, differs) != field.default) and field.name != "algorithm"
            )

        for algorithm, chosen in CONFIGS.items():
            own = of_config(chosen, "", {}, differs)
            blocks.append(f"Only with algorithm {algorithm}:\n\n{own}")
    return "\n\n".join(blocks)
