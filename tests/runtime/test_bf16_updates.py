"""Updates of bfloat16 weights through float32 copies."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from rlhf_pg.runtime import Runtime

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


def weights_after(steps, lr=1e-3):
    """1 at first, under a gradient of 1: every step of AdamW is then one of length `lr`."""
    module = nn.Linear(50, 40, bias=False).bfloat16()
    nn.init.ones_(module.weight)
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.0)
    trained = RUNTIME.prepare(module, optimizer)
    for _ in range(steps):
        trained.backward(module.weight.sum())
        trained.step()
    return module.weight.detach().float()


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
    moved = weights_after(steps, lr=lr)
    assert moved.eq(1 - steps * lr).all()


def test_micro_batches_are_summed_in_float32() -> None:
    """In bfloat16 the sum of 1 and 2^-9 is 1, however often that is added."""
    module = nn.Linear(3, 1, bias=False).bfloat16()
    trained = RUNTIME.prepare(module, adamw(module))
    for number in range(129):
        with trained.micro_batch(last=number == 128):
            trained.backward(module.weight.sum() * (2.0**-9 if number else 1.0))
    gradient = trained.gradient(module.weight)
    assert gradient.dtype == torch.float32
    assert gradient.eq(1.25).all()
    assert module.weight.grad is None  # two bytes per weight are gone


def test_model_can_be_trained_by_another_trainer() -> None:
    """A trainer that is there no more, or is not asked, takes none of its gradients."""
    module = nn.Linear(3, 1, bias=False).bfloat16()
    first = RUNTIME.prepare(module, adamw(module))
    first.backward(module.weight.sum())
    first.step()
    second = RUNTIME.prepare(module, adamw(module))
    second.backward(module.weight.sum())
    assert first.gradient(module.weight) is None
    assert second.gradient(module.weight).eq(1).all()
    module.float()
    module.weight.sum().backward()
    assert module.weight.grad.eq(1).all()


def test_non_finite_gradient_changes_neither_weights_nor_masters() -> None:
    module = Mixed()
    trained = RUNTIME.prepare(module, adamw(module))
    before = [p.clone() for p in module.parameters()]
    trained.backward(sum(parameter.sum() for parameter in module.parameters()))
    trained.gradient(module.first.weight)[0, 0] = torch.nan
    assert math.isnan(trained.step())
    assert all(a.equal(b) for a, b in zip(before, module.parameters(), strict=True))
    masters = {p: value for p, key, value in trained.state() if key == "master"}
    assert all(masters[p].equal(p.float()) for p in masters)


def test_weight_without_gradient_is_unchanged() -> None:
    """Between two numbers of bfloat16 a copy of it would move the weight."""
    module = Mixed()
    trained = RUNTIME.prepare(module, adamw(module))
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


def test_optimizer_with_bf16_moments_raises() -> None:
    module = Mixed()
    optimizer = adamw(module)
    module(INPUT).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"moments already, which bfloat16.*give a new optimizer"):
        RUNTIME.prepare(module, optimizer)
