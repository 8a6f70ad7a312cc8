"""A custom attention function for `transformers` models.

All tokens of a forward pass are in one packed row. The argument `layout`, passed through the model,
says where each token belongs.

Shapes: N tokens of the pass, H query and K key-value heads, D their width.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.integrations import moe

from rlhf_pg.masking import widen
from rlhf_pg.models.recurrent import Mixer, mark_mixers

logger = logging.getLogger(__name__)

NAME = "rlhf_pg"
LONG = "longrope"
LONG_FIXED = "longrope, fixed"
# Options that a model may pass to attention. Others are refused, since they would be ignored.
HONOURED = {
    "is_causal",
    "output_router_logits",  # passed through all layers, but not about attention
    "position_ids",  # stock functions infer the packing from these; here the layout gives it
    "use_cache",
}
# Blockwise attention, and the log of each query's softmax denominator; (B,H,L,D).
fused_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class AttentionOptions(NamedTuple):
    """What a layer asks of its attention: softmax over softcap tanh(scale q k / softcap)."""

    scale: float
    window: int | None = None  # a query sees this many tokens up to itself; None: all
    sinks: Tensor | None = None  # (H,) logits in each softmax without a value (Agarwal et al. 2025)
    softcap: float | None = None


class Layout(Protocol):
    """The arrangement of the tokens of a forward pass."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Return (N,H,D) from query (H,N,D), and key and value (K,N,D) of the same tokens."""
        ...

    def mix(self, mixer: Mixer) -> Tensor:
        """Return the outputs (N,width) of a recurrent mixer for the same tokens."""
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
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
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
    of_layer = AttentionOptions(scale, sliding_window, s_aux, softcap)
    out = layout.attend(int(module.layer_idx), query[0], key[0], value[0], of_layer)  # type: ignore[arg-type]
    return out.contiguous()[None], None  # some models rely on contiguous output


AttentionInterface.register(NAME, _attention)


def runs_on_device(act: Callable[[], Any], consequence: str) -> bool:
    """Return whether a compiled function runs on this device, by running it; log if not."""
    try:
        act()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        logger.warning("%s: %s", consequence, reason)
        return False
    return True


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices, or batches of them, summing and returning in at least float32."""
    wide = torch.promote_types(b.dtype, torch.float32)
    multiply: Any = torch.mm if b.dim() == 2 else torch.bmm
    # Tensor cores sum in float32 anyway, but torch does not return these sums on ROCm.
    if b.is_cuda and b.dtype != wide and torch.version.hip is None:
        product: Tensor = multiply(a.to(b.dtype), b, out_dtype=wide)
        return product
    return a.to(wide) @ b.to(wide)


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, options: AttentionOptions
) -> Tensor:
    """Return (H,N,D) from query, key and value (H,N,D), given what is `seen` (N,N)."""
    scores = options.scale * (widen(query) @ widen(key).transpose(1, 2))
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=2)
    weights = scores.softmax(dim=2)[..., : key.shape[1]]
    return (weights @ widen(value)).to(query.dtype)


def configs_of(model: PreTrainedModel) -> list[Any]:
    """Return the distinct configs that the modules of the model read."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


@contextmanager
def replace_attention(configs: Sequence[Any], names: Sequence[str] | None = None) -> Iterator[None]:
    """Use this file's attention, or these names, inside the block, then restore the models' own."""
    before = [config._attn_implementation for config in configs]
    try:
        for config, name in zip(configs, names or [NAME] * len(configs), strict=True):
            config._attn_implementation = name
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


class AttentionSupport(NamedTuple):
    """A model's support for tokens in any `Layout`."""

    unsupported_reason: str | None  # None if it is supported
    window: float = 0.0  # longest supported row
    bytes_per_row: int = 0  # of the states of recurrent layers
    # Of keys and values by the windows of the layers, in the model's dtype; None: no window.
    bytes_by_window: Mapping[int | None, int] = {}

    @property
    def bytes_per_token(self) -> int:
        """The bytes of keys and values in all layers."""
        return sum(self.bytes_by_window.values())

    def cached_bytes(self, tokens: int) -> int:
        """Return the bytes of keys and values of so many tokens of a row."""
        return sum(
            size * (tokens if window is None else min(tokens, window))
            for window, size in self.bytes_by_window.items()
        )


