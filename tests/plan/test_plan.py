"""`rlhf-pg plan`."""

import dataclasses
import math
import re
from pathlib import Path
from unittest.mock import patch

import pytest
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from rlhf_pg import GRPOConfig, PPOConfig, PPOTrainer
from rlhf_pg.cli import main
from rlhf_pg.plan.duration import hours
from rlhf_pg.plan.memory import build_meta_models, predict_memory
from rlhf_pg.run.token_budget import SHARDINGS
from rlhf_pg.tasks.tiny import character_tokenizer
from tests.cli.conftest import refused
from tests.distributed.launching import saved_model

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


def test_plan_shows_parts_and_verdict(capsys, model_path) -> None:
    recipe = ["--config", str(RECIPES / "ppo_arithmetic.yaml"), "--model_name_or_path", model_path]
    text = plan(capsys, *recipe)
    for part in ("weights", "gradients", "optimizer", "critic", "activations", "keys and values"):
        assert cells(text, part)
    assert [float(x) for x in cells(text, "gradients")][1] == 0.0
    assert re.search(r"It fits on one CPU, with [\d.]+ GiB to spare", text)


@pytest.mark.parametrize(
    ("given", "room", "expected"),
    [
        (["--micro_batch_tokens", "4096"], "0.06", r"micro_batch_tokens.*\n  --num_processes"),
        (["--use_peft", "--dtype=bfloat16", "--prompts_per_step=1"], "0.0025", "load_in_4bit"),
        (["--beta=0.1", "--dtype=bfloat16", "--prompts_per_step=1"], "0.0065", "adamw_8bit"),
    ],
)
def test_plan_names_what_would_make_it_fit(capsys, given, room, expected) -> None:
    recipe = ["--config", str(RECIPES / "grpo_arithmetic.yaml"), "--device", room, *given]
    said, _, found = re.split(r"(make\s+it\s+fit:\n)", plan(capsys, *recipe))
    assert re.search(rf"not fit on one GPU of {room} GiB, by [\d.]+ GiB", " ".join(said.split()))
    assert re.search(expected, found)
    flags = found.splitlines()[-1]
    assert "fits" in plan(capsys, *recipe, *flags.split())


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
        (["--num_processes", "0"], "--num_processes"),
        (["--device", "h900"], "h100"),
        (["--model_name_or_path", "no/such/directory"], "no model directory"),
    ],
)
def test_wrong_usage_is_one_message(capsys, flags, message) -> None:
    recipe = str(RECIPES / "grpo_arithmetic.yaml")
    assert message in refused(capsys, "plan", "--config", recipe, *flags)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    args = PPOConfig(
        task="arithmetic", prompts_per_step=8, num_generations=4, max_completion_length=6
    )
    return build_meta_models(args, "cpu")


@pytest.mark.parametrize(
    ("name", "own", "of_reference"),
    [
        # float32: weights, gradients, moments (and masters), per parameter.
        ("ZeRO-2", (4, 4 / 8, 12 / 8), 4),
        ("ZeRO-3", (4 / 8, 4 / 8, 8 / 8), 4 / 8),
        ("FSDP2", (4 / 8, 4 / 8, 8 / 8), 4 / 8),
    ],
)
def test_parts_on_eight_ranks_by_hand(drawn, name, own, of_reference) -> None:
    memory = predict_memory(drawn, BY_NAME[name], 8, 80e9, "cuda")
    count = sum(p.numel() for p in drawn.policy.parameters())
    critic = sum(p.numel() for p in drawn.critic.parameters())
    parts = [memory.update[part] for part in ("weights", "gradients", "optimizer")]
    assert parts == pytest.approx([size * count for size in own])
    assert memory.update["critic"] == pytest.approx(sum(own) * critic)
    assert memory.update["reference"] == pytest.approx(of_reference * count)
    copied = 0.0 if name == "ZeRO-2" else 4.0 * count
    assert memory.rollout["copy to sample from"] == copied
    keys = {"rollout_engine": "vllm_server", "vllm_server_base_url": ["http://localhost:8000"]}
    served = drawn._replace(args=dataclasses.replace(drawn.args, **keys))
    rollout = predict_memory(served, BY_NAME[name], 8, 80e9, "cuda").rollout
    assert rollout["copy to sample from"] == rollout["keys and values"] == 0.0


@pytest.mark.parametrize(
    ("optim", "moments_and_masters"),
    [
        ("adamw_torch", 8 + 4),
        ("adamw_8bit", 2 + 4),
    ],
)
def test_optimizer_bytes_follow_options(optim, moments_and_masters) -> None:
    args = GRPOConfig(
        task="arithmetic",
        dtype="bfloat16",
        optim=optim,
        max_completion_length=6,
    )
    own = build_meta_models(args, "cpu")
    memory = predict_memory(own, BY_NAME["DDP"], 1, 80e9, "cuda")
    count = sum(p.numel() for p in own.policy.parameters())
    assert memory.update["optimizer"] == pytest.approx(moments_and_masters * count)
    assert memory.update["gradients"] == pytest.approx(4 * count)


