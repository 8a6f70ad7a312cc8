"""Help, and the manner that all commands share."""

import dataclasses
import json
import subprocess
import sys

import pytest

from rlhf_pg import config
from rlhf_pg.cli import main, recipes
from rlhf_pg.cli.options import USAGE
from rlhf_pg.cli.recipes import CONFIGS
from rlhf_pg.config.parse import groups, recipe_file
from tests.cli.conftest import refused


@pytest.mark.parametrize("kind", [*CONFIGS.values(), config.PolicyGradientConfig])
def test_every_key_has_a_text_and_a_group(kind: type) -> None:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    assert sorted(fields) == sorted(field.name for own in groups(kind).values() for field in own)
    assert all(field.metadata["help"].endswith(".") for field in fields.values())


def test_light_imports_and_help_need_no_torch() -> None:
    """In one process: the package, its names, and the help of every command."""
    lines = [
        [],
        ["--help"],
        *([command, "--help"] for command in USAGE),
        ["train", "grpo", "--help"],
    ]
    code = f"""
import json, sys
import rlhf_pg
from rlhf_pg.cli import main
assert "GRPOTrainer" in dir(rlhf_pg)
statuses = []
for arguments in {lines!r}:
    try:
        main(arguments)
    except SystemExit as left:
        statuses.append(left.code)
heavy = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
print(json.dumps([statuses, heavy]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    statuses, heavy = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [0] * len(lines)
    assert heavy == []


def test_train_help_lists_common_keys_and_presets(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert "dr_grpo" in text
    assert "--learning_rate" in text
    assert "--vf_coef" not in text  # which PPO alone has


@pytest.mark.parametrize(
    ("flags", "kind", "loss"),
    [
        (["cispo", "--config", "FILE"], config.GRPOConfig, "cispo"),
        (["FILE", "--algorithm", "rloo"], config.RLOOConfig, "sapo"),
        (["FILE"], config.PPOConfig, "sapo"),
    ],
)
def test_preset_and_flag_choose_method_of_one_file(flags, kind, loss, tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("algorithm: ppo\npolicy_loss: sapo\nvf_coef: 0.3\noutput_dir: runs/mine\n")
    files, keys = recipes.split_recipe([str(file) if flag == "FILE" else flag for flag in flags])
    args = recipes.config_of(files, keys, "train")
    assert (type(args), args.policy_loss, args.output_dir) == (kind, loss, "runs/mine")


def test_value_with_a_blank_beside_a_config_is_no_recipe() -> None:
    file = str(recipe_file("grpo_arithmetic.yaml"))
    files, keys = recipes.split_recipe(["--config", file, "--prompt_template=Q: {q}", "--stop=--a"])
    args = recipes.config_of(files, keys, "train")
    assert (args.prompt_template, args.stop) == ("Q: {q}", ("--a",))


@pytest.mark.parametrize("command", ["train", "plan"])
def test_unknown_preset_lists_nearest_first(command: str, capsys) -> None:
    said = refused(capsys, command, "dapoo")
    assert "'" not in said.split("presets are")[0]
    names = said.partition("presets are ")[2].strip().split(", ")
    assert names[0] == "dapo"
    assert set(names) == set(recipes.presets())


def test_switch_stands_alone_or_with_any_case() -> None:
    recipe = ["--config", str(recipe_file("grpo_arithmetic.yaml"))]
    for value in ([], ["true"], ["TRUE"]):
        assert config.parse(config.GRPOConfig, [*recipe, "--use_peft", *value]).use_peft
    off = config.parse(config.GRPOConfig, [*recipe, "--shuffle_dataset", "FALSE"])
    assert not off.shuffle_dataset


def test_recipe_help_shows_its_values(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(recipe_file("ppo_arithmetic.yaml")), "--help"])
    text = capsys.readouterr().out
    assert "--sharding" in text
    assert "  --task str | none  (default: arithmetic)" in text
    assert "--critic separate | shared" in text
