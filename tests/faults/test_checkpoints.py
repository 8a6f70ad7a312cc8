"""Damage on the disk, and who may not go on from a checkpoint."""

import errno
import json
import os
import pickle
import shutil
import stat
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from rlhf_pg import PPOTrainer, failpoints
from rlhf_pg.checkpoint import compatibility
from rlhf_pg.checkpoint.atomic import STATE, find_damage, partial_of, publish
from rlhf_pg.checkpoint.run_dir import run_dir_lock
from rlhf_pg.runtime import Runtime
from tests.faults.job import build
from tests.tiny import tiny_model
from tests.untimed import untimed

OPTIONS = {"max_steps": 3, "eval_steps": 0, "save_total_limit": None}
NAMES = [f"step-{step:08d}" for step in (1, 2, 3)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three steps and as many checkpoints."""
    output = tmp_path_factory.mktemp("whole") / "run"
    build(str(output), **OPTIONS).train()
    return output


@pytest.fixture
def output(whole, tmp_path):
    """A copy to damage; the trainer that resumes it does not mind where it is."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def resume(output, choice="latest", **options):
    trainer = build(str(output), **(OPTIONS | options))
    trainer.checkpointer.resume(choice, trainer.runtime)
    return trainer.state.step


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def link(file):
    moved = file.rename(file.parents[2] / "elsewhere")
    file.symlink_to(moved)


def pipe(file):
    file.unlink()
    os.mkfifo(file)


def empty_list(file):
    file.write_text("[]")


DAMAGE = {
    "cut": (cut, "model.safetensors"),
    "flipped": (flip, "optimizer.safetensors"),
    "missing": (Path.unlink, "rng-rank0.safetensors"),
    "unsealed": (Path.unlink, STATE),
    "not JSON": (cut, STATE),
    "a link": (link, "model.safetensors"),
    "state is a link": (link, STATE),
    "a pipe": (pipe, STATE),
    "a list": (empty_list, STATE),
}


@pytest.mark.fault(9, "passed over with a warning: the newest whole checkpoint is resumed")
@pytest.mark.fault(10, "passed over with a warning: the newest whole checkpoint is resumed")
@pytest.mark.fault(11, "passed over with a warning: the newest whole checkpoint is resumed")
@pytest.mark.fault(13, "passed over with a warning, by all processes")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_skipped_for_newest_intact_one(output, caplog, damage) -> None:
    how, name = DAMAGE[damage]
    how(output / "checkpoints" / NAMES[2] / name)
    assert resume(output) == 2
    (warning,) = [
        r.getMessage() for r in caplog.records if r.name == "rlhf_pg.checkpoint.checkpointer"
    ]
    assert NAMES[2] in warning
    assert name in warning or damage == "not JSON"
    with pytest.raises(ValueError, match=NAMES[2]):
        resume(output, str(output / "checkpoints" / NAMES[2]))


@pytest.mark.fault(12, "one error that says what is wrong with each; never a new start")
def test_no_intact_checkpoint_raises(output) -> None:
    for name in NAMES:
        flip(output / "checkpoints" / name / "model.safetensors")
    for trial in ("latest", True):
        with pytest.raises(ValueError, match=f"no complete checkpoint.*{NAMES[2]}.*{NAMES[0]}"):
            resume(output, trial)
    shutil.rmtree(output / "final")  # a run that had come to its end would be set aside
    with pytest.raises(ValueError, match="has the checkpoints of an earlier run"):
        resume(output, None)


def test_checkpoint_beyond_max_steps_is_refused(output) -> None:
    before = [(output / name).read_bytes() for name in ("metrics.jsonl", "final/state.json")]
    with pytest.raises(ValueError, match="max_steps"):
        build(str(output), **OPTIONS | {"max_steps": 2}).train("latest")
    after = [(output / name).read_bytes() for name in ("metrics.jsonl", "final/state.json")]
    assert after == before


def fail_at(monkeypatch, fault):
    monkeypatch.setattr(failpoints, "_passed", failpoints.Counter())
    monkeypatch.setenv("RLHF_PG_FAULT", fault)


SAVING = ["save-begin", "save-state", "save-rename"]


@pytest.mark.fault(7, "one error with path and remedy; earlier checkpoints stay, nothing half-made")
@pytest.mark.parametrize("point", SAVING)
def test_full_disk_during_save_keeps_earlier_checkpoints(output, monkeypatch, point) -> None:
    trainer = build(str(output), **OPTIONS)
    trainer.checkpointer.resume("latest", trainer.runtime)
    trainer.state.step = 4
    fail_at(monkeypatch, f"{point}:enospc")
    with pytest.raises(OSError, match=r"step-00000004 could not.*No space left"):
        trainer.save_checkpoint()
    names = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert names == NAMES + ["step-00000004"] * (point == "save-rename")  # all had been written
    assert all(find_damage(output / "checkpoints" / name) is None for name in names)
    assert find_damage(trainer.save_checkpoint()) is None  # there is room again


@pytest.mark.fault(7, "a replacement that was written is completed")
def test_failed_replacement_is_completed(output, monkeypatch) -> None:
    trainer = build(str(output), **OPTIONS)
    trainer.checkpointer.resume("latest", trainer.runtime)
    fail_at(monkeypatch, "save-replace:eio")
    with pytest.raises(OSError, match="could not be saved"):
        trainer.save_checkpoint()
    assert find_damage(output / "checkpoints" / NAMES[2]) is None
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == NAMES


@pytest.mark.fault(8, "one error before the first step")
def test_unwritable_output_dir_raises_before_first_step(tmp_path, monkeypatch):
    trainer = build(str(tmp_path / "run"), **OPTIONS)
    fail_at(monkeypatch, "lock:enospc")
    with pytest.raises(ValueError, match=r"output_dir .*run cannot be written to"):
        trainer.train()
    assert trainer.state.step == 0


def test_output_dir_created_by_run_is_private(whole, tmp_path) -> None:
    assert stat.S_IMODE(whole.stat().st_mode) == 0o700
    (tmp_path / "run").mkdir(mode=0o755)
    build(str(tmp_path / "run"), **OPTIONS | {"max_steps": 1, "save_steps": 0}).train()
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755
    final = tmp_path / "run" / "final"  # others may read what the umask lets them read
    assert (
        stat.S_IMODE((final / "model.safetensors").stat().st_mode) == final.stat().st_mode & 0o666
    )


def test_older_checkpoints_are_removed_after_an_interrupted_removal(output) -> None:
    trainer = build(str(output), **OPTIONS | {"save_total_limit": 1})
    trainer.checkpointer.resume("latest", trainer.runtime)
    trainer.state.step = 4
    partial_of(output / "checkpoints" / NAMES[0]).mkdir()
    trainer.save_checkpoint()
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000004"]


def test_save_total_limit_does_not_count_skipped_checkpoints(output) -> None:
    """They are the newest by number."""
    for name in NAMES[1:]:
        flip(output / "checkpoints" / name / "model.safetensors")
    trainer = build(str(output), **OPTIONS | {"save_total_limit": 1})
    trainer.checkpointer.resume("latest", trainer.runtime)
    assert trainer.state.step == 1
    trainer.state.step = 2
    trainer.save_checkpoint()
    assert find_damage(output / "checkpoints" / NAMES[1]) is None


def hold(directory, told):
    with run_dir_lock(directory, Runtime()):
        told.send("here")
        told.recv()


@pytest.mark.fault(15, "an error that names host and process; the lock ends with the process")
def test_locked_output_dir_refuses_second_run(tmp_path) -> None:
    trainer = build(str(tmp_path), **OPTIONS | {"max_steps": 1})
    context = get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=hold, args=(tmp_path, theirs))
    other.start()
    assert ours.recv() == "here"
    with pytest.raises(ValueError, match=rf"in use by another run \(host .*, pid {other.pid}\)"):
        trainer.train()
    other.kill()
    other.join()
    trainer.train()
    assert trainer.state.step == 1


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A PPO run of four steps, without its last checkpoint; and its rates in the last two steps."""
    output = tmp_path_factory.mktemp("stopped") / "run"
    build(str(output), **FOUR).train()
    shutil.rmtree(output / "checkpoints" / "step-00000004")
    return output, rates(output)


FOUR = OPTIONS | {"trainer_type": PPOTrainer, "max_steps": 4, "save_steps": 2}
FOUR |= {"value_learning_rate": 2e-3, "lr_scheduler_type": "linear"}


def rates(output):
    keys = ("learning_rate", "value_learning_rate")
    return {key: [line[key] for line in untimed(output)[2:]] for key in keys}


@pytest.mark.fault(16, "a warning with both values; the schedule goes on with the new peak")
def test_changed_learning_rate_on_resume_warns_and_applies(stopped, tmp_path, caplog) -> None:
    output, before = tmp_path / "run", stopped[1]
    shutil.copytree(stopped[0], output)
    build(str(output), **FOUR | {"value_learning_rate": 8e-3}).train("latest")
    assert "value_learning_rate was 0.002 and is 0.008" in caplog.text
    assert len(set(before["learning_rate"])) == 2  # the schedule moves
    expected = before | {"value_learning_rate": [4 * r for r in before["value_learning_rate"]]}
    assert rates(output) == {name: pytest.approx(values) for name, values in expected.items()}


def test_changed_max_steps_on_resume_warns_and_rescales_schedule(stopped, tmp_path, caplog) -> None:
    output = tmp_path / "run"
    shutil.copytree(stopped[0], output)
    build(str(output), **FOUR | {"max_steps": 5}).train("latest")
    assert "max_steps was 4 and is 5" in caplog.text
    expected = [1e-3 * (1 - step / 5) for step in range(2, 5)]  # 1 - step / 4 before
    assert rates(output)["learning_rate"] == pytest.approx(expected)


def test_changed_rewards_on_resume_are_named() -> None:
    """A tuple is the list that was saved."""
    names = dict.fromkeys(compatibility.REMEDIES, "the same")
    config = {"reward_funcs": ["math"]}
    saved = {"counters": {}, "config": config, "fingerprints": names, "running": {}}
    for own, said in (("math", ""), ("exact", "reward_funcs was ['math'] and is ['exact']")):
        config = {"reward_funcs": (own,)}
        assert compatibility.check(Path("x"), saved, config, names, {}, {}) == said


@pytest.mark.fault(17, "refused, with what is different")
def test_changed_model_on_resume_is_refused(output) -> None:
    with pytest.raises(ValueError, match="another model"):
        resume(output, model=tiny_model("gpt2"))


@pytest.mark.fault(17, "refused, with what is different")
@pytest.mark.parametrize("change", ["vocabulary", "chat template"])
def test_changed_tokenizer_on_resume_is_refused(output, change) -> None:
    trainer = build(str(output), **OPTIONS)
    tokenizer = trainer.processing_class
    if change == "vocabulary":
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        vocab = backend["model"]["vocab"]
        vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(backend))
    else:
        tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(ValueError, match="another tokenizer"):
        trainer.checkpointer.resume("latest", trainer.runtime)


@pytest.mark.fault(17, "refused, with what is different")
def test_changed_algorithm_on_resume_is_refused(output) -> None:
    trainer = build(str(output), **OPTIONS)
    assert trainer.algorithm == "GRPO"
    trainer.checkpointer.config["algorithm"] = "PPO"
    with pytest.raises(ValueError, match="algorithm was 'GRPO' and is 'PPO'"):
        trainer.checkpointer.resume("latest", trainer.runtime)


def changed_row(rows):
    return rows.map(lambda row, i: row | {"answer": "0"} if i == 5 else row, with_indices=True)


@pytest.mark.fault(19, "refused, with the remedy")
@pytest.mark.parametrize("change", [changed_row, lambda rows: rows.select([1, 0, 2, 3, 4, 5])])
def test_changed_dataset_on_resume_is_refused(output, change) -> None:
    trainer = build(str(output), **OPTIONS)
    rows = change(trainer.train_prompts.rows)
    trainer.data_fingerprint = trainer.prompt_loader.load(rows, "train_dataset").fingerprint
    with pytest.raises(ValueError, match="another train_dataset"):
        trainer.checkpointer.resume("latest", trainer.runtime)


class Planted:
    """Unpickled, it leaves a file behind."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_resume_never_unpickles_checkpoint_files(output, tmp_path) -> None:
    fired = tmp_path / "fired"
    for name in ("pytorch_model.bin", "adapter_model.bin", "optimizer.pt", "training_args.bin"):
        torch.save(Planted(fired), output / "checkpoints" / NAMES[2] / name)
    (output / "checkpoints" / NAMES[2] / "rng_state.pth").write_bytes(pickle.dumps(Planted(fired)))
    assert resume(output) == 3
    assert not fired.exists()
    torch.load(output / "checkpoints" / NAMES[2] / "optimizer.pt", weights_only=False)
    assert fired.exists()  # it would have been noticed


