"""A sampler that is not the policy ends the run in the step in which it is seen first."""

import copy
import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_pg import GRPOTrainer, PPOTrainer
from rlhf_pg.report.run_files import read
from rlhf_pg.rollout.native import continuous_batching
from rlhf_pg.runtime.processes import SHARED
from rlhf_pg.trainers import Callback
from rlhf_pg.trainers.agreement import LIMITS, Agreement, DisagreementError
from tests.rows import batch_of
from tests.trainers.conftest import of_task

LORA = {"use_peft": True, "lora_r": 4, "learning_rate": 1e-2}
PLANTED = 2  # the step, counted from 0, in which something begins to be wrong


class Planting(Callback):
    """Plant a fault before a step, and keep what the weights were before each."""

    def __init__(self, plant) -> None:
        self.plant, self.before = plant, []

    def on_step_begin(self, trainer) -> None:
        self.before.append(copy.deepcopy(trainer.model.state_dict()))
        if trainer.state.step == PLANTED:
            self.plant(trainer, self.before)


def sampling_from(trainer, weights=None, change=lambda model: None) -> None:
    """Make the engine sample from a copy of the policy with other weights or adapters."""
    model = copy.deepcopy(trainer.model)
    if weights is not None:
        model.load_state_dict(weights)
    change(model)

    @contextmanager
    def load_weights():
        trainer.sampler.engine.weights = model
        yield

    trainer.sampler.engine._load_weights = load_weights


def lora_layers(model):
    return [module for module in model.modules() if hasattr(module, "lora_B")]


def without_a_layer(model) -> None:
    lora_layers(model)[0].lora_B["default"].weight.data.zero_()


def scaled(model) -> None:
    for layer in lora_layers(model):
        layer.scaling["default"] *= 1.5


def sampled_with(monkeypatch, **changes):
    """Sample with other parameters than the config has."""
    real = continuous_batching.sample

    def sample(logits, params, noise):
        return real(logits, replace(params, **changes), noise)

    return lambda *_: monkeypatch.setattr(continuous_batching, "sample", sample)


def raw_logprobs(monkeypatch):
    """Return what the model says, before the temperature."""
    real = continuous_batching.sample

    def sample(logits, params, noise):
        ids, _ = real(logits, params, noise)
        return ids, logits.log_softmax(-1).gather(1, ids[:, None]).squeeze(1)

    return lambda *_: monkeypatch.setattr(continuous_batching, "sample", sample)


def shifted_positions(monkeypatch):
    real = continuous_batching.BatchingSession._forward

    def forward(self, ids, positions, layout, keep=0):
        return real(self, ids, positions + (positions > 0), layout, keep)

    return lambda *_: monkeypatch.setattr(continuous_batching.BatchingSession, "_forward", forward)


def kept_prompts(monkeypatch):
    """Keep the keys and values of prompts over an update, as a stale prefix cache does."""

    def remember(trainer, before) -> None:
        old = copy.deepcopy(trainer.model)
        old.load_state_dict(before[-2])
        real = continuous_batching.BatchingSession._prefill

        def from_old(self, fresh) -> None:
            model, self.model = self.model, old
            try:
                with torch.no_grad():
                    real(self, fresh)
            finally:
                self.model = model

        monkeypatch.setattr(continuous_batching.BatchingSession, "_prefill", from_old)

    return remember


def as_copy(**changes):
    return lambda _: lambda trainer, before: sampling_from(trainer, **changes)


def one_update_old(_):
    return lambda trainer, before: sampling_from(trainer, before[-2])


def from_base(model) -> None:
    model.base_model.disable_adapter_layers()


