"""Attention without padding, with the kernel of a GPU played by a softmax in plain torch."""

import logging
from collections import deque
from dataclasses import replace

import pytest
import torch

from rlhf_pg.models.attention import Heads, attention_support
from rlhf_pg.rollout import NativeEngine, Request
from rlhf_pg.rollout.native import continuous_batching
from rlhf_pg.rollout.native.compiled import Compiled
from rlhf_pg.rollout.native.flash_attention import QUERIES, FlatKeyValues
from rlhf_pg.rollout.native.kept import forward
from rlhf_pg.rollout.native.slots import Prompt, Row
from rlhf_pg.rollout.native.unpadded_kv_cache import Places, Unpadded
from tests.device.pretend import flash
from tests.rollout.native.test_engine import EOS, PAD, PARAMS, PROMPTS, assert_same, char_tokenizer
from tests.tiny import ARCHS, tiny_model

flash.install("CPU", (torch.float32, torch.float64))


class WithFlash(continuous_batching.BatchingSession):
    """A session as on a GPU in 16 bits, without graphs."""

    looks = 8

    def __init__(self, *args) -> None:
        super().__init__(*args)
        layers, device = attention_support(self.model).layers, self.model.device
        self.stores = Unpadded(self.params.max_tokens, layers, device)
        self.tokens_per_look = self.looks


@pytest.fixture
def flashing(monkeypatch):
    """Around sampling in that way."""

    def change(session=WithFlash):
        monkeypatch.setattr("rlhf_pg.rollout.native.engine.BatchingSession", session)

    return change


@pytest.mark.parametrize(
    ("arch", "cache_tokens"), [*((arch, 100) for arch in ARCHS), ("qwen3", None), ("gpt2", 1)]
)
def test_samples_match_default_attention(flashing, arch, cache_tokens):
    """Rows that enter, leave and move, gaps that are filled and room that grows."""
    model = tiny_model(arch, dtype=torch.float64)
    expected = NativeEngine(model, EOS, PAD).generate(PROMPTS, 6, PARAMS, seed=0)
    flashing()
    engine = NativeEngine(model, EOS, PAD, cache_tokens=cache_tokens)
    assert_same(engine.generate(PROMPTS, 6, PARAMS, seed=0), expected)


@pytest.mark.parametrize("n", [1, QUERIES + 30])
def test_groups_of_any_size_match_default_attention(flashing, n):
    """A group that is cut into runs, and rows that share their prompt with nobody."""
    model = tiny_model("gpt2", dtype=torch.float64)  # no query heads share a key head
    expected = NativeEngine(model, EOS, PAD).generate(PROMPTS, n, PARAMS, seed=0)
    flashing()
    assert_same(NativeEngine(model, EOS, PAD).generate(PROMPTS, n, PARAMS, seed=0), expected)


@pytest.mark.parametrize("fields", [{"top_p": 0.7}, {"stop": ["bd", "k"]}, {"max_tokens": 1}])
def test_truncated_and_stopped_samples_match_default_attention(flashing, fields):
    model, params = tiny_model("qwen2", dtype=torch.float64), replace(PARAMS, **fields)
    engine = NativeEngine(model, EOS, PAD, char_tokenizer())
    expected = engine.generate(PROMPTS, 4, params, seed=0)
    flashing()
    assert_same(engine.generate(PROMPTS, 4, params, seed=0), expected)


def prompt_of(length: int, slot: int, start: int = 0) -> Prompt:
    request = Request(tokens=[1] * length, prompt_index=0)
    return Prompt(request, limit=4, waiting=deque(), slot=slot, start=start)


def test_row_places_by_hand():
    """Rows 0 to 4 of prompts b, a, b, b, a in runs of two; three rows fill up."""
    a, b = prompt_of(3, slot=0, start=7), prompt_of(5, slot=1, start=0)
    rows = [Row(prompt, 0) for prompt in (b, a, b, b, a)]
    places = Places.of([a, b], rows, count=8, most=2, device=torch.device("cpu"))
    assert places.positions.tolist() == [5, 3, 5, 5, 3, 0, 0, 0]
    assert places.order.tolist() == [1, 4, 0, 2, 3, 5, 6, 7]
    assert places.order[places.back].tolist() == list(range(8))
    # a's two rows, two of b's and the third, two that fill up and one: five runs, three empty ones.
    assert places.runs.tolist() == [0, 2, 4, 5, 7, 8, 8, 8, 8]
    assert places.starts.tolist() == [7, 0, 0, 7, 7, 0, 0, 0, 0]
    assert places.lengths.tolist() == [3, 5, 5, 1, 1, 0, 0, 0]
    assert {x.dtype for x in (places.runs, places.starts, places.lengths)} == {torch.int32}


