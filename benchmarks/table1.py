"""Table 1 of PPO (Schulman et al. 2017, section 6.1) for language models: to clip or to penalize.

    rlhf-pg fetch smollm2                         # for letters alone
    OMP_NUM_THREADS=1 python -m benchmarks.table1 all --jobs 2    # what docs/results lacks
    OMP_NUM_THREADS=1 python -m benchmarks.table1 run guess "clip 0.2" 1
    python docs/table1.py                         # the table and the picture

Each run makes four updates of all rows per rollout, from the task's warm start or SmolLM2. Learning
rates were tried with clip 0.2 and seed 101; `--set learning_rate=...` tries others.
"""

import argparse
import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from benchmarks.files import make_missing
from rlhf_pg import PPOConfig, PPOTrainer
from rlhf_pg.config.parse import load

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "table1.jsonl"
SEEDS = range(1, 6)
PENALTY = {"policy_loss": "kl_penalty"}
SETTINGS: dict[str, dict[str, Any]] = {
    "no clipping or penalty": {"policy_loss": "surrogate"},
    **{f"clip {epsilon}": {"epsilon": epsilon} for epsilon in (0.1, 0.2, 0.3)},
    **{
        f"adaptive KL {target}": PENALTY | {"old_kl_target": target}
        for target in (0.003, 0.01, 0.03)
    },
    **{f"fixed KL {coef}": PENALTY | {"old_kl_coef": coef} for coef in (0.3, 1.0, 3.0)},
}
SHARED: dict[str, Any] = {
    "algorithm": "ppo",
    "num_generations": 1,
    "num_iterations": 4,
    "num_mini_batches": 1,
    "beta": 0.0,
    "max_grad_norm": 0.0,  # not in the paper, as the next
    "cliprange_value": None,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "eval_steps": 0,
    "save_steps": 0,
    "dtype": "float32",
}
TASKS: dict[str, dict[str, Any]] = {
    "arithmetic": {
        "task": "arithmetic",
        "prompts_per_step": 256,
        "max_completion_length": 6,
        "learning_rate": 2e-4,
        "value_learning_rate": 1e-3,
        "max_steps": 60,
    },
    "preference": {
        "task": "preference",
        "prompts_per_step": 128,
        "max_completion_length": 20,
        "learning_rate": 1e-3,
        "value_learning_rate": 1e-3,
        "max_steps": 40,
    },
    "guess": {
        "task": "guess",
        "prompts_per_step": 128,
        "max_turns": 4,
        "max_completion_length": 16,
        "learning_rate": 1e-3,
        "value_learning_rate": 1e-3,
        "max_steps": 60,
    },
    "calculator": {
        "task": "calculator",
        "prompts_per_step": 128,
        "max_turns": 3,
        "max_completion_length": 48,
        "learning_rate": 5e-4,
        "value_learning_rate": 1e-3,
        "max_steps": 40,
    },
    "letters": {
        **load(ROOT / "recipes" / "smollm2_letters.yaml"),
        **SHARED,
        "prompts_per_step": 32,
        "critic": "shared",  # half the time of a separate one, which the paper has
        "max_steps": 12,
    },
}


def run(task: str, setting: str, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Train once, and return the result; a run that diverges ends early."""
    keys = SHARED | TASKS[task] | SETTINGS[setting] | changes
    name = "-".join(map(str, (task, setting, seed, *changes.values()))).replace(" ", "-")
    keys |= {"seed": seed, "output_dir": f"runs/table1/{name}"}
    trainer = PPOTrainer(args=PPOConfig(**keys).locate(ROOT / "recipes"))
    start = time.process_time()
    with suppress(FloatingPointError):
        trainer.train()
    return {
        "task": task,
        "setting": setting,
        "seed": seed,
        "changes": changes,
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True)[:-1],
        "cpu_seconds": round(time.process_time() - start),
        "reward": [round(step["reward"], 4) for step in trainer.history],
        # KL(policy before the step || policy), nats per token: the mean over its updates.
        "kl": [round(step["approx_kl"], 5) for step in trainer.history],
    }


def run_apart(task: str, setting: str, seed: int) -> dict[str, Any]:
    """Train once in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.table1", "run", task, setting, str(seed)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="make one run, and print its result")
    one.add_argument("task", choices=TASKS)
    one.add_argument("setting", choices=SETTINGS)
    one.add_argument("seed", type=int)
    one.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    whole = commands.add_parser("all", help="make the missing runs")
    whole.add_argument("--jobs", type=int, default=1, help="runs at a time")
    flags = parser.parse_args()
    if flags.command == "all":
        wanted = [(task, name, seed) for seed in SEEDS for task in TASKS for name in SETTINGS]
        make_missing(RESULTS, ("task", "setting", "seed"), wanted, run_apart, flags.jobs)
        return
    changes = {}
    for pair in flags.set:
        key, value = pair.split("=")
        changes[key] = yaml.safe_load(value)
    print(json.dumps(run(flags.task, flags.setting, flags.seed, changes)))


if __name__ == "__main__":
    main()
