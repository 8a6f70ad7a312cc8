"""Evaluation without training: a model, prompts, rewards and an engine, and nothing that learns."""

from typing import Any, NoReturn

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.trainers.step import PolicyGradientTrainer


class Evaluation(PolicyGradientTrainer):
    """A trainer that only evaluates: it has no optimizer, no reference and no critic in memory.

    `evaluate` gives the numbers of a trainer's. Under FSDP or ZeRO-3 the weights are sharded as a
    reference is.

    Args:
        args: a config of any algorithm; keys of training are not used, and no adapter is added.
        eval_dataset: see `PolicyGradientTrainer`; by default what the config holds out, or else all
            that it names. The other arguments are those of the trainer, too.

    Raises:
        ValueError: there is no model, or there are no data or no rewards.
    """

    config_type = PolicyGradientConfig
    trains = False

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: PolicyGradientConfig,
        eval_dataset: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(model, reward_funcs, args, eval_dataset=eval_dataset, **others)

    def describe(self) -> str:
        """Describe in one line what is evaluated and how."""
        count = sum(len(prompts) for prompts in self.eval_sets.values())
        return (
            f"Evaluation: {self.runtime.describe()}; {self.learner.size}; {count} prompts; "
            f"rollout_engine {self.engine_name} ({self.why_engine})"
        )

    def train(self, resume_from_checkpoint: str | bool | None = None) -> NoReturn:
        """Refuse to train (ValueError)."""
        raise ValueError("an Evaluation trains nothing: make the trainer of an algorithm")
