"""SplitMix64 against published numbers and plain integers; generators that go on as they were."""

import random

import numpy as np
import pytest
import torch

from rlhf_pg.rng import as_signed, mix, restore_rng, rng_tensors

STEP = 0x9E3779B97F4A7C15


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (0, 0xE220A8397B1DCDAF),
        (1234567, 6457827717110365317),
        (1234567 + STEP, 3203168211198807973),
    ],
)
def test_mix_matches_published_values(state, expected):
    assert mix(torch.tensor(as_signed(state))).item() == as_signed(expected)


def splitmix64(state):
    """The output in this state (Steele, Lea and Flood 2014), on Python's integers."""
    x = (state + STEP) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_mix_of_integers_of_any_size():
    states = [as_signed(i * STEP) for i in range(100)] + [-1, -(2**63), 2**63 - 1]
    assert mix(torch.tensor(states)).tolist() == [as_signed(splitmix64(x % 2**64)) for x in states]


def seed_everything(seed):
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def draw():
    return [
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        [random.random(), random.gauss(0, 1), random.getrandbits(70)],
        [np.random.random(), np.random.normal(), int(np.random.randint(2**40))],
    ]


@pytest.mark.parametrize("drawn", [0, 1, 2, 700])
def test_restored_generators_continue_from_saved_state(drawn):
    # An odd number of normal deviates leaves a second one in store, in python and in numpy.
    seed_everything(7)
    for _ in range(drawn):
        random.gauss(0, 1), np.random.normal(), torch.randn(1)
    states = {name: state.clone() for name, state in rng_tensors().items()}
    expected = draw()
    seed_everything(8)
    random.gauss(0, 1), np.random.normal()
    restore_rng(states)
    assert draw() == expected
