"""This library's side."""

from typing import Any

from transformers import PreTrainedModel

from rlhf_pg import Callback, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from tests.benchmarks.learning.job import WARMUP, Job
from tests.benchmarks.learning.watch import Watch

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


class Watching(Callback):
    """Tells the watch of every step."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_start(self, trainer: Any) -> None:
        self.watch.begin()

    def on_step(self, trainer: Any, metrics: dict[str, Any]) -> None:
        self.watch.after_step(
            rollout_seconds=metrics["time/rollout"],
            update_seconds=metrics["time/update"],
            entropy=metrics["entropy"],
            reward=metrics["reward"],
        )


def train(job: Job, model: PreTrainedModel, tokenizer: Any, watch: Watch, output_dir: str) -> None:
    kind, config = TRAINERS[job.method]
    subject = job.subject
    options = {
        "output_dir": output_dir,
        "seed": job.seed,
        "prompts_per_step": subject.prompts,
        "num_generations": subject.n,
        "max_completion_length": subject.new,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": WARMUP,
        "max_steps": job.steps,
        "save_steps": 0,
        "log_completions_steps": 0,
    }
    trainer = kind(
        model=model,
        reward_funcs=watch.reward,
        args=config(**options | job.options),
        train_dataset=subject.task.train_dataset,
        processing_class=tokenizer,
        callbacks=[Watching(watch)],
    )
    trainer.train()
