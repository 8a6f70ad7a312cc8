"""`rlhf-pg replay` and `rlhf-pg diff`."""

import inspect
import json
import shutil
import sys
from pathlib import Path

import pytest

from rlhf_pg import GRPOConfig
from rlhf_pg.boundary.user_modules import PREFIX
from rlhf_pg.cli import main
from rlhf_pg.tasks import arithmetic
from tests.cli.conftest import refused
from tests.trainers.conftest import digits

KEYS = """\
algorithm: grpo
model_name_or_path: {model}
dataset_name: {place}/problems.jsonl
reward_funcs: {place}/my_rewards.py:digits
max_completion_length: 6
prompts_per_step: 4
num_generations: 4
learning_rate: 1.0e-3
max_steps: 4
save_steps: 2
log_completions_steps: 0
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model_path: str) -> Path:
    """A directory with a recipe, its data, its reward, and one that is the opposite."""
    place = tmp_path_factory.mktemp("replay")
    arithmetic().train_dataset.select(range(24)).to_json(place / "problems.jsonl")
    source = "from typing import Any\n\n" + inspect.getsource(digits)
    (place / "my_rewards.py").write_text(source)
    opposite = source.replace("def digits", "def minus").replace("return [sum", "return [-sum")
    (place / "other.py").write_text(opposite)
    (place / "recipe.yaml").write_text(KEYS.format(model=model_path, place=place))
    return place


@pytest.fixture(scope="module")
def run(place: Path) -> str:
    """A run of the recipe, which no test changes."""
    out = str(place / "run")
    main(["train", f"{place}/recipe.yaml", "--output_dir", out, "--log_completions_steps", "3"])
    return out


def test_step_is_shown(run: str, capsys) -> None:
    capsys.readouterr()
    main(["replay", run, "--step", "2", "--rows", "5", "--resample"])
    shown = capsys.readouterr().out
    assert "step 2: as it was recorded" in shown
    assert "row 5" in shown


def test_other_keys_show_what_would_have_changed(run: str, place: Path, capsys) -> None:
    capsys.readouterr()
    main(["replay", run, "--step", "3", "--reward_funcs", f"{place / 'other.py'}:minus"])
    assert "180°" in capsys.readouterr().out  # the gradient, by the opposite reward


@pytest.mark.parametrize("key", ["system_prompt", "prompt_template", "max_turns", "top_k"])
def test_key_of_the_completions_is_refused_before_data_are_read(
    run: str, capsys, monkeypatch, key: str
) -> None:
    monkeypatch.setattr("rlhf_pg.replay.replay.trainer_type", lambda *_: NoTrainer)
    flags = [f"--{key}", "3", "--truncated_sampling", "ignore"]
    text = refused(capsys, "replay", run, "--step", "2", *flags)
    assert f"{key} cannot be changed for existing completions" in text


class NoTrainer:
    config_type = GRPOConfig

    def __init__(self, **_) -> None:
        raise AssertionError


TRAINER = """
from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.config import config, option

@config
class PulledConfig(GRPOConfig):
    pull: float = option(0.5, ge=0, help="Factor on the advantages.")

class Pulled(GRPOTrainer):
    config_type = PulledConfig

    def advantages(self, inputs):
        return self.args.pull * super().advantages(inputs)
