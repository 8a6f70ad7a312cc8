"""Every algorithm learns: from a random model, within seconds, with a fixed seed."""

import pytest

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer
from rlhf_pg.report.run_files import read
from tests.distributed.launching import saved_model

FEW = {"prompts_per_step": 8, "max_steps": 30, "learning_rate": 4e-3}
OTHERS = [
    (GRPOTrainer, {"num_iterations": 2, "num_mini_batches": 2}),
    (RLOOTrainer, {"beta": 0.001}),
    (PPOTrainer, {"beta": 0.001, "num_iterations": 2}),
    (PPOTrainer, {"beta": 0.001, "num_iterations": 2, "critic": "shared"}),
    (ReinforceTrainer, {"beta": 0.001, "num_generations": 1, "prompts_per_step": 64}),
]


@pytest.fixture
def model_path(tmp_path) -> str:
    """The embedded model as it is: one of a single narrow layer learns too slowly."""
    return saved_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("trainer_type", "options"),
    [
        (GRPOTrainer, {"beta": 0.001} | FEW),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
    ],
)
def test_training_raises_reward(make, tmp_path, trainer_type, options) -> None:
    """The share of even digits among six characters: a random model has about a quarter."""
    sizes = {"prompts_per_step": 16, "num_generations": 4, "max_steps": 50, "learning_rate": 2e-3}
    make(trainer_type, **(sizes | {"warmup_steps": 5} | options)).train()
    rewards = [line["reward"] for line in read(tmp_path / "run" / "metrics.jsonl")]
    assert sum(rewards[:3]) / 3 < 0.35
    assert sum(rewards[-3:]) / 3 > 0.85
