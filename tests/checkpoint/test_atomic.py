"""A published directory: what of it counts as damage."""

import json
import os
from pathlib import Path

import pytest

from rlhf_pg.checkpoint.atomic import STATE, find_damage, partial_of, publish, remove, seal, state

WEIGHTS = "model.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "step-00000001"
    partial_of(path).mkdir()
    (partial_of(path) / WEIGHTS).write_bytes(b"weights")
    publish(path, {"step": 1, "counters": {"prompt_index": 77}, "learning_rates": [1e-3]})
    assert find_damage(path) is None
    return path


def test_every_flipped_bit_of_the_state_is_damage(saved: Path) -> None:
    whole = (saved / STATE).read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            (saved / STATE).write_bytes(flipped)
            assert find_damage(saved) is not None, bytes(flipped)
            assert state(saved) == {}


SHAPES = ("[]", "null", "3", '"text"', "{}", '{"files": {}}', "[" * 100_000)
SEALED = [{}, {"files": []}, {"files": {WEIGHTS: 7}}, {"files": {WEIGHTS: {"size": 7}}}]
SEALED += [{"files": {f"../step-00000001/{WEIGHTS}": {"size": 7}}}, {"files": {"/etc/passwd": {}}}]


@pytest.mark.parametrize("shape", [*map(str.encode, SHAPES), *map(seal, SEALED)])
def test_other_shapes_of_the_state_are_damage(saved: Path, shape: bytes) -> None:
    (saved / STATE).write_bytes(shape)
    assert find_damage(saved) is not None


def replace_by_link(file: Path) -> None:
    file.symlink_to(file.rename(file.parents[1] / "elsewhere"))


def replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("replace", [replace_by_link, replace_by_pipe, replace_by_directory])
@pytest.mark.parametrize("name", [WEIGHTS, STATE])
def test_what_is_not_a_file_of_its_own_is_damage(saved: Path, name: str, replace) -> None:
    replace(saved / name)
    assert name in find_damage(saved)


def test_pipe_that_was_not_saved_is_damage(saved: Path) -> None:
    os.mkfifo(saved / "rng-rank1.safetensors")
    assert "rng-rank1" in find_damage(saved)


def test_removal_of_a_link_leaves_what_it_names(saved: Path) -> None:
    link = saved.with_name("step-00000002")
    link.symlink_to(saved)
    remove(link)
    assert not link.is_symlink()
    assert json.loads((saved / STATE).read_text())["step"] == 1