@torch.no_grad()
def attention_support(model: PreTrainedModel) -> AttentionSupport:
    """Pass one token to find out whether every layer calls our function in a known form, and mark
    the modules that carry states.
    """
    trunk: Any = model.base_model
    cache = DynamicCache(config=model.config.get_text_config())
    probe = _Probe()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    inputs: dict[str, Any] = {
        "input_ids": token,
        "attention_mask": token + 1,
        "position_ids": token,
        "use_cache": False,
    }
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        names = inspect.signature(trunk.forward).parameters
        name = "cache_params" if "cache_params" in names else "past_key_values"
        inputs |= {"use_cache": True, name: cache}

    def pass_token() -> None:
        with replace_attention(configs_of(model)), measurable_experts():
            trunk(**inputs, layout=probe)

    try:
        recurrent = mark_mixers(trunk, cache, pass_token)
    except Exception as error:
        return AttentionSupport(f"its attention cannot be replaced ({error})")
    longest = _longrope_limit(model)
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, CacheLayerMixin):
            continue
        if number not in probe.windows:
            return AttentionSupport("only some of its layers can be replaced")
        window = getattr(layer, "sliding_window", None)
        if probe.windows[number] != window:  # perhaps chunks: rows within the first are exact
            longest = min(longest, window or 0)
    state_bytes = 0
    for number in recurrent:
        layer = cache.layers[number]
        states = (*layer.conv_states.values(), *layer.recurrent_states.values())
        state_bytes += sum(state.nbytes for state in states if state is not None)
    return AttentionSupport(None, longest, state_bytes, probe.bytes)


@contextmanager
def measurable_experts() -> Iterator[None]:
    """Let mixtures of experts be computed with tensors that have no data, in any dtype: torch's
    kernel is refused in float32, `transformers`' other one is not.
    """
    before = moe._can_use_grouped_mm
    try:
        moe._can_use_grouped_mm = lambda *inputs: False
        yield
    finally:
        moe._can_use_grouped_mm = before


def _longrope_limit(model: PreTrainedModel) -> float:
    """Return the longest row for which a batch keeps its rotary frequencies."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    if rope.get("rope_type") == LONG and LONG_FIXED not in kinds:
        return float(rope["original_max_position_embeddings"])
    return math.inf


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the longest sequence that the model has positions for; None if it sets no limit."""
    limit: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def fix_longrope(model: nn.Module, longest: int) -> None:
    """Fix the frequencies of LongRoPE (Ding et al. 2024) for rows of all lengths, as vLLM does.

    Such a model changes them if a row of the batch is longer than its original length, in sampling
    from that token on, so sampling and scoring would disagree. Here the longest row decides.
    """
    rotary: list[Any] = [m for m in model.modules() if getattr(m, "rope_type", None) == LONG]
    for module in rotary:
        last = torch.tensor([[longest - 1]], device=module.inv_freq.device)
        module(module.inv_freq, last)
        module.rope_type = LONG_FIXED


class _Probe:
    """A `Layout` of one token that records what attends."""

    size = 1

    def __init__(self) -> None:
        self.windows = dict[int, int | None]()  # of the layers
        self.bytes = dict[int | None, int]()  # by window

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        if layer in self.windows:
            raise NotImplementedError("a layer that attends twice")
        if value.shape[2] > key.shape[2]:
            raise NotImplementedError("values wider than keys")
        window = self.windows[layer] = options.window
        self.bytes[window] = self.bytes.get(window, 0) + key.nbytes + value.nbytes
        return torch.zeros_like(query.transpose(0, 1))[..., : value.shape[-1]]
