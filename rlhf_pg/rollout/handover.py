"""The policy's weights on their way to another engine, adapters merged layer by layer."""

import copy
from collections.abc import Iterator
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_pg import models


def bare(model: PreTrainedModel) -> PreTrainedModel:
    """The model below its adapter, if it has one."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def parts_tied_weights(model: PreTrainedModel) -> bool:
    """Whether an adapter gives one end of tied weights a value that the other end has not."""
    base = bare(model)
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    saved = any(isinstance(end, ModulesToSaveWrapper) for end in ends)
    return models.adapts_tied_weights(model) or (saved and base.config.tie_word_embeddings)


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of `models.merged(model)`, without a second copy of the model.

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
