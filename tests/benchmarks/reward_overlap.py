"""How much of a slow reward hides behind the rollout, by hand.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.reward_overlap [--workers 8] [--milliseconds 50]

First a reward that sleeps 50 ms a completion, in workers, beside the same run with a reward that
costs nothing: what it adds to a step. The cache has room for 32 rows, so that prompts end one after
another and the rollout takes longer than the rewards. Then two async functions that wait one second
each, which should add one second to a step and not two.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.tasks import arithmetic
from rlhf_pg.tasks.tiny import character_tokenizer, tiny_decoder

LETTERS = range(0x4E00, 0x4E00 + 1000)  # so that one token in a thousand ends a completion
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


def new_trainer(directory: str, functions, asked: argparse.Namespace, **options) -> GRPOTrainer:
    """A trainer whose completions end here and there, most of them by length."""
    tokenizer = character_tokenizer("0123456789+=" + "".join(map(chr, LETTERS)))
    return GRPOTrainer(
        model=tiny_decoder(tokenizer, max_positions=asked.length + 8),
        processing_class=tokenizer,
        reward_funcs=functions,
        args=GRPOConfig(
            output_dir=directory,
            max_steps=asked.rounds + 1,
            prompts_per_step=asked.prompts,
            num_generations=4,
            max_completion_length=asked.length,
            rollout_cache_tokens=32 * (asked.length + 8),
            **options,
        ),
        train_dataset=arithmetic().train_dataset,
    )


def step_times(trainers, rounds: int) -> list[list[dict]]:
    """The steps of each trainer after its first; they take turns, since a machine has moods."""
    steps = [[trainer.step() for trainer in trainers] for _ in range(rounds + 1)]
    return [list(of_one) for of_one in zip(*steps[1:], strict=True)]


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
    parser.add_argument("--length", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--prompts", type=int, default=24, help="prompts of a step")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    os.environ[WAIT] = str(asked.milliseconds)
    module = __import__("tests.benchmarks.reward_overlap", fromlist=["slow"])  # not __main__
    kinds = {
        "a reward that costs nothing": ([module.free], {}),
        f"{asked.milliseconds:g} ms in {asked.workers} workers": (
            [module.slow],
            {"reward_workers": asked.workers},
        ),
        "one async function, 1 s": ([first], {}),
        "two async functions, 1 s each": ([first, second], {}),
    }
    with tempfile.TemporaryDirectory() as root:
        trainers = [
            new_trainer(f"{root}/{number}", functions, asked, **options)
            for number, (functions, options) in enumerate(kinds.values())
        ]
        times = step_times(trainers, asked.rounds)
        free_, slow_, one, two = map(report, kinds, times)
    print(f"the slow reward adds {100 * (slow_ / free_ - 1):.1f} % to a step")
    print(f"the second async function adds {two - one:.2f} s")


if __name__ == "__main__":
    main()