"""


def test_own_trainer_is_found_with_its_key(place: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "own.py").write_text(TRAINER)
    recipe = tmp_path / "own.yaml"
    recipe.write_text((place / "recipe.yaml").read_text() + "trainer: own.py:Pulled\n")
    out = str(tmp_path / "run")
    main(["train", str(recipe), "--output_dir", out, "--pull", "0.25", "--max_steps", "1"])
    main(["eval", out, "--num_generations_eval", "1"])
    capsys.readouterr()
    main(["replay", out, "--step", "1"])
    assert "step 1: as it was recorded" in capsys.readouterr().out
    assert "pull" in refused(capsys, "replay", out, "--step", "1", "--pull", "-1")


def test_reward_that_has_no_name_comes_from_the_record(
    place: Path, tmp_path: Path, make, capsys
) -> None:
    nameless = lambda completions, **_: digits(completions)  # noqa: E731
    data = str(place / "problems.jsonl")
    make(reward_funcs=nameless, train_dataset=None, dataset_name=data, max_steps=2).train()
    capsys.readouterr()
    main(["replay", str(tmp_path / "run"), "--step", "2"])
    assert "step 2: as it was recorded" in capsys.readouterr().out


def test_edited_reward_shows(run: str, place: Path, capsys) -> None:
    rewards = place / "my_rewards.py"
    before = rewards.read_text()
    rewards.write_text((place / "other.py").read_text().replace("minus", "digits"))
    for name in [name for name in sys.modules if name.startswith(PREFIX)]:
        del sys.modules[name]  # as in another process
    main(["replay", run, "--step", "3", "--resample"])
    rewards.write_text(before)
    assert "step 3: differs: scores" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--step", "9"], "step 9"),
        (["--step", "3", "--rows", "99"], "--rows 99: the step has rows 0 to 15"),
        (["--step", "3", "--betta", "1"], "'betta'"),
        (["--step", "3", "--temperature", "0.5"], "temperature"),
        ([], "--step"),
    ],
)
def test_wrong_usage_is_one_error(run: str, flags: list[str], said: str, capsys) -> None:
    assert said in refused(capsys, "replay", run, *flags)


def test_what_is_no_run_is_one_error(tmp_path: Path, capsys) -> None:
    assert str(tmp_path) in refused(capsys, "replay", str(tmp_path), "--step", "1")
    (tmp_path / "config.yaml").write_text("algorithm: sft\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    said = refused(capsys, "replay", str(tmp_path), "--step", "1")
    assert "algorithm must be one of grpo" in said


def test_run_of_python_says_how(make, capsys) -> None:
    trainer = make(max_steps=1)
    trainer.train()
    said = refused(capsys, "replay", trainer.args.output_dir, "--step", "1")
    assert "was given its data in Python: make its trainer in Python, and give it to" in said


@pytest.mark.parametrize("command", [("replay", "--step", "1"), ("eval",)])
@pytest.mark.parametrize(
    "key",
    [
        "reward_funcs: [planted.py:f]",
        "trainer: {run}/planted.py:Trainer",
        "policy_loss: final/../planted.py:f",
        "advantage_estimator: {run}/planted.py:f",
        "agent_program: python {run}/planted.py",
        "trust_remote_code: true",
    ],
)
def test_strangers_run_brings_no_code(
    run: str, tmp_path: Path, command: tuple[str, ...], key: str, capsys
) -> None:
    other, key = tmp_path / "other", key.format(run=tmp_path / "other")
    shutil.copytree(run, other)
    (other / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    keys = (other / "config.yaml").read_text().splitlines()
    name = key.partition(":")[0]
    at = next(i for i, line in enumerate(keys) if line.startswith(f"{name}:"))
    keys[at : at + 1 + (name == "reward_funcs")] = [key]
    (other / "config.yaml").write_text("\n".join(keys))
    name, *flags = command
    assert "add --trust_run" in refused(capsys, name, str(other), *flags)
    assert not (tmp_path / "ran").exists()


def test_diff_prints_the_first_difference(run: str, place: Path, tmp_path: Path, capsys) -> None:
    other = str(tmp_path / "b")
    main(["train", f"{place}/recipe.yaml", "--output_dir", other, "--temperature", "0.8"])
    capsys.readouterr()
    main(["diff", run, run])
    assert "no difference in 4 steps" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["diff", run, other])
    assert end.value.code == 1
    shown = capsys.readouterr().out
    assert "temperature: 1.0 | 0.8" in shown
    assert "step 1: ids differ first" in shown
    with pytest.raises(SystemExit):
        main(["diff", run, other, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["places"][0]["stage"]) == (1, "ids")
