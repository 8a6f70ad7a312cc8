"""Loading of complete weights, and of tokenizers, by path or Hub id."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import quoted, shown, told


def from_pretrained(
    auto_class: Any,
    path: str | PathLike[str],
    new: tuple[str, ...] = (),
    *,
    trust_remote_code: bool,
    **options: Any,
) -> PreTrainedModel:
    """Load a model, and refuse a checkpoint that lacks tensors, which `transformers` would make up.

    Args:
        auto_class: of `transformers`, or a model's own class.
        trust_remote_code: run code that comes with the model.
        new: prefixes of the names of tensors that the checkpoint may lack: those of a new head.

    Raises:
        ValueError: a tensor is missing, or nothing can be loaded.
    """
    model: PreTrainedModel
    with opening("model", path):
        model, info = auto_class.from_pretrained(
            path, output_loading_info=True, trust_remote_code=trust_remote_code, **options
        )
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
    """Load the tokenizer saved at a path or Hub id.

    Raises:
        ValueError: there is none, or it cannot be loaded.
    """
    with opening("tokenizer", path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, revision=revision or "main"
        )
    return tokenizer


@contextmanager
def opening(what: str, path: str | PathLike[str]) -> Iterator[None]:
    """Turn any error of code that reads the files of a model into one that names the path.

    Raises:
        ValueError: the code failed, but not for lack of memory; with the path and what belongs
            there.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"the {what} {shown(str(path))} cannot be loaded ({told(error)}): give a directory as "
            "save_pretrained leaves it, with its config.json, weights and tokenizer files, or the "
            "id of one on the Hub"
        ) from error


@contextmanager
def about(name: str) -> Iterator[None]:
    """Put the name of the setting in front of a `ValueError` that is raised inside.

    Raises:
        ValueError: the same error, with the name in front.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_directory(model: str | PathLike[str]) -> None:
    """Refuse a path without a model directory.

    What cannot be a Hub id is a path, and so is a name that begins with a directory that is here.

    Raises:
        ValueError: the directory is missing.
    """
    name = str(model)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    first = name.partition("/")[0]
    is_here = not is_path and first != name and os.path.isdir(first)
    if (is_path or is_here) and not os.path.isdir(name):
        of_hub = "; a model of the Hub with this id has to be downloaded into it" if is_here else ""
        raise ValueError(f"there is no model directory {quoted(name)}{of_hub}")
