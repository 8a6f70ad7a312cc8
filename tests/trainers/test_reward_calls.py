"""Runs whose rewards are called in workers, run beside the rollout, log, and fail."""

import asyncio
import json
import math
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from rlhf_pg.report.metrics import Meter
from rlhf_pg.report.run_files import read
from rlhf_pg.tasks import arithmetic
from tests.rewards import misbehaving as faults
from tests.rewards.test_reward_model import classifier
from tests.trainers.conftest import digits
from tests.untimed import without_times


def lines(trainer):
    return [without_times(line) for line in read(Path(trainer.args.output_dir) / "metrics.jsonl")]


def test_place_of_reward_does_not_change_run(make, tmp_path):
    async def length(completions, **_):
        await asyncio.sleep(0)
        return faults.length(completions)

    runs, held_out = [], arithmetic().eval_dataset.select(range(6))
    for name, function, options in (
        ("here", faults.length, {}),
        ("beside", length, {}),
        ("worker", faults.length, {"reward_workers": 1}),
    ):
        options |= {"output_dir": str(tmp_path / name), "max_steps": 1, "eval_dataset": held_out}
        trainer = make(reward_funcs=function, **options)
        trainer.train()
        runs.append((lines(trainer), trainer.evaluate()))
    assert runs[0] == runs[1] == runs[2]


def test_rewards_begin_while_others_are_sampled(make, monkeypatch):
    """A call has begun before the last completion is told."""
    called = threading.Event()
    finished_rows = []

    async def notes(completions):
        called.set()
        return digits(completions)

    trainer = make(reward_funcs=notes)
    engine_stream = trainer.sampler.engine.stream

    def stream(prompts, n, *options):
        for place, completion in engine_stream(prompts, n, *options):
            yield place, completion
            finished_rows.append(place)
            if len(finished_rows) == len(prompts) * n - 1:
                assert called.wait(10)

    monkeypatch.setattr(trainer.sampler.engine, "stream", stream)
    trainer.sampler.next_batch(0, Meter())
    assert len(finished_rows) == 16


def test_error_while_others_are_sampled_closes_the_session(make, monkeypatch):
    """Even while somebody still holds the error, as an interactive interpreter does."""

    async def notes(completions):
        return digits(completions)

    def fails(inputs):
        raise KeyError("begin")

    trainer = make(reward_funcs=notes)
    monkeypatch.setattr(trainer.rewards, "begin", fails)
    with pytest.raises(KeyError) as held:
        trainer.sampler.next_batch(0, Meter())
    assert torch.is_grad_enabled()
    assert not trainer.sampler.engine.is_synced
    assert held.value


def test_calls_about_other_completions_of_a_prompt_are_not_mixed_up(make):
    """Two batches of one prompt: the calls that the second has begun are not the first's."""

    async def sizes(completions):
        return [float(len(text)) for text in completions]

    sampler = make(reward_funcs=sizes).sampler
    first, second = (sampler.sample(sampler.prompts, [0], [0], 4, heat) for heat in (1.0, 0.2))
    assert first.completions != second.completions
    for batch in (first, second):
        scores = sampler.add_rewards(batch).scores.nansum((1, 2)).tolist()
        assert scores == [len(text) for text in batch.completions]


def test_what_functions_log_is_in_both_files(make):
    def logging(completions, prompts, log_extra, log_metric, **_):
        log_extra("shouted", [text.upper() for text in prompts])
        log_metric("answers", len(completions))
        return digits(completions)

    trainer = make(reward_funcs=logging, max_steps=1, log_completions_steps=1)
    trainer.train()
    (line,) = lines(trainer)
    assert line["answers"] == 4  # the mean of four calls
    file = Path(trainer.args.output_dir) / "completions.jsonl"
    records = [json.loads(text) for text in file.read_text().splitlines()]
    assert all(record["shouted"] == record["prompt"].upper() for record in records)


def fails_on(*numbers):
    """A reward that fails on some rows of every batch, by their places."""

    def fails(prompts, completions, ended, row):
        if any(number in numbers for number in row):
            raise KeyError("judge")
        return digits(completions)

    return fails


def with_rows():
    data = arithmetic().train_dataset.select(range(16))
    return data.add_column("row", list(range(16)))


def test_lost_completion_leaves_losses(make):
    data = with_rows()
    options = {"on_reward_error": "drop", "prompts_per_step": 16, "max_steps": 1}
    trainer = make(reward_funcs=fails_on(3), train_dataset=data, **options)
    batch = trainer.sampler.next_batch(0, Meter())
    lost = torch.tensor([row == 3 for row in batch.dataset_rows])
    assert lost.sum() == 4
    assert torch.equal(~batch.action_mask.any(1), lost)
    assert torch.equal(batch.scores.isnan().all(2).all(1), lost)
    assert batch.metrics["rewards/fails/failed"] == 4 / 64
    trainer.train()
    (line,) = lines(trainer)
    assert line["rewards/fails/failed"] == 4 / 64
    assert math.isfinite(line["loss"])


@pytest.mark.parametrize("choice", ["drop", "value"])
def test_batch_of_failed_calls_ends_run(make, choice):
    def fails(completions):
        raise KeyError("judge")

    trainer = make(reward_funcs=fails, on_reward_error=choice, max_steps=2)
    with pytest.raises(ValueError, match=r"every call .* first: reward function fails raised K"):
        trainer.train()
    assert not (Path(trainer.args.output_dir) / "final").exists()


@pytest.fixture
def judge_path(tmp_path):
    path = tmp_path / "judge"
    classifier("gpt2").save_pretrained(path)
    arithmetic().new_model()[1].save_pretrained(path)
    return str(path)


def test_reward_processing_classes_set_reward_tokenizer(make, judge_path):
    own = AutoTokenizer.from_pretrained(judge_path)
    model = classifier("gpt2")
    with pytest.raises(ValueError, match=r"GPT2For.* no tokenizer was saved with the model"):
        make(reward_funcs=model)
    named = make(reward_funcs=judge_path).checkpointer.config["reward_funcs"]
    assert list(named) == [f"model:{judge_path}"]
    trainer = make(reward_funcs=model, reward_processing_classes=own)
    assert trainer.rewards.sources[0].function.processing_class is own
    with pytest.raises(ValueError, match="one entry per reward function, got 1 for 2"):
        make(reward_funcs=[model, digits], reward_processing_classes=[own])


def test_name_that_is_refused_after_the_updates_leaves_them_counted(make):
    """So that what is saved then says that it has updates of the interrupted step. After a step the
    names of its metrics are known, and refused before the updates.
    """
    names = ["ratio", "mine", "ratio"]

    def logging(completions, log_metric):
        log_metric(names[0], 1.0)
        return digits(completions)

    trainer = make(reward_funcs=logging, num_iterations=2)
    for updates in (2, 2, 0):
        trainer.learner.updates_begun = 0  # as the loop does after a step
        if names[0] == "mine":
            trainer.step()
        else:
            with pytest.raises(ValueError, match="'ratio'"):
                trainer.step()
        assert trainer.learner.updates_begun == updates
        names.pop(0)


@pytest.mark.parametrize("name", ["loss", "reward_stderr"])
def test_logged_name_of_run_itself_is_refused(make, name):
    def logging(completions, log_metric):
        log_metric(name, 1.0)
        return digits(completions)

    trainer = make(reward_funcs=logging)
    with pytest.raises(ValueError, match=f"log_metric: the run itself has a metric '{name}'"):
        trainer.evaluate(with_rows()) if name == "reward_stderr" else trainer.train()
