"""A small run in a process of its own, which does to itself what its command line says.

python -m tests.faults.runs OUT SIGNAL...

In the second of three steps the process gets the signals, one after the other; a checkpoint is
saved after every step.
"""

import os
import signal
import sys
import time
from typing import Any

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.runtime.signals import SAME
from rlhf_pg.tasks import arithmetic


def main(out: str, *names: str) -> None:
    task = arithmetic()
    model, tokenizer = task.new_model()

    def judge(completions: list[str], **_: Any) -> list[float]:
        if trainer.state.step == 1:
            for name in names:
                os.kill(os.getpid(), getattr(signal, name))
                time.sleep(SAME + 0.1)
            print("still here", flush=True)
        return [float(len(text)) for text in completions]

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=judge,
        args=GRPOConfig(
            output_dir=out, max_steps=3, save_steps=1, prompts_per_step=2, max_completion_length=4
        ),
        train_dataset=task.train_dataset,
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
