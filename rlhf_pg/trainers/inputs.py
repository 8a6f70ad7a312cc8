"""The inputs of a run: data, rewards, model and environment, from Python or from the config."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary import user_modules
from rlhf_pg.boundary.quoted import quote
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.files import absolute, names_function
from rlhf_pg.data.inputs import resolve_data
from rlhf_pg.episodes import EnvironmentFactory, EnvironmentSource, Tool, source_of
from rlhf_pg.episodes.factory import load_tools
from rlhf_pg.rewards.named import check_arguments, no_reward, resolve_rewards
from rlhf_pg.run.optimizer import Optimizers

CODE = ("trainer", "agent_program", "tools", "environment_factory")  # keys that name it
# Arguments that no config key can replace.
OF_EVALUATION = ("tools", "environment_factory", "agent_program", "quantization_config")
OF_TRAINING = ("peft_config", "optimizers", "value_model", "privileged_prompt")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The arguments of a trainer besides its config (see `PolicyGradientTrainer`); once resolved,
    also the inputs that the config names.
    """

    model: Any = None
    reward_funcs: Any = ()
    train_dataset: Any = None
    eval_dataset: Any = None
    processing_class: PreTrainedTokenizerBase | None = None
    reward_processing_classes: Any = None
    peft_config: Any = None
    optimizers: Optimizers = (None, None)
    quantization_config: Any = None
    tools: Sequence[Tool] | None = None
    environment_factory: EnvironmentFactory | EnvironmentSource | None = None
    privileged_prompt: Callable[..., Any] | None = None
    agent_program: Callable[..., Any] | str | None = None
    value_model: Any = None

    def given_in_python(self, args: PolicyGradientConfig) -> tuple[str, ...]:
        """Return the names of arguments that no config key can replace; ValueError if one is
        missing that the run of a recorded config had.
        """
        in_python = []
        for name in (*OF_EVALUATION, *OF_TRAINING):
            value = getattr(self, name)
            if any(value) if isinstance(value, list | tuple) else value is not None:
                in_python.append(name)
        missing = [name for name in args.given_in_python if name not in in_python]
        if missing:
            raise ValueError(
                f"given_in_python: the run of this config was given {', '.join(missing)} in "
                "Python: give the same to the trainer again, or take the names out of "
                "given_in_python"
            )
        return tuple(in_python)

    @property
    def environments(self) -> EnvironmentSource | None:
        """The source of the environments, once resolved."""
        return cast(EnvironmentSource | None, self.environment_factory)


def resolve_inputs(
    args: PolicyGradientConfig, inputs: Inputs, trains: bool
) -> tuple[PolicyGradientConfig, Inputs, list[str], dict[str, Any]]:
    """Take the inputs that were not given in Python from the config.

    Returns:
        The config and the inputs: reward functions in a list, evaluation sets by name, and an
        `EnvironmentSource` for any environment; a line to show for each reward and each function
        of the user's; and keys to add to config.yaml.

    Raises:
        ValueError: something is given twice, missing or unfit. No model has been loaded.
    """
    args = args.locate()
    in_python = inputs.given_in_python(args)
    for name in in_python:
        if getattr(args, name, None):
            raise ValueError(f"{name} is given twice, as an argument and in args")
    named_tools, environment_factory = load_tools(args)
    tools = named_tools or inputs.tools
    if environment_factory is None:
        environment_factory = inputs.environment_factory
    agent_program = args.agent_program or inputs.agent_program
    privileged_prompt = inputs.privileged_prompt
    code = [key for key in CODE if getattr(args, key)]
    code += [key for key in ("advantage_estimator", "policy_loss") if ":" in getattr(args, key)]
    hidden = args.privileged_prompt or ""
    if names_function(hidden):
        privileged_prompt = user_modules.load(hidden)
        code.append("privileged_prompt")

    task, train_dataset, eval_datasets = resolve_data(
        args, inputs.train_dataset, inputs.eval_dataset, environment_factory, trains
    )
    if args.eval_steps and not eval_datasets:
        raise ValueError("eval_steps needs an eval_dataset (dataset_test_split, eval_dataset_name)")
    functions, described, recorded = resolve_rewards(
        inputs.reward_funcs, args, None if task is None else task.reward
    )
    for key in code:
        names = getattr(args, key)
        listed = names if isinstance(names, str) else ", ".join(names)
        described.append(f"{key}: runs {quote(listed)}")
    if not trains and inputs.eval_dataset is not None:
        recorded |= args.without_names()
    recorded |= {"given_in_python": in_python}
    alone = environment_factory is None and agent_program is None
    if not functions and args.teacher_model_name_or_path and alone:
        functions = [no_reward]
    if privileged_prompt is not None:
        check_arguments([privileged_prompt], {"train_dataset": train_dataset}, "rewards")
    held_out = {f"eval_dataset {name}".rstrip(): data for name, data in eval_datasets.items()}
    check_arguments(functions, {"train_dataset": train_dataset, **held_out})

    model = inputs.model or args.model_name_or_path
    if task is not None:
        tools = task.tools if tools is None else tools
        environment_factory = environment_factory or task.environment_factory
        if model is None and task.make_tokenizer is not None:
            model = task.warm_started_model()
    if model is None:
        raise ValueError("no model: give model=... or the key model_name_or_path")
    if environment_factory is not None:
        environment_factory = source_of(environment_factory)
    changes: dict[str, Any] = {"output_dir": os.path.abspath(args.output_dir)}
    if isinstance(model, str | PathLike):
        changes["model_name_or_path"] = absolute(os.fspath(model), None)
    args = dataclasses.replace(args, **changes)
    inputs = dataclasses.replace(
        inputs,
        model=model,
        reward_funcs=functions,
        train_dataset=train_dataset,
        eval_dataset=eval_datasets,
        tools=tools,
        environment_factory=environment_factory,
        privileged_prompt=privileged_prompt,
        agent_program=agent_program,
    )
    return args, inputs, described, recorded