def test_prompt_is_placed_in_first_fitting_gap():
    store = Unpadded(4, {0: Heads(2, 2, 8, torch.float32)}, torch.device("cpu"))
    first, second, third = (prompt_of(length, slot=i) for i, length in enumerate((5, 3, 4)))
    store.place([first, second, third], [first, second, third])
    assert [p.start for p in (first, second, third)] == [0, 5, 8]
    small, large = prompt_of(2, slot=1), prompt_of(4, slot=3)
    store.place([small, large], [first, small, third, large])  # second has left
    assert [p.start for p in (small, large)] == [5, 12]


def test_growing_token_store_keeps_contents():
    tokens = FlatKeyValues({3: Heads(2, 2, 8, torch.float32)}, torch.device("cpu"))
    tokens.reserve(4)
    key, value = torch.randn(2, 2, 3, 8)
    tokens.write(3, torch.tensor([2, 0, 1]), key, value)
    tokens.reserve(9)
    keys, values = tokens.layers[3]
    assert keys.shape == values.shape == (9, 2, 8)
    assert torch.equal(keys[:3], key[:, [1, 2, 0]].transpose(0, 1))
    assert torch.equal(values[:3], value[:, [1, 2, 0]].transpose(0, 1))


@pytest.mark.parametrize(
    ("dtype", "options", "fits"),
    [
        (torch.bfloat16, {}, True),
        (torch.float16, {}, True),
        (torch.float32, {}, False),
        (torch.bfloat16, {"head_dim": 12}, False),
        (torch.bfloat16, {"head_dim": 264}, False),
    ],
)
def test_kernel_accepts_only_supported_heads(dtype, options, fits):
    assert attention_support(tiny_model("qwen3", dtype=dtype, **options)).flash == fits


# --- compiled -------------------------------------------------------------------------------------


def decoding(calls: list, run=None):
    """A session that runs every decoding step once more by another function, and compares."""

    class Twice(WithFlash):
        looks = 1

        def __init__(self, *args) -> None:
            super().__init__(*args)
            self.forward = self.both

        def both(self, *inputs):
            logits, rows = forward(self.model, *inputs), len(self.rows)
            torch.testing.assert_close(run(self.model, *inputs)[:rows], logits[:rows])
            calls.append(len(inputs[0]))
            return logits

    return Twice


def test_step_is_one_graph_compiled_once(flashing):
    """Whatever the number of rows, in two sessions, with weights that are copies in the second."""
    compiled, calls = [], []

    def backend(module, inputs):
        compiled.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    torch._dynamo.reset()
    run = Compiled(forward)
    run.compiled = torch.compile(forward, dynamic=True, fullgraph=True, backend=backend)
    flashing(decoding(calls, run))
    for _ in range(2):
        model = tiny_model("qwen3", num_hidden_layers=1)
        NativeEngine(model, EOS, PAD).generate(PROMPTS, 6, PARAMS, seed=0)
    assert run.works
    assert len(set(calls)) > 1
    assert len(compiled) == 1


def test_uncompilable_function_runs_eagerly_and_logs_once(monkeypatch, caplog):
    def refuse(module, inputs):
        raise RuntimeError("Failed to find C compiler")

    torch._dynamo.reset()
    run = Compiled(lambda x: x + 1)
    run.compiled = torch.compile(run.function, backend=refuse)
    with caplog.at_level(logging.WARNING, "rlhf_pg"):
        assert [run(torch.tensor(i)).item() for i in range(3)] == [1, 2, 3]
    assert caplog.text.count("without torch.compile") == 1
    assert "Failed to find C compiler" in caplog.text


def test_out_of_memory_is_no_compilation_failure():
    run = Compiled(lambda: 1)

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    run.compiled = full
    with pytest.raises(torch.OutOfMemoryError):
        run()
    assert run.works
