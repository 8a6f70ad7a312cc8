"""A tiny run of four steps in a process of its own, which the tests beside this file make fail.

python -m tests.faults.job OUTPUT_DIR [KEY=VALUE ...]
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlhf_pg.metrics import read

ROOT = Path(__file__).parents[2]
STEPS = 4
PATIENCE = 120  # seconds, far beyond what any of these takes


def build(output_dir: str, **options: Any) -> Any:
    """A trainer that uses every save point: checkpoints, a best one that is replaced, pruning."""
    import torch
    from transformers import set_seed

    from rlhf_pg import GRPOConfig, GRPOTrainer
    from rlhf_pg.tasks import arithmetic

    task = arithmetic()
    set_seed(0)
    torch.set_num_threads(1)
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
    trainer = GRPOTrainer(
        model=options.pop("model", model),
        processing_class=options.pop("processing_class", tokenizer),
        reward_funcs=judge,
        args=GRPOConfig(output_dir=output_dir, **(defaults | options)),
        train_dataset=task.train_dataset.select(range(6)),
        eval_dataset=task.eval_dataset.select(range(2)),
    )
    return trainer


def start(output: Path, fault: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it to its end, which a fault (as in `RLHF_PG_FAULT`) may bring about early."""
    given = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RLHF_PG_FAULT": fault}
    return subprocess.run(
        [sys.executable, "-m", "tests.faults.job", str(output), *given],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def left(output: Path) -> tuple[str, list[dict[str, Any]]]:
    """SHA-256 of the final weights, and the lines of metrics.jsonl without what the clock says."""
    weights = (output / "final" / "model.safetensors").read_bytes()
    lines = [
        {k: v for k, v in line.items() if not k.startswith(("time/", "perf/", "step_time"))}
        for line in read(output / "metrics.jsonl")
    ]
    return hashlib.sha256(weights).hexdigest(), lines


def main(output: str, *given: str) -> None:
    options = {key: json.loads(value) for key, _, value in (text.partition("=") for text in given)}
    build(output, **options).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
