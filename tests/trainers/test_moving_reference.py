"""A reference that follows the policy: when, how far, and over a stop."""

import pytest
import torch
from torch import Tensor

from rlhf_pg import Callback
from rlhf_pg.report.run_files import read

LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8.0}
KINDS = {"full": {}, "lora": LORA}


def named(module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


class Keep(Callback):
    """Policy and reference after every step."""

    def __init__(self) -> None:
        self.policies: list[dict[str, Tensor]] = []
        self.references: list[dict[str, Tensor]] = []

    def on_step(self, trainer, metrics) -> None:
        self.policies.append(named(trainer.learner.policy))
        self.references.append(named(trainer.learner.reference.policy))


@pytest.mark.parametrize("kind", KINDS)
def test_reference_moves_by_mixup_alpha_at_sync_steps(make, kind) -> None:
    keep = Keep()
    sync = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.3}
    options = {"beta": 0.1, "max_steps": 4, "learning_rate": 1e-2, "dtype": "float64"}
    trainer = make(callbacks=[keep], **options, **sync, **KINDS[kind])
    expected = named(trainer.learner.policy)
    trainer.train()
    for step, (policy, reference) in enumerate(
        zip(keep.policies, keep.references, strict=True), start=1
    ):
        if step in (2, 4):
            moved = {n: 0.3 * p + 0.7 * expected[n] for n, p in policy.items()}
            assert max((moved[n] - expected[n]).abs().max() for n in moved) > 1e-4
            expected = moved
        assert reference.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(reference[name], tensor, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_is_zero_only_after_reference_sync(make, kind, tmp_path) -> None:
    sync = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    options = {"beta": 0.1, "num_iterations": 1, "learning_rate": 1e-2}
    make(max_steps=3, **options, **sync, **KINDS[kind]).train()
    kl = [line["kl"] for line in read(tmp_path / "run" / "metrics.jsonl")]
    assert [k == 0 for k in kl] == [True, False, True]
    assert abs(kl[1]) > 1e-6
