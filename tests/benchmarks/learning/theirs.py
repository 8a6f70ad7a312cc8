"""TRL's side."""

import time
from typing import Any

from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.benchmarks.learning.job import WARMUP, Job
from tests.benchmarks.learning.watch import Watch

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


class Watching(TrainerCallback):
    """Tells the watch of every step."""

    def __init__(self, trainer: Any, watch: Watch) -> None:
        self.trainer, self.watch, self.rollout = trainer, watch, 0.0
        self.generate, trainer._generate = trainer._generate, self._timed

    def _timed(self, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = self.generate(*args, **options)
        self.rollout = time.perf_counter() - start
        return result

    def on_train_begin(self, *args: Any, **options: Any) -> None:
        self.watch.begin()

    def on_step_end(self, *args: Any, **options: Any) -> None:
        logged = self.trainer._metrics["train"]  # lists that grow, a number per forward pass
        entropies = logged["entropy"]
        self.watch.after_step(
            rollout_seconds=self.rollout,
            entropy=sum(entropies) / len(entropies),
            reward=logged["reward"][-1],
        )
        entropies.clear()


def train(job: Job, model: PreTrainedModel, tokenizer: Any, watch: Watch, output_dir: str) -> None:
    kind, config = TRAINERS[job.method]
    subject = job.subject
    rows = subject.prompts * subject.n
    trainer = kind(
        model=model,
        reward_funcs=watch.reward,
        args=config(
            output_dir=output_dir,
            seed=job.seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=job.batch,
            gradient_accumulation_steps=rows // job.batch,
            num_generations=subject.n,
            max_completion_length=subject.new,
            learning_rate=job.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=WARMUP,
            max_steps=job.steps,
            shuffle_dataset=False,  # it is laid out in the order that this library draws
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=subject.in_order(job.seed, job.samples),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Watching(trainer, watch))
    trainer.train()
