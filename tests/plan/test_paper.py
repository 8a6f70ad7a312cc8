"""The seconds on paper, against numbers worked out by hand on a small model and a slow GPU."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rlhf_pg.plan import decoding, learning
from rlhf_pg.plan.decoding import NATIVE, VLLM, rollout_seconds
from rlhf_pg.plan.devices import DEVICES, Device
from rlhf_pg.plan.job import Job, positions, spread
from rlhf_pg.plan.learning import (
    body_seconds,
    exchanges,
    gather_seconds,
    head_seconds,
    launched,
    optimizer_seconds,
    tokens_of,
)
from rlhf_pg.plan.paper import (
    LIBRARIES,
    NATIVELY,
    TRL,
    VERL,
    WITH_VLLM,
    handover_seconds,
    learner_seconds,
    stages,
)
from rlhf_pg.plan.shapes import shape_of
from rlhf_pg.plan.sharding import SHARDINGS
from tests.plan.published import (
    SHAPES,
    agreement,
    fit,
    gated,
    left_out,
    long_tailed,
    points,
)

H100 = DEVICES["h100"]
LAYOUT = {layout.name: layout for layout in SHARDINGS}
# A thousand operations and a thousand bytes a second; links of 100 and 10 bytes a second.
SLOW = Device(1e3, 1e3, 1e9, 100.0, 10.0)
READER = SLOW._replace(flops=1e30)  # computes in no time
# Attention of 4, keys of 2, bodies of 2 * 4 * (2*4 + 2*2 + 3*8) = 288 and a head of 40 parameters.
SMALL = gated(2, 4, (2, 1), 8, 10, width=2)
JOB = Job(prompt=3, lengths=(2, 4), generations=2)


def test_shape_by_hand() -> None:
    assert (SMALL.body, SMALL.head, SMALL.read, SMALL.parameters) == (288, 40, 328, 368)
    assert SMALL.cached == 2 * 2 * 2 * 2  # bytes: keys and values, two layers, two numbers each
    assert gated(2, 4, (2, 1), 8, 10, tied=True, width=2).parameters == 328


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-0.5B", 0.494),
        ("Qwen3-0.6B", 0.596),
        ("Qwen2.5-1.5B", 1.544),
        ("Qwen3-4B", 4.022),
        ("Qwen2.5-7B", 7.616),
        ("Llama-3-8B", 8.030),
        ("Llama-2-13B", 13.016),
        ("Qwen2.5-14B", 14.770),
        ("Qwen2.5-32B", 32.764),
        ("Qwen3-32B", 32.762),
        ("Llama-3-70B", 70.554),
        ("Qwen2.5-72B", 72.706),
    ],
)
def test_known_models_have_known_size(name: str, billions: float) -> None:
    assert SHAPES[name].parameters == pytest.approx(billions * 1e9, rel=2e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_shape_of_meta_model(tied: bool) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes, **heads))
    shape = shape_of(model)
    assert shape[:6] == (3, 64, 64, 32, 96, 50)
    assert shape.tied == tied
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_waiting_rows_take_freed_places() -> None:
    # Two at a time: the row of 1 token ends first, and the third begins at the second position.
    assert list(positions((1, 3, 2), 2)) == [(2, 0), (2, 1), (2, 3)]
    assert list(positions((1, 3, 2), 3)) == [(3, 0), (2, 2), (1, 2)]


def test_positions_match_loop() -> None:
    lengths, room = (5, 1, 7, 2, 2, 6, 1), 3
    waiting, active, expected = list(lengths), list[list[int]](), []
    while waiting or active:
        while waiting and len(active) < room:
            active.append([waiting.pop(0), 0])
        expected.append((len(active), sum(done for _, done in active)))
        active = [[most, done + 1] for most, done in active if done + 1 < most]
    assert list(positions(lengths, room)) == expected


def test_lengths_have_requested_ends_and_mean() -> None:
    assert spread(4, 8) == (2, 4, 6, 8)
    tail = long_tailed(1000, 300, 10**6)
    assert sum(tail) / 1000 == pytest.approx(300, rel=0.01)
    assert max(long_tailed(1000, 300, 900)) == 900


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("shared", (9, 2 * 3 + 2 + 4 * 3 + 8 + 4.5, 6)),  # 2 + 4 and one prompt
        ("unpadded", (12, (25 + 49) / 2, 12)),
        ("padded", (14, 49, 8)),  # two rows of 7, and completions of 4
    ],
)
def test_tokens_by_hand(rows, expected) -> None:
    assert tokens_of(rows, JOB) == expected


def test_layers_by_hand() -> None:
    """2 * 288 operations a token, and 4 * 2 * 4 for each pair that attends."""
    products = body_seconds(SLOW, SMALL, 10, 50, efficiency=1.0, traffic=0.0)
    assert products == pytest.approx((5760 + 1600) / 1e3)
    # 3 times 2 bytes of 4 + 4 + 8 numbers in two layers for 10 tokens, at 850 bytes a second.
    moved = body_seconds(SLOW, SMALL, 10, 50, passes=2.0, traffic=3.0) - body_seconds(
        SLOW, SMALL, 10, 50, passes=2.0, traffic=0.0
    )
    assert moved == pytest.approx(2 * 3 * 2 * 2 * 16 * 10 / 850)


def test_head_by_hand() -> None:
    """6 tokens of 10 logits in pieces of 20 numbers: three pieces of two tokens."""
    seconds = head_seconds(SLOW, SMALL, 6, 20, products=4, efficiency=1.0)
    each = 4 * 2 * 40 * 2 / 1e3 + 8 * 40 / 1e3 + 16 * 4 * 20 / 1e3 + 30 * 6.5e-6
    assert seconds == pytest.approx(3 * each)
    scored = head_seconds(SLOW, SMALL, 6, 20, products=1, backward=False, efficiency=1.0)
    assert scored == pytest.approx(3 * (2 * 40 * 2 / 1e3 + 4 * 4 * 20 / 1e3 + 30 * 6.5e-6))


def test_small_head_chunks_cost_more() -> None:
    small, large = (
        head_seconds(H100, SHAPES["Qwen3-0.6B"], 131_072, piece, 4) for piece in (2.0**24, 2.0**29)
    )
    assert small > 1.5 * large


def test_rollout_by_hand() -> None:
    """One row of two tokens after a prompt of one, of which 1 and then 2 are read."""
    job = Job(prompt=1, lengths=(2,), generations=1)
    engine = replace(VLLM, kernels=0, host=0.25)
    prompt = body_seconds(READER, SMALL, 1, 0.5)
    weights = 2 * 328 / 850
    logits = 4 * 4 * 10 / 1e3
    fixed = 21 * 2e-6 + 0.25
    expected = prompt + 2 * (weights + logits + fixed) + (1 + 2) * 16 / 800
    assert rollout_seconds(engine, READER, SMALL, job) == pytest.approx(expected)
    # 3 kernels in each of two layers, at two positions: 2 us each.
    busy = replace(engine, kernels=3)
    more = rollout_seconds(busy, READER, SMALL, job) - expected
    assert more == pytest.approx(2 * 6 * 2e-6, rel=1e-6)


def test_doubled_bandwidth_halves_read_time() -> None:
    job = Job(prompt=8, lengths=(4, 6), generations=2)
    engine = replace(VLLM, host=0.0)
    slow, fast = (
        rollout_seconds(engine, READER._replace(bandwidth=b), SMALL, job) for b in (1.0, 2.0)
    )
    assert slow == pytest.approx(2 * fast, rel=1e-3)


def test_tensor_parallel_rollout_halves_reads() -> None:
    """Each has its own rows; the other's come with the half of the weights that is not there."""
    job = Job(prompt=1, lengths=(1,), generations=1)
    engine = replace(VLLM, kernels=0, host=0.0)
    seconds = rollout_seconds(engine, READER, SMALL, job, gpus=2)
    both = body_seconds(READER, SMALL, 2, 1.0) / 2
    read = (2 * 328 / 850 + 2 * 16 / 800 + 4 * 4 * 2 * 10 / 1e3) / 2
    assert seconds == pytest.approx(both + read + 21 * 2e-6 + 2 * 2 * 10e-6)


