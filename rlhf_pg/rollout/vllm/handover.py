"""Hand over the policy's weights to another engine, with adapters merged layer by layer."""

import copy
import re
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import groupby
from typing import Any

from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from rlhf_pg.models.adapters import Gather, adapts_tied_weights, copy_adapted
from rlhf_pg.models.lm_head import bare


def parts_tied_weights(model: PreTrainedModel) -> bool:
    """Return whether an adapter changes only one of two tied weights."""
    base = bare(model)
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    saved = any(isinstance(end, ModulesToSaveWrapper) for end in ends)
    return adapts_tied_weights(model) or (saved and base.config.tie_word_embeddings)


def published_weights(
    model: PreTrainedModel, gathered: Gather = nullcontext
) -> Iterator[tuple[str, Tensor]]:
    """Yield `merged_weights` under their names in checkpoints, which other engines know.

    `transformers` keeps the experts of a layer in one tensor, and renames some parts. The layers of
    such a model are copied one at a time.
    """
    names = copy.copy(bare(model))
    # These conversions come from the loaded checkpoint, perhaps with a larger model's prefix.
    vars(names).pop("_weight_conversions", None)
    weights = merged_weights(model, gathered)
    if not get_model_conversion_mapping(names, add_legacy=False):
        yield from weights
        return

    def layer_of(pair: tuple[str, Tensor]) -> str:
        name, _ = pair
        prefix = re.match(r".*?\.\d+\.", name)  # such as "model.layers.3."
        return prefix[0] if prefix else name

    for _, layer in groupby(weights, key=layer_of):
        yield from revert_weight_conversion(names, dict(layer)).items()


def merged_weights(
    model: PreTrainedModel, gathered: Gather = nullcontext
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of `merge(model)` without a second copy of the model.

    Persistent buffers are included. The layers that the adapter changes are copied one at a time;
    the rest are the policy's own tensors, tied ones once. Sharded weights are `gathered` until the
    next is asked for: collective, so each process has to take them all.
    """
    is_yielded = {id(parameter): False for parameter in model.parameters()}
    yield from _weights(bare(model), "", is_yielded, gathered)


def _weights(
    module: nn.Module,
    prefix: str,
    is_yielded: dict[int, bool],
    gathered: Gather,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a module, except those of the policy that were already yielded.

    `is_yielded` has only the policy's own tensors, since a copy may reuse the id of a freed one.
    """
    if hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer"):
        with gathered(module.parameters()):
            yield from _weights(_merge(module), prefix, is_yielded, nullcontext)
        return
    for name, parameter in module.named_parameters(recurse=False):
        if not is_yielded.get(id(parameter)):
            if id(parameter) in is_yielded:
                is_yielded[id(parameter)] = True
            with gathered([parameter]):
                yield prefix + name, parameter.detach()
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer
    for name, child in module.named_children():
        yield from _weights(child, f"{prefix}{name}.", is_yielded, gathered)


def _merge(layer: Any) -> nn.Module:
    """Merge a layer of `peft` in a copy, as `merge_and_unload` does."""
    copied = copy_adapted(layer)
    if hasattr(copied, "unload_and_optionally_merge_module"):
        unloaded: nn.Module = copied.unload_and_optionally_merge_module(True, False, None)
        return unloaded
    copied.merge()
    bottom: nn.Module = copied.get_base_layer()
    return bottom