def test_hours_are_those_of_published_throughputs(drawn) -> None:
    """By hand, for a GPU that is in the table, and not for another."""
    size, model = 8e8 / 8.03e9, nn.Linear(8000, 10**5, bias=False, device="meta")
    args = dataclasses.replace(drawn.args, max_steps=7200, beta=0.0)
    width, rows = args.max_completion_length, args.prompts_per_step * args.num_generations
    tokens = args.prompts_per_step * drawn.prompt + rows * width
    seconds = size * (width * 6.5e-3 + tokens * (args.num_iterations + 1 / 3) / 5605)
    meta = drawn._replace(args=args, policy=model)
    said = hours(meta, 1, "NVIDIA H100 80GB HBM3")
    assert f"About {2 * seconds:.1f} hours for 7200 steps" in said
    assert "nothing was measured" in said
    assert hours(meta, 1, "CPU") is hours(drawn, 1, "H100") is None


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory) -> str:
    return saved_model(tmp_path_factory.mktemp("two layers"))


def test_offload_plans_no_inputs_of_layers_on_gpu(two_layers) -> None:
    """Not of the last, at the peak."""
    keys = {"model_name_or_path": two_layers, "max_prompt_length": 6, "max_completion_length": 6}
    kept, left = (
        build_meta_models(GRPOConfig(gradient_checkpointing=how, **keys), "cpu", "cuda")
        for how in (True, "offload")
    )
    config, tokens = kept.policy.model.config, kept.update.tokens
    assert config.num_hidden_layers == 2
    assert kept.update.bytes - left.update.bytes == tokens * config.hidden_size * 4


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_planned_model_computes_as_trained_one(two_layers, tmp_path, critic) -> None:
    """Under `with META` its head and its window were lost: it planned padded rows of all logits."""
    keys = {"model_name_or_path": two_layers, "max_completion_length": 6, "critic": critic}
    args = PPOConfig(**keys, max_prompt_length=6, output_dir=str(tmp_path))
    trainer = PPOTrainer(
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["12"]}),
    )
    policy, planned = trainer.learner.policy, build_meta_models(args, "cpu").policy
    assert policy.head is not None
    settings = ("temperature", "entropy_gradient", "chunks", "transform")
    for name in settings:
        assert getattr(planned.head, name) == getattr(policy.head, name)
    assert planned.window == policy.window == math.inf


def test_gpu_is_planned_with_whole_chunks_of_logits(tmp_path) -> None:
    """A GPU computes a chunk at once, the CPU on which it is planned a few rows at a time."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = Qwen2Config(**shape, num_hidden_layers=1, num_key_value_heads=2, vocab_size=32768)
    config.save_pretrained(tmp_path)
    character_tokenizer("0123456789").save_pretrained(tmp_path)
    keys = {"max_prompt_length": 8, "max_completion_length": 512, "micro_batch_tokens": 8192}
    args = GRPOConfig(model_name_or_path=str(tmp_path), dtype="float32", **keys)
    on_cpu, on_gpu = (build_meta_models(args, "cpu", kind).update for kind in ("cpu", "cuda"))
    chunk = 2**24  # logits: `lm_head.CHUNK_SIZE`
    assert on_gpu.at(8192) - on_cpu.at(8192) > 6 * chunk


def test_vllm_in_process_takes_its_share_of_gpu(drawn) -> None:
    for sleeps, kept in ((False, 0.25 * 80e9), (True, 2.5e9)):
        keys = {"vllm_gpu_memory_utilization": 0.25, "vllm_enable_sleep_mode": sleeps}
        args = dataclasses.replace(drawn.args, rollout_engine="vllm", **keys)
        memory = predict_memory(drawn._replace(args=args), BY_NAME["DDP"], 1, 80e9, "cuda")
        assert memory.update["vLLM"] == kept
        assert memory.rollout["vLLM"] == 0.25 * 80e9
        assert memory.rollout["copy to sample from"] == memory.rollout["keys and values"] == 0.0


def test_sleeping_vllm_takes_what_the_rollout_leaves(drawn) -> None:
    """Of sharded weights, the largest is whole at a time."""
    args = dataclasses.replace(drawn.args, rollout_engine="vllm", vllm_enable_sleep_mode=True)
    memory = predict_memory(drawn._replace(args=args), BY_NAME["FSDP2"], 8, 80e9, "cuda")
    rest = sum(memory.rollout.values()) - memory.rollout["vLLM"]
    assert memory.rollout["vLLM"] == pytest.approx(0.9 * (80e9 - rest))
    widest = max(p.nbytes for p in drawn.policy.parameters())
    assert memory.rollout["copy to sample from"] == widest
    small = predict_memory(drawn._replace(args=args), BY_NAME["FSDP2"], 8, 1e6, "cuda")
    assert small.rollout["vLLM"] == sum(p.nbytes for p in drawn.policy.parameters())  # at least
    fp8 = dataclasses.replace(args, vllm_quantization="fp8")
    eight = predict_memory(drawn._replace(args=fp8), BY_NAME["FSDP2"], 8, 1e6, "cuda")
    linear = sum(p.numel() for n, p in drawn.policy.named_parameters() if "_proj" in n)
    saved = small.rollout["vLLM"] - eight.rollout["vLLM"]
    assert saved == linear * (next(drawn.policy.parameters()).element_size() - 1)
    awake = dataclasses.replace(args, vllm_enable_sleep_mode=False)
    memory = predict_memory(drawn._replace(args=awake), BY_NAME["FSDP2"], 8, 80e9, "cuda")
    assert memory.rollout["vLLM"] == memory.update["vLLM"] == 0.3 * 80e9
