"""Native decoding on a device: the ids of the CPU, few launches, no waits, memory given back."""

import gc
from collections import Counter

import pytest
import torch
from rlhf_pg.rollout.native.compiled import Compiled

from rlhf_pg.rollout import Completion, NativeEngine, Request, SamplingParams
from rlhf_pg.rollout.native.continuous_batching import BatchingSession
from tests.device.pretend import flex, streams
from tests.device.pretend.extension import ext
from tests.rollout.native.test_engine import assert_teacher_forced, teacher_forced
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8, 9], [9, 9, 9, 4]]
PARAMS = SamplingParams(max_tokens=100)


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch):
    """What a compiler makes of a step is tested elsewhere."""
    monkeypatch.setattr("rlhf_pg.rollout.native.engine.Compiled", lambda function: function)


def engine_on(
    where: str, arch: str = "qwen3", dtype: torch.dtype = torch.bfloat16, **options
) -> NativeEngine:
    model = tiny_model(arch, max_position_embeddings=128, dtype=dtype).to(where)
    return NativeEngine(model, [2, 3], 0, **options)


def ids(completions: list[Completion]) -> list[list[int]]:
    return [c.tokens for c in completions]


@pytest.mark.parametrize(
    ("arch", "cache_tokens"), [("qwen3", None), ("gpt2", None), ("llama", 700)]
)
def test_sampled_ids_match_cpu(arch, cache_tokens, caplog):
    """Rows that enter, leave and move, stores that grow, graphs of several shapes."""
    sampled, replays = {}, streams.replays
    for where in ("cpu", "cuda"):
        engine = engine_on(where, arch, torch.float32, cache_tokens=cache_tokens)
        sampled[where] = ids(engine.generate(PROMPTS, 6, PARAMS, seed=0))
    assert sampled["cpu"] == sampled["cuda"]
    assert streams.replays > replays
    assert "without CUDA graphs" not in caplog.text


@pytest.mark.parametrize("arch", ["qwen3", "gpt2", "llama"])
def test_bf16_logprobs_match_plain_forward(arch):
    engine = engine_on("cuda", arch)
    completions = engine.generate(PROMPTS, 4, SamplingParams(max_tokens=60), seed=0)
    model = tiny_model(arch, max_position_embeddings=128, dtype=torch.bfloat16)
    assert_teacher_forced(model, PROMPTS, completions, atol=0.5, temperature=1.0)
    off = [
        abs(a - b)
        for c, exact in zip(completions, teacher_forced_of(model, completions), strict=True)
        for a, b in zip(c.logprobs, exact, strict=True)
    ]
    assert sum(off) / len(off) < 0.03


def teacher_forced_of(model, completions):
    for i, c in enumerate(completions):
        exact = teacher_forced(model, PROMPTS[i // 4], c.tokens, 1.0)
        yield exact[range(len(c.tokens)), c.tokens].tolist()


@pytest.mark.parametrize("cache_tokens", [None, 700])
@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"temperature": 0.0}])
def test_replayed_graph_matches_eager_step(monkeypatch, caplog, cache_tokens, fields):
    """With graphs and without, bit for bit: nothing is read where it was once."""
    params = SamplingParams(max_tokens=100, **fields)
    sampled = []
    for works in (True, False):
        engine = engine_on("cuda", cache_tokens=cache_tokens)
        if not works:
            monkeypatch.setattr(torch.cuda, "CUDAGraph", refused)
        replays = streams.replays
        sampled.append(engine.generate(PROMPTS, 6, params, seed=0))
        assert (streams.replays > replays) == works
    assert sampled[0] == sampled[1]
    assert caplog.text.count("without CUDA graphs, which is slower: no graphs") == 1


def refused():
    raise RuntimeError("no graphs")


def test_nested_session_has_own_tensors():
    engine, request = (
        engine_on("cuda"),
        Request(tokens=PROMPTS[0], prompt_index=0, samples=range(3)),
    )
    alone = engine.generate(PROMPTS, 2, PARAMS, seed=1)
    with engine.session(PARAMS, seed=0) as session:
        session.add(request)
        finished = [*session.step(), *session.step()]
        assert engine.generate(PROMPTS, 2, PARAMS, seed=1) == alone
        while not session.idle:
            finished += session.step()
    by_sample = [f.completion for f in sorted(finished, key=lambda f: f.sample)]
    assert by_sample == engine_on("cuda").generate(PROMPTS[:1], 3, PARAMS, seed=0)


def test_graphs_are_reused_by_next_session():
    engine = engine_on("cuda")
    engine.generate(PROMPTS, 6, PARAMS, seed=0)
    captures, replays = len(streams.recorded), streams.replays
    again = engine.generate(PROMPTS, 6, PARAMS, seed=1)
    assert len(streams.recorded) == captures
    assert streams.replays > replays
    fresh = engine_on("cuda")
    assert ids(again) == ids(fresh.generate(PROMPTS, 6, PARAMS, seed=1))


