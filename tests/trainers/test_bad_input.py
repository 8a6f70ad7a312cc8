"""Bad input gets one error that names what is wrong and what to do."""

import math

import pytest
import torch

from rlhf_pg import GRPOTrainer, RLOOConfig
from rlhf_pg.rewards.verifiers import make_verifier
from rlhf_pg.tasks import arithmetic

DATA = arithmetic().train_dataset
UNLOADED = {"model": "there/is/none"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_dataset": DATA.select([])}, "train_dataset: the dataset has no prompts"),
        ({"train_dataset": None}, "train_dataset: set dataset_name"),
        ({"model": None}, "no model"),
        ({"max_completion_length": 60}, "max_position_embeddings of 64"),
        ({"reward_funcs": []}, "reward_funcs is empty"),
        ({"train_dataset": DATA.to_iterable_dataset()}, r"train_dataset: .*read it first"),
        ({"eval_steps": 5}, "eval_steps needs an eval_dataset"),
        ({"reward_weights": (1.0, 2.0)}, "reward_weights must have one entry"),
        # Before a model is loaded.
        (UNLOADED | {"reward_funcs": lambda answers, **_: []}, r"'answers'.*train_dataset .answer"),
        (UNLOADED | {"reward_funcs": make_verifier("exact", {"column": "to"})}, "exact needs 'to'"),
        (UNLOADED | {"eval_dataset": [{"prompt": "", "prompts": ""}]}, "eval_dataset.* 'prompts'"),
    ],
)
def test_bad_trainer_argument_raises(make, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(("rate", "count"), [(2e-5, 0), (3e-5, 1)])
def test_rate_that_wrecks_a_real_model_is_a_warning(make, rate, count, monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.nn.Parameter, "numel", lambda self: 10**8)
    make(learning_rate=rate)
    assert caplog.text.count("learning_rate") == count


def test_nonfinite_gradient_leaves_weights_unchanged(make) -> None:
    trainer = make(max_skipped_steps=0)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    vars(trainer)["estimator"] = lambda signals: signals.rewards * math.inf
    with pytest.raises(FloatingPointError, match=r"not finite.*learning_rate"):
        trainer.train()
    assert all(before[name].equal(p) for name, p in trainer.model.named_parameters())


def test_config_of_other_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match=r"args must be .* GRPOConfig, got .*RLOOConfig"):
        GRPOTrainer(args=RLOOConfig())
