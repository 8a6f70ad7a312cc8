"""What a trainer is given, checked and made ready: model, adapter, prompts."""

import dataclasses
import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from os import PathLike
from typing import Any, TypeAlias

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg import models
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data import Prompts, check_fit, load_prompts
from rlhf_pg.rollout import EnvironmentFactory, Player, Tool, Toolbox, ToolEnvironment
from rlhf_pg.rollout.tools import check_template

Model: TypeAlias = str | PathLike[str] | PreTrainedModel


def resolve(
    args: PolicyGradientConfig, model: Model | None, eval_dataset: Dataset | None
) -> tuple[PolicyGradientConfig, Model]:
    """The model that is meant, and the config with its path and with an absolute `output_dir`: a
    change of the working directory sends nothing elsewhere.

    Raises:
        ValueError: none is named, or there is nothing to evaluate on.
    """
    if args.eval_steps and eval_dataset is None:
        raise ValueError("eval_steps needs an eval_dataset")
    model = model or args.model_name_or_path
    if model is None:
        raise ValueError("no model: give model=... or the key model_name_or_path")
    args = dataclasses.replace(args, output_dir=os.path.abspath(args.output_dir))
    if isinstance(model, str | PathLike):
        args = dataclasses.replace(args, model_name_or_path=str(model))
    return args, model


def load_policy(
    model: Model,
    args: PolicyGradientConfig,
    device: torch.device,
    peft_config: Any,
    quantization_config: Any,
) -> PreTrainedModel:
    """The model in `args.dtype` on its device, with its adapter."""
    dtype: torch.dtype = getattr(torch, args.dtype)
    if args.load_in_4bit and quantization_config is not None:
        raise ValueError("give quantization_config or set load_in_4bit, not both")
    if args.load_in_4bit:
        quantization_config = models.quantization(dtype)
    with models.about("model_name_or_path") if isinstance(model, str | PathLike) else nullcontext():
        loaded = models.load_policy(
            model, dtype, device, peft_config, quantization_config, args.trust_remote_code
        )
    if args.save_merged and (quantization_config or not isinstance(loaded, PeftModel)):
        raise ValueError("save_merged is for a model with an adapter on unquantized weights")
    return loaded


def adapter(args: PolicyGradientConfig, given: Any) -> Any:
    """The adapter's config: the one given, or that of `use_peft`."""
    if not args.use_peft:
        return given
    if given is not None:
        raise ValueError("there are two adapters: give peft_config or set use_peft, not both")
    return models.lora_config(
        args.lora_r, args.lora_alpha, args.lora_dropout, args.lora_target_modules
    )


def prompts(
    dataset: Dataset | None,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: PolicyGradientConfig,
    tools: Sequence[dict[str, Any]] = (),
) -> Prompts:
    """The dataset's prompts as tokens, with the schemas of the tools in them.

    Raises:
        ValueError: what is wrong with the dataset `name`.
    """
    try:
        loaded = load_prompts(dataset, tokenizer, args.max_prompt_length, args.long_prompts, tools)
        texts = [row for row, p in enumerate(loaded.rows["prompt"]) if isinstance(p, str)]
        if tools and texts:
            raise ValueError(
                f"the prompt in row {texts[0]} is a string, and tools are called in a chat: make "
                "it a list of messages"
            )
        check_fit(
            loaded,
            args.max_completion_length,
            models.max_positions(model),
            args.micro_batch_tokens,
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return loaded


def player(
    args: PolicyGradientConfig,
    tools: Sequence[Tool] | None,
    environment_factory: EnvironmentFactory | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Player | None:
    """What plays episodes, for a run with tools or an environment.

    Raises:
        ValueError: there are both, something that cannot be called, or keys of episodes for a run
            that has none; or a chat template that does not know tools.
    """
    has_episodes = bool(tools) or environment_factory is not None
    why = "is for episodes: give tools or environment_factory to the trainer, or leave it out"
    args.refuse_idle(("max_turns", "environment_timeout"), has_episodes, why)
    if not has_episodes:
        return None
    if tools and environment_factory is not None:
        raise ValueError(
            "give tools or environment_factory, not both: an environment can call what it likes"
        )
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "stop_token_ids": models.stop_token_ids(model, tokenizer),
        "max_turns": args.max_turns,
    }
    if environment_factory is not None:
        if not callable(environment_factory):
            raise ValueError(
                "environment_factory must be a class or function that makes an environment, got "
                f"{environment_factory!r}"
            )
        timeout = args.environment_timeout
        return Player(environment_factory=environment_factory, timeout=timeout, **options)
    box = Toolbox.of(tools or (), tokenizer, args.environment_timeout)
    check_template(tokenizer, box.schemas)
    return Player(
        environment_factory=partial(ToolEnvironment, box),
        timeout=None,  # it keeps to that of its tools
        tools=box.schemas,
        special_tokens=box.reads_tokens,
        **options,
    )
