"""What truncation keeps, as the engine says it."""

from dataclasses import replace

import pytest
import torch

from rlhf_pg.rollout import NativeEngine, SamplingParams
from rlhf_pg.rollout.native.continuous_batching import BatchingSession
from rlhf_pg.rollout.token_sampling import ids_of, sample, support_mask
from tests.rollout.native.test_engine import EOS, PAD, PROMPTS, teacher_forced
from tests.rollout.test_token_sampling import PROBS, TRUNCATIONS, noise_of
from tests.tiny import tiny_model

CUTS = [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.8, "min_p": 0.05}]
PARAMS = SamplingParams(temperature=0.8, max_tokens=10)


@pytest.mark.parametrize(("fields", "ids"), TRUNCATIONS)
def test_kept_ids_by_hand(fields, ids) -> None:
    params = SamplingParams(**fields)
    [found] = ids_of(support_mask(PROBS.log()[None], params))
    assert found.dtype == torch.int32
    assert found.tolist() == ids


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", CUTS)
def test_tokens_and_logprobs_follow_kept_ids(fields, dtype) -> None:
    logits = (3 * torch.randn(500, 40, generator=torch.Generator().manual_seed(0))).to(dtype)
    params = SamplingParams(temperature=0.7, **fields)
    ids, logprobs = sample(logits, params, noise_of(500))
    mask = support_mask(logits, params)
    assert mask[range(500), ids].all()
    assert (~mask).any(1).all()
    p = (logits.double() / 0.7).softmax(-1)
    mass = torch.where(mask, p, 0.0).sum(1)
    expected = (p[range(500), ids] / mass).log()
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)


def test_rows_keep_different_numbers_of_ids() -> None:
    logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 0.0], [5.0, 0.0, 5.0]])
    found = ids_of(support_mask(logits, SamplingParams(top_p=0.9)))
    assert [ids.tolist() for ids in found] == [[1], [0, 1, 2], [0, 2]]


@pytest.mark.parametrize(
    ("fields", "truncates"),
    [
        ({}, False),
        ({"temperature": 0.5}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.999}, True),
        ({"min_p": 0.01}, True),
        ({"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.5}, False),  # greedy
    ],
)
def test_only_truncation_drops_ids(fields, truncates) -> None:
    params = SamplingParams(**fields)
    assert params.truncates == truncates
    mask = support_mask(torch.tensor([[0.0, 9.0, 1.0]]), params)
    assert (~mask).any().item() == truncates
    engine = NativeEngine(tiny_model("gpt2"), EOS, PAD)
    completions = engine.generate(PROMPTS, 2, replace(params, max_tokens=4), seed=0)
    assert all((c.support is not None) == truncates for c in completions)


class Looking(BatchingSession):
    """Looks at what has ended after several tokens, as on a GPU."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.tokens_per_look = 4


def change(monkeypatch, engine: NativeEngine, way: str) -> None:
    """Let it sample in another way."""
    if way == "rows wait":
        engine.cache_tokens = 60
    if way == "looks later":
        monkeypatch.setattr("rlhf_pg.rollout.native.engine.BatchingSession", Looking)
    if way == "by generate":
        monkeypatch.setattr(engine, "unsupported_reason", lambda longest: "of this test")


@pytest.mark.parametrize("way", ["at once", "rows wait", "looks later", "by generate"])
@pytest.mark.parametrize("fields", CUTS)
def test_each_completion_token_has_own_support(monkeypatch, fields, way) -> None:
    model, params = tiny_model("gpt2", dtype=torch.float64), replace(PARAMS, **fields)
    engine = NativeEngine(model, EOS, PAD)
    atol = 1e-5 if way == "by generate" else 1e-9  # `generate` hands over float32
    change(monkeypatch, engine, way)
    completions = engine.generate(PROMPTS, 4, params, seed=0)
    assert len({len(c.tokens) for c in completions}) > 3  # rows left the batch at many moments
    for i, completion in enumerate(completions):
        exact = teacher_forced(model, PROMPTS[i // 4], completion.tokens, params.temperature)
        expected = ids_of(support_mask(exact, SamplingParams(**fields)))
        assert completion.support is not None
        for t, (token, ids) in enumerate(zip(completion.tokens, completion.support, strict=True)):
            assert ids.tolist() == expected[t].tolist()
            mass = exact[t, ids.long()].logsumexp(0)
            logprob = (exact[t, token] - mass).item()
            assert completion.logprobs[t] == pytest.approx(logprob, abs=atol)
