"""A run of 200 steps, and 20 of them made again: for one process or several.

    python -m tests.replay.long_run train DIRECTORY KIND
    python -m tests.replay.long_run replay DIRECTORY KIND

`replay` writes DIRECTORY/replay.json: of each step whether ids and rewards are equal, and what is
not as it was recorded.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from rlhf_pg import GRPOTrainer, PPOTrainer
from rlhf_pg.replay.again import Replay
from rlhf_pg.tasks import arithmetic, guess
from rlhf_pg.trainers import PolicyGradientTrainer
from tests.trainers.conftest import digits

STEPS, CHOSEN = 200, 20
SIZES = {
    "max_completion_length": 6,
    "prompts_per_step": 4,
    "num_generations": 4,
    "learning_rate": 1e-3,
    "max_steps": STEPS,
    "save_steps": 5,
    "save_total_limit": None,
    "log_completions_steps": 50,
}
KINDS: dict[str, tuple[type[PolicyGradientTrainer], Any, dict[str, Any]]] = {
    "grpo": (GRPOTrainer, arithmetic, {}),
    "ppo": (PPOTrainer, arithmetic, {"num_iterations": 2, "num_mini_batches": 2}),
    "lora": (GRPOTrainer, arithmetic, {"use_peft": True, "lora_r": 4, "beta": 0.05}),
    "episodes": (GRPOTrainer, guess, {"max_completion_length": 24}),
}


def trainer(kind: str, directory: Path) -> PolicyGradientTrainer:
    """The trainer of a kind of run, on a tiny model with random weights."""
    torch.set_num_threads(1)
    trainer_type, new_task, options = KINDS[kind]
    task = new_task()
    torch.manual_seed(0)
    model, tokenizer = task.new_model()
    return trainer_type(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[] if task.environment_factory else [digits],
        args=trainer_type.config_type(**SIZES | options, output_dir=str(directory)),
        train_dataset=task.train_dataset.select(range(64)),
        environment_factory=task.environment_factory,
    )


def chosen() -> list[int]:
    """The steps that are made again."""
    return sorted(random.Random(0).sample(range(1, STEPS + 1), CHOSEN))


def make_again(kind: str, directory: Path) -> list[dict[str, Any]]:
    """Make the chosen steps again; return how each agrees with the run."""
    replay = Replay(trainer(kind, directory))
    found = []
    for step in chosen():
        made = replay.make(step)
        recorded = replay.run.traces[step]
        found.append(
            {
                "step": step,
                "ids": made.record.trace.ids == list(recorded.ids),
                "rewards": made.record.trace.rewards == recorded.rewards,
                "differs": list(made.differs),
            }
        )
    return found


def main() -> None:
    command, place, kind = sys.argv[1:]
    directory = Path(place)
    if command == "train":
        trainer(kind, directory).train()
        return
    found = make_again(kind, directory)
    if os.environ.get("RANK", "0") == "0":
        (directory / "replay.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
