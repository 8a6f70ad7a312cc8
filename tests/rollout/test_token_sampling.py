"""The drawing of one token, and the noise behind it."""

import itertools
import math

import pytest
import torch

from rlhf_pg.rollout import SamplingParams
from rlhf_pg.rollout.token_sampling import row_key, sample, uniform as uniform_of_key
from tests.test_rng import splitmix64

LAST = 1 - 2.0**-52  # the largest number that `uniform` gives
INF = float("inf")
# Out of order, so that a token's id is not its rank: sorted, 0.4 0.3 0.15 0.1 0.05.
PROBS = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15], dtype=torch.float64)

# Parameters, and the ids that they keep of PROBS.
TRUNCATIONS = [
    ({"top_k": 1}, [1]),
    ({"top_k": 2}, [1, 3]),
    ({"top_k": 99}, [0, 1, 2, 3, 4]),
    ({"top_p": 0.35}, [1]),  # always at least one
    ({"top_p": 0.6}, [1, 3]),  # the token that crosses the threshold is kept
    ({"top_p": 0.8}, [1, 3, 4]),
    ({"min_p": 0.3}, [1, 3, 4]),  # at least 0.3 * 0.4
    ({"min_p": 1.0}, [1]),
    ({"top_k": 3, "top_p": 0.8}, [1, 3]),  # masses after top-k: 0.47 0.35 0.18
    ({"top_p": 0.8, "min_p": 0.5}, [1, 3]),
    ({"temperature": 0.5, "top_p": 0.8}, [1, 3]),  # masses at 0.5: 0.56 0.32 0.08
    ({"temperature": 0.5, "min_p": 0.3}, [1, 3]),  # and 0.09 / 0.16 passes, 0.0225 / 0.16 not
    ({"temperature": 2.0, "min_p": 0.4}, [0, 1, 3, 4]),  # sqrt(0.1 / 0.4) passes
]


def uniform(seed: int, draws: torch.Tensor, samples: torch.Tensor, position: int) -> torch.Tensor:
    return uniform_of_key(row_key(seed, draws, samples), position)


def noise_of(n: int, seed: int = 0) -> torch.Tensor:
    return uniform(seed, torch.arange(n), torch.zeros(n, dtype=torch.long), position=0)


def distribution(params: SamplingParams, kept: list[int]) -> torch.Tensor:
    """PROBS after temperature, renormalised on the kept ids."""
    weights = torch.zeros_like(PROBS)
    weights[kept] = PROBS[kept] ** (1 / params.temperature)
    return weights / weights.sum()


@pytest.mark.parametrize(("fields", "kept"), TRUNCATIONS)
def test_logprobs_are_renormalized_over_kept_ids(fields, kept):
    params = SamplingParams(**fields)
    noise = torch.linspace(0, LAST, 1001, dtype=torch.float64)
    ids, logprobs = sample(PROBS.log().expand(1001, -1), params, noise)
    assert set(ids.tolist()) == set(kept)
    torch.testing.assert_close(logprobs, distribution(params, kept).log()[ids])


@pytest.mark.parametrize("temperature", [0.25, 0.5, 2.0])
def test_temperature_matches_closed_form(temperature):
    params = SamplingParams(temperature=temperature)
    noise = torch.linspace(0, LAST, 101, dtype=torch.float64)
    ids, logprobs = sample(PROBS.log().expand(101, -1), params, noise)
    powers = PROBS ** (1 / temperature)
    torch.testing.assert_close(logprobs.exp(), (powers / powers.sum())[ids], rtol=1e-12, atol=0)


@pytest.mark.parametrize("noise", [0.0, LAST])
def test_temperature_zero_is_greedy_with_logprobs_at_one(noise):
    logits = torch.stack([PROBS, PROBS.flip(0)]).log() + 3  # unnormalised, as logits are
    params = SamplingParams(temperature=0)
    ids, logprobs = sample(logits, params, torch.full((2,), noise, dtype=torch.float64))
    assert ids.tolist() == [1, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.4, 0.4], dtype=torch.float64))


@pytest.mark.parametrize("low", [-INF, -1e4])  # probability 0, and one that underflows to 0
@pytest.mark.parametrize(("noise", "drawn"), [(0.0, 2), (LAST, 5)])
def test_zero_probability_tokens_are_never_drawn(noise, drawn, low):
    logits = torch.tensor([[low, low, 0.3, low, -1.0, 0.7, low]])
    ids, logprobs = sample(logits, SamplingParams(), torch.tensor([noise], dtype=torch.float64))
    assert ids.tolist() == [drawn]
    assert logprobs.isfinite().all()


def test_last_token_of_large_vocabulary_is_reachable():
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(0))
    ids, _ = sample(logits, SamplingParams(), torch.full((64,), LAST, dtype=torch.float64))
    assert (ids == 49_999).all()


def test_tokens_rarer_than_float32_epsilon_keep_their_share():
    logits = torch.tensor([0.0, -22, -22, -22])
    rare = math.exp(-22)  # 2.8e-10
    noise = 1 - rare * torch.tensor([3.5, 2.5, 1.5, 0.5], dtype=torch.float64)
    ids, _ = sample(logits.expand(4, -1), SamplingParams(), noise)
    assert ids.tolist() == [0, 1, 2, 3]


def test_each_token_owns_half_open_noise_interval():
    edges = [0.0, 0.25 - 2**-52, 0.25, 0.5, 0.75 - 2**-52, 0.75, LAST]
    noise = torch.tensor(edges, dtype=torch.float64)
    ids, _ = sample(torch.zeros(7, 4), SamplingParams(), noise)
    assert ids.tolist() == [0, 0, 1, 2, 2, 3, 3]


def test_half_precision_logits_are_sampled_in_float32():
    params = SamplingParams(temperature=0.7)
    logits = 3 * torch.randn(64, 50_000, generator=torch.Generator().manual_seed(0))
    logits = logits.bfloat16()
    ids, logprobs = sample(logits, params, noise_of(64))
    exact = (logits.double() / 0.7).log_softmax(-1)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), exact[range(64), ids], rtol=0, atol=1e-5)


def expected_uniform(seed: int, draw: int, sample: int, position: int) -> float:
    word = 0
    for key in (seed, draw, sample, position):
        word = splitmix64(word + key)
    return (word >> 12) / 2**52


def one(seed: int, draw: int, sample: int, position: int) -> float:
    return uniform(seed, torch.tensor([draw]), torch.tensor([sample]), position).item()


@pytest.mark.parametrize("seed", [0, 42, 2**63, -1])
def test_uniform_matches_reference_generator(seed):
    for at in itertools.product([0, 1, 2**40], [0, 3, 1000], [0, 1, 4095]):
        assert one(seed, *at) == expected_uniform(seed, *at)


def test_first_noise_values_are_pinned():
    """A release that changes these changes every run: it must say so."""
    assert one(0, 0, 0, 0) == 0.1296456182997474
    assert one(42, 0, 0, 1) == 0.4211658554149422
    assert one(42, 7, 3, 11) == 0.9581007961503081


def test_every_coordinate_gives_distinct_noise():
    draws, samples = torch.cartesian_prod(torch.arange(30), torch.arange(30)).T
    noise = [uniform(seed, draws, samples, i) for seed in range(30) for i in range(30)]
    assert len(torch.cat(noise).unique()) == 30**4
