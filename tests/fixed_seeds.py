"""Record what short runs of fixed seeds compute, and compare it number by number after a refactor.

    python -m tests.fixed_seeds record before.json     # on the code as it was
    python -m tests.fixed_seeds compare before.json    # on the code as it is now

The numbers depend on the machine and on the versions of the libraries: record and compare on one.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer
from rlhf_pg.tasks import arithmetic, calculator, guess
from rlhf_pg.trainers import PolicyGradientTrainer
from tests.untimed import untimed

SIZES: dict[str, Any] = {
    "max_completion_length": 6,
    "prompts_per_step": 4,
    "num_generations": 4,
    "learning_rate": 1e-3,
    "max_steps": 3,
    "eval_steps": 2,
    "log_completions_steps": 1,
}
TWICE = {"num_mini_batches": 2, "num_iterations": 2}
LORA = {"use_peft": True, "lora_r": 4}

# Name: the trainer, its task, and its config beyond `SIZES`.
RUNS: dict[str, tuple[type[PolicyGradientTrainer], Callable[[], Any], dict[str, Any]]] = {
    "grpo": (GRPOTrainer, arithmetic, {}),
    "grpo-kl": (GRPOTrainer, arithmetic, TWICE | {"beta": 0.1, "target_kl": 0.01}),
    "grpo-dynamic": (
        GRPOTrainer,
        arithmetic,
        {"dynamic_sampling_rounds": 2, "missing_eos_penalty": 0.5},
    ),
    "grpo-lora": (GRPOTrainer, arithmetic, LORA | {"beta": 0.1}),
    "rloo": (RLOOTrainer, arithmetic, TWICE),
    "reinforce": (ReinforceTrainer, arithmetic, {}),
    "reinforce-greedy": (
        ReinforceTrainer,
        arithmetic,
        {"advantage_estimator": "returns_minus_greedy"},
    ),
    "ppo": (PPOTrainer, arithmetic, TWICE | {"value_pretraining_steps": 1, "value_iterations": 1}),
    "ppo-shared": (PPOTrainer, arithmetic, TWICE | {"critic": "shared", "normalize_values": True}),
    "ppo-lora": (PPOTrainer, arithmetic, LORA | {"kl_controller": "adaptive", "kl_target": 0.1}),
    "episodes": (GRPOTrainer, guess, {"max_completion_length": 24}),
    "ppo-tools": (PPOTrainer, calculator, {"max_completion_length": 32}),
    "grpo-two-processes": (GRPOTrainer, arithmetic, TWICE | {"beta": 0.1}),
    "ppo-two-processes": (PPOTrainer, arithmetic, TWICE),
}


def even_digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that random weights already earn: the share of even digits."""
    return [sum(character in "02468" for character in str(said)) / 6 for said in completions]


def train(name: str, directory: Path) -> None:
    """Make one run."""
    trainer_type, new_task, options = RUNS[name]
    task = new_task()
    torch.manual_seed(0)
    model, tokenizer = task.new_model()
    trainer = trainer_type(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[] if task.environment_factory else [even_digits],
        args=trainer_type.config_type(**SIZES | options, output_dir=str(directory)),
        train_dataset=_first(task.train_dataset),
        eval_dataset=_first(task.eval_dataset),
        tools=task.tools,
        environment_factory=task.environment_factory,
    )
    trainer.train()


def outcome(name: str, directory: Path) -> dict[str, Any]:
    """What one run leaves: its metrics, its completions and a hash of its weights."""
    if name.endswith("two-processes"):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m"]
        command = [*launch, "tests.fixed_seeds", "run", str(directory), name]
        subprocess.run(command, env=os.environ | {"ACCELERATE_USE_CPU": "true"}, check=True)
    else:
        train(name, directory)
    digest = hashlib.sha256()
    for path in sorted((directory / "final").rglob("*.safetensors")):
        digest.update(path.read_bytes())
    completions = [json.loads(line) for line in (directory / "completions.jsonl").open()]
    return {
        "metrics": untimed(directory),
        "completions": completions,
        "weights": digest.hexdigest(),
    }


def _first(dataset: Dataset, count: int = 16) -> Dataset:
    return dataset.select(range(min(count, len(dataset))))


def differences(found: Any, expected: Any, where: str) -> list[str]:
    """Every place at which two records differ; NaN equals NaN, and only keys of both count."""
    if isinstance(found, dict) and isinstance(expected, dict):
        names = [name for name in expected if name in found]
        return [
            line
            for name in names
            for line in differences(found[name], expected[name], f"{where}/{name}")
        ]
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}/{i}")]
    same = found == expected or (found != found and expected != expected)
    return [] if same else [f"{where}: {expected!r} before, {found!r} now"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("record", "compare", "run"))
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *RUNS], help="of runs; by default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.names or list(RUNS)
    if options.command == "run":  # in one of several processes
        train(names[0], options.file)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        found = {name: outcome(name, Path(directory) / name) for name in names}
    if options.command == "record":
        options.file.write_text(json.dumps(found))
        return 0
    expected = json.loads(options.file.read_text())
    found = json.loads(json.dumps(found))
    old, new = (set().union(*runs["grpo"]["metrics"]) for runs in (expected, found))
    print(f"metrics that are gone: {sorted(old - new)}; new: {sorted(new - old)}")
    lines = [line for name in names for line in differences(found[name], expected[name], name)]
    print("\n".join(lines[:40]) or f"{len(names)} runs as before, number by number")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
