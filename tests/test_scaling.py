"""The arithmetic of docs/scaling.md, against what torch takes, what a ring sends, and by hand."""

import importlib.util
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
)

from rlhf_pg.runtime import Runtime

# `docs` is no package.
_spec = importlib.util.spec_from_file_location(
    "docs_scaling", Path(__file__).parents[1] / "docs" / "scaling.py"
)
assert _spec is not None
assert _spec.loader is not None
scaling = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scaling)

BY_NAME = {layout.name: layout for layout in scaling.SHARDINGS}

# As their cards on the hub have it.
SHAPES = [
    Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152_064,
        tie_word_embeddings=False,
    ),
    LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128_256,
    ),
]


def without_data(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("model", "config"), list(zip(scaling.MODELS, SHAPES, strict=True)))
def test_models_match_real_sizes_and_shapes(model, config) -> None:
    count = sum(p.numel() for p in without_data(config).parameters())
    assert model.parameters == pytest.approx(count, rel=0.1)
    assert (model.layers, model.vocabulary) == (config.num_hidden_layers, config.vocab_size)
    width = config.hidden_size // config.num_attention_heads
    assert model.key_width == config.num_key_value_heads * width


def test_adapter_share_matches_real_adapter() -> None:
    model = without_data(SHAPES[0])
    total = sum(p.numel() for p in model.parameters())
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert trained / total == pytest.approx(scaling.ADAPTER, rel=0.1)


