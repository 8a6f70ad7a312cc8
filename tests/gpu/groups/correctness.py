"""Numbers in float32, what is sampled, and that a run which is resumed goes on bit for bit."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.rollout import NativeEngine
from rlhf_pg.tasks import arithmetic
from tests.gpu.check import Check, Result, within
from tests.gpu.groups.common import (
    ARCHITECTURES,
    gradient,
    lengths,
    rollout_of,
    save_model,
)
from tests.tiny import tiny_model

# The sampler's, in float64: see `deterministic`.
UNDETERMINED = {"cumsum_cuda_kernel"}


def float32(device: str) -> Iterator[Check]:
    """Per-token numbers and gradients on the device against those of the CPU."""
    for arch in ARCHITECTURES:
        yield f"log-probabilities and gradient, {arch}", partial(agrees, arch, device)


def agrees(arch: str, device: str) -> Result:
    model = tiny_model(arch, scale=0.1)
    rollout = rollout_of(NativeEngine(model, 2, 0))
    expected, slope = gradient(model, rollout, "cpu")
    there = tiny_model(arch, scale=0.1).to(device)
    actual, other = gradient(there, rollout, device)
    off = (actual - expected).abs().max().item()
    return within(max(off, ((other - slope).norm() / slope.norm()).item()), 1e-4)


def sampling(device: str) -> Iterator[Check]:
    """Sampled ids against the CPU; group `decoding` has their log-probabilities."""
    for arch in ("qwen3", "gpt2"):
        yield f"sampled ids as on the CPU, {arch}", partial(same_ids, arch, device)


def same_ids(arch: str, device: str) -> Result:
    here, there = (
        rollout_of(NativeEngine(tiny_model(arch).to(where), 2, 0)).completion_ids
        for where in ("cpu", device)
    )
    return Result("equal" if here.equal(there) else "differ", here.equal(there))


def resuming(device: str) -> Iterator[Check]:
    """Four steps are two, a stop and two, to the last bit, by torch's deterministic algorithms."""
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(directory)
        for dtype, use_peft in (("float32", False), ("bfloat16", True)):
            what = f"{dtype}{', LoRA' * use_peft}"
            yield what, partial(resumed, model, directory, dtype, use_peft)


def resumed(model: str, directory: str, dtype: str, use_peft: bool) -> Result:
    ends = []
    with deterministic() as without:
        for name, stops in (("whole", [4]), ("broken", [2, 4])):
            for steps in stops:
                args = GRPOConfig(
                    output_dir=f"{directory}/{name}-{dtype}",
                    dtype=dtype,
                    use_peft=use_peft,
                    beta=0.05,
                    max_steps=steps,
                    save_steps=2,
                    learning_rate=1e-3,
                    max_completion_length=16,
                    lr_scheduler_type="constant",
                    micro_batch_tokens=512,
                    rollout_engine="native",
                )
                ends.append(trained(model, args, resume=name == "broken" and steps == 4))
    whole, _, broken = ends
    same = all(a.equal(b) for a, b in zip(whole, broken, strict=True))
    rest = f", without a deterministic form of {', '.join(sorted(without))}" if without else ""
    return Result(("equal" if same else "differ") + rest, same and without <= UNDETERMINED)


def trained(model: str, args: GRPOConfig, resume: bool) -> list[Tensor]:
    """The weights at the end of a run."""
    trainer = GRPOTrainer(
        model=model, reward_funcs=lengths, args=args, train_dataset=arithmetic().train_dataset
    )
    trainer.train("latest" if resume else None)
    return [p.detach().cpu() for p in trainer.model.parameters()]


@contextmanager
def deterministic() -> Iterator[set[str]]:
    """Torch's deterministic algorithms inside (run.sh sets what cuBLAS needs for them); yields the
    names of the kernels that were used and have none.

    CUDA's cumsum of floats is one in some versions of torch, which would raise at the first token
    that is sampled. With `warn_only` the kernels that have a deterministic form are used all the
    same; the check then compares bits, and refuses any other name than that one, for with another
    bits that are equal would be luck.
    """
    without: set[str] = set()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield without
        finally:
            torch.use_deterministic_algorithms(False)
            texts = [str(warning.message) for warning in said]
            mark = " does not have a deterministic implementation"
            without |= {text.partition(mark)[0] for text in texts if mark in text}
