"""Bytes: what a rollout gives back before the update, and what the plan predicts."""

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from datasets import Dataset

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.plan.memory import build_meta_models, predict_memory
from rlhf_pg.report.metrics import Meter
from rlhf_pg.run.token_budget import SHARDINGS
from tests.gpu.check import Check, Result
from tests.gpu.groups.common import lengths, save_wide_model
from tests.rows import tensors

ON_CPU = "nothing to check on a CPU"
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
    "8 bits": {"dtype": "bfloat16", "optim": "adamw_8bit"},
    "float32": {"dtype": "float32"},
    "LoRA": {"dtype": "bfloat16", "use_peft": True, "gradient_checkpointing": True},
    "QLoRA": {"dtype": "bfloat16", "use_peft": True, "load_in_4bit": True},
}


def memory(device: str) -> Iterator[Check]:
    """Bytes that torch's allocator has given out, and those that the plan predicts."""
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
    trainer.sampler.roll_out(range(2))
    with uncollected():
        before = allocated(device)
        samples = trainer.sampler.roll_out(range(2))
        own = sum(x.nbytes for x in tensors(samples).values())
        more = (allocated(device) - before - own) / 2**20
    return of_gpu(device, f"{more:.1f} MiB are kept", abs(more) <= 16, more)


def after_rollout(model: str, directory: str, device: str) -> Result:
    trainer = wide_trainer(model, directory, device)
    samples = trainer.sampler.roll_out(range(2))
    experience = trainer.credit(
        trainer.learner.infer(trainer.sampler.add_rewards(samples)), Meter()
    )
    trainer.agreement.refuses = False  # later updates train on what older weights sampled
    trainer.update(experience, Meter())  # the first makes the optimizer's state
    with uncollected():
        alone = peak(device, lambda: trainer.update(experience, Meter()))
        trainer.sampler.roll_out(range(2))
        after = peak(device, lambda: trainer.update(experience, Meter()))
    ratio = after / max(alone, 1)
    figure = f"{after / 1e9:.2f} GB, without one {alone / 1e9:.2f} GB"
    return of_gpu(device, figure, ratio <= 1.05, ratio)


def later_steps(model: str, directory: str, device: str) -> Result:
    """Against that of the second, the first of whose kind it is."""
    trainer = wide_trainer(model, directory, device)
    peaks = [peak(device, lambda: trainer.step()) for _ in range(5)]
    ratio = peaks[4] / max(peaks[1], 1)
    figure = f"{peaks[4] / 1e9:.2f} GB, of the second {peaks[1] / 1e9:.2f} GB"
    return of_gpu(device, figure, ratio <= 1.05, ratio)


def planned(setup: str, model: str, directory: str, device: str) -> Result:
    """Bytes that the plan predicts for an update, against the most that were allocated in one."""
    options = SETUPS[setup]
    if "optim" in options and not find_spec("bitsandbytes"):
        return Result("bitsandbytes is not installed", None)
    args = GRPOConfig(model_name_or_path=model, **{**PLANNED, **options})
    total = torch.cuda.get_device_properties(device).total_memory if device == "cuda" else 8e9
    meta = build_meta_models(args, device, "cuda", float(total))
    predicted = predict_memory(meta, SHARDINGS[0], 1, float(total), "cuda")
    trainer = wide_trainer(model, directory, device, **options)
    samples = trainer.sampler.roll_out(range(2))
    experience = trainer.credit(
        trainer.learner.infer(trainer.sampler.add_rewards(samples)), Meter()
    )
    del samples
    trainer.agreement.refuses = False  # later updates train on what older weights sampled
    trainer.update(experience, Meter())  # the first makes the optimizer's state
    most = peak(device, lambda: trainer.update(experience, Meter()))
    off = sum(predicted.update.values()) / max(most, 1) - 1
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
    trainer.sampler.engine.eos_token_ids = []
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
