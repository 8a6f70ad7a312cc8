"""Rows that enter, wait, continue and leave: nothing but the time they take may change."""

from dataclasses import replace

import pytest
import torch

from rlhf_pg.models.adapters import add_adapter
from rlhf_pg.rollout import NativeEngine, Request, SamplingParams
from rlhf_pg.rollout.native import continuous_batching, engine as native_engine
from tests.models.architectures import build
from tests.rollout.native.test_engine import (
    EOS,
    PAD,
    PARAMS,
    PROMPTS,
    assert_same,
    assert_teacher_forced,
    char_tokenizer,
)
from tests.tiny import adapter, stir, tiny_model


def forward_sizes(model) -> list[int]:
    """Grows by the number of tokens of every forward pass."""
    sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return sizes


@pytest.mark.parametrize(("arch", "cache_tokens"), [("llama", 1), ("gpt2", 40)])
def test_small_cache_delays_rows_without_changing_samples(arch, cache_tokens):
    model = tiny_model(arch, dtype=torch.float64)  # no token's noise is that close to an edge
    expected = NativeEngine(model, EOS, PAD).generate(PROMPTS, 6, PARAMS, seed=0)
    sizes = forward_sizes(model)
    engine = NativeEngine(model, EOS, PAD, cache_tokens=cache_tokens)
    assert_same(engine.generate(PROMPTS, 6, PARAMS, seed=0), expected)
    # Prompts have seven tokens at most: a pass of more than the rows that fit computes prompts.
    fitting = max(1, cache_tokens // PARAMS.max_tokens)
    decoding = [size for size in sizes if size <= fitting]
    assert sum(decoding) >= sum(len(c.tokens) - 1 for c in expected)
    # Each prompt is computed once for all its samples, however late the last of them enters.
    assert sum(sizes) == sum(len(p) for p in PROMPTS) + sum(len(c.tokens) - 1 for c in expected)


LONG = [[i, *range(3, 38)] for i in range(3, 33)]


@pytest.mark.parametrize(
    ("arch", "prompts", "samples", "ends"),
    [("llama", PROMPTS, 6, 1), ("qwen3_5_text", PROMPTS, 6, 1), ("llama", LONG, 1, 0)],
)
def test_rows_that_grow_are_sent_back_without_changing_samples(
    monkeypatch, arch, prompts, samples, ends
):
    """As on a GPU: more rows at a time than have room for their full length."""
    eos = EOS[:ends]
    cache, most = (150, 32) if prompts is PROMPTS else (500, 27)
    taken: list[tuple[int, int]] = []

    class Growing(continuous_batching.BatchingSession):
        def __init__(self, *options, grows):
            super().__init__(*options, grows=True)

        def _decode(self):
            super()._decode()
            lengths = [prompt.length for prompt in self.prompts]
            longest = max(len(row.tokens) for row in self.rows) - 1
            of_prompts = len(lengths) * (max(lengths) + self.row_tokens)
            of_rows = len(self.rows) * (-(-longest // 4) * 4 + self.row_tokens)
            taken.append((len(self.rows), of_prompts + of_rows))

    monkeypatch.setattr("rlhf_pg.rollout.native.engine.BatchingSession", Growing)
    monkeypatch.setattr(continuous_batching, "COLUMNS", 4)
    monkeypatch.setattr(NativeEngine, "row_tokens", lambda _: 2)  # recurrent states take far more
    model = tiny_model(arch, dtype=torch.float64)
    params = SamplingParams(max_tokens=most)
    expected = NativeEngine(model, eos, PAD).generate(prompts, samples, params, seed=0)
    sizes = forward_sizes(model)
    taken.clear()
    engine = NativeEngine(model, eos, PAD, cache_tokens=cache)
    assert_same(engine.generate(prompts, samples, params, seed=0), expected)
    assert max(tokens for _, tokens in taken) <= cache
    of_prompts = len(prompts) / samples * (max(map(len, prompts)) + 2)  # of each row
    assert max(rows for rows, _ in taken) > cache / (most + 2 + of_prompts / len(prompts))
    once = sum(map(len, prompts)) + sum(len(c.tokens) - 1 for c in expected)
    assert once < sum(sizes) < 2 * once  # some begin again


def test_rows_beyond_limit_take_turns(monkeypatch):
    model = tiny_model("llama")
    expected = NativeEngine(model, EOS, PAD).generate(PROMPTS * 2, 5, PARAMS, seed=0)
    monkeypatch.setattr(continuous_batching, "MAX_ROWS", 7)
    sizes = forward_sizes(model)
    assert_same(NativeEngine(model, EOS, PAD).generate(PROMPTS * 2, 5, PARAMS, seed=0), expected)
    assert max(sizes) < 30  # 50 rows
    assert len(sizes) < sum(len(c.tokens) for c in expected) / 4  # which are mostly in use


def test_prompts_are_prefilled_in_small_batches(monkeypatch):
    model = tiny_model("qwen2")
    expected = NativeEngine(model, EOS, PAD).generate(PROMPTS, 2, PARAMS, seed=0)
    monkeypatch.setattr(continuous_batching, "PREFILL_TOKENS", 6)  # less than the longest prompt
    sizes = forward_sizes(model)
    assert_same(NativeEngine(model, EOS, PAD).generate(PROMPTS, 2, PARAMS, seed=0), expected)
    assert sizes[:3] == [1 + 1 + 2, 4, 7]


def test_continued_request_draws_same_tokens():
    """A later request with what was sampled so far, at its position, draws the same tokens."""
    engine = NativeEngine(tiny_model("gpt2"), [], PAD)
    whole = engine.generate(PROMPTS, 3, PARAMS, seed=5)
    with engine.session(PARAMS, seed=5) as session:
        for draw, prompt in enumerate(PROMPTS):
            session.add(Request(tokens=prompt, prompt_index=draw, samples=range(3), max_tokens=4))
        completions = {}
        while not session.idle:
            for request, sample, completion in session.step():
                key = (request.prompt_index, sample)
                tokens, logprobs = completions.get(key, ([], []))
                tokens, logprobs = tokens + completion.tokens, logprobs + completion.logprobs
                completions[key] = (tokens, logprobs)
                if len(tokens) == PARAMS.max_tokens:
                    continue
                # Some go on at once, others share their prompt with nobody any more.
                session.add(
                    Request(
                        tokens=[*PROMPTS[request.prompt_index], *tokens],
                        prompt_index=request.prompt_index,
                        samples=[sample],
                        position=len(tokens),
                        max_tokens=min(4 + sample, PARAMS.max_tokens - len(tokens)),
                    )
                )
    for i, completion in enumerate(whole):
        tokens, logprobs = completions[divmod(i, 3)]
        assert tokens == completion.tokens
        assert logprobs == pytest.approx(completion.logprobs, abs=1e-5)


def test_request_samples_may_have_any_indices():
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        Request(tokens=[5], prompt_index=0, max_tokens=0)
    engine = NativeEngine(tiny_model("llama"), EOS, PAD)
    all_four = engine.generate([[17, 4]], 4, PARAMS, seed=0, prompt_ids=[9])
    with engine.session(PARAMS, seed=0) as session:
        session.add(Request(tokens=[5], prompt_index=0, samples=()))
        assert session.idle
        session.add(Request(tokens=[17, 4], prompt_index=9, samples=[3, 1]))
        finished = []
        while not session.idle:
            finished += session.step()
        assert session.step() == []
    by_sample = {sample: completion for _, sample, completion in finished}
    assert_same([by_sample[3], by_sample[1]], [all_four[3], all_four[1]])


def test_cancelled_request_leaves_its_place_to_others():
    engine = NativeEngine(tiny_model("llama"), [], PAD, cache_tokens=40)
    with engine.session(SamplingParams(max_tokens=30), seed=0) as session:
        left = []
        session.add(Request(tokens=[5], prompt_index=0, cancelled=lambda: bool(left)))
        session.add(Request(tokens=[6], prompt_index=1))
        assert session.step() == session.step() == []
        left.append(True)
        (first,) = session.step()
        assert (first.request.prompt_index, len(first.completion.tokens)) == (0, 3)
        while not session.idle:
            finished = session.step()
    assert len(finished[0].completion.tokens) == 30


def test_adapter_is_merged_into_copy_of_policy():
    model = stir(add_adapter(tiny_model("llama"), adapter(lora_alpha=1)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = NativeEngine(model, EOS, PAD)
    with engine.weights_synced():
        merged = engine.weights
        assert merged is not model
        assert not any("lora" in name for name, _ in merged.named_modules())
        # What the adapter does not change is not copied.
        assert merged.get_input_embeddings().weight is model.get_input_embeddings().weight
        completions = engine.generate(PROMPTS, 4, PARAMS, seed=0)
        assert engine.weights is merged  # once for all that is sampled
    assert engine.weights is model
    assert_teacher_forced(model, PROMPTS, completions)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    stir(model, seed=1)  # other weights the next time
    completions = engine.generate(PROMPTS, 2, PARAMS, seed=0)
    assert_teacher_forced(model, PROMPTS, completions)


UNSUPPORTED = {
    "bloom": {},
    "llama4_text": {"attention_chunk_size": 4},
}  # ALiBi; attention in chunks


@pytest.mark.parametrize("arch", UNSUPPORTED)
def test_unsupported_architecture_uses_generate_with_warning(arch, caplog):
    model = build(arch, **UNSUPPORTED[arch])
    completions = NativeEngine(model, EOS, PAD).generate(PROMPTS, 4, PARAMS, seed=0)
    assert "generate, which is slower" in caplog.text
    assert_teacher_forced(model, PROMPTS, completions)
    assert len({tuple(c.tokens) for c in completions}) > 12


@pytest.mark.parametrize("max_tokens", [10, 20])
def test_longrope_rows_are_not_batched(caplog, max_tokens):
    """longrope (Phi-3): one row beyond the original length changes the factors of all others."""
    rope = {"rope_type": "longrope", "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
    model = tiny_model(
        "phi3",
        intermediate_size=48,
        num_key_value_heads=2,
        rope_scaling=rope,
        original_max_position_embeddings=20,
    )
    params = replace(PARAMS, max_tokens=max_tokens)
    completions = NativeEngine(model, [], PAD).generate(PROMPTS, 2, params, seed=0)
    assert ("exceeds the model's window of 20" in caplog.text) == (max_tokens == 20)
    if max_tokens == 10:
        assert_teacher_forced(model, PROMPTS, completions)


def plainly(monkeypatch, engine: NativeEngine) -> NativeEngine:
    monkeypatch.setattr(engine, "unsupported_reason", lambda longest: "of this test")
    return engine


@pytest.mark.parametrize(
    ("arch", "temperature", "stop"), [("gpt2", 0.0, None), ("llama", 0.8, ["bd", "k"])]
)
def test_generate_fallback_samples_same_tokens(monkeypatch, arch, temperature, stop):
    model = tiny_model(arch)
    params = replace(PARAMS, temperature=temperature, stop=stop)
    engine = NativeEngine(model, EOS, PAD, char_tokenizer())
    fast = engine.generate(PROMPTS, 4, params, seed=0)
    model.generation_config.repetition_penalty = 5.0  # what a hub's model may come with
    model.generation_config.eos_token_id = [9, 12]
    configured = model.generation_config
    assert_same(plainly(monkeypatch, engine).generate(PROMPTS, 4, params, seed=0), fast)
    assert model.generation_config is configured


def test_generate_fallback_keeps_request_limits(monkeypatch):
    engine = NativeEngine(tiny_model("llama"), [], PAD)
    requests = [
        Request(tokens=[5, 9], prompt_index=3, samples=[2], position=7, max_tokens=3),
        Request(tokens=[8], prompt_index=1, samples=[0, 4]),
    ]

    def results():
        with engine.session(PARAMS, seed=0) as session:
            for request in requests:
                session.add(request)
            finished = []
            while not session.idle:
                finished += session.step()
        ordered = sorted(finished, key=lambda f: (f.request.prompt_index, f.sample))
        return [f.completion for f in ordered]

    fast = results()
    assert [len(c.tokens) for c in fast] == [10, 10, 3]
    plainly(monkeypatch, engine)
    assert_same(results(), fast)


def test_generate_fallback_respects_cache_tokens_and_max_rows(monkeypatch):
    model = tiny_model("llama")  # prompts of seven tokens at most, completions of ten
    fast = NativeEngine(model, EOS, PAD).generate(PROMPTS, 3, PARAMS, seed=0)
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    for cache_tokens, max_rows, rows in ((17 * 4, 256, 4), (10_000, 5, 5)):
        monkeypatch.setattr(native_engine, "MAX_ROWS", max_rows)
        engine = plainly(monkeypatch, NativeEngine(model, EOS, PAD, cache_tokens=cache_tokens))
        assert_same(engine.generate(PROMPTS, 3, PARAMS, seed=0), fast)
        assert max(shapes) == rows
        shapes.clear()


def test_cache_size_stays_near_limit(monkeypatch):
    """A long prompt leaves no wide slots behind for the short ones that follow it."""
    reserved = []

    class Watched(continuous_batching.BatchingSession):
        def step(self):
            finished = super().step()
            stores = (self.prompt_cache, self.own_cache)
            reserved.append(sum(store.slots * store.width for store in stores))
            return finished

    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=2048)
    prompts = [[5, 9] * 640, *([7, 2, i] * 20 for i in range(20))]
    params = SamplingParams(max_tokens=60)
    expected = NativeEngine(model, [], PAD).generate(prompts, 1, params, seed=0)
    monkeypatch.setattr("rlhf_pg.rollout.native.engine.BatchingSession", Watched)
    engine = NativeEngine(model, [], PAD, cache_tokens=4000)
    assert_same(engine.generate(prompts, 1, params, seed=0), expected)
    assert max(reserved) < 1.6 * 4000
