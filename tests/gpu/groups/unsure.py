"""What is least sure: bfloat16, decoding as CUDA graphs, memory, the fused attention kernel."""

import gc
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.metrics import Meter
from rlhf_pg.plan import draw, predicted_memory
from rlhf_pg.progress import Journal
from rlhf_pg.rollout import NativeEngine, SamplingParams
from rlhf_pg.runtime import LAYOUTS
from tests.gpu.check import Check, Result, within
from tests.gpu.groups.common import (
    gradient,
    lengths,
    random_rollout,
    rollout_of,
    save_wide_model,
    scored,
)
from tests.tiny import ARCHS, tiny_model

ON_CPU = "nothing to check on a CPU"

# ------------------------------------------------------------------------------------- bfloat16


def bfloat16(device: str) -> Iterator[Check]:
    """Per-token numbers and gradients in bfloat16 against float32 on the CPU."""
    for arch in ARCHS:
        yield f"log-probabilities, {arch}", partial(rounded_scores, arch, device)
    for arch in ARCHS:
        yield f"gradient, {arch}", partial(rounded_gradient, arch, device)


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


# ------------------------------------------------------------------------------------- decoding


def decoding(device: str) -> Iterator[Check]:
    """Long completions, with decoding steps recorded and replayed, against a scoring pass."""
    for arch in ARCHS:
        yield f"CUDA graphs, {arch}", partial(decoded, arch, torch.float32, device)
    yield "CUDA graphs, qwen3, bfloat16", partial(decoded, "qwen3", torch.bfloat16, device)
    yield "CUDA graphs beside a thread that uses the device", partial(decoded_beside, device)


def decoded(arch: str, dtype: torch.dtype, device: str) -> Result:
    # Weights a third as far from 0 in bfloat16, whose logits would spread by whole nats.
    scale = 0.3 if dtype == torch.float32 else 0.1
    model = tiny_model(arch, max_position_embeddings=128, dtype=dtype, scale=scale).to(device)
    with replayed(device) as counts, warned() as warnings:
        rollout = rollout_of(NativeEngine(model, [], 0), SamplingParams(max_tokens=100))
    error = (scored(model, rollout, device) - rollout.sampler_logprobs).abs()
    off = error.max().item() if dtype == torch.float32 else error.mean().item()
    fine = off <= (1e-4 if dtype == torch.float32 else 1e-2)
    graphs = device == "cpu" or (counts["capture_begin"] > 0 and counts["replay"] > 0)
    figure = f"{counts['capture_begin']} recorded, {counts['replay']} replays, {off:.1e}"
    return Result("; ".join([figure, *warnings]), fine and graphs and not warnings, off)


def decoded_beside(device: str) -> Result:
    """As with a tracker or a profiler in this process: capturing may not mind its allocations."""
    ended = threading.Event()

    def use() -> None:
        kept = []
        while not ended.is_set():
            kept = [*kept[-16:], torch.zeros(2**20, device=device) + len(kept)]

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    try:
        return decoded("qwen3", torch.float32, device)
    finally:
        ended.set()
        thread.join()


@contextmanager
def replayed(device: str) -> Iterator[dict[str, int]]:
    """How often torch begins to record a graph inside, and replays one."""
    counts = {"capture_begin": 0, "replay": 0}
    with ExitStack() as stack:
        for name in counts if device == "cuda" else ():
            plain = getattr(torch.cuda.CUDAGraph, name)
            stack.enter_context(patch.object(torch.cuda.CUDAGraph, name, _counted(plain, counts)))
        yield counts


def _counted(plain: Callable[..., Any], counts: dict[str, int]) -> Callable[..., Any]:
    def counted(*args: Any, **options: Any) -> Any:
        counts[plain.__name__] += 1
        return plain(*args, **options)

    return counted


@contextmanager
def warned() -> Iterator[list[str]]:
    """Warnings of the library inside: decoding without graphs is one."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage().splitlines()[0])  # type: ignore[method-assign]
    logger = logging.getLogger("rlhf_pg")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


# --------------------------------------------------------------------------------------- memory

# Two prompts, with eight completions each that fill several micro-batches.
PLANNED: dict[str, Any] = {
    "max_prompt_length": 256,
    "max_completion_length": 256,
    "prompts_per_step": 2,
    "num_generations": 8,
    "micro_batch_tokens": 4096,
    "rollout_engine": "native",
    "log_completions_steps": 0,
    "max_steps": 100,
}
SETUPS = {
    "bfloat16": {"dtype": "bfloat16"},
    "stochastic rounding": {"dtype": "bfloat16", "bfloat16_update": "stochastic_rounding"},
    "8 bits": {"dtype": "bfloat16", "optim": "adamw_8bit"},
    "float32": {"dtype": "float32"},
    "LoRA": {"dtype": "bfloat16", "use_peft": True, "gradient_checkpointing": True},
    "QLoRA": {"dtype": "bfloat16", "use_peft": True, "load_in_4bit": True},
}


def memory(device: str) -> Iterator[Check]:
    """Bytes that torch's allocator has given out, and those that the plan foretells."""
    with tempfile.TemporaryDirectory() as directory:
        model = save_wide_model(directory, device)
        yield "a rollout gives back its memory", partial(kept, model, directory, device)
        yield "peak of an update after a rollout", partial(after_rollout, model, directory, device)
        yield "peak of the fifth step", partial(later_steps, model, directory, device)
        for setup in SETUPS:
            if setup != "QLoRA":  # whose kernels have work space of their own
                yield f"plan, {setup}", partial(planned, setup, model, directory, device)


