"""A custom attention function for `transformers` models.

All tokens of a forward pass are in one packed row. The argument `layout`, passed through the model,
says where each token belongs.

Shapes: N tokens of the pass, H query and K key-value heads, D their width.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

NAME = "rlhf_pg"
LONG, SETTLED = "longrope", "longrope, settled"
# Options that a model may pass to attention. Others are refused, since they would be ignored.
HONOURED = {
    "is_causal",
    "output_router_logits",  # passed through all layers, but not about attention
    "position_ids",  # stock functions infer the packing from these; here the layout gives it
    "sliding_window",  # longer rows are not packed: see `window`
}
# Blockwise attention, and the log of each query's softmax denominator; (B,H,L,D).
fused_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Layout(Protocol):
    """The arrangement of the tokens of a forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return (N,H,D) from query (H,N,D), and key and value (K,N,D) of the same tokens."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with the `layout` of the pass, (1,H,N,D) -> (1,N,H,D), as `transformers` expects."""
    # None, False and a rate of 0 turn an option off.
    asked = {name for name, value in options.items() if isinstance(value, Tensor) or value}
    if unknown := sorted(asked - HONOURED):
        raise NotImplementedError(f"attention with {unknown[0]}")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise NotImplementedError("attention to later tokens")
    if attention_mask is not None:  # `transformers` makes none for an unknown function
        raise NotImplementedError("attention with the model's own mask")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layout.attend(int(module.layer_idx), query[0], key[0], value[0], scale)  # type: ignore[arg-type]
    return out.contiguous()[None], None  # some models rely on contiguous output


AttentionInterface.register(NAME, _attention)


def configs_of(model: PreTrainedModel) -> list[Any]:
    """Return the distinct configs that the modules of the model read."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


@contextmanager
def replace_attention(configs: Sequence[Any], names: Sequence[str] | None = None) -> Iterator[None]:
    """Use this file's attention, or these names, inside the block, then restore the models' own."""
    own = [config._attn_implementation for config in configs]
    try:
        for config, name in zip(configs, names or [NAME] * len(configs), strict=True):
            config._attn_implementation = name
        yield
    finally:
        for config, before in zip(configs, own, strict=True):
            config._attn_implementation = before


class AttentionSupport(NamedTuple):
    """A model's support for attention in two parts."""

    unsupported_reason: str | None  # None if it is supported
    bytes_per_token: int = 0  # of keys and values in all layers, in the model's dtype


@torch.no_grad()
def attention_support(model: PreTrainedModel) -> AttentionSupport:
    """Pass one token to find out whether every layer calls our function in a known form."""
    if not model._supports_attention_backend:
        return AttentionSupport("its attention cannot be replaced")
    layers = DynamicCache(config=model.config.get_text_config()).layers
    for layer in layers:
        if not hasattr(layer, "batch_select_indices"):
            return AttentionSupport(f"it has recurrent layers ({type(layer).__name__})")
    probe, token = _Probe(), torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    inputs = {"input_ids": token, "attention_mask": token + 1, "position_ids": token}
    trunk: Any = model.base_model
    try:
        with replace_attention(configs_of(model)):
            trunk(**inputs, use_cache=False, layout=probe)
    except (AttributeError, NotImplementedError, TypeError) as error:
        return AttentionSupport(f"its attention cannot be replaced ({error})")
    if len(probe.layers) != len(layers):
        return AttentionSupport("only some of its layers can be replaced")
    return AttentionSupport(None, probe.size)


def window(model: PreTrainedModel) -> float:
    """Return the longest row, perhaps infinite, to which all layers attend in full."""
    config = model.config.get_text_config()
    layers = DynamicCache(config=config).layers
    windows = [getattr(layer, "sliding_window", None) or math.inf for layer in layers]
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    if rope.get("rope_type") == LONG and SETTLED not in kinds:
        # If one row is longer than this, the rotary frequencies of the whole batch change.
        windows.append(rope["original_max_position_embeddings"])
    return min(windows)


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the longest sequence that the model has positions for; None if it sets no limit."""
    limit: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def settle_positions(model: nn.Module, longest: int) -> None:
    """Fix the frequencies of LongRoPE (Ding et al. 2024) for rows of all lengths, as vLLM does.

    Such a model changes them if a row of the batch is longer than its original length, in sampling
    from that token on, so sampling and scoring would disagree. Here the longest row decides.
    """
    rotary: list[Any] = [m for m in model.modules() if getattr(m, "rope_type", None) == LONG]
    for module in rotary:
        last = torch.tensor([[longest - 1]], device=module.inv_freq.device)
        module(module.inv_freq, last)
        module.rope_type = SETTLED


class _Probe:
    def __init__(self) -> None:
        self.layers: set[int] = set()
        self.size = 0  # bytes

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if layer in self.layers:
            raise NotImplementedError("a layer that attends twice")
        if value.shape[2] > key.shape[2]:
            raise NotImplementedError("values wider than keys")
        self.layers.add(layer)
        self.size += key.nbytes + value.nbytes
        return torch.zeros_like(query.transpose(0, 1))[..., : value.shape[-1]]
