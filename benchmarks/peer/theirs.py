"""TRL's side."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from benchmarks.peer.workload import LEARNING_RATE, Job, device, synchronize
from benchmarks.rollout import force
from rlhf_pg.data.batch import Batch

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
# TRL's default multiplies the KL by the ratio; this is the paper's, and ours.
OPTIONS = {"grpo": {"use_bias_correction_kl": False}, "rloo": {}}


def new_trainer(job: Job, model: PreTrainedModel, batch: int, steps: int) -> Any:
    """A trainer of TRL whose `train()` ends after so many steps.

    Args:
        batch: completions per forward and backward pass.
    """
    kind, config = TRAINERS[job.algorithm]
    trainer = kind(
        model=model,
        reward_funcs=job.reward,
        args=config(
            output_dir=f"{job.output_dir}/theirs",
            use_cpu=device().type == "cpu",
            bf16=job.dtype == "bfloat16",
            gradient_checkpointing=False,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=job.workload.rows // batch,
            num_generations=job.workload.n,
            max_completion_length=job.workload.new,
            beta=job.beta,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            max_steps=steps,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            **OPTIONS[job.algorithm],
        ),
        train_dataset=job.dataset(),
        processing_class=job.tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    _force_lengths(trainer.model, job.workload.lengths.flatten().to(device()))
    return trainer


def _force_lengths(model: PreTrainedModel, wanted: Tensor) -> None:
    """`generate` as it is, with one more logits processor."""
    plain = model.generate

    def generate(input_ids: Tensor, **options: Any) -> Any:
        width = input_ids.shape[1]

        def processor(ids: Tensor, scores: Tensor) -> Tensor:
            return force(scores, wanted, ids.shape[1] - width)

        return plain(
            input_ids=input_ids, logits_processor=LogitsProcessorList([processor]), **options
        )

    model.generate = generate


class Clock(TrainerCallback):
    """The seconds of every step and of its phases.

    Args:
        between: called after each step, with its seconds.
    """

    PARTS = ("_generate", "_calculate_rewards", "_generate_and_score_completions")

    def __init__(self, trainer: Any, between: Callable[[dict[str, float]], Any]) -> None:
        self.between, self.parts, self.start = between, dict[str, float](), 0.0
        for name in self.PARTS:
            setattr(trainer, name, self._timed(name, getattr(trainer, name)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **options)
            self.parts[name] = time.perf_counter() - start
            return result

        return timed

    def on_step_begin(self, *args: Any, **options: Any) -> None:
        synchronize()
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **options: Any) -> None:
        synchronize()
        step = time.perf_counter() - self.start
        rollout, reward, prepared = (self.parts[name] for name in self.PARTS)
        self.between(
            {
                "rollout": rollout,
                "reward": reward,
                "score": prepared - rollout - reward,
                "update": step - prepared,
                "step": step,
            }
        )


def train(
    job: Job,
    model: PreTrainedModel,
    steps: int,
    batch: int,
    between: Callable[[dict[str, float]], Any] = lambda seconds: None,
) -> None:
    """TRL's own `train()`, which lets others work `between` its steps."""
    trainer = new_trainer(job, model, batch, steps)
    trainer.add_callback(Clock(trainer, between))
    trainer.train()


def fastest(job: Job, batches: list[int]) -> int:
    """The batch with the fastest step; the first of them warms up too."""
    if len(batches) == 1:
        return batches[0]
    steps: dict[int, float] = {}
    for batch in [batches[0], *batches]:
        taken: list[dict[str, float]] = []
        train(job, job.load(), 1, batch, taken.append)
        steps[batch] = taken[0]["step"]
    return min(steps, key=steps.__getitem__)


def gradient(job: Job, model: PreTrainedModel, batch: Batch, size: int = 8) -> dict[str, Tensor]:
    """Of the loss on all rows of the batch, `size` at a time, by the name of the weight."""
    trainer = new_trainer(job, model, job.workload.rows, 1)
    trainer.model.eval()  # in which no loss is divided by the number of its accumulation steps
    tokens = batch.action_mask.sum()
    for rows in torch.arange(batch.num_rows).split(size):
        part = batch.select(rows.to(tokens.device))
        loss = trainer.compute_loss(trainer.model, _inputs(trainer, part, tokens))
        # GRPO's is a sum over the tokens of all rows, RLOO's a mean over those that it is given.
        scale = len(rows) / batch.num_rows if job.algorithm == "rloo" else 1.0
        (scale * loss).backward()
    return {name: weight.grad for name, weight in trainer.model.named_parameters()}


def _inputs(trainer: Any, batch: Batch, tokens: Tensor) -> dict[str, Tensor]:
    """What TRL's own scoring hands to its loss."""
    mask = batch.completion_mask.long()
    inputs = {
        "prompt_ids": batch.prompt_ids,
        "prompt_mask": batch.prompt_mask.long(),
        "completion_ids": batch.completion_ids,
        "completion_mask": mask,
        "advantages": batch.advantages[:, 0],
        "num_items_in_batch": tokens,
    }
    if batch.ref_logprobs is not None:
        inputs["ref_per_token_logps"] = batch.ref_logprobs
    if isinstance(trainer, RLOOTrainer):
        ids, attended = (
            torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1)
            for name in ("ids", "mask")
        )
        with torch.no_grad():
            logprobs = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, attended, mask.shape[1]
            )[0]
        inputs["old_logps"] = (logprobs * mask).sum(1)
    return inputs
