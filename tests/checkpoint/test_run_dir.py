"""What is in a directory that a run begins in, whoever put it there."""

import pytest
from datasets import Dataset

from rlhf_pg.checkpoint.run_dir import run_dir_lock
from rlhf_pg.config import RewardModelConfig, SFTConfig
from rlhf_pg.rewards import train_reward_model
from rlhf_pg.runtime import Runtime
from rlhf_pg.tasks.warm_start import warm_start
from tests.rewards.test_reward_model import classifier, letters
from tests.trainers.conftest import make as make


def a_reward_model(directory) -> None:
    args = RewardModelConfig(output_dir=str(directory), max_steps=1, batch_size=2)
    few = Dataset.from_dict({"chosen": ["ab", "ba"], "rejected": ["a", "b"]})
    train_reward_model(args, classifier(), letters(), few, few)


def a_warm_start(directory) -> None:
    warm_start(SFTConfig(task="arithmetic", output_dir=str(directory), max_steps=1, batch_size=2))


@pytest.mark.parametrize("train", [a_reward_model, a_warm_start])
def test_other_trainings_set_aside_earlier_files(train, tmp_path, capsys) -> None:
    mine = tmp_path / "run" / "final" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    train(tmp_path / "run")
    earlier = tmp_path / "run" / "earlier-1"
    assert (earlier / "final" / "mine").read_text() == "mine"
    assert not mine.exists()
    assert f"had an earlier run or a model, which was moved to {earlier}" in capsys.readouterr().out


@pytest.mark.parametrize("train", [a_reward_model, a_warm_start])
def test_other_trainings_leave_live_run_unchanged(train, tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text("of a live run")
    with (
        run_dir_lock(tmp_path, Runtime()),
        pytest.raises(ValueError, match="in use by another run"),
    ):
        train(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "metrics.jsonl"]
