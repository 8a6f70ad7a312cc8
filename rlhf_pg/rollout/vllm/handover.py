"""The policy's weights on their way to another engine, adapters merged layer by layer."""

import copy
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from rlhf_pg import models


def bare(model: PreTrainedModel) -> PreTrainedModel:
    """The model below its adapter, if it has one."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def has_experts(model: PreTrainedModel) -> bool:
    """Whether it is a mixture of experts."""
    return any(".experts." in name for name, _ in model.named_parameters())


def parts_tied_weights(model: PreTrainedModel) -> bool:
    """Whether an adapter gives one end of tied weights a value that the other end has not."""
    base = bare(model)
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    saved = any(isinstance(end, ModulesToSaveWrapper) for end in ends)
    return models.adapts_tied_weights(model) or (saved and base.config.tie_word_embeddings)


def published_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """`merged_weights` as checkpoints have them, whose names other engines know.

    `transformers` keeps the experts of a layer in one tensor, and calls some parts otherwise. A
    layer of such a model is copied when its turn comes.
    """
    names = copy.copy(bare(model))
    # What the checkpoint that it was loaded from calls them: perhaps with the prefix of another
    # class, whose language model this is.
    vars(names).pop("_weight_conversions", None)
    weights = merged_weights(model)
    if not get_model_conversion_mapping(names, add_legacy=False):
        yield from weights
        return
    for _, layer in groupby(weights, key=lambda pair: _layer(pair[0])):
        yield from revert_weight_conversion(names, dict(layer)).items()


def _layer(name: str) -> str:
    """Of a weight: "model.layers.3." for one of layer 3."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of `models.merged(model)`, without a second copy of the model; and the
    buffers that are saved with them, as the bias that an expert is chosen by.

    A layer that the adapter changes is copied when its turn comes, and the copy is the caller's: it
    goes when the caller lets it go. The others are the policy's own tensors, tied ones once.
    """
    yield from _weights(bare(model), "", {id(p): False for p in model.parameters()})


def _weights(
    module: nn.Module, prefix: str, given: dict[int, bool]
) -> Iterator[tuple[str, Tensor]]:
    """`given` has the policy's own; a copy may get the id of one that is gone."""
    if hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer"):
        module = _merged(module)
    for name, parameter in module.named_parameters(recurse=False):
        if not given.get(id(parameter)):
            if id(parameter) in given:
                given[id(parameter)] = True
            yield prefix + name, parameter.detach()
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer
    for name, child in module.named_children():
        yield from _weights(child, f"{prefix}{name}.", given)


def _merged(layer: Any) -> nn.Module:
    """What `peft` leaves of a layer of its own in `merge_and_unload`, in a copy."""
    tuners = [part for part in layer.modules() if isinstance(part, BaseTunerLayer)]
    changed = {id(p) for part in tuners for p in part.parameters()}
    shared: dict[int, Any] = {id(p): p for p in layer.parameters() if id(p) not in changed}
    copied = copy.deepcopy(layer, shared)
    if hasattr(copied, "unload_and_optionally_merge_module"):
        unloaded: nn.Module = copied.unload_and_optionally_merge_module(True, False, None)
        return unloaded
    copied.merge()
    bottom: nn.Module = copied.get_base_layer()
    return bottom
