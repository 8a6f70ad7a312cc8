"""Trackers get the lines of metrics.jsonl; what arrived is read back from what they have written.

No network: W&B is offline, trackio and TensorBoard are local.
"""

import dataclasses
import json
import logging
import shutil
import struct
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_pg import Callback
from rlhf_pg.report.run_files import read
from rlhf_pg.tasks import arithmetic

NAMES = ("tensorboard", "wandb", "trackio")
Steps = dict[int, dict[str, float]]


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Before trackio is imported, since it reads its directory then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


def tensorboard_steps(run: Path) -> Steps:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    steps: Steps = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            steps.setdefault(event.step, {})[tag] = event.value
    return steps


def tensorboard_config(run: Path) -> dict[str, Any]:
    newest = max(run.glob("tensorboard/*/hparams.yml"), key=lambda path: float(path.parent.name))
    return yaml.safe_load(newest.read_text())


def wandb_records(run: Path) -> list[Any]:
    """Of the newest W&B run, once its process has written the end of it."""
    for _ in range(100):
        records = wandb_records_so_far(run)
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            break
        time.sleep(0.1)
    return records


def wandb_records_so_far(run: Path) -> list[Any]:
    """Protobufs in a LevelDB log, with blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (run / "wandb" / "latest-run").glob("*.wandb")
    data, at, buffer, records = file.read_bytes(), 7, b"", []
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += 7 + length
        buffer += data[at - length : at]
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(buffer))
            buffer = b""
    return records


def wandb_steps(run: Path) -> Steps:
    steps: Steps = {}
    for record in wandb_records(run):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            steps[items["_step"]] = {k: v for k, v in items.items() if k[0] != "_"}
    return steps


def wandb_config(run: Path) -> dict[str, Any]:
    configs = [r.config for r in wandb_records(run) if r.WhichOneof("record_type") == "config"]
    return {item.key: json.loads(item.value_json) for c in configs for item in c.update}


def wandb_exit_code(run: Path) -> int:
    (code,) = [
        r.exit.exit_code for r in wandb_records(run) if r.WhichOneof("record_type") == "exit"
    ]
    return code


def trackio_name(run: Path) -> str:
    config = yaml.safe_load((run / "config.yaml").read_text())
    return config["run_name"] or (run / "run-id").read_text()


def trackio_steps(run: Path) -> Steps:
    from trackio.sqlite_storage import SQLiteStorage

    lines = SQLiteStorage.get_logs("rlhf_pg", trackio_name(run))
    own = ("step", "timestamp")
    return {line["step"]: {k: v for k, v in line.items() if k not in own} for line in lines}


def trackio_config(run: Path) -> dict[str, Any]:
    import trackio

    (found,) = [r for r in trackio.Api().runs("rlhf_pg") if r.name == trackio_name(run)]
    assert found.config is not None
    return found.config


RUN_NAME = f"third try {uuid.uuid4().hex}"  # trackio may have earlier runs in its directory
STEPS: dict[str, Callable[[Path], Steps]] = {
    "tensorboard": tensorboard_steps,
    "wandb": wandb_steps,
    "trackio": trackio_steps,
}
CONFIG: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tensorboard": tensorboard_config,
    "wandb": wandb_config,
    "trackio": trackio_config,
}


def lines(run: Path) -> Steps:
    """What trackers are to have: metrics.jsonl, less its nulls; float32 as TensorBoard stores."""
    return {
        line.pop("step"): pytest.approx({k: v for k, v in line.items() if v is not None}, rel=1e-6)
        for line in read(run / "metrics.jsonl")
    }


def test_run_reports_every_metric(make, tmp_path) -> None:
    held_out = arithmetic().eval_dataset.select(range(4))
    run = tmp_path / "run"
    options = {"report_to": NAMES, "run_name": RUN_NAME, "epsilon_high": None, "max_steps": 2}
    trainer = make(eval_dataset=held_out, eval_steps=2, **options)
    trainer.train()
    expected = lines(run)
    assert list(expected) == [1, 2]
    assert "eval_reward" in expected[2].expected
    assert "kl" not in expected[1].expected
    config = dataclasses.asdict(trainer.args)
    for name in NAMES:
        assert STEPS[name](run) == expected, name
        kept = {k: v for k, v in CONFIG[name](run).items() if k in config}
        assert kept["learning_rate"] == 1e-3
        assert kept["disable_dropout"] is True
        assert kept["epsilon_high"] == "null"
        assert json.loads(kept["report_to"]) == list(NAMES)
        assert set(kept) == set(config)
    assert wandb_exit_code(run) == 0
    (record,) = [r.run for r in wandb_records(run) if r.WhichOneof("record_type") == "run"]
    assert (record.display_name, record.project) == (RUN_NAME, "rlhf_pg")


def test_run_fails_is_resumed_and_another_begins(make, tmp_path) -> None:
    """Trackers keep what a run reported before it failed, go on with it, and begin anew with the
    next run in its directory.
    """
    run, calls = tmp_path / "run", []
    options = {"report_to": NAMES, "max_steps": 2, "save_steps": 1}

    def reward(completions, **_):
        calls.append(len(completions))
        if len(calls) == 5:
            raise RuntimeError("not today")
        return [float(len(text)) for text in completions]

    with pytest.raises(ValueError, match="not today"):
        make(reward_funcs=reward, **options).train()
    expected = lines(run)
    assert list(expected) == [1]
    for name in NAMES:
        assert STEPS[name](run) == expected, name
    assert wandb_exit_code(run) == 1

    run_id = (run / "run-id").read_text()
    make(reward_funcs=reward, **options).train(resume_from_checkpoint="latest")
    expected = lines(run)
    assert list(expected) == [1, 2]
    assert tensorboard_steps(run) == expected
    assert trackio_steps(run) == expected
    assert set(wandb_steps(run)) == {2}
    offline = [path.name for path in run.glob("wandb/offline-run-*")]
    assert len(offline) == 2
    assert all(f"-{run_id}" in name for name in offline)  # a second one of the same second: "-1"

    make(**options | {"max_steps": 1}).train()
    for name in NAMES:
        assert set(STEPS[name](run)) == {1}


class TakeAway(Callback):
    """Puts a file where TensorBoard's directory was, before the second step is reported."""

    def on_step(self, trainer, metrics) -> None:
        if metrics["step"] == 2:
            place = Path(trainer.args.output_dir) / "tensorboard"
            shutil.rmtree(place)
            place.write_text("")