FAULTS = {
    "rollouts from the base model": (LORA, as_copy(change=from_base)),
    "one layer of an adapter missing": (LORA, as_copy(change=without_a_layer)),
    # In large batches, so that its updates go one way.
    "a stale adapter": (LORA | {"prompts_per_step": 16}, one_update_old),
    "alpha / r wrong": (LORA, as_copy(change=scaled)),
    "weights one update old": ({"learning_rate": 1e-4}, one_update_old),
    "weights one small update old": (
        {"learning_rate": 1e-5, "prompts_per_step": 8},
        one_update_old,
    ),
    "top-p in the sampler alone": ({}, lambda patch: sampled_with(patch, top_p=0.95)),
    "temperature in the loss alone": (
        {"temperature": 0.9},
        lambda patch: sampled_with(patch, temperature=1.0),
    ),
    "a position off by one": ({}, shifted_positions),
    "raw log-probabilities": ({"temperature": 0.9}, raw_logprobs),
    "a prefix cache kept over an update": ({}, kept_prompts),
}


@pytest.mark.parametrize(
    ("fault", "twice"),
    [
        *((fault, False) for fault in FAULTS),
        # Of several updates the first is compared by scores that are there before it.
        ("rollouts from the base model", True),
    ],
)
def test_planted_fault_ends_run_in_its_step(make, monkeypatch, fault, twice) -> None:
    options, planting = FAULTS[fault]
    planted = Planting(planting(monkeypatch))
    trainer = make(
        callbacks=[planted],
        max_steps=PLANTED + 1,
        num_iterations=1 + twice,
        **({"lr_scheduler_type": "constant"} | options),
    )
    with pytest.raises(DisagreementError) as raised:
        trainer.train()
    assert trainer.state.step == PLANTED
    assert SHARED in vars(raised.value)  # so several processes save the steps before
    assert "sampler" in str(raised.value)
    assert ("without the adapter" in str(raised.value)) == (fault == "rollouts from the base model")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (GRPOTrainer, LORA | {"temperature": 0.7}),
        (PPOTrainer, {"num_iterations": 2}),
        (GRPOTrainer, {"arch": "qwen3_5_text"}),
        (PPOTrainer, {"arch": "gpt_oss", **LORA}),
    ],
)
def test_sound_run_agrees_to_rounding(make, tmp_path, kind, options) -> None:
    options = dict(options)
    inputs = of_task(options.pop("arch")) if "arch" in options else {}
    make(kind, **options, **inputs).train()
    lines = list(read(tmp_path / "run" / "metrics.jsonl"))
    assert len(lines) == 3
    assert all(0 <= line["agreement/kl"] < 1e-11 for line in lines)
    assert all(0 < line["agreement/max"] < 1e-4 for line in lines)


def test_difference_is_measured_alone_where_a_correction_was_asked_for(
    make, monkeypatch, tmp_path
) -> None:
    sampled_with(monkeypatch, top_p=0.5)()
    make(sampler_correction="token_truncate", max_steps=1).train()
    (line,) = read(tmp_path / "run" / "metrics.jsonl")
    assert line["agreement/kl"] > 1e-3


def test_packing_that_leaks_between_rows_is_named(make, monkeypatch) -> None:
    trainer = make()
    own = trainer.learner.policy.forward

    def sees_others(batch, **options):
        out = own(batch, **options)
        return out._replace(logprobs=out.logprobs + 0.1 * (batch.num_rows - 1))

    monkeypatch.setattr(trainer.learner.policy, "forward", sees_others)
    with pytest.raises(DisagreementError, match=r"packing.*micro_batch_tokens"):
        trainer.train()
    assert trainer.state.step == 0


def test_model_that_padding_changes_is_refused(make) -> None:
    widths = [{"prompt": text, "answer": ""} for text in ("1+2=", "12+3=", "12+34=", "7+123=")]
    inputs = of_task("recurrent_gemma")
    with pytest.raises(DisagreementError, match="padding"):
        make(**inputs, train_dataset=widths).train()


def rows_of(sampler, policy):
    """A batch of one row, with the policy's log-probabilities of it."""
    tokens = list(range(1, len(sampler) + 1))
    batch = batch_of([[1]], [tokens], logprobs=[sampler])
    return batch.with_columns(old_logprobs=torch.tensor([policy]))


