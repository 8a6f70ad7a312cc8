"""Every preset names its paper and its deviations, and trains."""

import math
from pathlib import Path

import pytest
import torch
import yaml

from rlhf_pg.cli import main
from rlhf_pg.config import GRPOConfig, parse
from rlhf_pg.losses import sampler_weights
from rlhf_pg.report.metrics import KEYS
from rlhf_pg.report.run_files import read

RECIPES = Path(__file__).parents[2] / "recipes"
PRESETS = RECIPES / "presets"
NAMES = [
    *(
        "vpg",
        "a2c",
        "ppo",
        "ppo_penalty",
        "grpo",
        "deepseekmath",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
    ),
    *("rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax", "vapo", "sapo"),
    *("maxrl", "gdpo", "icepop", "dppo", "high_entropy", "echo", "sdpo"),
]
each_preset = pytest.mark.parametrize("name", NAMES)


def test_preset_list_is_complete() -> None:
    assert {path.stem for path in PRESETS.glob("*.yaml")} == set(NAMES)


@each_preset
def test_preset_names_paper_and_deviations(name: str) -> None:
    text = (PRESETS / f"{name}.yaml").read_text()
    comment = text[: text.index("\nalgorithm:")]
    assert any(f"{year}" in comment for year in range(1992, 2027))
    assert "# Deviations: " in comment
    # A method alone, whatever the task: sizes and rates are the data's.
    sizes = {"max_steps", "prompts_per_step", "num_generations", "max_completion_length"}
    assert not {"learning_rate", "task", "output_dir", *sizes} & yaml.safe_load(text).keys()


def test_file_takes_precedence_over_preset(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dapo").write_text("algorithm: nothing")
    with pytest.raises(SystemExit):
        main(["train", "dapo"])
    assert "got 'nothing'" in capsys.readouterr().err


def test_icepop_drops_tokens_on_both_sides() -> None:
    """Its equation, M(k) = k where alpha <= k <= beta, and else 0, by the preset's own numbers."""
    args = parse(GRPOConfig, ["--config", str(PRESETS / "icepop.yaml")])
    ratios = torch.tensor([[0.49, 0.51, 1.0, 4.9, 5.1]], dtype=torch.float64)
    mode, bounds = args.correction_of("native"), (args.sampler_clip_max, args.sampler_clip_min)
    mask = torch.ones(1, 5).bool()
    weights = sampler_weights(ratios.log(), torch.zeros_like(ratios), mask, mode, *bounds)
    torch.testing.assert_close(weights, ratios * torch.tensor([[0, 1, 1, 1, 0]]))


BRIEFLY = ("dapo", "remax", "vapo", "sapo", "sdpo")  # the others take the same ways


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in BRIEFLY else pytest.mark.slow)
        for n in NAMES
        if n != "echo"  # which needs tools: tests/trainers/test_episodes.py has it
    ],
)
def test_preset_trains_a_step(name: str, model_path: str, tmp_path: Path) -> None:
    small = ["--max_steps=1", "--prompts_per_step=8", "--eval_steps=0", "--warmup_steps=0"]
    if name == "vapo":
        small.append("--value_pretraining_steps=0")  # or else the critic alone trains in it
    if name == "sdpo":
        small.append("--privileged_prompt={prompt}{answer}")
    where = ["--output_dir", str(tmp_path), "--model_name_or_path", model_path]
    main(["train", name, "--config", str(RECIPES / "arithmetic.yaml"), *small, *where])
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1]
    assert set(KEYS) <= set(lines[0])
    # A random model is seldom right: a step whose scores are all equal has no gradient.
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert (tmp_path / "final" / "model.safetensors").exists()
