"""The construction of a trainer: model, prompts, rewards, engine and learner are made ready."""

import dataclasses
import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerState,
    set_seed,
)

from rlhf_pg import models
from rlhf_pg.advantages import ADVANTAGES, AdvantageInputs
from rlhf_pg.boundary.launcher import check_precision
from rlhf_pg.boundary.quoted import quoted
from rlhf_pg.checkpoint import Checkpointer, TrainState
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.fields import bound
from rlhf_pg.config.files import absolute
from rlhf_pg.config.foreign_keys import FOREIGN_ARGUMENTS
from rlhf_pg.data import Batch, Prompts, PromptSampler, vocabulary_fingerprint
from rlhf_pg.data.chat import set_template_arguments
from rlhf_pg.data.prompts import fitting_prompts
from rlhf_pg.losses import POLICY_LOSSES, Loss
from rlhf_pg.models import Critic, PolicyOutput, Reference
from rlhf_pg.models.assemble import Models, adapter_of, assembled, policy_of
from rlhf_pg.plan.token_budget import chunk_size, most, settled_budget
from rlhf_pg.report.run_files import Start
from rlhf_pg.report.trackers import Trackers
from rlhf_pg.rewards.functions import source_fingerprint
from rlhf_pg.rewards.scoring import Rewards, RewardSource
from rlhf_pg.rewards.shaping import Shaping
from rlhf_pg.rollout import (
    EnvironmentFactory,
    EnvironmentSource,
    RolloutEngine,
    Tool,
    source_of,
)
from rlhf_pg.rollout.factory import new_engine, new_episode_runner
from rlhf_pg.running_stats import MovingAverage
from rlhf_pg.runtime import Runtime, Termination, broadcasts_failure
from rlhf_pg.tasks.inputs import Inputs, given_again, settled_inputs
from rlhf_pg.trainers.callbacks import Callback, checked
from rlhf_pg.trainers.controllers import Controllers
from rlhf_pg.trainers.engines import choose_engine, start, with_engine
from rlhf_pg.trainers.learner import Learner
from rlhf_pg.trainers.loop import TrainingLoop
from rlhf_pg.trainers.optimizer import Optimizers, optimizer_and_schedule
from rlhf_pg.trainers.recorder import Recorder
from rlhf_pg.trainers.sampler import Sampler
from rlhf_pg.trainers.skipping import SkippedUpdates

logger = logging.getLogger(__name__)