def test_native_engine_reads_prompt_once() -> None:
    """Two rows of one prompt of 3, at their first position."""
    job = Job(prompt=3, lengths=(1, 1), generations=2)
    engine = replace(NATIVE, kernels=0, drawing=0, moves=0, cache_rate=0.55)
    seconds = rollout_seconds(engine, READER, SMALL, job)
    expected = body_seconds(READER, SMALL, 3, 4.5) + 2 * 328 / 850 + 12 * 4 * 2 * 10 / 1e3
    assert seconds == pytest.approx(expected + 3 * 16 / 550 + 21 * 2e-6)


def test_drawing_kernels_are_replayed_in_graph() -> None:
    """Three positions of 140 kernels."""
    job = Job(prompt=3, lengths=(1, 3), generations=2)
    drawn, undrawn = (
        rollout_seconds(replace(NATIVE, drawing=d), READER, SMALL, job) for d in (140, 0)
    )
    assert drawn - undrawn == pytest.approx(3 * 140 * 2e-6)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("DDP", 2 * 2),  # two updates
        ("ZeRO-1", 2 * 2),
        ("ZeRO-2", 5 * 3 + 2),  # five micro-batches in three epochs
        ("ZeRO-3", 5 * 3 * 3 + 5),  # and one pass that scores
        ("FSDP2", 5 * 3 * 3 + 5),
    ],
)
def test_exchanges_by_hand(layout, expected) -> None:
    job = replace(JOB, layout=LAYOUT[layout], epochs=3, updates=2)
    assert exchanges(job, 5, scores=1) == expected


