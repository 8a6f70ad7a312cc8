"""A tiny run of four steps in a process of its own, which the tests beside this file make fail."""

import hashlib
import os
import sys
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from rlhf_pg import GRPOTrainer, failpoints
from rlhf_pg.tasks import arithmetic
from tests.untimed import untimed

STEPS = 4
PATIENCE = 120  # seconds, far beyond what any of these takes


def build(output_dir: str, **options: Any) -> Any:
    """A trainer that uses every save point: checkpoints, a best one that is replaced, pruning."""
    task = arithmetic()
    set_seed(0)
    model, tokenizer = task.new_model()

    def judge(completions: list[str], **_: Any) -> list[float]:
        """Even digits, and more of a reward in every step: each evaluation is the best so far."""
        return [trainer.state.step + sum(c in "02468" for c in text) / 6 for text in completions]

    defaults = {
        "max_steps": STEPS,
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_completion_length": 3,
        "learning_rate": 1e-3,
        "micro_batch_tokens": 64,
        "save_steps": 1,
        "save_total_limit": 2,
        "eval_steps": 1,
    }
    trainer_type = options.pop("trainer_type", GRPOTrainer)
    trainer = trainer_type(
        model=options.pop("model", model),
        processing_class=options.pop("processing_class", tokenizer),
        reward_funcs=options.pop("reward_funcs", judge),
        args=trainer_type.config_type(output_dir=output_dir, **(defaults | options)),
        train_dataset=task.train_dataset.select(range(6)),
        eval_dataset=task.eval_dataset.select(range(2)),
    )
    return trainer


@dataclass
class Ended:
    """A process that has ended: `returncode` is negative for a signal."""

    returncode: int | None
    said: str


def start(output: Path, fault: str = "", **options: Any) -> Ended:
    """Run it to its end, which a fault (as in `RLHF_PG_FAULT`) may bring about early.

    In a fork, which has nothing to import: that takes longer than the run.
    """
    log = output.with_name(f"{output.name}.log")
    process = get_context("fork").Process(target=_child, args=(output, log, fault, options))
    process.start()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
    return Ended(process.exitcode, log.read_text())


def _child(output: Path, log: Path, fault: str, options: dict[str, Any]) -> None:
    sys.stdout = sys.stderr = log.open("a", buffering=1)
    os.environ["RLHF_PG_FAULT"] = fault
    failpoints._passed.clear()
    torch.manual_seed(os.getpid())  # no process begins like another
    build(str(output), **options).train()


def left(output: Path) -> tuple[str, list[dict[str, Any]]]:
    """SHA-256 of the final weights, and the lines of metrics.jsonl without what the clock says."""
    files = sorted((output / "final").rglob("*.safetensors"))
    weights = b"".join(file.read_bytes() for file in files)
    assert weights
    return hashlib.sha256(weights).hexdigest(), untimed(output)


if __name__ == "__main__":
    build(sys.argv[1]).train(*sys.argv[2:])
