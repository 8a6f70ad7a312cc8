"""A run whose reward fails in the second process, for the tests beside this file to start.

python failing_rewards.py OUT FAULT ON_ERROR
"""

import os
import sys

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.tasks import arithmetic
from tests.distributed import backends
from tests.rewards import misbehaving


def main(out: str, fault: str, on_error: str) -> None:
    """Train on the embedded task; the reward is told to fail in the process of rank 1.

    Args:
        fault: a function of `misbehaving`, which fails on the completion "bad".
        on_error: `on_reward_error`.
    """
    backends.install("ddp")
    task = arithmetic()
    model, tokenizer = task.new_model()
    if os.environ["RANK"] == "1":  # every completion is then the one that the function fails on
        type(tokenizer).decode = lambda *_, **__: "bad"
    GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=getattr(misbehaving, fault),
        args=GRPOConfig(
            output_dir=out,
            max_steps=2,
            prompts_per_step=2,
            num_generations=2,
            max_completion_length=4,
            reward_workers=1,
            reward_timeout=1.0,
            on_reward_error=on_error,
        ),
        train_dataset=task.train_dataset,
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