class TrainerSetup(TrainingLoop):
    """A trainer up to its first step; `PolicyGradientTrainer` documents the arguments."""

    config_type: ClassVar[type[PolicyGradientConfig]]
    trains: ClassVar[bool] = True  # an evaluation does not
    args: PolicyGradientConfig
    value_model: Any = None  # an argument of PPO's

    @abstractmethod
    def loss(self, new: PolicyOutput, batch: Batch) -> Loss:
        """Compute the loss of every token (B,T), and (B,T) numbers to average for the log."""

    @abstractmethod
    def new_critic(self) -> Critic | None:
        """Make the critic of an algorithm that has one."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        said = [
            f"{name!r} {FOREIGN_ARGUMENTS[name]}" for name in given if name in FOREIGN_ARGUMENTS
        ]
        if said:
            raise TypeError(f"{cls.__name__}: {'; '.join(said)}")
        return super().__new__(cls)

    @broadcasts_failure
    def __init__(
        self,
        model: str | PathLike[str] | PreTrainedModel | None = None,
        reward_funcs: RewardSource | Sequence[RewardSource] = (),
        args: PolicyGradientConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        callbacks: Sequence[Callback] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        quantization_config: Any = None,
        tools: Sequence[Tool] | None = None,
        environment_factory: EnvironmentFactory | EnvironmentSource | None = None,
    ) -> None:
        args = self.config_type() if args is None else args
        if not isinstance(args, self.config_type):
            kind = f"{type(args).__module__}.{type(args).__name__}"
            raise ValueError(
                f"args must be rlhf_pg's {self.config_type.__name__}, got {quoted(kind)}"
            )
        args = args.located()
        check_precision(args.dtype)
        self.callbacks = checked(callbacks)
        again = given_again(
            *(args, peft_config, quantization_config, tools, environment_factory),
            *(optimizers, self.value_model),
        )
        given = settled_inputs(
            *(args, model, reward_funcs, train_dataset, eval_dataset, tools, environment_factory),
            trains=self.trains,
        )
        self._said, self._recorded = given.said, given.recorded | {"given_in_python": again}
        args = self._settled(args, given)
        self.runtime = Runtime(args.ddp_timeout)
        self.args = args = args.on(self.runtime.device.type)
        for warning in args.warnings if self.runtime.is_main else ():
            logger.warning("%s", warning)
        self.trackers = Trackers(args.report_to, self.runtime)
        self.termination = Termination(self.runtime)
        factory = given.environment_factory
        self.environments = None if factory is None else source_of(factory)
        self.rewards = Rewards(
            given.reward_funcs,
            args.reward_weights,
            reward_processing_classes,
            self.runtime.device,
            self.environments is not None and self.environments.pays,
            args.reward_model_sees_eos,
            args.trust_remote_code,
            args.reward_workers,
            args.reward_timeout,
            args.on_reward_error,
            args.reward_error_value,
        )
        self.shaping = Shaping(args, self.rewards)
        set_seed(args.seed)
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.peft_config = adapter_of(args, peft_config)
        self.model = policy_of(
            given.model, args, self.runtime.loading_device, self.peft_config, quantization_config
        )
        self.processing_class = models.load_tokenizer(
            processing_class,
            self.model,
            args.pad_token,
            args.trust_remote_code,
            args.model_init_kwargs.get("revision"),
        )
        set_template_arguments(self.processing_class, args.chat_template_kwargs)
        self.episode_runner = new_episode_runner(
            args, given.tools, self.environments, self.model, self.processing_class
        )
        self._load_prompts(given.train_dataset, given.eval_datasets)
        self._resolve_method()
        self.critic = self.new_critic()
        longest = self.longest_row  # one set of positions for rows of all lengths
        if self.environments is not None and self._limit is not None:
            longest = max(longest, self._limit)
        for module in filter(None, (self.model, self.critic)):
            models.settle_positions(module, longest)
        self.state = TrainState()
        self.engine_name, self.why_engine = choose_engine(args, self.model, self.runtime)
        self.learner = self._new_learner(optimizers)
        self.sampler = self._new_sampler()
        self.checkpointer = self._new_checkpointer()
        self.recorder = Recorder(
            self.runtime,
            self.processing_class,
            self.shaping.names,
            parameters=lambda: self.checkpointer.parameters,
        )

    @property
    def engine(self) -> RolloutEngine:
        """The engine that samples."""
        return self.sampler.engine

    @engine.setter
    def engine(self, engine: RolloutEngine) -> None:
        self.sampler.engine = engine

    def _settled(self, args: PolicyGradientConfig, given: Inputs) -> PolicyGradientConfig:
        """Return the config of this run, which never changes.

        It has the model's path, if there is one, and an absolute `output_dir`, so that a change of
        the working directory does not matter.

        Raises:
            ValueError: it names no model, or evaluates on nothing.
        """
        if args.eval_steps and not given.eval_datasets:
            raise ValueError(
                "eval_steps needs an eval_dataset, or dataset_test_split or eval_dataset_name"
            )
        if given.model is None:
            raise ValueError("no model: give model=... or the key model_name_or_path")
        changes: dict[str, Any] = {"output_dir": os.path.abspath(args.output_dir)}
        if isinstance(given.model, str | PathLike):
            changes["model_name_or_path"] = absolute(os.fspath(given.model), None)
        return dataclasses.replace(args, **changes)

    def _load_prompts(self, train_dataset: Any, eval_datasets: Mapping[str, Any]) -> None:
        args, environments = self.args, self.environments
        if environments is not None:
            own, rows = train_dataset is None, args.prompts_per_step
            train_dataset = environments.prompted(train_dataset, rows)
            if own and train_dataset is not None and args.max_steps < 0:
                raise ValueError("without a train_dataset, max_steps has to say how long to train")
            eval_datasets = {
                name: environments.prompted(data, rows) for name, data in eval_datasets.items()
            }
        self.eval_sets = self.eval_prompts(eval_datasets)
        if self.trains:
            prompts = self.prompts_of(train_dataset, "train_dataset")
        else:
            prompts = next(iter(self.eval_sets.values()))
        wanted = args.dataset_fingerprint
        if wanted is not None and wanted != prompts.fingerprint:
            raise ValueError(
                f"the training data have the fingerprint {prompts.fingerprint}, and "
                f"dataset_fingerprint is {wanted}: they are not the data of that run, or its "
                "tokenizer or prompt keys have changed; leave dataset_fingerprint out to train on "
                "them"
            )
        self.train_prompts, self.total_steps = prompts, args.total_steps(len(prompts))
        self.prompt_order = PromptSampler(len(prompts), args.seed, args.shuffle_dataset)

    def prompts_of(self, dataset: Any, name: str) -> Prompts:
        """Return the prompts of a dataset.

        Raises:
            ValueError: a prompt cannot be used; `name` and the row are named.
        """
        return fitting_prompts(
            dataset,
            name,
            self.processing_class,
            max_prompt_length=self.args.max_prompt_length,
            long_prompts=self.args.long_prompts,
            max_completion_length=self.args.max_completion_length,
            positions=models.max_positions(self.model),
            micro_batch_tokens=self.args.micro_batch_tokens,
            tools=self.episode_runner.tools if self.episode_runner else (),
        )

    def eval_prompts(self, datasets: Mapping[str, Any]) -> dict[str, Prompts]:
        """Return the prompts of every evaluation set, by its name."""
        names = {name: f"eval_dataset {name}".rstrip() for name in datasets}
        return {name: self.prompts_of(data, names[name]) for name, data in datasets.items()}

    def _resolve_method(self) -> None:
        """Look up the functions that the config names, and make the controllers."""
        args = self.args
        self.estimator: Callable[[AdvantageInputs], Tensor] = bound(
            ADVANTAGES[args.advantage_estimator], args
        )
        self.policy_loss: Callable[..., Loss] = bound(POLICY_LOSSES[args.policy_loss], args)
        self.controllers = Controllers(args)
        averaging = args.advantage_estimator == "returns_minus_moving_average"
        self.moving_average = MovingAverage() if averaging else None

    def _new_learner(self, optimizers: Optimizers) -> Learner:
        args, runtime, longest = self.args, self.runtime, self.train_prompts.longest
        if args.micro_batch_tokens == "auto":
            tokens = most(runtime.device.type, longest + args.max_completion_length)
        else:
            tokens = args.token_budget
        policy, module = assembled(self.model, args, self.critic, tokens, chunk_size(runtime))
        module.to(runtime.loading_device).eval()
        token_budget = settled_budget(args, module, runtime, longest)
        reference = Reference(policy, args.sync_ref_model) if args.beta > 0 else None
        optimizer, scheduler = optimizer_and_schedule(
            policy, self.critic, args, self.total_steps, optimizers
        )
        return Learner(
            Models(policy, self.critic, reference, module),
            optimizer,
            scheduler,
            self.loss,
            runtime,
            args,
            token_budget,
            SkippedUpdates(args, self.state, self.processing_class, runtime.rank),
        )

    def _new_sampler(self) -> Sampler:
        runner, limit = self.episode_runner, self._limit
        # A prompt that is not the dataset's must leave room for a completion.
        longest = None if limit is None else limit - self.args.max_completion_length
        if runner is not None:
            runner = dataclasses.replace(runner, longest_prompt=longest)
        return Sampler(
            engine=self._start_engine(),
            prompts=self.train_prompts,
            order=self.prompt_order,
            rewards=self.rewards,
            shaping=self.shaping,
            runtime=self.runtime,
            args=self.args,
            policy=self.learner.full_policy,
            tokenizer=self.processing_class,
            stop_token_ids=models.stop_token_ids(self.model, self.processing_class),
            progress=self._progress,
            episode_runner=runner,
        )

    def _start_engine(self) -> RolloutEngine:
        """Start the engine; fall back to the native one if a chosen vLLM cannot start."""
        if self.args.rollout_engine != "auto" or self.engine_name != "vllm":
            return self._new_engine()
        try:
            return start(self._new_engine, with_engine(self.args, "vllm"), self.learner)
        except ValueError as error:
            why = str(error)
        if self.runtime.is_main:
            logger.warning("rollout_engine auto: %s, so the native engine samples", why)
        self.engine_name, self.why_engine = "native", f"auto: {why}"
        return self._new_engine()

    def _new_engine(self) -> RolloutEngine:
        return new_engine(
            with_engine(self.args, self.engine_name),
            self.learner.full_policy.module,
            models.stop_token_ids(self.model, self.processing_class),
            self.processing_class,
            self.runtime.is_main,
            self.longest_row,
        )

    def _new_checkpointer(self) -> Checkpointer:
        return Checkpointer(
            directory=Path(self.args.output_dir) / "checkpoints",
            parts=self.learner.parts,
            tokenizer=self.processing_class,
            trained=self.learner.trained,
            scheduler=self.learner.scheduler,
            state=self.state,
            config=self._config(),
            fingerprints=lambda: self.learner.fingerprints | self.fingerprints,
            running=self.running,
            limit=self.args.save_total_limit,
            found=self._open_keys,
        )

    # ------------------------------------------------------------------- what a run says of itself

    def describe(self) -> str:
        """Describe in one line what is trained and how, and in one each where rewards come from."""
        trained = (
            f"{type(self).__name__}: {self.runtime.describe()}; {self.learner.size}; "
            f"{len(self.train_prompts)} prompts, {self.total_steps} steps; "
            f"rollout_engine {self.engine_name} ({self.why_engine})"
        )
        return "\n".join([trained, *self._said])

    def resolved_args(self) -> PolicyGradientConfig:
        """Return the config with what was found: data, rewards, engine, token budget."""
        found: dict[str, Any] = {
            "micro_batch_tokens": self.learner.token_budget,
            "dataset_fingerprint": self.train_prompts.fingerprint,
        }
        return dataclasses.replace(
            with_engine(self.args, self.engine_name), **found, **self._recorded
        )

    def _config(self) -> dict[str, Any]:
        return dataclasses.asdict(self.resolved_args()) | {"algorithm": self.algorithm}

    @property
    def algorithm(self) -> str:
        """The name of the algorithm, for example "GRPO"."""
        return self.config_type.__name__.removesuffix("Config")

    @property
    def updates_begun(self) -> int:
        """Updates of the current step that have reached the weights, or are about to."""
        return self.learner.updates_begun

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of what a resumed run has to be given again."""
        return {
            "tokenizer": vocabulary_fingerprint(self.processing_class),
            "train_dataset": self.train_prompts.fingerprint,
        }

    @property
    def running(self) -> dict[str, Any]:
        """The records that change during the run and are saved with it, by name."""
        average = {} if self.moving_average is None else {"moving_average": self.moving_average}
        return self.controllers.controllers | self.shaping.moments | average

    @property
    def longest_row(self) -> int:
        """The most tokens that a row may have."""
        longest = max(p.longest for p in (self.train_prompts, *self.eval_sets.values()))
        return longest + self.args.max_completion_length

    @property
    def _limit(self) -> int | None:
        """The most tokens of an environment's own prompt and a completion; None: any number."""
        limits = [models.max_positions(self.model)]
        if self.args.micro_batch_tokens != "auto":  # what auto finds must not change the samples
            limits.append(self.args.token_budget)
        return min((limit for limit in limits if limit), default=None)

    @property
    def _open_keys(self) -> set[str]:
        """Keys that the config leaves open; a resumed run takes what was found before."""
        keys = ("micro_batch_tokens", "rollout_engine")
        return {key for key in keys if getattr(self.args, key) == "auto"}

    def _progress(self) -> TrainerState:
        """Return the progress of the run, which reward functions may ask for."""
        return TrainerState(
            epoch=self.state.prompt_index / len(self.train_prompts),
            global_step=self.state.step,
            max_steps=self.total_steps,
        )

    # ------------------------------------------------------------------------- start and resume

    def on_resume(self, saved: dict[str, Any]) -> None:
        """Settle open keys as the resumed run did.

        Raises:
            ValueError: its engine cannot be had here.
        """
        found = {key for key in self._open_keys if saved.get(key, "auto") != "auto"}
        if "micro_batch_tokens" in found:  # sums in another order round otherwise
            self.learner.token_budget = saved["micro_batch_tokens"]
        if "rollout_engine" in found:  # another engine samples otherwise
            self._sample_as_before(saved["rollout_engine"])
        self.checkpointer.config = self._config()

    def _sample_as_before(self, engine: str) -> None:
        here = self.engine_name
        if (engine, here) == ("native", "vllm"):
            self.engine_name = "native"
            self.engine = self._new_engine()
        elif engine != here:
            raise ValueError(
                f"the run that is resumed samples with rollout_engine {engine}, and auto takes "
                f"{here} here ({self.why_engine}): set rollout_engine to {engine} and provide what "
                "it needs, or start a new run from its weights"
            )
        self.why_engine = "auto: as before it was resumed"

    def began(self) -> Start:
        """Return on what the run begins or goes on, and from which weights; collective."""
        sources = {s.name: source_fingerprint(s.function) for s in self.rewards.sources}
        return self.recorder.start(self.state.step, self.train_prompts.contents, sources)

    def weights(self) -> dict[str, str]:
        """Return a fingerprint of each trained tensor, by name; collective."""
        return self.recorder.fingerprints(trained=True)
