"""Evaluation without training: a model, prompts, rewards and an engine, and nothing that learns."""

import dataclasses
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.shared import AdapterConfig
from rlhf_pg.data.sources import load_datasets
from rlhf_pg.models.assemble import assembled
from rlhf_pg.models.policy import Policy
from rlhf_pg.plan.token_budget import chunk_size, most
from rlhf_pg.runtime import FullWeights, Runtime
from rlhf_pg.tasks import Task, load_task
from rlhf_pg.tasks.inputs import by_name
from rlhf_pg.tasks.warm_start import ensure_model
from rlhf_pg.trainers.base import PolicyGradientTrainer
from rlhf_pg.trainers.learner import Learner
from rlhf_pg.trainers.optimizer import Optimizers

C = TypeVar("C", bound=PolicyGradientConfig)

# Keys that say how a run is trained and logged, which an evaluation does not do.
IDLE = ("eval_steps", "report_to", "resume_from_checkpoint", "dataset_fingerprint", "streaming")


class Evaluation(PolicyGradientTrainer):
    """A trainer that only evaluates: it has no optimizer, no reference and no critic in memory.

    `evaluate` gives the numbers of a trainer's. Under FSDP or ZeRO-3 the weights are sharded as a
    reference is.

    Args:
        args: a config of any algorithm; keys of training are not used.
        eval_dataset: see `PolicyGradientTrainer`; the other arguments are those of it, too.
    """

    config_type = PolicyGradientConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: PolicyGradientConfig,
        eval_dataset: Any,
        **others: Any,
    ) -> None:
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=without_training(args),
            train_dataset=next(iter(by_name(eval_dataset).values())),
            eval_dataset=eval_dataset,
            **others,
        )

    def _new_learner(self, optimizers: Optimizers) -> Learner:
        longest = self.longest_row
        tokens = most(self.runtime.device.type, longest)
        policy, _ = assembled(self.model, self.args, None, tokens, chunk_size(self.runtime))
        policy.to(self.runtime.loading_device).eval()
        return Untrained(policy, self.runtime, self.args, tokens)

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


class Untrained(Learner):
    """A learner with a policy alone, placed as a reference is: there is nothing to update."""

    def __init__(
        self, policy: Policy, runtime: Runtime, args: PolicyGradientConfig, token_budget: int
    ) -> None:
        self.policy, self.module = policy, policy
        self.critic = self.reference = None
        self.runtime, self.args, self.token_budget = runtime, args, token_budget
        self.updates_begun, self.compares_rows = 0, False
        self.pads = self.together = True
        self.size = self._size()
        self.full_policy = FullWeights(policy.model, runtime.splits, runtime.watch)
        self.parts = {}  # of what an update will need memory for, and a checkpoint holds
        if runtime.splits:
            _ = self.fingerprints  # computed now and kept: they need whole weights
        runtime.place(policy)
        self.scheduler = cast(Any, None)
        self.trained = cast(Any, partial(runtime.output, policy))


def evaluation_of(args: PolicyGradientConfig) -> Evaluation:
    """Make the evaluation of a config: its model, its held-out data and its rewards.

    Raises:
        ValueError: it names no model, no data or no rewards.
    """
    task = None if args.task is None else load_task(args.task, args.task_options, args.seed)
    if task is None:
        return Evaluation(args.model_name_or_path, (), args, held_out(args))
    model = args.model_name_or_path
    if model is None and task.make_tokenizer is not None:
        model = ensure_model(task.name, None)
    rewards: list[Any] = []
    if not args.reward_funcs:
        judge = args.reward_model_name_or_path
        rewards = [*([] if judge is None else [judge]), *task.rewards()]
    return Evaluation(
        model,
        rewards,
        args,
        held_out(args, task),
        tools=task.tools,
        environment_factory=task.environment_factory,
    )


def held_out(args: PolicyGradientConfig, task: Task | None = None) -> dict[str, Any]:
    """Return what a config evaluates on, by name: what it holds out, or else all that it names.

    Raises:
        ValueError: it names no data, or they cannot be loaded.
    """
    if task is not None and not args.eval_dataset_name:
        return {"": task.train_dataset if task.eval_dataset is None else task.eval_dataset}
    if not (args.dataset_name or args.eval_dataset_name):
        raise ValueError(
            "no data to evaluate on: write eval_dataset_name or dataset_name (a file, a folder or "
            "a Hub id), or task"
        )
    whole = dataclasses.replace(args, streaming=False)
    loaded = load_datasets(whole, args.seed, train=False).eval
    return dict(loaded) or {"": load_datasets(whole, args.seed).train}


def without_training(args: C) -> C:
    """Return the config without keys that would train or log, or add a new adapter to a model."""
    kept = {"load_in_4bit"}
    of_adapters = {field.name for field in dataclasses.fields(AdapterConfig)} - kept
    changed = of_adapters.union(IDLE)
    defaults = {f.name: f.default for f in dataclasses.fields(args) if f.name in changed}
    return dataclasses.replace(args, **defaults)  # type: ignore[arg-type]
