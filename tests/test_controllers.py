"""The controllers, step by step against sequences worked out by hand."""

import json

import pytest

from rlhf_pg.kl import AdaptiveKLController, KLAdaptiveRate, PenaltyKLController
from rlhf_pg.trainers.controllers import EntropyController

NAN, INF = float("nan"), float("inf")


@pytest.mark.proves("rlhf_pg.kl.AdaptiveKLController")
@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.6, 0.1001),  # error 0.1: 0.1 * (1 + 0.1 * 100 / 10_000)
        (5.4, 0.0999),
        (60.0, 0.1002),  # error 9, clipped to 0.2
        (0.0, 0.0998),  # error -1, clipped to -0.2
        (-6.0, 0.0998),  # k1 of a sample may be negative
        (INF, 0.1002),
        (6.0, 0.1),
    ],
)
def test_adaptive_controller_follows_clipped_error(kl, expected):
    controller = AdaptiveKLController(coef=0.1, target=6.0, horizon=10_000)
    controller.update(kl, num_samples=100)
    assert controller.coef == pytest.approx(expected, rel=1e-12)


@pytest.mark.proves("rlhf_pg.kl.PenaltyKLController")
@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.0, 0.5), (1.99, 0.5), (2.0, 1), (3.0, 1), (4.5, 1), (4.51, 2), (100.0, 2)],
)
def test_penalty_controller_halves_below_and_doubles_above(kl, expected):
    controller = PenaltyKLController(coef=1.0, target=3.0)  # bounds 3 / 1.5 = 2 and 3 * 1.5 = 4.5
    controller.update(kl)
    assert controller.coef == expected


@pytest.mark.proves("rlhf_pg.trainers.controllers.EntropyController")
def test_entropy_controller_rises_below_and_falls_above_target():
    controller = EntropyController(coef=0.25, target=0.5, delta=0.125, minimum=0.0, maximum=0.5)
    steps = [
        (0.4, 0.375),
        (0.5, 0.375),  # at the target nothing moves
        (0.49, 0.5),
        (0.0, 0.5),  # held at the maximum
        (0.51, 0.375),
        (2.0, 0.25),
        (2.0, 0.125),
        (2.0, 0.0),
        (2.0, 0.0),  # held at the minimum
        (0.1, 0.125),
    ]
    for entropy, expected in steps:
        controller.update(entropy)
        assert controller.coef == expected


def test_entropy_controller_stops_at_off_step_bounds():
    controller = EntropyController(coef=0.3, target=1.0, delta=0.25, minimum=0.1, maximum=0.4)
    controller.update(0.0)
    assert controller.coef == 0.4
    controller.update(2.0)
    controller.update(2.0)
    assert controller.coef == 0.1


@pytest.mark.proves("rlhf_pg.kl.KLAdaptiveRate")
@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.0, 2.25),
        (0.124, 2.25),
        (0.125, 1.5),  # half the target exactly, still inside
        (0.25, 1.5),
        (0.5, 1.5),  # twice the target exactly, still inside
        (0.501, 1.0),
        (INF, 1.0),
    ],
)
def test_rate_falls_above_twice_target_and_rises_below_half(kl, expected):
    rate = KLAdaptiveRate(target=0.25, coef=1.5)
    rate.update(kl)
    assert rate.coef == expected


def test_rate_starts_at_one_and_stays_within_factor_ten():
    rate = KLAdaptiveRate(target=0.01)
    assert rate.coef == 1
    for expected in (1.5, 2.25, 3.375, 5.0625, 7.59375, 10, 10):
        rate.update(0.0)
        assert rate.coef == expected
    rate = KLAdaptiveRate(target=0.01, coef=0.225)
    for expected in (0.15, 0.1, 0.1):
        rate.update(1.0)
        assert rate.coef == pytest.approx(expected, rel=1e-12)
    assert rate.coef == 0.1


CONTROLLERS = {
    "adaptive": lambda: AdaptiveKLController(coef=0.1, target=1.0, horizon=10.0),
    "penalty": lambda: PenaltyKLController(coef=0.1, target=1.0),
    "entropy": lambda: EntropyController(0.1, target=1.0, delta=0.01, minimum=0.0, maximum=1.0),
    "rate": lambda: KLAdaptiveRate(target=1.0),
}


def update(controller, value):
    counted = isinstance(controller, AdaptiveKLController)
    controller.update(value, **({"num_samples": 4} if counted else {}))


@pytest.mark.parametrize("new", CONTROLLERS.values(), ids=CONTROLLERS)
def test_nan_measurement_leaves_controller_unchanged(new):
    controller = new()
    update(controller, NAN)
    assert controller == new()
    update(controller, 100.0)
    assert controller != new()


@pytest.mark.parametrize("new", CONTROLLERS.values(), ids=CONTROLLERS)
def test_controller_state_survives_json(new):
    controller = new()
    update(controller, 100.0)
    restored = type(controller)(**json.loads(json.dumps(vars(controller))))
    for each in (controller, restored):
        update(each, 0.01)
    assert restored == controller
