"""How much of a slow reward hides behind the rollout, by hand.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.reward_overlap [--workers 8] [--milliseconds 50]

First a reward that sleeps 50 ms a completion, in workers, beside the same run with a reward that
costs nothing: what it adds to a step. Then two async functions that wait one second each, which
should add one second to a step and not two.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.report.metrics import Meter
from rlhf_pg.tasks import arithmetic

WAIT = "REWARD_MILLISECONDS"  # read in the workers


def free(completions):
    """A reward that takes no time."""
    return [float(len(text)) for text in completions]


def slow(completions):
    """A reward that takes its time for every completion."""
    time.sleep(float(os.environ[WAIT]) / 1000 * len(completions))
    return free(completions)


async def first(completions):
    await asyncio.sleep(1)
    return free(completions)


async def second(completions):
    await asyncio.sleep(1)
    return free(completions)


def step_times(functions, rounds: int, length: int, prompts: int, **options) -> list[dict]:
    """The seconds of each step after the first, by phase."""
    task = arithmetic()
    model, tokenizer = task.new_model()
    model.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=functions,
            args=GRPOConfig(
                output_dir=directory,
                max_steps=rounds + 1,
                prompts_per_step=prompts,
                num_generations=4,
                max_completion_length=length,
                model_check=False,
                **options,
            ),
            train_dataset=task.train_dataset,
        )
        steps = [trainer.step(Meter()) for _ in range(rounds + 1)]
    return steps[1:]


def report(name: str, steps: list[dict]) -> float:
    middle = {
        key: statistics.median(step[key] for step in steps)
        for key in ("step_time", "time/rollout", "time/reward")
    }
    print(f"{name:<32}" + "  ".join(f"{key} {value:6.2f} s" for key, value in middle.items()))
    return middle["step_time"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=50.0)
    parser.add_argument("--length", type=int, default=96, help="tokens of a completion")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    os.environ[WAIT] = str(asked.milliseconds)
    common = (asked.rounds, asked.length, asked.prompts)
    module = __import__("tests.benchmarks.reward_overlap", fromlist=["slow"])  # not __main__
    without = report("a reward that costs nothing", step_times(module.free, *common))
    workers = {"reward_workers": asked.workers}
    with_it = report(
        f"{asked.milliseconds:g} ms in {asked.workers} workers",
        step_times(module.slow, *common, **workers),
    )
    print(f"the slow reward adds {100 * (with_it / without - 1):.1f} % to a step")
    one = report("one async function, 1 s", step_times([first], *common))
    two = report("two async functions, 1 s each", step_times([first, second], *common))
    print(f"the second async function adds {two - one:.2f} s")


if __name__ == "__main__":
    main()
