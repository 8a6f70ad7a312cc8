"""Loading of complete weights, and of tokenizers, by path or Hub id."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file

from rlhf_pg.boundary.quoted import quoted, shown, told

logger = logging.getLogger(__name__)


def is_gguf(path: str | PathLike[str]) -> bool:
    """Return whether a path is a GGUF file, which has model, config and tokenizer in it."""
    return os.path.isfile(path) and str(path).endswith(".gguf")


def place(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the arguments by which `from_pretrained` finds a directory, Hub id or GGUF file."""
    if not is_gguf(path):
        return {"pretrained_model_name_or_path": path}
    directory, name = os.path.split(path)
    return {"pretrained_model_name_or_path": directory or ".", "gguf_file": name}


def is_adapter(path: str | PathLike[str]) -> bool:
    """Return whether a directory or Hub id holds an adapter; ValueError if nobody can say."""
    with opening("model", path):
        return not is_gguf(path) and find_adapter_config_file(str(path)) is not None


def from_pretrained(
    auto_class: Any,
    path: str | PathLike[str],
    new: tuple[str, ...] = (),
    *,
    trust_remote_code: bool,
    **options: Any,
) -> PreTrainedModel:
    """Load a model, and refuse a checkpoint that lacks tensors, which `transformers` would make up.

    Only tensors whose names begin with one of `new`, those of a new head, may be missing;
    ValueError if others are, or if nothing can be loaded. `auto_class` may be a model's own class.
    """
    model: PreTrainedModel
    where = place(path)
    if "gguf_file" in where and hasattr(transformers, "GgufConfig"):  # older ones always unpack
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with opening("model", path):
        model, info = auto_class.from_pretrained(
            **where, output_loading_info=True, trust_remote_code=trust_remote_code, **options
        )
    if "gguf_file" in where:
        logger.info("%s: its GGUF weights are dequantized to %s", path, model.dtype)
        if hasattr(model, "hf_quantizer"):
            model.hf_quantizer.remove_quantization_config(model)
        model.name_or_path = model.config.name_or_path = str(path)
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(new))
    if missing:
        raise ValueError(
            f"the checkpoint {str(path)!r} lacks {len(missing)} tensors of a "
            f"{type(model).__name__}, which would be random: {missing[0]} for example. Is it "
            "whole, and of a model of this kind?"
        )
    return model


def tokenizer_from_pretrained(
    path: str | PathLike[str], *, trust_remote_code: bool, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer saved at a path or Hub id; ValueError if that fails."""
    with opening("tokenizer", path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            **place(path), trust_remote_code=trust_remote_code, revision=revision or "main"
        )
    return tokenizer


@contextmanager
def opening(what: str, path: str | PathLike[str]) -> Iterator[None]:
    """Turn errors of reading a model's files into a ValueError with the path and a remedy."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"the {what} {shown(str(path))} cannot be loaded ({told(error)}): give a directory as "
            "save_pretrained leaves it, with its config.json, weights and tokenizer files, a GGUF "
            "file (pip install gguf), or the id of one on the Hub"
        ) from error


@contextmanager
def about(name: str) -> Iterator[None]:
    """Put the name of the setting in front of a `ValueError` that is raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_directory(model: str | PathLike[str]) -> None:
    """Refuse a path without a model directory (ValueError).

    What cannot be a Hub id is a path, and so is a name that begins with a directory that is here.
    """
    name = str(model)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    first = name.partition("/")[0]
    is_here = not is_path and first != name and os.path.isdir(first)
    if (is_path or is_here) and not os.path.isdir(name) and not is_gguf(name):
        of_hub = "; a model of the Hub with this id has to be downloaded into it" if is_here else ""
        raise ValueError(f"there is no model directory {quoted(name)}{of_hub}")
