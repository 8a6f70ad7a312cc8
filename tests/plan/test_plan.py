"""`rlhf-pg plan`, and the seconds it predicts."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_pg import GRPOConfig, PPOConfig
from rlhf_pg.cli import main
from rlhf_pg.plan import (
    Pace,
    Rates,
    build_meta_models,
    measured_rates,
    predicted_memory,
    predicted_pace,
)
from rlhf_pg.plan.sharding import SHARDINGS
from tests.plan.published import agreement

RECIPES = Path(__file__).parents[2] / "recipes"
BY_NAME = {layout.name: layout for layout in SHARDINGS}


def plan(capsys, *flags: str) -> str:
    main(["plan", *flags])
    text: str = capsys.readouterr().out
    return text


def cells(text: str, name: str) -> list[str]:
    """The numbers of a row."""
    line = next(line for line in text.splitlines() if re.match(rf"\W+{name}\b", line))
    return re.findall(r"[\d.]+(?:e-\d+)?", line.split(name)[1])


def test_plan_shows_parts_and_phases(capsys, model_path) -> None:
    recipe = ["--config", str(RECIPES / "ppo_arithmetic.yaml"), "--model_name_or_path", model_path]
    text = plan(capsys, *recipe, "--tflops", "1", "--bandwidth", "100")
    for part in ("weights", "gradients", "optimizer", "critic", "activations", "keys and values"):
        assert cells(text, part)
    assert [float(x) for x in cells(text, "gradients")][1] == 0.0
    assert all(float(cells(text, phase)[2]) > 0 for phase in ("rollout", "score", "update"))
    assert "1 TFLOP/s, 100 GB/s" in text.replace("\n", " ")


def test_absent_device_is_planned_on_paper(capsys, model_path) -> None:
    recipe = ["--config", str(RECIPES / "grpo_arithmetic.yaml"), "--model_name_or_path", model_path]
    text = plan(capsys, *recipe, "--device", "h100", "--gpus", "8", "--sharding", "fsdp2")
    assert cells(text, "copy to sample from")
    header = next(line for line in text.splitlines() if "seconds, on paper" in line)
    for name in ("ours, native", "ours, vLLM", "TRL, vLLM", "verl"):
        assert name in header
    stages = ("rollout", "weights handed over", "score", "update", "exchange")
    columns = [[float(x) for x in cells(text.split("on paper")[1], name)] for name in stages]
    totals = [float(x) for x in cells(text.split("on paper")[1], "total")]
    assert len(totals) == 4
    assert [sum(column) for column in zip(*columns, strict=True)] == pytest.approx(totals, rel=0.06)
    words = " ".join(text.split())
    assert "On paper, none of it measured" in words
    found = agreement()
    off = f"off by a factor of {found.median:.2f} in the median and {found.worst:.2f} at worst"
    assert f"On {found.points} published throughputs" in words
    assert off in words


def test_trl_column_is_empty_for_ppo(capsys, model_path) -> None:
    recipe = ["--config", str(RECIPES / "ppo_arithmetic.yaml"), "--model_name_or_path", model_path]
    text = plan(capsys, *recipe, "--device", "a100").split("on paper")[1]
    line = next(line for line in text.splitlines() if re.match(r"\W+total\b", line))
    filled = [cell.strip() != "-" for cell in re.split("[│|]", line)[2:-1]]
    assert filled == [True, True, False, True]


def test_plan_loads_no_weights(model_path) -> None:
    def refuse(*_, **__):
        raise AssertionError("loads")

    with patch.object(AutoModelForCausalLM, "from_pretrained", refuse):
        drawn = build_meta_models(
            GRPOConfig(task="arithmetic", model_name_or_path=model_path, max_completion_length=6),
            "cpu",
        )
    assert all(p.untyped_storage().device.type == "meta" for p in drawn.policy.parameters())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0"], "at least 1"),
        (["--memory", "-3"], "above 0"),
        (["--sharding", "zero4"], "invalid choice"),
        (["--no_such_key", "1"], "no_such_key"),
        (["--device", "h900"], "invalid choice: 'h900' (choose from"),
        (["--device", "h100", "--tflops", "1"], "give it alone"),
        (["--model_name_or_path", "no/such/directory"], "no model directory"),
    ],
)
def test_wrong_usage_is_one_message(capsys, flags, message) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--config", str(RECIPES / "grpo_arithmetic.yaml"), *flags])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    args = PPOConfig(
        task="arithmetic", prompts_per_step=8, num_generations=4, max_completion_length=6
    )
    return build_meta_models(args, "cpu")


@pytest.mark.parametrize(
    ("name", "own", "of_reference"),
    [
        # float32: weights, gradients (and DDP's buckets), moments (and masters), per parameter.
        ("DDP", (4, 8, 8), 4),
        ("ZeRO-2", (4, 4 / 8, 12 / 8), 4),
        ("ZeRO-3", (4 / 8, 4 / 8, 8 / 8), 4 / 8),
        ("FSDP2", (4 / 8, 4 / 8, 8 / 8), 4 / 8),
    ],
)
def test_parts_on_eight_ranks_by_hand(drawn, name, own, of_reference) -> None:
    memory = predicted_memory(drawn, BY_NAME[name], 8, 80e9, "cuda")
    count = sum(p.numel() for p in drawn.policy.parameters())
    critic = sum(p.numel() for p in drawn.critic.parameters())
    parts = [memory.update[part] for part in ("weights", "gradients", "optimizer")]
    assert parts == pytest.approx([size * count for size in own])
    assert memory.update["critic"] == pytest.approx(sum(own) * critic)
    assert memory.update["reference"] == pytest.approx(of_reference * count)


@pytest.mark.parametrize(
    ("update", "optim", "moments_and_masters"),
    [
        ("master_weights", "adamw_torch", 8 + 4),
        ("stochastic_rounding", "adamw_torch", 8),
        ("nearest", "adamw_torch", 4),
        ("master_weights", "adamw_8bit", 2 + 4),
        ("stochastic_rounding", "adamw_8bit", 2),
    ],
)
def test_optimizer_bytes_follow_options(update, optim, moments_and_masters) -> None:
    args = GRPOConfig(
        task="arithmetic",
        dtype="bfloat16",
        bfloat16_update=update,
        optim=optim,
        max_completion_length=6,
    )
    own = build_meta_models(args, "cpu")
    memory = predicted_memory(own, BY_NAME["DDP"], 1, 80e9, "cuda")
    count = sum(p.numel() for p in own.policy.parameters())
    assert memory.update["optimizer"] == pytest.approx(moments_and_masters * count)


def test_head_chunk_is_sized_for_planned_gpu() -> None:
    args = GRPOConfig(task="arithmetic", max_completion_length=6)
    assert build_meta_models(args, "cpu", "cuda", 16e9).policy.chunk_size == 16e9 / 160


@pytest.mark.parametrize(("source", "is_scored"), [("policy", True), ("sampler", False)])
def test_sampler_logprobs_skip_scoring_pass(source, is_scored) -> None:
    args = GRPOConfig(
        task="arithmetic", num_iterations=2, old_logprobs_source=source, max_completion_length=6
    )
    own = build_meta_models(args, "cpu")
    memory = predicted_memory(own, BY_NAME["DDP"], 1, 80e9, "cuda")
    assert (predicted_pace(own, memory, 1)["score"].work > 0) == is_scored


@pytest.mark.parametrize(("kind", "layers"), [("cuda", 2), ("cpu", 0)])
def test_offload_plans_no_inputs_of_layers_on_gpu(model_path, kind: str, layers: int) -> None:
    """On a CPU there is nowhere to offload to."""
    keys = {"model_name_or_path": model_path, "max_prompt_length": 6, "max_completion_length": 6}
    kept, left = (
        build_meta_models(GRPOConfig(gradient_checkpointing=how, **keys), "cpu", kind)
        for how in (True, "offload")
    )
    config, tokens = kept.policy.model.config, kept.update.first.tokens
    assert config.num_hidden_layers == 2
    for part in ("layers", "forward"):
        there, gone = (getattr(meta.update.first, part) for meta in (kept, left))
        assert there - gone == layers * tokens * config.hidden_size * 4
    assert left.update.first.work == kept.update.first.work


def test_plan_of_sft_recipe_is_rejected(capsys) -> None:
    with pytest.raises(SystemExit):
        plan(capsys, "--config", str(RECIPES / "sft_arithmetic.yaml"))
    assert "must be one of grpo, ppo, rloo, reinforce, got 'sft'" in capsys.readouterr().err


def test_work_by_hand(drawn) -> None:
    """2 operations per weight of a matrix and token, 3 times as many with the backward pass; and a
    little for attention.
    """
    memory = predicted_memory(drawn, BY_NAME["DDP"], 1, 80e9, "cuda")
    pace = predicted_pace(drawn, memory, 1)
    model = drawn.policy.model
    layers = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    # Policy and critic read 8 prompts and 32 completions, the head of the policy the completions.
    tokens = 8 * drawn.prompt + 32 * 6
    forward = 2 * layers * 2 * tokens + 2 * model.lm_head.weight.numel() * 32 * 6
    assert pace["update"].work == pytest.approx(4 * 3 * forward, rel=0.1)
    assert pace["score"].work == pytest.approx(1.5 * forward, rel=0.1)


def test_slower_of_compute_and_memory_counts() -> None:
    rates = Rates(100.0, 10.0)
    assert Pace(200.0, 10.0).seconds(rates) == 2.0
    assert Pace(200.0, 50.0).seconds(rates) == 5.0


def test_measured_rates_are_plausible() -> None:
    rates = measured_rates(torch.device("cpu"), torch.float32)
    assert 1e8 < rates.work < 1e15
    assert 1e7 < rates.bytes < 1e13
