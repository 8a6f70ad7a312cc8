"""Models and tokenizers by path, Hub id or object, checked before anything is computed."""

import os
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


def load_model(
    model: str | os.PathLike[str] | PreTrainedModel, dtype: torch.dtype
) -> PreTrainedModel:
    """A causal language model with weights in `dtype`; an object's weights are cast in place.

    Raises:
        ValueError: a path (what cannot be a Hub id) with no directory there.
    """
    if isinstance(model, str | os.PathLike):
        name = str(model)
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        if is_path and not os.path.isdir(name):
            raise ValueError(f"there is no model directory {name}")
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    for parameter in model.parameters():
        # Not model.to(dtype), which would round the rotary frequencies too: they are buffers.
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def load_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None, model: PreTrainedModel, pad_token: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer given, or the one saved beside the model.

    Args:
        pad_token: used where the tokenizer has none.

    Raises:
        ValueError: no tokenizer, no pad or EOS token, or ids beyond the model's embedding rows.
    """
    if tokenizer is None and not model.name_or_path:
        raise ValueError(
            "the model was not loaded from a path: give its tokenizer as processing_class"
        )
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(model.name_or_path)
    if tokenizer.pad_token_id is None and pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ValueError(f"pad_token {pad_token!r} is no token of the tokenizer")
        tokenizer.pad_token = pad_token
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no EOS token, so no completion could end: set "
            "processing_class.eos_token"
        )
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "the tokenizer has no pad token: set the key pad_token, or processing_class.pad_token "
            "(the EOS token will do: padding is masked by position, not by id)"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} ids but the model only {rows} embedding rows: "
            "they do not belong together, or model.resize_token_embeddings is due"
        )
    return tokenizer


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion: the tokenizer's EOS and those of the generation config."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({tokenizer.eos_token_id, *(i for i in ids if i is not None)})


def max_positions(model: PreTrainedModel) -> int | None:
    """Longest sequence that the model has positions for; None if it sets no limit."""
    limit: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: the modules, and the rates that attention functions read."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
