"""What is in a directory that a run begins in, whoever put it there."""

import os

import pytest
from datasets import Dataset

from rlhf_pg.config import RewardModelConfig
from rlhf_pg.output import occupied
from rlhf_pg.rewards import train_reward_model
from rlhf_pg.run_files import set_aside
from rlhf_pg.runtime import Runtime
from rlhf_pg.sealed import begin, publish
from tests.trainers.conftest import make as make


@pytest.mark.parametrize("name", ["final", "best", "config.yaml", "tensorboard"])
def test_what_has_the_name_of_a_runs_file_is_set_aside(make, tmp_path, name) -> None:
    mine = tmp_path / "run" / name
    if name.endswith(".yaml"):
        mine.parent.mkdir()
        mine.write_text("mine")
        mine = mine.parent / "earlier-1" / name
    else:
        mine.mkdir(parents=True)
        (mine / "mine").write_text("mine")
        mine = mine.parent / "earlier-1" / name / "mine"
    make(max_steps=1, eval_steps=0).train()
    assert mine.read_text() == "mine"


def test_a_link_that_leads_nowhere_is_set_aside_too(tmp_path) -> None:
    (tmp_path / "final").symlink_to("nowhere")
    assert set_aside(tmp_path) == tmp_path / "earlier-1"
    assert os.readlink(tmp_path / "earlier-1" / "final") == "nowhere"


def test_a_file_called_lock_that_is_no_lock_is_left_alone(tmp_path) -> None:
    (tmp_path / "lock").write_text("combination: 1234")
    run = occupied(tmp_path, Runtime())
    with pytest.raises(ValueError, match="is no lock of a run"), run:
        pass
    assert (tmp_path / "lock").read_text() == "combination: 1234"


@pytest.mark.parametrize("leads_to", ["elsewhere", "nowhere"])
def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path, leads_to) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("mine")
    best = tmp_path / "best"
    best.symlink_to(leads_to)
    for content in ("first", "second"):
        (begin(best) / "weights").write_text(content)
        publish(best)
        assert (best / "weights").read_text() == content
    assert (tmp_path / "elsewhere" / "mine").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "elsewhere"]


def test_a_reward_model_replaces_no_other(model_path, tmp_path) -> None:
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "mine").write_text("mine")
    args = RewardModelConfig(output_dir=str(tmp_path / "run"), max_steps=1, batch_size=2)
    few = Dataset.from_dict({"chosen": ["1+1=2", "2+2=4"], "rejected": ["1+1=3", "2+2=5"]})
    train_reward_model(args, model=model_path, train_dataset=few, eval_dataset=few)
    assert (tmp_path / "run" / "earlier-1" / "final" / "mine").read_text() == "mine"
    assert not (tmp_path / "run" / "final" / "mine").exists()