def kept(model: str, directory: str, device: str) -> Result:
    """Beyond what is there after an earlier one; without the collector, which comes too late."""
    trainer = wide_trainer(model, directory, device)
    trainer.roll_out(range(2))
    with uncollected():
        before = allocated(device)
        samples = trainer.roll_out(range(2))
        own = sum(x.nbytes for _, x in samples.rollout._tensors())
        more = (allocated(device) - before - own) / 2**20
    return of_gpu(device, f"{more:.1f} MiB are kept", abs(more) <= 16, more)


def after_rollout(model: str, directory: str, device: str) -> Result:
    trainer = wide_trainer(model, directory, device)
    samples = trainer.roll_out(range(2))
    experience, _ = trainer.make_experience(samples.rollout, trainer.reward(samples), Meter())
    trainer.update(experience, Meter())  # the first makes the optimizer's state
    with uncollected():
        alone = peak(device, lambda: trainer.update(experience, Meter()))
        trainer.roll_out(range(2))
        after = peak(device, lambda: trainer.update(experience, Meter()))
    ratio = after / max(alone, 1)
    figure = f"{after / 1e9:.2f} GB, without one {alone / 1e9:.2f} GB"
    return of_gpu(device, figure, ratio <= 1.05, ratio)


def later_steps(model: str, directory: str, device: str) -> Result:
    """Against that of the second, the first of whose kind it is."""
    trainer = wide_trainer(model, directory, device)
    journal = Journal(Path(directory), 0, is_main=False)
    peaks = [peak(device, lambda: trainer.step(journal)) for _ in range(5)]
    ratio = peaks[4] / max(peaks[1], 1)
    figure = f"{peaks[4] / 1e9:.2f} GB, of the second {peaks[1] / 1e9:.2f} GB"
    return of_gpu(device, figure, ratio <= 1.05, ratio)


def planned(setup: str, model: str, directory: str, device: str) -> Result:
    """Bytes that the plan foretells for an update, against the most that were allocated in one."""
    options = SETUPS[setup]
    if "optim" in options and not find_spec("bitsandbytes"):
        return Result("bitsandbytes is not installed", None)
    args = GRPOConfig(model_name_or_path=model, **{**PLANNED, **options})
    total = torch.cuda.get_device_properties(device).total_memory if device == "cuda" else 8e9
    foretold = predicted_memory(draw(args, device, "cuda"), LAYOUTS[0], 1, float(total), "cuda")
    trainer = wide_trainer(model, directory, device, **options)
    samples = trainer.roll_out(range(2))
    experience, _ = trainer.make_experience(samples.rollout, trainer.reward(samples), Meter())
    del samples
    most = peak(device, lambda: trainer.update(experience, Meter()))
    off = sum(foretold.update.values()) / max(most, 1) - 1
    return of_gpu(device, f"{most / 1e9:.2f} GB, {100 * off:+.0f} %", abs(off) <= 0.2, off)


def wide_trainer(model: str, directory: str, device: str, **options: Any) -> GRPOTrainer:
    """Whose completions all have their full length."""
    gc.collect()  # the trainer before it
    small = {"max_completion_length": 16} if device == "cpu" else {}
    args = GRPOConfig(
        model_name_or_path=model,
        output_dir=f"{directory}/run",
        **{**PLANNED, "dtype": "bfloat16", **options, **small},
    )
    prompts = Dataset.from_dict({"prompt": ["1" * 256, "2" * 256]})
    trainer = GRPOTrainer(reward_funcs=lengths, args=args, train_dataset=prompts)
    trainer.engine.eos_token_ids = []
    return trainer


@contextmanager
def uncollected() -> Iterator[None]:
    """Only what nobody refers to any more gives back its memory inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def peak(device: str, run: Callable[[], object]) -> int:
    """The most bytes that are allocated while something runs."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def of_gpu(device: str, figure: str, passed: bool, value: float) -> Result:
    """What only a GPU can tell: on a CPU the code has run, and that is all."""
    return Result(figure, passed, value) if device == "cuda" else Result(ON_CPU, None)


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
