"""The algorithms, and the training step that they share."""

from rlhf_pg.boundary import user_modules
from rlhf_pg.run.loop import Callback as Callback
from rlhf_pg.trainers.algorithms import (
    GRPOTrainer as GRPOTrainer,
    PPOTrainer as PPOTrainer,
    ReinforceTrainer as ReinforceTrainer,
    RLOOTrainer as RLOOTrainer,
)
from rlhf_pg.trainers.step import PolicyGradientTrainer as PolicyGradientTrainer


def trainer_type(algorithm: str, name: str | None) -> type[PolicyGradientTrainer]:
    """Return the trainer of an algorithm, or the user's own of this name (the key `trainer`)."""
    if not name:
        return TRAINERS[algorithm]
    loaded: type[PolicyGradientTrainer] = user_modules.load(name, "class")
    return loaded


# By the name that the key `algorithm` has.
TRAINERS: dict[str, type[PolicyGradientTrainer]] = {
    trainer.config_type.algorithm: trainer
    for trainer in (GRPOTrainer, PPOTrainer, RLOOTrainer, ReinforceTrainer)
}
