"""The step time of a run whose reward waits, with and without sampling ahead.

    OMP_NUM_THREADS=1 python -m benchmarks.ahead

Both halves of a step are measured where they run: sampling and scoring in the thread beside, the
rest in the main thread. Ahead, a step should take as long as the longer half.
"""

import asyncio
import tempfile
from statistics import median
from typing import Any

from transformers import set_seed

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.tasks import arithmetic

STEPS, WAIT = 16, 0.3


async def slow(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(WAIT)
    return [sum(c in "02468" for c in text) / 6 for text in completions]


def run(ahead: int, prompts: int) -> None:
    set_seed(0)
    task = arithmetic()
    model, tokenizer = task.new_model()
    with tempfile.TemporaryDirectory() as directory:
        args = GRPOConfig(
            output_dir=directory,
            max_steps=STEPS,
            prompts_per_step=prompts,
            num_generations=8,
            max_completion_length=12,
            num_iterations=2,
            learning_rate=1e-5,
            save_steps=0,
            log_completions_steps=0,
            rollout_ahead=ahead,
            rollout_workers=1,
        )
        trainer = GRPOTrainer(
            model, slow, args, task.train_dataset.select(range(256)), processing_class=tokenizer
        )
        trainer.train()
    lines = trainer.history[4:]  # the workers have started

    def typical(*keys: str) -> float:
        return median(sum(line[key] for key in keys) for line in lines)

    first, second = typical("time/rollout", "time/reward"), typical("time/score", "time/update")
    step = typical("step_time")
    print(
        f"ahead {ahead}, {prompts} prompts: rollout and reward {first:.3f} s, update "
        f"{second:.3f} s, step {step:.3f} s, {step / max(first, second):.2f} of the longer half"
    )


if __name__ == "__main__":
    for prompts in (8, 32):
        for ahead in (0, 1):
            run(ahead, prompts)
