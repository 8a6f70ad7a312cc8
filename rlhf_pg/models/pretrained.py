"""Weights by path or Hub id, all of them."""

from os import PathLike
from typing import Any

from transformers import PreTrainedModel


def from_pretrained(
    auto_class: Any,
    path: str | PathLike[str],
    new: tuple[str, ...] = (),
    *,
    trust_remote_code: bool,
    **options: Any,
) -> PreTrainedModel:
    """A model whose every tensor the checkpoint has: `transformers` makes up what is missing.

    Args:
        auto_class: of `transformers`, or a model's own class.
        trust_remote_code: run code that comes with the model.
        new: how the names of tensors begin that the checkpoint need not have: those of a new head.

    Raises:
        ValueError: a tensor is missing.
        OSError, ImportError: of `transformers`.
    """
    model: PreTrainedModel
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
