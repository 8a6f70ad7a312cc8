"""Updates of bfloat16 weights: through float32 copies, rounded at random, or lost."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from rlhf_pg.runtime import Runtime, bf16_updates
from rlhf_pg.runtime.bf16_updates import round_stochastically

RUNTIME = Runtime()
INPUT = torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.5, 0.75, -0.5, 1.0]])
# Between 1 and the next number in bfloat16.
STEP = 2.0**-7


class Mixed(nn.Module):
    """Layers in bfloat16 under a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8).bfloat16()
        self.second = nn.Linear(8, 3).bfloat16()
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.second(self.first(x.bfloat16()).tanh()).float())


def adamw(module, lr=1e-3):
    return torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.1)


def weights_after(update, steps, seed=0, lr=1e-3):
    """1 at first, under a gradient of 1: every step of AdamW is then one of length `lr`."""
    module = nn.Linear(50, 40, bias=False).bfloat16()
    nn.init.ones_(module.weight)
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.0)
    trained = RUNTIME.prepare(module, optimizer, bfloat16_update=update, seed=seed)
    for _ in range(steps):
        module.weight.grad = torch.ones_like(module.weight)
        trained.step()
    return module.weight.detach().float()


# -------------------------------------------------------------------------------- float32 masters


@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_masters_match_float32_adamw_with_rounded_forward(max_norm) -> None:
    module, by_hand = Mixed(), Mixed()
    trained = RUNTIME.prepare(module, adamw(module), max_norm)
    # The gradient passes the cast as if it were not there.
    start = {name: p.detach().float().clone() for name, p in by_hand.named_parameters()}
    weights = {name: nn.Parameter(p.clone()) for name, p in start.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, weight_decay=0.1)
    for step in range(30):
        trained.backward(module(INPUT * step).square().sum())
        norm = trained.step()
        cast = {name: w if name.startswith("head") else w.bfloat16() for name, w in weights.items()}
        functional_call(by_hand, cast, INPUT * step).square().sum().backward()
        expected = nn.utils.clip_grad_norm_(weights.values(), max_norm or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        assert norm == float(expected)
    for name, parameter in module.named_parameters():
        assert parameter.equal(weights[name].to(parameter.dtype))
        assert not parameter.equal(start[name].to(parameter.dtype))
    masters = {p: value for p, key, value in trained.state() if key == "master"}
    assert all(masters[p].equal(weights[name]) for name, p in module.named_parameters())


def test_updates_below_last_bit_add_up_only_in_masters() -> None:
    steps, lr = 100, STEP / 20
    assert weights_after("nearest", steps, lr=lr).eq(1).all()
    moved = weights_after("master_weights", steps, lr=lr)
    assert moved.eq(1 - steps * lr).all()


@pytest.mark.parametrize("update", ["master_weights", "stochastic_rounding"])
def test_non_finite_gradient_changes_neither_weights_nor_masters(update) -> None:
    module = Mixed()
    trained = RUNTIME.prepare(module, adamw(module), bfloat16_update=update)
    before = [p.clone() for p in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    module.first.weight.grad[0, 0] = torch.nan
    assert math.isnan(trained.step())
    assert all(a.equal(b) for a, b in zip(before, module.parameters(), strict=True))
    masters = {p: value for p, key, value in trained.state() if key == "master"}
    assert all(masters[p].equal(p.float()) for p in masters)


@pytest.mark.parametrize("update", ["master_weights", "stochastic_rounding"])
def test_weight_without_gradient_is_unchanged(update) -> None:
    """Between two numbers of bfloat16 a copy of it would move the weight."""
    module = Mixed()
    trained = RUNTIME.prepare(module, adamw(module), bfloat16_update=update)
    trained.backward(module(INPUT).sum())
    trained.step()
    before = {name: p.clone() for name, p in module.named_parameters()}
    trained.backward(module(INPUT).sum())
    trained.zero_grad_of(module.first)
    trained.step()
    changed = {name for name, p in module.named_parameters() if not p.equal(before[name])}
    assert "head.weight" in changed
    assert not any(name.startswith("first") for name in changed)
    counts = {p: int(value) for p, key, value in trained.state() if key == "step"}
    assert [counts[p] for p in (module.first.weight, module.second.weight)] == [1, 2]


def test_masters_follow_weights_loaded_without_masters() -> None:
    module = Mixed()
    trained = RUNTIME.prepare(module, adamw(module))
    with torch.no_grad():
        module.first.weight.fill_(3.0)
    trained.load_state([])
    masters = {p: value for p, key, value in trained.state() if key == "master"}
    assert masters[module.first.weight].eq(3.0).all()


@pytest.mark.parametrize("update", ["master_weights", "stochastic_rounding"])
def test_optimizer_with_bf16_moments_raises(update) -> None:
    module = Mixed()
    optimizer = adamw(module)
    module(INPUT).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="moments already, of bfloat16 weights: give a new one"):
        RUNTIME.prepare(module, optimizer, bfloat16_update=update)
    RUNTIME.prepare(module, optimizer, bfloat16_update="nearest")


def test_deepspeed_with_other_bf16_update_raises() -> None:
    zero = pytest.importorskip("rlhf_pg.runtime.deepspeed")
    engine = object.__new__(zero.DeepSpeedBackend)
    with pytest.raises(ValueError, match="bfloat16_update nearest: DeepSpeed keeps float32 mast"):
        engine._new_updates("nearest", 0)


# ---------------------------------------------------------------------------- stochastic rounding


def rounded(x, key=0, offset=0):
    out = torch.empty_like(x, dtype=torch.bfloat16)
    round_stochastically(x, out, torch.tensor(key), offset)
    return out.float()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**90])
