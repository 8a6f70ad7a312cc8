"""LoRA and similar adapters.

Policy, critic and reference share every frozen tensor: the base weights are in memory only once.
"""

import copy
import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import peft
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_pg.boundary.quoted import tell
from rlhf_pg.models.lm_head import bare

M = TypeVar("M", bound=nn.Module)
Gather = Callable[[Iterable[Tensor]], AbstractContextManager[Any]]
"""What fills in a few sharded weights, inside a block; collective."""

# Share of an adapter that may be lost to rounding when it is merged for sampling. Early in training
# an adapter in bfloat16 loses more: a change of a weight by less than 2^-9 of it vanishes.
MOST_LOST = 0.1
# What loading an adapter cannot repeat: inits that read data or change base weights at random.
UNREPEATABLE = ("corda", "eva", "lora_ga", "pissa_niter")


def share_frozen(module: M) -> M:
    """Copy a module, except for its frozen parameters, which the copy shares."""
    frozen: dict[int, Any] = {id(p): p for p in module.parameters() if not p.requires_grad}
    return copy.deepcopy(module, frozen)


def add_adapter(model: PreTrainedModel, config: Any) -> PeftModel:
    """Freeze the model and add a trained adapter from a `peft` config, in place; ValueError if the
    model has an adapter, a target matches no module, or the adapter cannot be trained and loaded.
    """
    if isinstance(model, PeftModel):
        raise ValueError("the model comes with an adapter: leave peft_config (use_peft) out")
    _check_targets(model, config)
    config = copy.deepcopy(config)
    if getattr(config, "target_modules", None) == "all-linear" and not config.exclude_modules:
        # peft would break subclasses of Linear with their own forward, such as routers that return
        # a tuple (PhiMoE, Llama 4) and grouped projections (DeepSeek-V4).
        sources = "transformers.models.", "transformers_modules."  # no classes of quantised layers
        excluded = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and type(module).__module__.startswith(sources)
            and type(module).forward is not nn.Linear.forward
        ]
        config.exclude_modules = excluded or None
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.startswith(UNREPEATABLE):
        raise ValueError(
            f"init_lora_weights {start!r} reads data, or changes the base weights at random: "
            "loading the adapter would not repeat it. Use pissa, olora or True"
        )
    if getattr(config, "layer_replication", None):
        raise ValueError("layer_replication shares weights between layers, which cannot be merged")
    try:
        adapted = peft.get_peft_model(model, config)
    except Exception as error:
        raise ValueError(
            f"peft_config does not fit {type(model).__name__}: {tell(error)}"
        ) from error
    check_kind(adapted)
    return adapted


def _check_targets(model: nn.Module, config: Any) -> None:
    """Refuse a target that matches no module; peft accepts it if another target matches."""
    targets = getattr(config, "target_modules", None)
    if targets is None or targets == "all-linear":
        return
    names = [name for name, _ in model.named_modules()]
    if isinstance(targets, str):
        unmatched = [] if any(re.fullmatch(targets, name) for name in names) else [targets]
    else:
        unmatched = [t for t in targets if not any(f".{n}".endswith(f".{t}") for n in names)]
    if unmatched:
        ends = {name.rsplit(".", 1)[-1] for name in names}
        leaves = sorted(end for end in ends if end.isidentifier())
        near = difflib.get_close_matches(unmatched[0], leaves, 3) or leaves
        raise ValueError(
            f"the LoRA target {unmatched[0]!r} matches no module of the model; near: "
            f"{', '.join(near)} (target_modules, lora_target_modules)"
        )


def check_kind(model: PreTrainedModel) -> None:
    """Refuse several adapters, one not named "default", prompt tuning, adapters that cannot be
    copied or merged, as sampling and `save_merged` do, and kernels for inference (ValueError).
    """
    if getattr(model, "use_kernels", False):
        raise ValueError("the model has use_kernels: load it without, since they have no gradient")
    if isinstance(model, PeftModel) and list(model.peft_config) != ["default"]:
        raise ValueError(
            f"the model has the adapters {', '.join(model.peft_config)}: only a single adapter "
            'named "default" can be trained and saved'
        )
    if not isinstance(model, PeftModel) or is_quantized(model):
        return
    layers = {
        name.rpartition(".")[2]: layer
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }
    if not layers:
        kind = type(model.active_peft_config).__name__
        raise ValueError(f"peft_config is a {kind}, which has no weights to adapt: use LoraConfig")
    for name, layer in layers.items():  # one of each kind
        try:
            copy.deepcopy(layer).merge()
        except Exception as error:
            raise ValueError(
                f"the adapter of {name} cannot be copied and merged, as sampling and save_merged "
                f"do ({tell(error)}): change peft_config (lora_bias needs layers with a bias, and "
                "ensure_weight_tying embeddings in modules_to_save, not in target_modules)"
            ) from error