@pytest.fixture
def agreement():
    return new_agreement()


def new_agreement(**options: Any) -> Agreement:
    runtime = SimpleNamespace(
        device="cpu",
        all_reduce_sum=lambda x: x,
        gather=lambda x: (x, slice(0, len(x))),
        raise_together=lambda kind: nullcontext(),
    )
    policy = SimpleNamespace(window=0.0, model=torch.nn.Identity(), drops=False)
    return Agreement(torch.float32, runtime, policy, lambda batch: batch.old_logprobs, **options)


def test_metrics_match_hand_computed_means(agreement) -> None:
    agreement.refuses = False
    metrics = agreement.check(rows_of([-1.0, -2.0], [-1.5, -1.0]))
    d = torch.tensor([0.5, -1.0], dtype=torch.float64)
    assert metrics["agreement/kl"] == pytest.approx(((-d).exp() - 1 + d).mean().item(), rel=1e-7)
    assert metrics["agreement/max"] == 1.0


def test_small_fault_is_found_over_steps(agreement) -> None:
    """Noise of ten times the mean hides it in one step of 100 tokens, not in the mean of many."""
    generator = torch.Generator().manual_seed(0)
    agreement.compared_row = True
    agreement.sampler_limits = limits = LIMITS[torch.float32]._replace(kl=1.0, usual=1.0)
    found = None
    for step in range(1000):
        off = 8 * limits.mean * (1 + 10 * torch.randn(100, generator=generator))
        batch = rows_of([-1.0] * 100, (-1.0 - off).tolist())
        try:
            agreement.check(batch)
        except DisagreementError as error:
            found = step, str(error)
            break
    assert found is not None
    assert 5 < found[0] < 200
    assert "mean of 1 - exp" in found[1]


def test_float32_softmax_over_large_vocabulary_raises_no_alarm(agreement) -> None:
    logits = 3 * torch.randn(64, 256_000, generator=torch.Generator().manual_seed(0))
    exact, rounded = (x.log_softmax(-1)[:, 0] for x in (logits.double(), logits))
    assert (exact - rounded).mean().abs() > 5e-6
    agreement.compared_row = True
    for _ in range(20):
        agreement.check(rows_of(exact.tolist(), rounded.tolist()))


def test_jump_beyond_recent_steps_is_found(agreement) -> None:
    agreement.compared_row = True
    agreement.sampler_limits = LIMITS[torch.bfloat16]
    for d in (0.002, 0.01, 0.02, 0.2):
        batch = rows_of([-1.0, -1.0] * 500, [-1.0 - d, -1.0 + d] * 500)
        if d < 0.2:
            agreement.check(batch)
    with pytest.raises(DisagreementError, match="agreement/kl"):
        agreement.check(batch)


@pytest.mark.parametrize(("d", "fits"), [(0.2, True), (1.0, False)])
def test_sampler_in_fp8_has_a_limit_of_its_own(d, fits) -> None:
    """Its rounding passes, another policy does not. Rows are compared in the policy's dtype."""
    batch = rows_of([-1.0, -1.0] * 500, [-1.0 - d, -1.0 + math.log(2 - math.exp(-d))] * 500)
    agreement = new_agreement(samples_in_fp8=True)
    with nullcontext() if fits else pytest.raises(DisagreementError, match="agreement/kl"):
        agreement.check(batch)
    if fits:
        agreement.compared_row = False
        agreement.log_probs = lambda row: row.old_logprobs + 0.01
        with pytest.raises(DisagreementError, match="micro-batch"):
            agreement.check(batch)
    with pytest.raises(DisagreementError, match="agreement/kl"):
        new_agreement().check(batch)


def test_nan_raises_no_alarm_and_is_forgotten(agreement) -> None:
    agreement.compared_row = True
    for value in (float("nan"), -1.0):
        metrics = agreement.check(rows_of([-1.0, -2.0], [value, -2.0]))
    assert metrics["agreement/kl"] == 0