def test_moved_weights_are_recaptured_and_read():
    """And read the new ones: a row that the old ones would draw is not drawn."""
    engine = engine_on("cuda")
    engine.generate(PROMPTS, 6, PARAMS, seed=0)
    captures = len(streams.recorded)
    for parameter in engine.model.parameters():
        parameter.data = parameter.data.clone() * 0.5
    moved = engine.generate(PROMPTS, 6, PARAMS, seed=0)
    assert len(streams.recorded) > captures
    fresh = NativeEngine(engine.model, [2, 3], 0).generate(PROMPTS, 6, PARAMS, seed=0)
    assert ids(moved) == ids(fresh)


def test_weights_changed_in_place_are_read_without_recapture():
    engine = engine_on("cuda")
    engine.generate(PROMPTS, 6, PARAMS, seed=0)
    captures = len(streams.recorded)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(0.5)
    changed = engine.generate(PROMPTS, 6, PARAMS, seed=0)
    assert len(streams.recorded) == captures
    fresh = NativeEngine(engine.model, [2, 3], 0).generate(PROMPTS, 6, PARAMS, seed=0)
    assert ids(changed) == ids(fresh)


def test_captures_are_thread_local():
    modes = len(streams.modes)
    engine_on("cuda").generate(PROMPTS, 6, PARAMS, seed=0)
    assert set(streams.modes[modes:]) == {"thread_local"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steady_token_is_one_launch_without_sync(monkeypatch, dtype):
    seen, decode = [], BatchingSession._decode

    def counted(self):
        steady, captures = self._places is not None, len(streams.recorded)
        replays, kernels, waits = streams.replays, ext.kernels(), ext.syncs()
        decode(self)
        if steady and len(streams.recorded) == captures and streams.replays > replays:
            seen.append((ext.kernels() - kernels, ext.syncs() - waits))

    monkeypatch.setattr(BatchingSession, "_decode", counted)
    engine = engine_on("cuda", dtype=dtype)
    engine.eos_token_ids = []
    waits = ext.syncs()
    engine.generate(PROMPTS, 8, PARAMS, seed=0)
    assert len(seen) > 60
    # A shape's new inputs are copied when it is replayed for the first time.
    assert Counter(seen).most_common(1)[0][0] == (1, 0)
    assert {waited for _, waited in seen} == {0}
    assert ext.syncs() - waits < 60


def test_one_compilation_serves_all_sessions_and_row_counts(monkeypatch):
    monkeypatch.setattr("rlhf_pg.rollout.native.engine.Compiled", Compiled)
    engine, compilations = engine_on("cuda"), sum(flex.compilations.values())
    engine.generate(PROMPTS, 6, PARAMS, seed=0)
    engine.generate(PROMPTS[:1], 3, PARAMS, seed=1)
    assert sum(flex.compilations.values()) == compilations + 1


def test_kernel_count_per_step_is_bounded():
    """Of two layers, without the compiler's fusing: a bound that a copy too many would break."""
    captures = len(streams.recorded)
    engine_on("cuda").generate(PROMPTS, 6, PARAMS, seed=0)
    assert len(streams.recorded) > captures
    assert max(streams.recorded[captures:]) <= 300


def test_rollout_frees_its_memory():
    """At once, and not when the garbage collector runs; small tensors and graphs stay."""
    engine = engine_on("cuda")
    gc.collect()
    gc.disable()
    try:
        before = ext.allocated()
        engine.generate(PROMPTS, 4, PARAMS, seed=0)
        after = ext.allocated()
        [kept] = engine.kept.values()
        stays = [*vars(kept.drawn).values(), kept.eos]
        inputs = sum(
            -(-x.nbytes // 512) * 512
            for recording in kept.graphs.recorded.values()
            if recording
            for x in vars(recording.inputs).values()
        )
        sources = inputs  # the last ones that were copied there
        assert after - before <= sum(-(-x.nbytes // 512) * 512 for x in stays) + inputs + sources
        for seed in range(2):
            engine.generate(PROMPTS, 4, PARAMS, seed=seed)
        assert ext.allocated() <= after + sources
    finally:
        gc.enable()


def test_room_counts_reserved_unused_memory():
    engine = engine_on("cuda")
    before = engine.room()
    taken = torch.empty(2**24, dtype=torch.uint8, device="cuda")
    assert engine.room() < before
    del taken
    assert engine.room() == before


def test_deterministic_mode_draws_same_ids():
    """By torch's deterministic algorithms, which have no running sum of floats on a GPU."""
    engine = engine_on("cuda", dtype=torch.float32)
    plain = engine.generate(PROMPTS, 4, PARAMS, seed=0)
    torch.use_deterministic_algorithms(True)
    try:
        told = engine_on("cuda", dtype=torch.float32).generate(PROMPTS, 4, PARAMS, seed=0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ids(told) == ids(plain)


def test_session_with_less_room_shrinks_kept_store():
    """The first rollout of a run comes before Adam has its moments."""
    engine = engine_on("cuda", cache_tokens=4000)
    engine.generate(PROMPTS, 8, PARAMS, seed=0)
    [kept] = engine.kept.values()
    most = kept.stores.own.tokens
    engine.cache_tokens = 900
    less = engine.generate(PROMPTS, 8, PARAMS, seed=0)
    assert kept.stores.own.tokens < most
    assert ids(less) == ids(
        engine_on("cuda", cache_tokens=900).generate(PROMPTS, 8, PARAMS, seed=0)
    )
