"""Evaluation without training: a model, prompts, rewards and an engine, and nothing that learns."""

import dataclasses
from typing import Any, NoReturn, TypeVar

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.inputs import AdapterConfig
from rlhf_pg.trainers.step import PolicyGradientTrainer

C = TypeVar("C", bound=PolicyGradientConfig)

# Keys that say how a run is trained and logged, which an evaluation does not do.
IDLE = ("eval_steps", "report_to", "resume_from_checkpoint", "dataset_fingerprint")
# Arguments in Python of which nothing is left to give, once a model is trained.
TRAINED = ("peft_config", "optimizers", "value_model")


class Evaluation(PolicyGradientTrainer):
    """A trainer that only evaluates: it has no optimizer, no reference and no critic in memory.

    `evaluate` gives the numbers of a trainer's. Under FSDP or ZeRO-3 the weights are sharded as a
    reference is.

    Args:
        args: a config of any algorithm; keys of training are not used.
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
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=without_training(args),
            eval_dataset=eval_dataset,
            **others,
        )

    def describe(self) -> str:
        """Describe in one line what is evaluated and how."""
        count = sum(len(prompts) for prompts in self.eval_sets.values())
        return (
            f"Evaluation: {self.runtime.describe()}; {self.learner.size}; {count} prompts; "
            f"rollout_engine {self.engine_name} ({self.why_engine})"
        )

    def train(self, resume_from_checkpoint: str | bool | None = None) -> NoReturn:
        """Refuse to train.

        Raises:
            ValueError: always.
        """
        raise ValueError("an Evaluation trains nothing: make the trainer of an algorithm")


def without_training(args: C) -> C:
    """Return the config without keys that would train or log, or add a new adapter to a model."""
    kept = {"load_in_4bit"}
    of_adapters = {field.name for field in dataclasses.fields(AdapterConfig)} - kept
    changed = of_adapters.union(IDLE)
    values: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(args) if field.name in changed
    }
    again = tuple(name for name in args.given_in_python if name not in TRAINED)
    return dataclasses.replace(args, **values, given_in_python=again)
