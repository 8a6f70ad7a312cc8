"""What a trainer is given, checked and made ready: model, adapter, prompts."""

import dataclasses
from os import PathLike
from typing import Any, TypeAlias

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg import models
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data import Prompts, check_fit, load_prompts

Model: TypeAlias = str | PathLike[str] | PreTrainedModel


def resolve(
    args: PolicyGradientConfig, model: Model | None, eval_dataset: Dataset | None
) -> tuple[PolicyGradientConfig, Model]:
    """The model that is meant, and the config with its path.

    Raises:
        ValueError: none is named, or there is nothing to evaluate on.
    """
    if args.eval_steps and eval_dataset is None:
        raise ValueError("eval_steps needs an eval_dataset")
    model = model or args.model_name_or_path
    if model is None:
        raise ValueError("no model: give model=... or the key model_name_or_path")
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
    loaded = models.load_policy(model, dtype, device, peft_config, quantization_config)
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
) -> Prompts:
    """The dataset's prompts as tokens.

    Raises:
        ValueError: what is wrong with the dataset `name`.
    """
    try:
        loaded = load_prompts(dataset, tokenizer, args.max_prompt_length, args.long_prompts)
        check_fit(
            loaded,
            args.max_completion_length,
            models.max_positions(model),
            args.micro_batch_tokens,
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return loaded