def is_plain(config: Any) -> bool:
    """Return whether an adapter is made without reading the weights that it adapts."""
    if not isinstance(config, LoraConfig) or config.use_dora or config.trainable_token_indices:
        return False
    return config.init_lora_weights in (True, False, "gaussian")


def saves_base(model: Any) -> bool:
    """Return whether peft saves base weights beside the adapter, as it does for embeddings."""
    if not isinstance(model, PeftModel):
        return False
    return any(".base_layer." in name for name in peft.get_peft_model_state_dict(model))


def adds_nothing(model: PreTrainedModel) -> bool:
    """Return whether the model has a newly created LoRA adapter, with B = 0."""
    if not isinstance(model, PeftModel):
        return False
    tensors = peft.get_peft_model_state_dict(model)
    plain = all(".lora_A." in name or ".lora_B." in name for name in tensors)
    return plain and not any(tensors[name].any() for name in tensors if ".lora_B." in name)


def freeze_unread(model: PreTrainedModel) -> None:
    """Freeze parts that text does not pass through, such as image towers."""
    base = bare(model)
    if base.config.get_text_config() is not base.config:
        parts = (
            base.get_decoder(),
            base.get_input_embeddings(),
            base.get_output_embeddings(),
        )
        freeze_all_but(base, *(part for part in parts if part is not None))


def freeze_all_but(model: nn.Module, *parts: nn.Module) -> None:
    """Freeze every parameter of the model outside its `parts`."""
    used = {id(p) for part in parts for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def is_quantized(model: nn.Module) -> bool:
    """Return whether weights are stored in fewer bits than they compute in."""
    return not all(p.is_floating_point() for p in model.parameters())


def copy_adapted(module: Any) -> Any:
    """Copy the layers that an adapter changes; the copy shares all other parameters."""
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    changed = {id(p) for layer in layers for p in layer.parameters()}
    shared: dict[int, Any] = {id(p): p for p in module.parameters() if id(p) not in changed}
    return copy.deepcopy(module, shared)


def merge(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the adapter merged into a copy of its layers; others are shared."""
    if not isinstance(model, PeftModel):
        return model
    copied = copy_adapted(model)
    for base in list(_tied_layers(copied)):  # layers tied to them keep the original
        base.weight = nn.Parameter(base.weight.detach().clone(), base.weight.requires_grad)
        copied.get_base_model().config.tie_word_embeddings = False
    return copied.merge_and_unload()


@torch.no_grad()
def merge_loss(model: nn.Module, gathered: Gather = nullcontext) -> float:
    """Return the share of an adapter that is lost to rounding when it is merged into the weights.

        |rounded - exact| / |exact - base|

    over all weights together: 1 if the adapter is too small to change any weight, and nearly 0 in
    float32. Layers are gathered and copied one at a time.
    """

    def merged_weight(layer: Any, dtype: torch.dtype) -> Tensor:
        copied = copy.deepcopy(layer)
        copied.get_base_layer().to(dtype)
        copied.merge()
        return copied.get_base_layer().weight  # type: ignore[no-any-return]

    error = change = 0.0
    for layer in model.modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base: Any = getattr(layer.get_base_layer(), "weight", None)
        if base is None or torch.promote_types(base.dtype, torch.float32) == base.dtype:
            continue
        with gathered(layer.parameters()):
            rounded, exact = (merged_weight(layer, dtype) for dtype in (base.dtype, torch.float32))
            error += float((rounded.float() - exact).square().sum())
            change += float((exact - base.float()).square().sum())
    if change:
        return math.sqrt(error / change)
    return 0.0


def adapts_tied_weights(model: nn.Module) -> bool:
    """Return whether an adapter changes one of two tied layers."""
    return any(_tied_layers(model))


def _tied_layers(model: nn.Module) -> Iterator[Any]:
    """Yield the layers under an adapter that share their weight with another layer."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            base: Any = layer.get_base_layer()
            if owners[id(getattr(base, "weight", None))] > 1:
                yield base
