"""Callbacks: when they are called, how they end a run, and what is refused."""

import pytest
from transformers import PrinterCallback

from rlhf_pg import Callback
from rlhf_pg.tasks import arithmetic
from tests.trainers.conftest import digits

MOMENTS = (
    *("on_start", "on_step_begin", "on_step_end", "on_evaluate", "on_step", "on_log", "on_save"),
    "on_end",
)


def recorder(seen: list[tuple[str, int]]) -> Callback:
    """A callback that notes each moment with its step."""

    def noting(moment):
        def note(self, trainer, *_) -> None:
            seen.append((moment.removeprefix("on_"), trainer.state.step))

        return note

    return type("Recorder", (Callback,), {moment: noting(moment) for moment in MOMENTS})()


def steps_of(directory) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in directory.iterdir())


def test_moments_come_in_order(make) -> None:
    seen: list[tuple[str, int]] = []
    held_out = arithmetic().eval_dataset.select(range(4))
    make(
        callbacks=[recorder(seen)],
        eval_dataset=held_out,
        eval_steps=2,
        save_steps=3,
        logging_steps=2,
    ).train()
    assert seen == [
        ("start", 0),
        *[("step_begin", 0), ("step_end", 1), ("step", 1)],
        *[("step_begin", 1), ("step_end", 2), ("evaluate", 2), ("step", 2), ("log", 2)],
        *[("step_begin", 2), ("step_end", 3), ("step", 3), ("log", 3), ("save", 3)],
        ("end", 3),
    ]


def test_stop_leaves_final_and_checkpoint(make, tmp_path) -> None:
    def reward(completions, **columns):
        if trainer.state.step == 1:
            trainer.stop()
        return digits(completions, **columns)

    seen: list[tuple[str, int]] = []
    trainer = make(callbacks=[recorder(seen)], reward_funcs=reward, max_steps=5, save_steps=0)
    trainer.train()
    assert seen[-1] == ("end", 2)
    assert steps_of(tmp_path / "run" / "checkpoints") == [2]
    assert (tmp_path / "run" / "final").is_dir()


@pytest.mark.parametrize("moment", ["on_log", "on_save"])
def test_stop_takes_effect_in_the_same_step(make, moment) -> None:
    def stop(self, trainer, _) -> None:
        trainer.stop()

    ours = type("Ours", (Callback,), {moment: stop})()
    trainer = make(callbacks=[ours], max_steps=5, save_steps=2, logging_steps=2)
    trainer.train()
    assert trainer.state.step == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Callback, "instantiate a class"),
        (PrinterCallback(), r"trainer\.stop\(\)"),
        (digits, "rlhf_pg.Callback"),
        (None, "got None"),
    ],
)
def test_wrong_callback_raises_when_trainer_is_made(make, wrong, said) -> None:
    with pytest.raises(ValueError, match=f"^callbacks .*{said}"):
        make(callbacks=[wrong])