def test_links_by_hand() -> None:
    """3 of 4 parts of 2 * 368 bytes at 100 bytes a second; 15 of 16 through the network."""
    assert gather_seconds(SLOW, SMALL, 4) == pytest.approx(0.75 * 736 / 100)
    assert gather_seconds(SLOW, SMALL, 16, 2) == pytest.approx(2 * 15 / 16 * 736 / 10)
    assert gather_seconds(SLOW, SMALL, 1) == 0


def test_slower_of_host_and_device_counts() -> None:
    assert launched(5.0, 3, SMALL, 1) == 5.0
    assert launched(0.0, 3, SMALL, 7) == pytest.approx(7 * 3 * 60 * 2 * 6.5e-6)


def test_zero1_optimizer_takes_its_share() -> None:
    job = replace(JOB, processes=4, updates=2, layout=LAYOUT["ZeRO-1"])
    assert optimizer_seconds(SLOW, SMALL, job) == pytest.approx(2 * 28 * 368 / 4 / 850)
    assert optimizer_seconds(SLOW, SMALL, replace(job, layout=LAYOUT["DDP"])) == pytest.approx(
        2 * 28 * 368 / 850
    )


def test_passes_per_update() -> None:
    """3 with the backward pass, 4 with recomputing, 2.5 where half is trained."""
    job = replace(JOB, lengths=(4000,) * 64, generations=64)
    shape = SHAPES["Qwen3-0.6B"]._replace(vocabulary=1)  # next to no head
    forward = body_seconds(H100, shape, *tokens_of("shared", job)[:2])

    def passes(**changes) -> float:
        return learner_seconds(NATIVELY, H100, shape, replace(job, **changes))[1] / forward

    assert passes() == pytest.approx(3, rel=0.01)
    assert passes(recomputes=True) == pytest.approx(4, rel=0.01)
    assert passes(trained=0.5) == pytest.approx(2.5, rel=0.01)
    assert passes(epochs=2) == pytest.approx(6, rel=0.01)
    assert passes(models=2) == pytest.approx(6, rel=0.01)


def test_only_requested_passes_are_scored() -> None:
    shape = SHAPES["Qwen3-0.6B"]
    one = learner_seconds(NATIVELY, H100, shape, replace(JOB, old=True))[0]
    assert learner_seconds(NATIVELY, H100, shape, JOB)[0] == 0
    assert learner_seconds(NATIVELY, H100, shape, replace(JOB, old=True, references=1))[
        0
    ] == pytest.approx(2 * one)
    assert learner_seconds(VERL, H100, shape, JOB)[0] > 0


def test_fast_link_is_mostly_hidden_and_slow_link_is_not() -> None:
    job = replace(JOB, processes=8, lengths=(500,) * 64, layout=LAYOUT["FSDP2"])
    shape = SHAPES["Qwen3-0.6B"]
    sent = gather_seconds(H100, shape, 8, 3 * 2)  # two micro-batches
    assert learner_seconds(NATIVELY, H100, shape, job)[2] == pytest.approx(0.2 * sent)
    far = H100._replace(link=H100.link / 1000)
    _, update, exchange = learner_seconds(NATIVELY, far, shape, job)
    assert exchange == pytest.approx(1000 * sent - update)


