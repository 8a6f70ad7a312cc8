"""The recipes for real models and data: each trains at small width, and its header is true."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_pg.cli import main
from rlhf_pg.cli.recipes import find_recipe
from rlhf_pg.config.parse import parse
from rlhf_pg.plan import memory
from rlhf_pg.plan.memory import Memory, build_meta_models, predict_memory
from rlhf_pg.report.run_files import read
from rlhf_pg.run.token_budget import SHARDINGS, Growth, of_update
from rlhf_pg.trainers import TRAINERS
from tests.recipes import architectures

RECIPES = Path(__file__).parents[2] / "recipes"
GSM8K = [
    *("gsm8k_ppo", "gsm8k_grpo", "gsm8k_rloo", "gsm8k_reinforce"),
    *("gsm8k_qwen3_lora", "gsm8k_qwen7b_zero3", "gsm8k_llama8b_lora_ppo"),
]
PLANNED = [*GSM8K, "tldr_ppo"]
NAMES = [*PLANNED, "tldr_sft", "tldr_reward_model"]
H100 = 80 * 2**30  # bytes
SLOW = pytest.mark.slow
BY_FLAG = {layout.name.replace("-", "").lower(): layout for layout in SHARDINGS}

# In the form of openai/gsm8k, trl-lib/tldr and trl-lib/tldr-preference.
PROBLEMS = [
    {"question": "Ann has 3 eggs and buys 1,000 more. How many?", "answer": "3+1000\n#### 1,003"},
    {"question": "What is 2+2?", "answer": "2+2 = <<2+2=4>>4\n#### 4"},
    {"question": "What is 7-9?", "answer": "It is <<7-9=-2>>-2.\n#### -2"},
    {"question": "What is half of 5?", "answer": "5/2\n#### 2.5"},
]
POSTS = [f"SUBREDDIT: r/pets\n\nTITLE: {one}\n\nPOST: I like {one}.\n\nTL;DR:" for one in "abcd"]
SUMMARIES = [{"prompt": post, "completion": " Likes it."} for post in POSTS]
PAIRS = [{"prompt": post, "chosen": " Likes it.", "rejected": " No."} for post in POSTS]


def recipe(name: str) -> tuple[str, dict[str, Any]]:
    """The header of a recipe, as one line, and its keys."""
    text = (RECIPES / f"{name}.yaml").read_text()
    header = text[: text.index("algorithm:")]
    words = " ".join(line.removeprefix("#").strip() for line in header.splitlines())
    return words, yaml.safe_load(text)


def file_of(rows: list[dict[str, str]], path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_header_has_launch_memory_and_score(name: str) -> None:
    header, keys = recipe(name)
    script = f"recipes/{keys['algorithm']}.py --config recipes/{name}.yaml"
    launch = re.search(r"accelerate launch (--\S+ \S+) (.*?\.yaml)", header)
    assert launch is not None
    assert launch[2] == script
    assert (RECIPES / f"{keys['algorithm']}.py").exists()
    if launch[1].startswith("--config_file"):
        assert (RECIPES.parent / launch[1].split()[1]).exists()
    assert re.search(r"Memory: \d+ GiB on each GPU of 80 GiB ", header)
    assert "Published: " in header
    assert keys["output_dir"] == f"runs/{name}"
    assert find_recipe(name) == RECIPES / f"{name}.yaml"


def test_page_lists_recipes_with_memory() -> None:
    rows = re.findall(
        r"^\| \[(\w+)\]\(../recipes/\w+\.yaml\) .*\| (\d+) \| (\d+) \|$",
        (RECIPES.parent / "docs" / "options.md").read_text(),
        re.MULTILINE,
    )
    assert {name: (int(gpus), int(gb)) for name, gpus, gb in rows} == {
        name: (8 if "zero3" in name else 1, in_header(name)) for name in NAMES
    }


@pytest.mark.parametrize("name", architectures.PUBLISHED)
def test_architectures_have_published_parameters(name: str) -> None:
    with torch.device("meta"):
        model = architectures.full_model(name)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert millions == pytest.approx(architectures.PARAMETERS[name], abs=0.1)


def planned(name: str, directory: Path, **changes: Any) -> Memory:
    """What `rlhf-pg plan` says of a recipe, with the options of its header."""
    header, keys = recipe(name)
    model = architectures.save_blueprint(keys["model_name_or_path"], directory, **changes)
    flags = ["--config", str(RECIPES / f"{name}.yaml"), "--model_name_or_path", str(model)]
    if "value_model_name_or_path" in keys:
        flags += ["--value_model_name_or_path", str(model)]
    args = parse(TRAINERS[keys["algorithm"]].config_type, flags)
    meta = build_meta_models(args, "cpu", "cuda", H100)
    options = header.split("rlhf-pg plan ", 1)[1]
    gpus = re.search(r"--num_processes (\d+) --sharding (\w+)", options)
    layout, processes = (SHARDINGS[0], 1) if gpus is None else (BY_FLAG[gpus[2]], int(gpus[1]))
    return predict_memory(meta, layout, processes, H100, "cuda")


def in_header(name: str) -> int:
    found = re.search(r"Memory: (\d+) GiB", recipe(name)[0])
    assert found is not None
    return int(found[1])


def gibibytes(memory: Memory) -> int:
    return round(memory.peak / 2**30)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("tldr_ppo", "gsm8k_qwen7b_zero3") else SLOW)
        for name in PLANNED
    ],
)
def test_memory_in_header_is_planned(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """With an update measured at one layer and at two, since it grows by as much with each."""
    keys = recipe(name)[1]
    measured: list[Growth] = []

    def keep(*given: Any) -> Growth:
        measured.append(of_update(*given))
        return measured[-1]

    monkeypatch.setattr(memory, "of_update", keep)
    for layers in (1, 2):
        planned(name, tmp_path / str(layers), **architectures.depth(layers))
    depth = architectures.published(keys["model_name_or_path"]).num_hidden_layers
    monkeypatch.setattr(memory, "of_update", lambda *_: at_depth(*measured, depth))
    assert gibibytes(planned(name, tmp_path / "whole")) == in_header(name)


def at_depth(one: Growth, two: Growth, layers: int) -> Growth:
    """What one and two layers take, extended to more; tokens stay as they are."""

    growth = (x + (layers - 1) * (y - x) for x, y in zip(one, two, strict=True))
    return Growth(*growth)


def small(**changes: Any) -> list[str]:
    """Flags for a CPU, on top of a recipe: sizes, engine and dtype."""
    flags = {"max_steps": 3, "eval_steps": 3, "dtype": "float32", "log_completions_steps": 0}
    return [f"--{key}={value}" for key, value in (flags | changes).items()]


BRIEFLY = ("gsm8k_ppo", "gsm8k_qwen3_lora")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in BRIEFLY else SLOW) for n in GSM8K]
)
def test_gsm8k_recipe_trains_three_steps(name: str, tmp_path: Path) -> None:
    keys = recipe(name)[1]
    model = architectures.save_small(keys["model_name_or_path"], tmp_path / "model")
    rows = file_of(PROBLEMS, tmp_path / "gsm8k.jsonl")
    changes = {
        "model_name_or_path": model,
        "output_dir": tmp_path / "run",
        "dataset_name": rows,
        "dataset_test_split": 0.25,
        "prompts_per_step": 4,
        "num_generations": min(2, keys["num_generations"]),
        "num_mini_batches": min(2, keys.get("num_mini_batches", 1)),
        "max_completion_length": 6,
        "rollout_engine": "native",
    }
    text = (RECIPES / f"{name}.yaml").read_text()
    without_vllm = re.sub(r"(?m)^vllm_.*\n", "", text)  # keys that no other engine takes
    (tmp_path / "recipe.yaml").write_text(without_vllm)
    main(["train", str(tmp_path / "recipe.yaml"), *small(**changes)])
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert {"rewards/numeric/mean", "rewards/regex/mean", "eval_greedy_reward"} <= set(lines[-1])
    left = tmp_path / "run" / "final"
    assert (left / "adapter_config.json").exists() == keys.get("use_peft", False)
    assert (left / "critic").exists() == (keys["algorithm"] == "ppo")


def test_tldr_recipes_train_one_after_another(tmp_path: Path) -> None:
    """Each on what the one before left, as their keys say."""
    start = architectures.save_small(architectures.PYTHIA, tmp_path / "model")
    runs = {name: tmp_path / name for name in ("tldr_sft", "tldr_reward_model", "tldr_ppo")}
    files = {"trl-lib/tldr": SUMMARIES, "trl-lib/tldr-preference": PAIRS}
    for name, run in runs.items():
        keys = recipe(name)[1]
        changes: dict[str, Any] = {"dtype": "float32", "dataset_test_split": 0.25}
        changes |= {
            "dataset_name": file_of(files[keys["dataset_name"]], tmp_path / f"{name}.jsonl")
        }
        changes |= {"output_dir": run, "max_steps": 3}
        if name == "tldr_ppo":
            changes |= {"prompts_per_step": 4, "num_iterations": 2, "max_completion_length": 6}
            changes |= {"eval_steps": 3}
        else:
            changes |= {"batch_size": 2}
        for key in keys:
            if key.endswith("model_name_or_path"):
                left = re.fullmatch(r"runs/(\w+)/final", keys[key])
                changes[key] = start if left is None else runs[left[1]] / "final"
        main(["train", str(RECIPES / f"{name}.yaml"), *(f"--{k}={v}" for k, v in changes.items())])
        assert (run / "final" / "model.safetensors").exists()
    lines = read(runs["tldr_ppo"] / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 and line["value_loss"] > 0 for line in lines)
    assert all(line["reward"] != 0 for line in lines)
