"""Draws that rounding would decide: each is decided by its row alone."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_pg.rollout import Completion, NativeEngine, Request, SamplingParams
from rlhf_pg.rollout.native import close_draws, continuous_batching
from rlhf_pg.rollout.native.choosing import Chooser
from rlhf_pg.rollout.native.kept import forward
from tests.rollout.native.test_drafts import drafting
from tests.rollout.native.test_engine import PAD, PROMPTS
from tests.tiny import tiny_model

PARAMS = SamplingParams(temperature=0.8, max_tokens=9)
N = 3
OPTIONS: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}]
OPTIONS.append({"temperature": 0.0})


def one_by_one(engine: NativeEngine, params: SamplingParams, seed: int) -> list[Completion]:
    """What `generate` returns for N samples of `PROMPTS`, with no row beside another."""
    found = []
    for place in range(len(PROMPTS) * N):
        i, sample = divmod(place, N)
        with engine.session(params, seed) as session:
            session.add(Request(tokens=PROMPTS[i], prompt_index=i, samples=(sample,)))
            while not session.idle:
                found += [finished.completion for finished in session.step()]
    return found


def same(a: Sequence[Completion], b: Sequence[Completion]) -> bool:
    """Whether ids and log-probabilities agree bit by bit."""
    return [(c.tokens, c.logprobs) for c in a] == [(c.tokens, c.logprobs) for c in b]


@pytest.mark.parametrize("fields", OPTIONS)
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_close_draw_is_decided_by_row_alone(monkeypatch, arch, fields):
    """With a bound on rounding so wide that every draw is close."""
    monkeypatch.setattr(close_draws, "ROUNDING", 1e12)
    model, params = (
        tiny_model(arch),
        SamplingParams(**{"temperature": 0.8, "max_tokens": 9} | fields),
    )
    plain = NativeEngine(model, [], PAD)
    expected = one_by_one(plain, params, seed=0)
    assert same(plain.generate(PROMPTS, N, params, seed=0), expected)
    engine, pace = drafting(model, 5, [])
    for _ in range(2):
        assert same(engine.generate(PROMPTS, N, params, seed=0), expected)
    assert pace.kept > len(expected)


def disturbed(model: PreTrainedModel, size: float) -> Callable[..., Tensor]:
    """A forward pass whose logits are off by at most `size`, as told by the number of tokens."""

    def decode(ids: Tensor, *rest: Any) -> Tensor:
        logits = forward(model, ids, *rest)
        generator = torch.Generator().manual_seed(len(ids))
        noise = torch.rand(logits.shape[1], generator=generator, dtype=logits.dtype)
        return logits + size * (2 * noise - 1)

    return decode


class Careless(Chooser):
    """A chooser that never looks at a row alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.forward = None


@pytest.mark.parametrize("fields", OPTIONS)
def test_errors_that_depend_on_batch_decide_no_draw(monkeypatch, fields):
    """Errors of up to 1e-2 in logits, for which the bound is widened."""
    model, params = (
        tiny_model("llama"),
        SamplingParams(**{"temperature": 0.8, "max_tokens": 9} | fields),
    )
    if params.temperature == 0:  # two tokens are nearly as likely everywhere
        with torch.no_grad():
            model.lm_head.weight[20:] = model.lm_head.weight[:20] * 1.0001
    monkeypatch.setattr(close_draws, "ROUNDING", 2e5)

    def ids(chooser: type[Chooser]) -> list[list[list[int]]]:
        monkeypatch.setattr(continuous_batching, "Chooser", chooser)
        plain, (engine, _) = NativeEngine(model, [], PAD), drafting(model, 5, [])
        for one in (plain, engine):
            monkeypatch.setattr(one, "decoder", partial(disturbed, model, 1e-2))
        sampled = []
        for seed in range(2):
            ways = [one_by_one(plain, params, seed), plain.generate(PROMPTS, N, params, seed)]
            ways += [engine.generate(PROMPTS, N, params, seed) for _ in range(2)]
            sampled.append([[c.tokens for c in completions] for completions in ways])
        return [way for seeds in sampled for way in seeds[1:] if way != seeds[0]]

    assert not ids(Chooser)
    assert ids(Careless)


def test_half_precision_is_not_computed_again(monkeypatch):
    """Its rounding decides so many draws that nothing would be saved by batches."""
    monkeypatch.setattr(Chooser, "_alone", None)  # which would fail
    monkeypatch.setattr(close_draws, "ROUNDING", 1e12)
    for dtype in (torch.bfloat16, torch.float16):
        completions = NativeEngine(tiny_model("llama", dtype=dtype), [], PAD).generate(
            PROMPTS, 1, PARAMS, seed=0
        )
        assert all(len(completion.tokens) == 9 for completion in completions)