@pytest.mark.fault(42, "one warning, and it is left out; the others and metrics.jsonl go on")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
def test_failing_tracker_is_dropped_and_run_continues(make, tmp_path, caplog) -> None:
    trainer = make(report_to=NAMES, max_steps=4, callbacks=[TakeAway()])
    with caplog.at_level(logging.WARNING, "rlhf_pg"):
        trainer.train()
    said = [r.getMessage() for r in caplog.records if r.name.startswith("rlhf_pg")]
    assert len(said) == 1
    assert said[0].startswith("report_to: tensorboard failed and is disabled: ")
    run = tmp_path / "run"
    expected = lines(run)
    assert list(expected) == [1, 2, 3, 4]
    assert wandb_steps(run) == trackio_steps(run) == expected


def test_tracker_start_failure_raises_before_first_step(make, monkeypatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("in the way")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", fails)
    trainer = make(report_to=["tensorboard"])
    with pytest.raises(ValueError, match="report_to: tensorboard cannot start: "):
        trainer.train()
    assert trainer.state.step == 0


@pytest.mark.fault(
    42,
    "one that cannot start is an error before the first step; a run that is "
    "resumed goes on without it, with a warning",
)
def test_tracker_start_failure_on_resume_warns(make, tmp_path, caplog) -> None:
    run = tmp_path / "run"
    make(save_steps=1, max_steps=1).train()
    (run / "tensorboard").write_text("in the way")
    make(report_to=["tensorboard", "trackio"], max_steps=2).train("latest")
    (said,) = [r.getMessage() for r in caplog.records if r.name == "rlhf_pg.runtime.trackers"]
    assert said.startswith("report_to: tensorboard cannot start: ")
    assert set(trackio_steps(run)) == {2}


@pytest.mark.parametrize("name", NAMES)
def test_missing_tracker_error_names_extra(make, monkeypatch, name) -> None:
    for package in (name, "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf'{name} is not installed.*"rlhf-pg\[trackers\]"'):
        make(report_to=[name])
