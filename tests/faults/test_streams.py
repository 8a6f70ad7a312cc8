"""Runs whose reader leaves, as `head` does, or a `tee` that dies."""

import io
import os
import sys
from contextlib import ExitStack, suppress

import pytest
from datasets import Dataset

from rlhf_pg.boundary.streams import outliving_readers
from rlhf_pg.cli.main import main
from rlhf_pg.config import RewardModelConfig, SFTConfig
from rlhf_pg.report.json_lines import read
from rlhf_pg.rewards import train_reward_model
from rlhf_pg.tasks.warm_start import warm_start
from tests.trainers.conftest import digits


@pytest.fixture
def piped(monkeypatch):
    """Puts stdout and stderr into a pipe; returns the end that is read, a number to close. (Not by
    itself: between fixtures and test pytest has streams of its own.)
    """
    with ExitStack() as streams:

        def pipe() -> int:
            ours, theirs = os.pipe()
            for name in ("stdout", "stderr"):
                stream = os.fdopen(os.dup(theirs), "w")
                streams.enter_context(suppress(OSError))  # what is left may not be written
                streams.enter_context(stream)
                monkeypatch.setattr(sys, name, stream)
            os.close(theirs)
            return ours

        yield pipe


@pytest.mark.fault(50, "what a reward function prints goes nowhere either")
def test_printing_reward_survives_closed_reader(make, tmp_path, piped) -> None:
    reader, left = piped(), []

    def talks(completions, **columns):
        left.append(left or os.close(reader))
        print("a line", "and more" * 10_000)
        print("a warning", file=sys.stderr)
        return digits(completions, **columns)

    make(max_steps=2, reward_funcs=talks).train()
    assert len(left) == len(read(tmp_path / "run" / "metrics.jsonl")) == 2
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


@pytest.mark.fault(50, "a warm start goes on quietly, and saves")
def test_warm_start_survives_closed_reader(tmp_path, piped) -> None:
    os.close(piped())
    final = warm_start(
        SFTConfig(task="arithmetic", output_dir=str(tmp_path / "run"), max_steps=2, batch_size=2)
    )
    assert (final / "model.safetensors").exists()


@pytest.mark.fault(50, "the training of a reward model goes on quietly, and saves")
def test_reward_model_training_survives_closed_reader(model_path, tmp_path, piped) -> None:
    os.close(piped())
    args = RewardModelConfig(output_dir=str(tmp_path / "run"), max_steps=1, batch_size=2)
    few = Dataset.from_dict({"chosen": ["1+1=2", "2+2=4"], "rejected": ["1+1=3", "2+2=5"]})
    train_reward_model(args, model=model_path, train_dataset=few, eval_dataset=few)
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_cli_command_survives_closed_reader(piped) -> None:
    os.close(piped())
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0


def test_outliving_readers_delivers_all_output(monkeypatch) -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours) as reader, os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print("before")
        with outliving_readers():
            print("in it")
            sys.stdout.buffer.write(b"as bytes\n")
        assert sys.stdout is stream
        print("after")
        stream.close()
        assert sorted(reader.read().splitlines()) == ["after", "as bytes", "before", "in it"]


def test_stdout_closed_by_user_code_is_restored(piped) -> None:
    piped()
    before = sys.stdout
    with outliving_readers():
        sys.stdout.close()
    assert sys.stdout is before


@pytest.mark.parametrize("stream", [None, io.StringIO(), io.TextIOWrapper(io.BytesIO())])
def test_outliving_readers_keeps_non_pipe_stdout(monkeypatch, stream) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    with outliving_readers():
        assert sys.stdout is stream
