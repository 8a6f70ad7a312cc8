"""The help of all commands."""

import dataclasses
from collections.abc import Sequence

from rlhf_pg.cli import recipes
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import CONFIGS
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.help import of_config
from rlhf_pg.config.inputs import DataConfig, ModelConfig, RewardsConfig
from rlhf_pg.config.method import SamplingConfig
from rlhf_pg.config.parse import load

# Keys that matter where nothing is trained.
OF_EVALUATION = {
    *("seed", "dtype", "pad_token", "max_prompt_length", "long_prompts", "load_in_4bit"),
    *("num_generations_eval", "eval_success_threshold", "reward_weights"),
    "reward_model_sees_eos",
    *(
        field.name
        for config in (ModelConfig, DataConfig, RewardsConfig, SamplingConfig)
        for field in dataclasses.fields(config)
    ),
}
FLAGS = (
    "Every key of a recipe is a flag as well, and flags win; --use_peft is short for --use_peft "
    "true."
)


def help_of(command: str, flags: Sequence[str]) -> str:
    """Return the help of a command: usage, its own options, and the keys of the config in groups.

    A recipe among the flags decides which config it is, and its values stand in for the defaults.
    """
    parser = parser_of(command)
    if command not in ("train", "plan", "eval", "demo"):
        return parser.format_help().strip()
    about = [parser.description, FLAGS]
    if command in ("train", "plan"):
        about.append(f"Presets: {', '.join(recipes.presets())}.")
    if command == "eval":
        about.append("A run directory brings its own keys, and its final/ is the model.")
        about.append("A share that dataset_test_split splits off depends on seed: keep the run's.")
    parser.description = " ".join(map(str, about))
    blocks = [parser.format_help().strip()]

    name, _ = recipes.split_recipe([flag for flag in flags if flag not in ("-h", "--help")])
    if command == "demo":
        blocks.append(of_config(CONFIGS["grpo"]))
    elif name is not None and (command != "eval" or recipes.is_recipe(name)):
        recipe = recipes.find_recipe(name)
        keys = OF_EVALUATION if command == "eval" else None
        blocks.append(of_config(recipes.config_type_of(recipe, CONFIGS), load(recipe), keys))
    elif command == "eval":
        blocks.append(of_config(PolicyGradientConfig, {}, OF_EVALUATION))
    else:
        blocks.append(of_config(PolicyGradientConfig))
        common = {field.name: field.default for field in dataclasses.fields(PolicyGradientConfig)}
        for algorithm, config in CONFIGS.items():
            own = {
                field.name
                for field in dataclasses.fields(config)
                if field.name not in common or common[field.name] != field.default
            }
            shown = of_config(config, {}, own - {"algorithm"})
            blocks.append(f"Only with algorithm {algorithm}:\n\n{shown}")
    return "\n\n".join(blocks)
