"""Callbacks of transformers beside ours: what they see, what they may ask for, what is refused."""

import logging

import pytest
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback

from rlhf_pg import Callback
from rlhf_pg.report.json_lines import read
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers.callbacks import TransformersCallback
from tests.trainers.conftest import digits

MOMENTS = (
    *("on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end", "on_log"),
    *("on_evaluate", "on_save", "on_epoch_end", "on_train_end"),
)


class Recorder(TrainerCallback):
    """Keeps each moment with its step; sets control as `requests`, {(moment, step): flag}, say."""

    def __init__(self, requests=None) -> None:
        self.seen, self.requests, self.more = [], requests or {}, {}
        for moment in MOMENTS:
            setattr(self, moment, self.note(moment))

    def note(self, moment):
        def noted(args, state, control, **more):
            self.seen.append((moment.removeprefix("on_"), state.global_step))
            self.more[moment] = (args, state, more)
            if (moment, state.global_step) in self.requests:
                setattr(control, self.requests[moment, state.global_step], True)

        return noted


@pytest.fixture
def held_out():
    return arithmetic().eval_dataset.select(range(4))


def steps_of(directory) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in directory.iterdir())


def test_moments_come_in_transformers_order(make, held_out, tmp_path):
    recorder = Recorder()
    few = arithmetic().train_dataset.select(range(6))  # an epoch is a step and a half
    make(
        callbacks=[recorder],
        train_dataset=few,
        eval_dataset=held_out,
        eval_steps=2,
        save_steps=3,
        logging_steps=2,
    ).train()
    assert recorder.seen == [
        *[("train_begin", 0), ("epoch_begin", 0)],
        *[("step_begin", 0), ("step_end", 1)],
        *[("step_begin", 1), ("step_end", 2), ("evaluate", 2)],
        *[("epoch_end", 2), ("epoch_begin", 2), ("log", 2)],
        *[("step_begin", 2), ("step_end", 3), ("epoch_end", 3), ("log", 3), ("save", 3)],
        ("train_end", 3),
    ]


def test_state_arguments_and_logs_are_those_of_the_run(make, held_out, tmp_path):
    recorder = Recorder()
    trainer = make(callbacks=[recorder], eval_dataset=held_out, eval_steps=3)
    trainer.train()
    args, state, more = recorder.more["on_log"]
    (*_, line) = read(tmp_path / "run" / "metrics.jsonl")
    shown = {key: value for key, value in line.items() if value is not None}
    assert more["logs"] == shown | {"epoch": state.epoch}
    assert (state.max_steps, state.num_input_tokens_seen) == (3, line["num_tokens"])
    assert state.epoch == pytest.approx(12 / len(trainer.train_prompts))
    assert more["model"] is trainer.model
    assert more["optimizer"].param_groups[0]["lr"] is not None
    assert (args.learning_rate, args.eval_strategy, args.save_strategy) == (1e-3, "steps", "steps")
    assert args.to_dict()["num_generations"] == 4
    with pytest.raises(AttributeError, match="see prompts_per_step"):
        _ = args.per_device_train_batch_size
    metrics = recorder.more["on_evaluate"][2]["metrics"]
    assert metrics == {k: v for k, v in line.items() if k.startswith("eval_")}


def test_control_saves_evaluates_logs_and_stops(make, held_out, tmp_path):
    requests = {
        ("on_step_end", 1): "should_save",
        ("on_step_end", 2): "should_evaluate",
        ("on_step_begin", 2): "should_log",
        ("on_evaluate", 2): "should_training_stop",
    }
    recorder = Recorder(requests)
    trainer = make(
        callbacks=[recorder], eval_dataset=held_out, max_steps=6, save_steps=0, logging_steps=4
    )
    trainer.train()
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [("eval_reward" in line) for line in lines] == [False, True]
    assert steps_of(tmp_path / "run" / "checkpoints") == [1, 2]
    assert [seen for seen in recorder.seen if seen[0] == "log"] == [("log", 2)]
    assert recorder.seen[-1] == ("train_end", 2)
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    make(max_steps=6, save_steps=0, logging_steps=4).train("latest")  # a stopped run can go on
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 6


