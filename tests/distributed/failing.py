"""A run in which the second process fails, for the tests beside this file to start.

python failing.py OUT WHERE HOW [BACKEND]
"""

import os
import signal
import sys
import time
from typing import Any

from rlhf_pg import Callback, GRPOConfig, GRPOTrainer
from rlhf_pg.runtime.termination import POLL
from rlhf_pg.tasks import arithmetic
from tests.distributed import backends
from tests.rewards import misbehaving


def raises() -> None:
    raise RuntimeError("the judge is down")


def is_interrupted() -> None:
    raise KeyboardInterrupt("the judge has had enough")


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def is_interrupted_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def loses_its_launcher() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3 * POLL)  # which is noticed in this step


def sleeps_for_ever() -> None:
    while True:
        time.sleep(3600)


def main(out: str, where: str, how: str, backend: str = "ddp") -> None:
    """Train on the embedded task; in the second step, `how` is called in the process of rank 1.

    Args:
        where: it is called in: "reward", which all processes agree on, "callback", or "begin", the
            callback before the step, or "all callbacks", in the process of rank 0 as well; or the
            reward is that of `misbehaving` in a worker, and all completions in the process of rank
            1 are "bad": "worker error" or "worker drop", by `on_reward_error`.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in the background
    backends.install(backend)
    task = arithmetic()
    model, tokenizer = task.new_model()

    def fail(place: str) -> None:
        mine = trainer.runtime.rank == 1 or where == "all callbacks"
        if mine and trainer.state.step == 1 and place in where:
            globals()[how]()

    def judge(completions: list[str], **_: Any) -> list[float]:
        fail("reward")
        return [0.0] * len(completions)

    reward, options = judge, {}
    if where.startswith("worker"):
        reward = getattr(misbehaving, how)
        options = {"num_generations": 2, "reward_workers": 1, "reward_timeout": 1.0}
        options["on_reward_error"] = where.removeprefix("worker ")
        if os.environ["RANK"] == "1":
            type(tokenizer).decode = lambda *_, **__: "bad"

    class Failing(Callback):
        def on_step(self, trainer: GRPOTrainer, metrics: dict[str, Any]) -> None:
            fail("callback")

        def on_step_begin(self, trainer: GRPOTrainer) -> None:
            fail("begin")

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=out,
            max_steps=3,
            prompts_per_step=2,
            max_completion_length=4,
            ddp_timeout=8 if how == "sleeps_for_ever" else 300,
            **options,
        ),
        train_dataset=task.train_dataset,
        callbacks=[Failing()],
    )
    try:
        trainer.train()
    except KeyboardInterrupt:
        sleeps_for_ever()  # and its connections stay open, as those of NCCL seem to


if __name__ == "__main__":
    main(*sys.argv[1:])