def test_handover_time_by_hand() -> None:
    shape = SHAPES["Qwen2.5-7B"]
    assert handover_seconds(NATIVELY, H100, shape, JOB) == 0
    assert handover_seconds(WITH_VLLM, H100, shape, JOB) == pytest.approx(
        0.5 + 2 * shape.parameters / 40e9
    )
    split = replace(JOB, processes=8, layout=LAYOUT["FSDP2"])
    assert handover_seconds(NATIVELY, H100, shape, split) == gather_seconds(H100, shape, 8)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_stages_sum_to_total(library) -> None:
    parts = stages(library, H100, SHAPES["Qwen3-0.6B"], replace(JOB, processes=8))
    total = parts.pop("total")
    assert total == pytest.approx(sum(parts.values()))
    assert min(parts.values()) >= 0


def test_engine_without_room_for_weights_raises() -> None:
    job = replace(JOB, processes=8)
    with pytest.raises(ValueError, match="ours, vLLM: the engine's weights do not fit in 56 GB"):
        stages(WITH_VLLM, H100, SHAPES["Llama-3-70B"], job)
    assert stages(VERL, H100, SHAPES["Llama-3-70B"], job)["rollout"] > 0


@pytest.mark.parametrize(
    ("model", "completions", "processes", "layout"),
    [
        ("Qwen3-0.6B", 256, 1, "DDP"),
        ("Qwen3-0.6B", 256, 8, "DDP"),
        ("Qwen2.5-7B", 64, 8, "ZeRO-2"),
    ],
)
@pytest.mark.parametrize("recomputes", [True, False])
def test_vllm_engine_is_predicted_ahead_of_trl_and_verl(
    model, completions, processes, layout, recomputes
) -> None:
    """Of what TRL and verl do by default, and of what they do without gradient checkpointing."""
    job = Job(
        prompt=256,
        lengths=spread(completions, 1024),
        generations=16,
        processes=processes,
        layout=LAYOUT[layout],
    )
    libraries = (WITH_VLLM, *(replace(x, recomputes=recomputes) for x in (TRL, VERL)))
    ours, *others = (stages(x, H100, SHAPES[model], job)["total"] for x in libraries)
    assert ours < min(others)


def test_every_published_number_has_source() -> None:
    assert len(points()) >= 8
    for point in points():
        assert point.source.startswith("https://")
        assert point.published > 0
        assert point.predicted() > 0


def test_published_numbers_by_hand() -> None:
    """A decode of one row: fixed, weights, keys and values, logits. An error is a factor."""
    first = points()[0]
    shape = SHAPES["Llama-3-8B"]
    fixed = (32 * 12 + 21) * 2e-6 + 1.7e-3
    # Of 128 positions the first is left out; 128 tokens before, and 64 of its own on average.
    read = 2 * shape.read / (0.85 * 3.35e12) + (128 + 64) * shape.cached / (0.8 * 3.35e12)
    seconds = fixed + read + 4 * 4 * shape.vocabulary / 3.35e12
    assert first.predicted() == pytest.approx(1e3 * seconds, rel=1e-6)
    assert first.off() == pytest.approx(1e3 * seconds / 6.48, rel=1e-6)


def test_constants_are_best_fit() -> None:
    train, decode = fit("train"), fit("decode")
    assert (train.efficiency, train.traffic) == (learning.EFFICIENCY, learning.TRAFFIC)
    assert decode.host == pytest.approx(decoding.HOST)


def test_left_out_point_is_predicted_worse() -> None:
    for kind in ("train", "decode"):
        inside = [point.off() for point in points() if point.kind == kind]
        assert left_out(kind).worst > max(inside)
        assert left_out(kind).points == len(inside)


def test_agreement_covers_all_points() -> None:
    off = sorted(point.off() for point in points())
    middle = len(off) // 2
    assert agreement().worst == off[-1]
    assert off[middle - 1] <= agreement().median <= off[middle]
    assert agreement().points == len(off)