@pytest.mark.parametrize(("dtype", "b"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_single_process_bytes_match_torch(dtype: torch.dtype, b: int) -> None:
    layer = nn.Linear(64, 64, dtype=dtype)
    optimizer = torch.optim.AdamW(layer.parameters())
    trained = Runtime().prepare(layer, optimizer)
    for _ in range(2):  # the second time for the gradient
        layer(torch.ones(1, 64, dtype=dtype)).sum().backward()
        if not optimizer.state:
            trained.step()
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    masters = [p for p in optimizer.state if p not in set(layer.parameters())]
    tensors = [*layer.parameters(), *(p.grad for p in layer.parameters()), *moments, *masters]
    count = sum(p.numel() for p in layer.parameters())
    bytes_each = sum(t.numel() * t.element_size() for t in tensors) / count
    assert scaling.update_bytes(BY_NAME["DDP"], b, 1) == bytes_each
    optimizer.zero_grad()
    assert scaling.rollout_bytes(BY_NAME["DDP"], b, 1) == bytes_each - b


@pytest.mark.parametrize(
    ("name", "b", "update", "rollout"),
    [
        # Weights, gradients, buckets, moments; without gradients.
        ("DDP", 4, 4 + 4 + 4 + 8, 4 + 4 + 8),
        # Masters and moments are float32: 12 bytes, or those among 8.
        ("DDP", 2, 2 + 2 + 2 + 12, 2 + 2 + 12),
        ("ZeRO-1", 2, 2 + 2 + 1.5, 2 + 1.5),
        ("ZeRO-2", 2, 2 + 0.25 + 1.5, 2 + 1.5),
        ("ZeRO-2", 4, 4 + 0.5 + 1.5, 4 + 1.5),
        # Everything among 8; then the copy, beside what there is.
        ("ZeRO-3", 2, 0.25 + 0.25 + 1.5, 0.25 + 0.25 + 1.5 + 2),
        ("ZeRO-3", 4, 0.5 + 0.5 + 1, 0.5 + 0.5 + 1 + 4),
        ("FSDP2", 2, 0.25 + 0.25 + 1.5, 0.25 + 1.5 + 2),
        ("FSDP2", 4, 0.5 + 0.5 + 1, 0.5 + 1 + 4),
    ],
)
def test_bytes_on_eight_ranks_by_hand(name: str, b: int, update: float, rollout: float) -> None:
    assert scaling.update_bytes(BY_NAME[name], b, 8) == update
    assert scaling.rollout_bytes(BY_NAME[name], b, 8) == rollout


def test_ppo_peak_by_hand() -> None:
    update = 2 * (0.25 + 0.25 + 1.5) + 0.25
    rollout = 2 * (0.25 + 0.25 + 1.5) + 2 + 0.25
    assert scaling.peak(BY_NAME["ZeRO-3"], 2, 8, critic=True) == max(update, rollout)
    assert scaling.peak(BY_NAME["ZeRO-2"], 2, 8, critic=True) == 2 * (2 + 0.25 + 1.5) + 2


@pytest.mark.parametrize(
    ("gpus", "size", "processes", "critic", "expected"),
    [
        (80, 3e9, 8, False, "DDP, float32"),  # 20 bytes are 60 of 60 GB
        (80, 8e9, 8, False, "ZeRO-2"),  # 3.75 bytes: 30 GB
        (80, 8e9, 2, False, "ZeRO-3, offload"),  # 2 + 7 bytes, 8 + 2 bytes: 72 and 80 GB
        (80, 8e9, 8, True, "ZeRO-3"),  # 9.5 bytes, 6.25 bytes: 76 and 50 GB
        (80, 32e9, 8, False, "-"),  # a copy of 64 GB
        (141, 32e9, 8, False, "ZeRO-3, offload"),
    ],
)
def test_choices_by_hand(gpus, size, processes, critic, expected) -> None:
    room = gpus * 1e9 * 0.75
    assert scaling.in_full(size, processes, room, critic) == expected


@pytest.mark.parametrize(
    ("size", "processes", "expected"),
    [(14e9, 1, "one process"), (14e9, 2, "DDP"), (70e9, 8, "DDP, 4 bits"), (100e9, 8, "-")],
)
def test_adapter_choices_by_hand(size: float, processes: int, expected: str) -> None:
    assert scaling.as_adapter(size, processes, 60e9) == expected


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ring_all_reduce_sends_documented_share(n: int) -> None:
    """Sums n vectors of n chunks in a ring, and counts: reduce-scatter, then all-gather."""
    vectors = [torch.arange(n * n).reshape(n, n)[i].double().clone() for i in range(n)]
    total, chunks_sent = sum(vectors), {"reduce": 0, "gather": 0}
    for phase in chunks_sent:
        for turn in range(n - 1):
            first = 0 if phase == "reduce" else 1
            chunks = [(i, (i + first - turn) % n) for i in range(n)]
            sent = [(i, c, vectors[i][c].clone()) for i, c in chunks]
            for i, c, value in sent:
                target = vectors[(i + 1) % n]
                target[c] = target[c] + value if phase == "reduce" else value
            chunks_sent[phase] += 1
    assert all(torch.equal(v, total) for v in vectors)
    model = scaling.Model("", n, 0, 0, 0)  # n parameters of one byte: a chunk is a byte
    assert scaling.sent(1, model, n, b=1) == chunks_sent["reduce"] == chunks_sent["gather"]
    assert scaling.sent(2, model, n, b=1) == sum(chunks_sent.values())


def test_cache_size_matches_transformers() -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=8,
    )
    cache = DynamicCache(config=config)
    model = LlamaForCausalLM(config).bfloat16()
    model(input_ids=torch.ones(1, 5, dtype=torch.long), past_key_values=cache)
    taken = sum(x.numel() * x.element_size() for y in cache.layers for x in (y.keys, y.values))
    assert scaling.cache(scaling.Model("", 0, 3, 2 * 8, 8)) == taken / 5


def test_seconds_by_hand() -> None:
    assert scaling.seconds(450e9, 8) == 1
    assert scaling.seconds(400e9, 16) == 1  # eight cards of 50 GB/s
    assert scaling.seconds(400e9, 16, cards=1) == 8


def test_step_by_hand() -> None:
    """7B on 64 GPUs: 64 rows of 256 + 1024 tokens each."""
    step = scaling.step_seconds(scaling.MODELS[0], 64)
    cached = 64 * (256 + 512) * (2 * 28 * 512 * 2)
    assert step["sampling"] == pytest.approx(1024 * (14e9 + cached) / 3.35e12)
    assert step["of that, weights"] == pytest.approx(1024 * 14e9 / 3.35e12)
    assert step["computing"] == pytest.approx(6 * 7e9 * 81920 / 395.6e12)
    # 81920 tokens are 5 micro-batches of 16384.
    assert step["exchange"] == pytest.approx(5 * 3 * 63 / 64 * 14e9 / 400e9)
    assert step["gather"] == pytest.approx(63 / 64 * 14e9 / 400e9)


def test_compute_and_exchange_times_are_equal_at_balance() -> None:
    tokens = float(scaling.balance().splitlines()[-1].split("|")[2])
    for model in scaling.MODELS:
        computing = 6 * model.parameters * tokens / scaling.FLOPS
        exchange = scaling.seconds(3 * 2 * model.parameters, 64, cards=1)
        assert computing == pytest.approx(exchange, rel=1e-3)