def test_early_stopping_of_transformers_stops(make, held_out, tmp_path):
    trainer = make(
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2), PrinterCallback()],
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        eval_dataset=held_out,
        eval_steps=1,
        max_steps=9,
    )
    trainer.train()
    assert trainer.state.step == 3  # the first is the best, and the next two are not better


def test_stop_leaves_final_and_checkpoint(make, tmp_path):
    def reward(completions, **columns):
        if trainer.state.step == 1:
            trainer.stop()
        return digits(completions, **columns)

    ended = []

    class Ours(Callback):
        def on_end(self, trainer) -> None:
            ended.append(trainer.state.step)

    trainer = make(callbacks=[Ours()], reward_funcs=reward, max_steps=5, save_steps=0)
    trainer.train()
    assert ended == [2]
    assert steps_of(tmp_path / "run" / "checkpoints") == [2]
    assert (tmp_path / "run" / "final").is_dir()


@pytest.mark.parametrize("moment", ["on_log", "on_save"])
def test_stop_takes_effect_in_the_same_step(make, moment):
    def stop(self, trainer, _):
        trainer.stop()

    ours = type("Ours", (Callback,), {moment: stop})()
    trainer = make(callbacks=[ours], max_steps=5, save_steps=2, logging_steps=2)
    trainer.train()
    assert trainer.state.step == 2
    theirs = Recorder({(moment, 2): "should_training_stop"})
    trainer = make(callbacks=[theirs], max_steps=5, save_steps=2, logging_steps=2)
    trainer.train()
    assert trainer.state.step == 2


def test_best_metric_outlives_a_resume_without_save_best(make, held_out):
    options = {"eval_dataset": held_out, "eval_steps": 1, "save_best": False, "save_steps": 1}
    make(
        **options, max_steps=1, reward_funcs=lambda completions, **_: [0.5] * len(completions)
    ).train()
    recorder = Recorder()
    trainer = make(
        **options,
        max_steps=2,
        reward_funcs=lambda completions, **_: [0.25] * len(completions),
        callbacks=[recorder],
    )
    trainer.train("latest")
    assert trainer.state.step == 2
    assert recorder.more["on_train_end"][1].best_metric == 0.5


def test_best_metric_skips_rewards_that_are_not_numbers(make) -> None:
    trainer = make()
    callback = TransformersCallback(TrainerCallback())
    callback.on_start(trainer)
    for reward in (float("nan"), 0.5, float("nan"), 0.25):
        callback.on_evaluate(trainer, {"eval_reward": reward})
    assert callback.state.best_metric == 0.5


def test_answered_control_counts(make):
    class Answering(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            answer = type(control)()
            answer.should_training_stop = True
            return answer

    trainer = make(callbacks=[Answering()])
    trainer.train()
    assert trainer.state.step == 1


def test_requested_end_of_epoch_is_warned_of(make, caplog):
    recorder = Recorder({("on_step_end", 1): "should_epoch_stop"})
    trainer = make(callbacks=[recorder])
    with caplog.at_level(logging.WARNING, "rlhf_pg"):
        trainer.train()
    assert trainer.state.step == 3
    assert [r for r in caplog.messages if "should_epoch_stop" in r] == [
        "Recorder set should_epoch_stop, which is not obeyed, since steps do not end with an "
        "epoch: set should_training_stop"
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Recorder, r"got the class Recorder: write Recorder\(\)"),
        (Callback, r"got the class Callback: write Callback\(\)"),
        (digits, " of rlhf_pg.Callback or transformers.TrainerCallback, got <func"),
        (None, "got None"),
    ],
)
def test_wrong_callback_raises_when_trainer_is_made(make, wrong, said):
    with pytest.raises(ValueError, match=f"^callbacks must be objects.*{said}"):
        make(callbacks=[wrong])


def test_failing_callback_is_named(make):
    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            raise SystemExit(3)

    with pytest.raises(RuntimeError, match="on_step_end of the callback Failing raised SystemExit"):
        make(callbacks=[Failing()]).train()