@pytest.mark.parametrize("share", [1 / 65536, 1 / 8, 0.5, 0.9])
def test_number_is_rounded_to_neighbours_proportionally(share, scale, sign) -> None:
    count, low = 200_000, sign * scale * (1 + 3 * STEP)
    high = sign * scale * (1 + 4 * STEP)
    got = rounded(torch.full((count,), low + share * (high - low)))
    assert set(got.tolist()) <= {low, high}
    up = int((got == high).sum())
    sigma = (count * share * (1 - share)) ** 0.5
    assert abs(up - count * share) <= 5 * sigma
    assert up > 0


def test_bf16_numbers_are_rounded_to_themselves() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = every[every.isfinite()].float()
    assert rounded(numbers).equal(numbers)


def test_non_finite_numbers_stay_non_finite() -> None:
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    assert rounded(nans).isnan().all()
    infinite = torch.tensor([torch.inf, -torch.inf])
    assert rounded(infinite).equal(infinite)


def test_every_position_and_key_has_own_noise() -> None:
    """Of two independent halves a quarter each: 250 are expected, and their sigma is 14."""
    half = torch.full((1000,), 1 + STEP / 2)
    first, second, shifted = rounded(half), rounded(half, key=1 << 40), rounded(half, offset=1000)
    for other in (second, shifted):
        both = int(((first > 1) & (other > 1)).sum())
        assert abs(both - 250) <= 70


def test_chunk_is_rounded_as_in_whole(monkeypatch) -> None:
    monkeypatch.setattr(bf16_updates, "CHUNK", 17)
    x = torch.randn(7, 30, generator=torch.Generator().manual_seed(0))
    pieces = [rounded(part, offset=30 * i) for i, part in zip((0, 3, 6), x.split(3), strict=True)]
    monkeypatch.undo()
    assert torch.cat(pieces).equal(rounded(x))


def test_mean_of_rounded_updates_is_exact() -> None:
    """2000 weights after 50 updates of a twentieth of the last bit."""
    steps, lr = 50, STEP / 20
    moved = weights_after("stochastic_rounding", steps, lr=lr)
    # Of one update: p (1 - p) steps squared, below 1 half a step long.
    sigma = (steps * 0.1 * 0.9) ** 0.5 * (STEP / 2) / moved.numel() ** 0.5
    assert float(moved.double().mean()) == pytest.approx(1 - steps * lr, abs=5 * sigma)
    assert len(moved.unique()) > 3


def test_rounding_noise_depends_on_seed() -> None:
    first, again, other = (weights_after("stochastic_rounding", 5, seed) for seed in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)


def test_copies_take_no_memory_between_updates() -> None:
    module = Mixed()
    trained = RUNTIME.prepare(module, adamw(module), bfloat16_update="stochastic_rounding")
    for _ in range(2):
        copies = [p for g in trained.optimizer.param_groups for p in g["params"]]
        sizes = {p.untyped_storage().nbytes() for p in copies[:4]}
        assert sizes == {0}
        assert copies[4] is module.head.weight
        trained.backward(module(INPUT).sum())
        trained.step()
    assert all(copy.grad is None for copy in copies)
    moments = [s["exp_avg"].dtype for s in trained.optimizer.state.values()]
    assert moments == [torch.float32] * 6