def test_checkpoint_of_another_version_is_refused() -> None:
    """Its data cursor had another name, and would silently stay at 0."""
    saved = {"version": "0.0.9", "counters": {"step": 100, "draws": 400}}
    with pytest.raises(ValueError, match=r"rlhf_pg 0\.0\.9, with the counters step, draws: "):
        compatibility.check(Path("x"), saved, {}, {}, {}, ["step", "prompt_index"])


def test_directory_above_that_may_not_be_read_is_not_synced(tmp_path, monkeypatch) -> None:
    """/home, say, where names of others are hidden."""
    opened = os.open

    def guarded(path, *args):
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, "no", str(path))
        return opened(path, *args)

    monkeypatch.setattr(os, "open", guarded)
    path = tmp_path / "run" / "final"
    partial_of(path).mkdir(parents=True)
    publish(path, {})
    assert find_damage(path) is None


def test_resume_from_non_checkpoint_names_checkpoint_location(output) -> None:
    shutil.copytree(output / "final", output / "best", dirs_exist_ok=True)
    trainer = build(str(output), **OPTIONS)
    for name in ("final", "best", ".", "checkpoints", "config.yaml"):
        with pytest.raises(ValueError, match=f"{output}/checkpoints has {NAMES[2]}$"):
            trainer.checkpointer.resume(str(output / name), trainer.runtime)
