"""Evaluation without training: a model, prompts, rewards and an engine."""

import dataclasses
from typing import Any, NoReturn

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.run.loop import TrainingLoop
from rlhf_pg.trainers.inputs import OF_EVALUATION
from rlhf_pg.trainers.step import PolicyGradientTrainer

# Keys that would ask for a part that only training needs.
UNUSED: dict[str, Any] = {
    "report_to": (),
    "save_merged": False,
    "save_best": False,
    "eval_steps": 0,
    "rollout_ahead": 0,
    "dataset_fingerprint": None,
    "privileged_prompt": None,
}


class Evaluation(PolicyGradientTrainer):
    """A trainer that only evaluates: it has no optimizer, no reference and no critic in memory.

    `evaluate` gives the same numbers as a trainer's. FSDP and ZeRO-3 shard the weights like a
    reference model's.

    Args:
        args: a config of any algorithm; training keys are not used, and no adapter is added.
        eval_dataset: see `PolicyGradientTrainer`; by default the config's held-out split, or else
            all of its data. The other arguments are the same as the trainer's.

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
        kept = tuple(name for name in args.given_in_python if name in OF_EVALUATION)
        args = dataclasses.replace(args, **UNUSED, given_in_python=kept)
        super().__init__(model, reward_funcs, args, eval_dataset=eval_dataset, **others)

    def describe(self) -> str:
        """Describe in one line what is evaluated and how."""
        count = sum(len(prompts) for prompts in self.eval_sets.values())
        return (
            f"{TrainingLoop.describe(self)}; {count} prompts; "
            f"rollout_engine {self.engine_name} ({self.why_engine})"
        )

    def train(self, resume_from_checkpoint: str | bool | None = None) -> NoReturn:
        """Refuse to train (ValueError)."""
        raise ValueError("an Evaluation cannot train: use the trainer of an algorithm")
