"""`rlhf-pg replay` and `rlhf-pg diff`."""

import inspect
import json
import sys
from pathlib import Path

import pytest

from rlhf_pg import GRPOTrainer
from rlhf_pg.boundary.user_modules import PREFIX
from rlhf_pg.cli import main
from rlhf_pg.tasks import arithmetic
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


@pytest.fixture
def recipe(tmp_path: Path, model_path: str) -> Path:
    """A recipe with data and a reward of its own."""
    arithmetic().train_dataset.select(range(24)).to_json(tmp_path / "problems.jsonl")
    for name, sign in (("digits", ""), ("minus", "-")):
        source = inspect.getsource(digits).replace("def digits", f"def {name}")
        source = source.replace("return [sum", f"return [{sign}sum")
        file = tmp_path / ("my_rewards.py" if name == "digits" else "other.py")
        file.write_text("from typing import Any\n\n" + source)
    path = tmp_path / "recipe.yaml"
    path.write_text(KEYS.format(model=model_path, place=tmp_path))
    return path


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> str:
    out = str(tmp_path / "run")
    main(["train", str(recipe), "--output_dir", out, "--log_completions_steps", "3"])
    return out


def said_of(flags: list[str], capsys) -> str:
    """What a command that fails says."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(flags)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_step_is_shown(run: str, capsys) -> None:
    capsys.readouterr()
    main(["replay", run, "--step", "2", "--rows", "5", "--resample"])
    shown = capsys.readouterr().out
    assert "step 2: as it was recorded" in shown
    assert "row 5" in shown


def test_other_keys_show_what_would_have_changed(run: str, tmp_path: Path, capsys) -> None:
    capsys.readouterr()
    main(["replay", run, "--step", "3", "--reward_funcs", f"{tmp_path / 'other.py'}:minus"])
    assert "180°" in capsys.readouterr().out  # the gradient, by the opposite reward


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


def test_own_trainer_is_found_with_its_key(recipe: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "own.py").write_text(TRAINER)
    recipe.write_text(f"{recipe.read_text()}trainer: own.py:Pulled\n")
    out = str(tmp_path / "run")
    main(["train", str(recipe), "--output_dir", out, "--pull", "0.25", "--max_steps", "1"])
    main(["eval", out, "--num_generations_eval", "1"])
    capsys.readouterr()
    main(["replay", out, "--step", "1"])
    assert "step 1: as it was recorded" in capsys.readouterr().out
    assert "pull" in said_of(["replay", out, "--step", "1", "--pull", "-1"], capsys)


def test_reward_that_has_no_name_comes_from_the_record(
    recipe: Path, tmp_path: Path, model_path: str, capsys
) -> None:
    data = str(tmp_path / "problems.jsonl")
    config = GRPOTrainer.config_type(
        dataset_name=data,
        max_completion_length=6,
        prompts_per_step=4,
        num_generations=4,
        max_steps=2,
        output_dir=str(tmp_path / "run"),
    )
    GRPOTrainer(
        model=model_path,
        reward_funcs=lambda completions, **_: digits(completions),
        args=config,
    ).train()
    capsys.readouterr()
    main(["replay", str(tmp_path / "run"), "--step", "2"])
    assert "step 2: as it was recorded" in capsys.readouterr().out


def test_edited_reward_shows(run: str, tmp_path: Path, capsys) -> None:
    edited = (tmp_path / "other.py").read_text().replace("minus", "digits")
    (tmp_path / "my_rewards.py").write_text(edited)
    for name in [name for name in sys.modules if name.startswith(PREFIX)]:
        del sys.modules[name]  # as in another process
    main(["replay", run, "--step", "3", "--resample"])
    assert "step 3: differs: scores" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--step", "9"], "step 9"),
        (["--step", "3", "--rows", "99"], "--rows 99: the step has rows 0 to 15"),
        (["--step", "3", "--betta", "1"], "'betta'"),
        (["--step", "3", "--beta", "0.1", "--resample"], "--resample"),
        (["--step", "3", "--temperature", "0.5"], "temperature"),
        ([], "--step"),
    ],
)
def test_wrong_usage_is_one_error(run: str, flags: list[str], said: str, capsys) -> None:
    assert said in said_of(["replay", run, *flags], capsys)


def test_what_is_no_run_is_one_error(tmp_path: Path, run: str, capsys) -> None:
    assert str(tmp_path) in said_of(["replay", str(tmp_path), "--step", "1"], capsys)
    assert "are required: RUN" in said_of(["replay", "--step", "1"], capsys)
    (tmp_path / "config.yaml").write_text("algorithm: sft\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    said = said_of(["replay", str(tmp_path), "--step", "1"], capsys)
    assert "algorithm must be one of grpo" in said


def test_run_of_python_says_how(make, capsys) -> None:
    trainer = make(max_steps=1)
    trainer.train()
    said = said_of(["replay", trainer.args.output_dir, "--step", "1"], capsys)
    assert "was given its data in Python: make its trainer in Python, and give it to" in said


def test_diff_prints_the_first_difference(run: str, recipe: Path, tmp_path: Path, capsys) -> None:
    other = str(tmp_path / "b")
    main(["train", str(recipe), "--output_dir", other, "--temperature", "0.8"])
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
    assert "are required: RUN" in said_of(["diff", run], capsys)
