"""This library's side."""

import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.peer.workload import LEARNING_RATE, Job, synchronize
from benchmarks.rollout import forced
from rlhf_pg import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from rlhf_pg.data.batch import Batch
from rlhf_pg.report.journal import Journal
from rlhf_pg.report.metrics import Meter
from rlhf_pg.trainers import PolicyGradientTrainer

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def new_trainer(job: Job, model: PreTrainedModel) -> PolicyGradientTrainer:
    kind, config = TRAINERS[job.algorithm]
    return kind(
        model=model,
        reward_funcs=job.reward,
        args=config(
            output_dir=f"{job.output_dir}/ours",
            dtype=job.dtype,
            prompts_per_step=job.workload.prompts,
            num_generations=job.workload.n,
            max_completion_length=job.workload.new,
            beta=job.beta,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            log_completions_steps=0,
            max_steps=1000,
        ),
        train_dataset=job.dataset(),
        processing_class=job.tokenizer(),
    )


def stepper(job: Job, model: PreTrainedModel) -> Callable[[], dict[str, float]]:
    """One whole step, as `train` takes it; returns the seconds of its phases, and of all of it."""
    trainer = new_trainer(job, model)
    trainer.agreement.refuses = False  # lengths are forced, so it is not the policy's
    journal = Journal(Path(trainer.args.output_dir), 0, is_main=True)
    journal.console.quiet = True  # it keeps its lines, and says nothing
    wanted = job.workload.lengths.tolist()

    def step() -> dict[str, float]:
        synchronize()
        start = time.perf_counter()
        with forced(wanted):
            metrics = trainer.step()
        journal.step(metrics)
        synchronize()
        seconds = {name: metrics[f"time/{name}"] for name in ("rollout", "reward", "score")}
        return seconds | {"update": metrics["time/update"], "step": time.perf_counter() - start}

    return step


def train(job: Job, model: PreTrainedModel, steps: int) -> None:
    step = stepper(job, model)
    for _ in range(steps):
        step()


def gradient(job: Job, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
    """Of the loss on all rows of the batch, by the name of the weight."""
    trainer = new_trainer(job, model)
    trainer.learner.accumulate(batch, trainer.objective, Meter())
    # RLOO divides by the longest length too ("constant"), TRL does not.
    scale = job.workload.new if job.algorithm == "rloo" else 1
    gradients = {}
    for name, weight in trainer.model.named_parameters():
        summed = trainer.learner.backend.gradient(weight)
        assert summed is not None
        gradients[name] = scale * summed
    return gradients
