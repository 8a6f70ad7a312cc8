"""What is least sure: bfloat16, decoding, the fused attention kernel."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from rlhf_pg.rollout import NativeEngine, SamplingParams
from tests.gpu.check import Check, Result, within
from tests.gpu.groups.common import (
    ARCHITECTURES,
    gradient,
    random_rollout,
    rollout_of,
    scored,
)
from tests.tiny import tiny_model

# ------------------------------------------------------------------------------------- bfloat16


def bfloat16(device: str) -> Iterator[Check]:
    """Per-token numbers and gradients in bfloat16 against float32 on the CPU."""
    for arch in ARCHITECTURES:
        yield f"log-probabilities, {arch}", partial(rounded_scores, arch, device)
    for arch in ARCHITECTURES:
        yield f"gradient, {arch}", partial(rounded_gradient, arch, device)
    yield "gradient, qwen3 with liger's layers", partial(with_liger, device)  # the last: it patches


def rounded_scores(arch: str, device: str) -> Result:
    model = tiny_model(arch, scale=0.1)
    rollout = rollout_of(NativeEngine(model, 2, 0))
    expected = scored(model, rollout, "cpu")
    there = tiny_model(arch, scale=0.1, dtype=torch.bfloat16).to(device)
    error = (scored(there, rollout, device) - expected).abs()[rollout.action_mask]
    # bfloat16 keeps 8 bits: single tokens may be further off, their mean may not.
    return within(error.mean().item(), 1e-2)


def rounded_gradient(arch: str, device: str) -> Result:
    """Norm of the difference over the norm."""
    model = tiny_model(arch, scale=0.1)
    rollout = rollout_of(NativeEngine(model, 2, 0))
    _, expected = gradient(model, rollout, "cpu")
    there = tiny_model(arch, scale=0.1, dtype=torch.bfloat16).to(device)
    _, actual = gradient(there, rollout, device)
    return within(((actual - expected).norm() / expected.norm()).item(), 0.05)


def with_liger(device: str) -> Result:
    """With the kernels of RMSNorm, rotary positions and SwiGLU that docs/engines.md describes."""
    if device == "cpu" or not find_spec("liger_kernel"):
        return Result("liger-kernel is not installed, or there is no GPU", None)
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    from transformers.models.qwen3 import modeling_qwen3

    apply_liger_kernel_to_qwen3(cross_entropy=False, fused_linear_cross_entropy=False)
    assert "Liger" in modeling_qwen3.Qwen3RMSNorm.__name__
    return rounded_gradient("qwen3", device)


# ------------------------------------------------------------------------------------- decoding


def decoding(device: str) -> Iterator[Check]:
    """Long completions, against a scoring pass."""
    for arch in ARCHITECTURES:
        yield f"decoding, {arch}", partial(decoded, arch, torch.float32, device)
    yield "decoding, qwen3, bfloat16", partial(decoded, "qwen3", torch.bfloat16, device)


def decoded(arch: str, dtype: torch.dtype, device: str) -> Result:
    # Weights a third as far from 0 in bfloat16, whose logits would spread by whole nats.
    scale = 0.3 if dtype == torch.float32 else 0.1
    model = tiny_model(arch, max_position_embeddings=128, dtype=dtype, scale=scale).to(device)
    rollout = rollout_of(NativeEngine(model, [], 0), SamplingParams(max_tokens=100))
    error = (scored(model, rollout, device) - rollout.sampler_logprobs).abs()
    if dtype == torch.float32:
        return within(error.max().item(), 1e-4)
    return within(error.mean().item(), 1e-2)


# ----------------------------------------------------------------------------------------- flex

FEW = [(5, [9, 4, 7]), (12, [3, 8])]  # less than a block of 128 tokens together
MANY = [(300, [150, 20, 257]), (7, [90]), (130, [128, 1])]


def flex(device: str) -> Iterator[Check]:
    """The fused kernel of the shared prefix, compiled, forward and backward, against the CPU."""
    float32, double = torch.float32, torch.float64
    for name, families in (("few tokens", FEW), ("many tokens", MANY)):
        for width in (8, 64, 128):
            what = f"heads of {width}, {name}"
            yield f"{what}, float32", partial(fused, width, families, float32, 1e-4, device)
        bounds = {torch.bfloat16: 0.05, double: 1e-5}
        for dtype, bound in bounds.items():
            what = f"heads of 64, {name}, {str(dtype).removeprefix('torch.')}"
            yield what, partial(fused, 64, families, dtype, bound, device)
    yield "gradients twice, bit for bit", partial(twice, device)


def fused(width: int, families: Any, dtype: torch.dtype, bound: float, device: str) -> Result:
    """Norms of the differences of log-probabilities and gradients, over the norms."""
    rollout = random_rollout(families)
    expected = gradient(wide_heads(width), rollout, "cpu")
    actual = gradient(wide_heads(width, dtype).to(device), rollout, device)
    off = max(((a - e).norm() / e.norm()).item() for a, e in zip(actual, expected, strict=True))
    return within(off, bound)


def twice(device: str) -> Result:
    """Without which a run that is resumed cannot go on bit for bit."""
    rollout = random_rollout(MANY)
    model = wide_heads(64).to(device)
    (_, one), (_, two) = (
        gradient(model, rollout, device) for _ in range(2) if not model.zero_grad()
    )
    return Result("equal" if one.equal(two) else "differ", one.equal(two))


def wide_heads(width: int, dtype: torch.dtype = torch.float32) -> Any:
    """Four query heads on two of keys and values."""
    options = {"hidden_size": 4 * width, "head_dim": width, "max_position_embeddings": 1024}
    return tiny_model("qwen3", dtype=dtype, scale=0.05, **options)
