"""The loop that all algorithms share: roll out, reward, score, update; log, save.

An algorithm is a subclass with `advantages` and `loss`. Shapes: B rows on this rank, N on all
ranks, T completion width; a row is one completion.
"""

import dataclasses
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState, set_seed

from rlhf_pg import models
from rlhf_pg.advantages import ADVANTAGES, NEED_GRADIENTS, AdvantageInputs
from rlhf_pg.boundary.streams import outliving_readers
from rlhf_pg.boundary.user_code import foreign
from rlhf_pg.checkpoint import atomic
from rlhf_pg.checkpoint.checkpointer import Checkpointer, TrainState
from rlhf_pg.checkpoint.run_dir import locks_run_dir
from rlhf_pg.config import PolicyGradientConfig, dump
from rlhf_pg.config.fields import bound
from rlhf_pg.data.chat import vocabulary_fingerprint
from rlhf_pg.data.prompts import Prompts, PromptSampler, fitting_prompts
from rlhf_pg.data.records import Experience, Rollout
from rlhf_pg.failpoints import failpoint
from rlhf_pg.kl import kl_loss
from rlhf_pg.losses import POLICY_LOSSES, Loss
from rlhf_pg.losses.off_policy import against_sampler
from rlhf_pg.models import Critic, PolicyOutput
from rlhf_pg.models.assemble import adapter_of, policy_of
from rlhf_pg.report.journal import Journal
from rlhf_pg.report.metrics import KEYS, Meter
from rlhf_pg.report.trackers import Trackers
from rlhf_pg.rewards import Rewards, RewardSource
from rlhf_pg.rewards.shaping import Shaping
from rlhf_pg.rng import restore_rng, rng_tensors
from rlhf_pg.rollout import (
    EnvironmentFactory,
    EpisodeRunner,
    RolloutEngine,
    RolloutError,
    SamplingParams,
    Tool,
)
from rlhf_pg.rollout.factory import new_engine, new_player
from rlhf_pg.rollout.multi_turn.metrics import episode_counts, episode_metrics, paid
from rlhf_pg.running_stats import MovingAverage, RunningMoments
from rlhf_pg.runtime import Runtime, Terminated, Termination, Writing, broadcasts_failure
from rlhf_pg.trainers import inputs
from rlhf_pg.trainers.callbacks import Callback
from rlhf_pg.trainers.controllers import Controllers
from rlhf_pg.trainers.drawing import draw_batch
from rlhf_pg.trainers.engines import chosen, start, with_engine
from rlhf_pg.trainers.evaluation import Answer, evaluate, stripped_text
from rlhf_pg.trainers.learner import Learner
from rlhf_pg.trainers.leaving import saved_on_leaving
from rlhf_pg.trainers.model_check import Verdict, check_model
from rlhf_pg.trainers.samples import Samples, ScoredSamples, collect
from rlhf_pg.trainers.scoring import make_experience
from rlhf_pg.trainers.skipping import SkippedUpdates

logger = logging.getLogger(__name__)


class Begun(NamedTuple):
    """What a step was begun with, to begin it anew."""

    rng: dict[str, Tensor]
    numbers: dict[str, Any]


class PolicyGradientTrainer:
    """Trains a language model on rewards.

    Args:
        model: a path, a Hub id or a loaded model (trained in place, cast to `args.dtype`); by
            default `args.model_name_or_path`.
        reward_funcs: one callable `(prompts, completions, completion_ids, **columns)` returning a
            list of floats (or None where it does not apply), plain or async; or a reward model (a
            sequence classifier with one output: path, Hub id or loaded); or several of these. In
            place of a float, a list with one float or None per token scores steps.
        args: the config; by default that of the algorithm.
        train_dataset: has a column `prompt`, of strings or of lists of chat messages. The other
            columns go to the reward functions, repeated for every completion.
        eval_dataset: likewise, for `evaluate`.
        processing_class: the tokenizer; by default the one saved with the model.
        reward_processing_classes: tokenizers of the reward models: one, or a list with one entry
            per reward function (None for a plain function, or for the one saved with the model).
        peft_config: of `peft`, to train an adapter on frozen weights; `args.use_peft` makes one. A
            model that comes with an adapter goes on with that one, and its copy is the reference.
        callbacks: see `Callback`.
        quantization_config: a `BitsAndBytesConfig` in 4 bits, for QLoRA; `args.load_in_4bit` makes
            one.
        optimizers: an optimizer (of everything that is trained) and a learning-rate scheduler of
            your own, or None for AdamW and
            `args.lr_scheduler_type`. The scheduler advances once per step.
        tools: functions with type hints and docstrings, plain or async, that the policy may call in
            a chat, as its chat template has it.
        environment_factory: makes the `Environment` of one episode, which answers the policy's
            turns. What it pays is the source of reward "environment", behind the reward functions,
            of which there may then be none.

    Raises:
        ValueError: whatever is wrong with the input, by name, before anything is computed.
    """

    config_type: ClassVar[type[PolicyGradientConfig]]
    value_moments: RunningMoments | None = None  # of the returns, where they are normalised

    @broadcasts_failure
    def __init__(
        self,
        model: str | PathLike[str] | PreTrainedModel | None = None,
        reward_funcs: RewardSource | Sequence[RewardSource] = (),
        args: PolicyGradientConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        callbacks: Sequence[Callback] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        quantization_config: Any = None,
        tools: Sequence[Tool] | None = None,
        environment_factory: EnvironmentFactory | None = None,
    ) -> None:
        args = self.config_type() if args is None else args
        if not isinstance(args, self.config_type):
            raise ValueError(
                f"args must be a {self.config_type.__name__}, got {type(args).__name__}"
            )
        self.args, model = inputs.resolve(args, model, eval_dataset)
        args = self.args
        self.callbacks = list(callbacks or ())
        self.runtime = Runtime(args.ddp_timeout)
        for doubt in args.doubts if self.runtime.is_main else ():
            logger.warning("%s", doubt)
        self.trackers = Trackers(args.report_to, self.runtime)
        self.termination = Termination(self.runtime)
        played = environment_factory is not None
        self.rewards = self._new_rewards(reward_funcs, reward_processing_classes, played)
        self.shaping = Shaping(args, self.rewards)
        set_seed(args.seed)
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.peft_config = adapter_of(args, peft_config)
        self.model = policy_of(
            model, args, self.runtime.loading_device, self.peft_config, quantization_config
        )
        self.processing_class = models.load_tokenizer(
            processing_class, self.model, args.pad_token, args.trust_remote_code
        )
        self.player = new_player(
            args, tools, environment_factory, self.model, self.processing_class
        )
        self._load_prompts(train_dataset, eval_dataset)
        self._choose()
        self.critic = self.new_critic()
        open_keys = "micro_batch_tokens", "rollout_engine"
        self.found = {key for key in open_keys if getattr(args, key) == "auto"}
        longest = 0 if environment_factory is None else self._limit or 0
        for module in filter(None, (self.model, self.critic)):
            models.settle_positions(module, max(longest, self.longest_row))
        self.state = TrainState()
        self._begun: Begun | None = None  # while there is a step
        self._verdict: Verdict | None = None  # of the model check
        self.args, self.why_engine = with_engine(args, self.model, self.runtime)
        self._new_learner(optimizers)
        self._start_engine()
        self.checkpointer = self._checkpointer()

    def _new_rewards(self, functions: Any, processing_classes: Any, environment: bool) -> Rewards:
        args = self.args
        return Rewards(
            functions,
            args.reward_weights,
            processing_classes,
            self.runtime.device,
            environment,
            args.reward_model_sees_eos,
            args.reward_model_closes_truncated,
            args.trust_remote_code,
        )

    def _load_prompts(self, train_dataset: Dataset | None, eval_dataset: Dataset | None) -> None:
        args = self.args
        self.train_prompts = self._prompts(train_dataset, "train_dataset")
        has_eval = eval_dataset is not None
        self.eval_prompts = self._prompts(eval_dataset, "eval_dataset") if has_eval else None
        self.prompt_order = PromptSampler(len(self.train_prompts), args.seed, args.shuffle_dataset)
        self.total_steps = args.total_steps(len(self.train_prompts))

    def _new_learner(self, optimizers: tuple[Optimizer | None, LRScheduler | None]) -> None:
        """And with it a number for `micro_batch_tokens: auto`."""
        args, longest = self.args, self.train_prompts.longest
        self.learner = Learner(
            self.model,
            args,
            self.runtime,
            self.loss,
            self.total_steps,
            SkippedUpdates(args, self.state, self.processing_class, self.runtime.rank),
            optimizers,
            self.critic,
            longest,
        )
        self.args = self.learner.args

    def _start_engine(self) -> None:
        """The native one, where vLLM was chosen and cannot start."""
        if "rollout_engine" in self.found and self.args.rollout_engine == "vllm":
            try:
                self.engine = start(self._new_engine, self.args, self.learner)
                return
            except ValueError as error:
                why = str(error)
            if self.runtime.is_main:
                logger.warning("rollout_engine auto: %s, so the native engine samples", why)
            self._sample_natively(f"auto: {why}")
        else:
            self.engine = self._new_engine()

    def _sample_natively(self, why: str) -> None:
        self.args = self.learner.args = chosen(self.args, "native")
        self.engine, self.why_engine = self._new_engine(), why

    @property
    def longest_row(self) -> int:
        """Tokens that a row may come to at most."""
        prompts = [p for p in (self.train_prompts, self.eval_prompts) if p is not None]
        return max(p.longest for p in prompts) + self.args.max_completion_length

    def _new_engine(self) -> RolloutEngine:
        return new_engine(
            self.args,
            self.learner.whole["model"].module,
            models.stop_token_ids(self.model, self.processing_class),
            self.processing_class,
            self.runtime.is_main,
            self.longest_row,
        )

    def _choose(self) -> None:
        """The functions that the config names, and the coefficients that move."""
        args = self.args
        self.estimator: Callable[[AdvantageInputs], Tensor] = bound(
            ADVANTAGES[args.advantage_estimator], args
        )
        if args.advantage_estimator in NEED_GRADIENTS and self.runtime.splits:
            raise ValueError(
                f"advantage_estimator {args.advantage_estimator} takes gradients of whole weights, "
                f"which {self.runtime.kind} splits: use DDP, or returns_minus_optimal"
            )
        self.policy_loss: Callable[..., Loss] = bound(POLICY_LOSSES[args.policy_loss], args)
        self.coefficients = Controllers(args)
        averaging = args.advantage_estimator == "returns_minus_moving_average"
        self.moving_average = MovingAverage() if averaging else None

    def _checkpointer(self) -> Checkpointer:
        return Checkpointer(
            directory=Path(self.args.output_dir) / "checkpoints",
            parts=self.learner.whole,
            tokenizer=self.processing_class,
            trained=self.learner.trained,
            scheduler=self.learner.scheduler,
            state=self.state,
            config=self._config(),
            fingerprints=lambda: self.learner.fingerprints | self.fingerprints,
            running=self.running,
            limit=self.args.save_total_limit,
            found=self.found,
        )

    def _config(self) -> dict[str, Any]:
        return dataclasses.asdict(self.args) | {"algorithm": self.algorithm}

    @property
    def algorithm(self) -> str:
        """For example "GRPO"."""
        return self.config_type.__name__.removesuffix("Config")

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Of what a resumed run has to be given again."""
        return {
            "tokenizer": vocabulary_fingerprint(self.processing_class),
            "train_dataset": self.train_prompts.fingerprint,
        }

    @property
    def running(self) -> dict[str, Any]:
        """Plain records that move with the run and are saved with it, by name."""
        others = {"value_moments": self.value_moments, "moving_average": self.moving_average}
        there = {name: record for name, record in others.items() if record is not None}
        return self.coefficients.controllers | self.shaping.moments | there

    # -------------------------------------------------------------- what makes it an algorithm

    def advantages(self, signals: AdvantageInputs) -> Tensor:
        """Advantages (B,T) of this rank's rows, from the scores of all ranks."""
        raise NotImplementedError

    def returns(self, signals: AdvantageInputs, advantages: Tensor) -> Tensor:
        """What a critic is to predict (B,T), from `advantages` before they are whitened."""
        raise NotImplementedError

    def loss(self, new: PolicyOutput, batch: Experience) -> Loss:
        """What to minimise at every token (B,T), and (B,T) numbers to average for the log."""
        raise NotImplementedError

    def surrogate(self, new: PolicyOutput, batch: Experience) -> Loss:
        """The policy loss that `args.policy_loss` names, weighed where the sampler was another."""
        changing = {"groups": batch.groups, "old_kl_coef": self.coefficients["old_kl_coef"]}
        taken = self.args.loss_options
        options = {name: value for name, value in changing.items() if name in taken}
        per_token, metrics = self.policy_loss(
            new.logprobs, batch.old_logprobs, batch.advantages, batch.action_mask, **options
        )
        if self.args.correction != "none" or self.args.rollout_engine != "native":
            assert batch.old_logprobs is not None
            weights, measured = against_sampler(
                batch.old_logprobs,
                batch.sampler_logprobs,
                batch.action_mask,
                self.args.correction,
                self.args.sampler_clip_max,
                self.args.sampler_clip_min,
            )
            per_token = per_token if weights is None else per_token * weights
            metrics |= measured
        return per_token, metrics | {"policy_loss": per_token.detach()}

    def regularizer(self, new: PolicyOutput, batch: Experience) -> Loss:
        """beta KL_t - entropy_coef H_t, (B,T); the KL only where it is part of the loss."""
        per_token = -self.coefficients["entropy_coef"] * new.entropy
        if batch.ref_logprobs is None or self.args.kl_placement == "reward":
            return per_token, {}
        assert batch.old_logprobs is not None
        kl = kl_loss(
            new.logprobs,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.action_mask,
            self.args.kl_estimator,
        )
        return per_token + self.coefficients["beta"] * kl, {"kl": kl.detach()}

    def update(self, experience: Experience, meter: Meter) -> dict[str, float]:
        """Every optimizer update on one rollout batch; returns metrics of this process.

        One of your own counts in `learner.begun` the updates that have reached the weights, or are
        about to: a checkpoint that is saved because the step broke off then says that it has them.
        """
        return self.learner.update(experience, self.state.step, meter)

    def new_critic(self) -> Critic | None:
        """The critic, for an algorithm that has one."""
        return None

    def bootstrap_value(self, rollout: Rollout, end_values: Tensor | None) -> Tensor | None:
        """(B,) what follows the last action token, from the critic's `end_values` (B,)."""
        return None

    # --------------------------------------------------------------------------------- the run

    @outliving_readers()
    @broadcasts_failure
    @locks_run_dir
    def train(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Train to the last step, and leave the run directory with `final/` behind.

        Args:
            resume_from_checkpoint: a checkpoint directory, or True or "latest" for the newest one
                in `output_dir`; by default `args.resume_from_checkpoint`.

        Raises:
            ValueError: no such checkpoint, none that is whole, or one beyond the last step;
                `output_dir` holds those of another run, is in use by one or cannot be written to;
                the model's config could not be saved; or a tracker cannot start.
            SystemExit: with code 143 (128 + SIGTERM) after SIGTERM to any process, or 129 after
                SIGHUP, or in several processes 130 after SIGINT: the step has been finished, and a
                checkpoint saved. Any other error saves a checkpoint of the last finished step,
                too, unless the run has diverged; in several processes, if all of them end by it.
        """
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        self._resume(resume_from_checkpoint)
        self.checkpointer.rehearse(self.runtime)
        directory = Path(self.args.output_dir)
        journal = Journal(directory, self.state.step, self.runtime.is_main)
        if self.runtime.is_main:
            dump(self.args, directory / "config.yaml")
        journal.say(
            f"{type(self).__name__}: {self.runtime.describe()}; {self.learner.size}; "
            f"{len(self.train_prompts)} prompts, {self.total_steps} steps; "
            f"rollout_engine {self.args.rollout_engine} ({self.why_engine})"
        )
        self._keep_to_model(keeps=True)
        tracked = self.trackers.opened(
            directory, self.args.run_name, dataclasses.asdict(self.args), self.state.step > 0
        )
        progress = journal.progress(self.total_steps)
        with self.termination.awaited(), tracked, progress, saved_on_leaving(self):
            while self.state.step < self.total_steps:
                metrics = self.step(journal)
                failpoint("stepped")
                try:
                    if _due(self.state.step, self.args.eval_steps):
                        metrics |= self.evaluate()
                        self._keep_if_best(metrics["eval_reward"])
                    self._tell("on_step", metrics)
                finally:  # a step that was taken has its line, whatever fails after it
                    journal.step(metrics)
                    if self._is_tracked(metrics):
                        self.trackers.log(metrics)
                saves = _due(self.state.step, self.args.save_steps)
                number = self.termination.agreed()
                if saves:
                    self.save_checkpoint()
                if number:
                    self._end_by_signal(number, journal)
            # Before the trackers are closed, which may wait for a network.
            self._save_final(directory / "final")
            if number := self.termination.agreed():  # whoever called is to end as well
                self._end_by_signal(number, journal)
        journal.say(f"saved {directory / 'final'}")
        self._tell("on_end")

    def _keep_to_model(self, keeps: bool = False) -> None:
        """Compute rows as the model check finds right, which looks before anything is sampled."""
        if not self.args.model_check:
            return
        if self._verdict is None:
            self._verdict = check_model(self, keeps)
        if self._verdict is not None:
            self.learner.keep_to(*self._verdict.of_rows)
            self._verdict.apply(self.engine)

    def _tell(self, moment: str, *arguments: Any) -> None:
        """Call a method of every callback."""
        for callback in self.callbacks:
            with foreign(f"{moment} of the callback {type(callback).__name__}"):
                getattr(callback, moment)(self, *arguments)

    def _is_tracked(self, metrics: dict[str, Any]) -> bool:
        due = _due(self.state.step, self.args.logging_steps)
        return due or "eval_reward" in metrics or self.state.step == self.total_steps

    def _resume(self, choice: str | bool | None) -> None:
        saved = self.checkpointer.resume(choice, self.runtime)
        if self.state.step > self.total_steps:
            raise ValueError(
                f"the checkpoint is of step {self.state.step}, and the run is to have "
                f"{self.total_steps} steps (max_steps or num_train_epochs): raise them, or load it "
                "as a model"
            )
        found = self.found & saved.keys()
        if "micro_batch_tokens" in found:
            self._set_budget(saved["micro_batch_tokens"])
        if "rollout_engine" in found:
            self._sample_as_before(saved["rollout_engine"])
        self.checkpointer.config = self._config()

    def _end_by_signal(self, number: int, journal: Journal) -> None:
        name = signal.Signals(number).name
        journal.say(f"{name}: the run goes on from {self._checkpoint()}")
        raise Terminated(number)

    def _set_budget(self, tokens: int) -> None:
        """Split rows as the run that is resumed did: sums in another order round otherwise."""
        self.learner.set_budget(tokens)
        self.args = self.learner.args

    def _sample_as_before(self, engine: str) -> None:
        """With the engine of the run that is resumed: another one samples otherwise.

        Raises:
            ValueError: it cannot be had here.
        """
        here = self.args.rollout_engine
        if (engine, here) == ("native", "vllm"):
            self._sample_natively("auto")
        elif engine != here:
            raise ValueError(
                f"the run that is resumed samples with rollout_engine {engine}, and auto takes "
                f"{here} here ({self.why_engine}): set rollout_engine to {engine} and provide what "
                "it needs, or start a new run from its weights"
            )
        self.why_engine = "auto: as before it was resumed"

    def step(self, journal: Journal) -> dict[str, Any]:
        """One rollout batch and every update on it; returns the line for metrics.jsonl."""
        start, meter = time.perf_counter(), Meter()
        self._begun = Begun(rng_tensors(), self.checkpointer.numbers())
        with self.sampling():
            batch = draw_batch(self, meter)
        samples, scores = batch.judged
        with meter.time("score"):
            experience, metrics = self.make_experience(samples.rollout, scores, meter, batch.greedy)
        with meter.time("update"):
            metrics |= self.update(experience, meter)
        alone = self.learner.trains_critic_alone(self.state.step)
        tokens = int(metrics.pop("tokens")) + batch.other_tokens
        self.state.step += 1
        self.learner.sync_reference(self.state.step)
        self.state.draws += batch.draws
        self.state.num_tokens += tokens
        if _due(self.state.step, self.args.log_completions_steps):
            shown = self.args.num_completions_to_print
            journal.completions(self.state.step, samples.records(scores, self.reward_names, shown))
        metrics |= batch.metrics | self.episode_metrics([samples])
        metrics |= meter.means(self.runtime.all_reduce_sum(meter.sums())) | meter.seconds
        metrics |= meter.extremes(lambda own: self.runtime.gather(own)[0])
        if not alone:  # a policy that stays does not answer to them
            completions = self.args.prompts_per_step * self.args.num_generations
            self.coefficients.update(metrics, completions)
        if self.moving_average is not None and math.isfinite(metrics["return"]):
            self.moving_average.update(metrics["return"])
        self.learner.next_rate(self.coefficients.learning_rate_scale)
        metrics |= self.coefficients.metrics()
        metrics["step"] = self.state.step
        metrics["num_tokens"] = self.state.num_tokens
        metrics["step_time"] = time.perf_counter() - start
        metrics["perf/tokens_per_second"] = tokens / metrics["step_time"]
        self._begun, self.learner.begun = None, 0
        return dict.fromkeys(KEYS) | metrics

    def take_back_step(self) -> None:
        """Where a step has broken off, it begins anew: random states, counters and records.

        Weights that it has updated stay as they are.
        """
        if self._begun is not None:
            restore_rng(self._begun.rng)
            self.checkpointer.put_back(self._begun.numbers)
        self._begun, self.learner.begun = None, 0

    def roll_out(self, draws: range) -> Samples:
        """Sample this rank's share of the prompts, whole groups each.

        Every minibatch is shared as evenly as its number of prompts allows.
        """
        args, runtime = self.args, self.runtime
        minibatches = [
            [draw for draw in draws if draw % args.num_mini_batches == m]
            for m in range(args.num_mini_batches)
        ]
        # The first share, which may be one larger, goes to another rank in each minibatch.
        mine = sorted(
            draw
            for m, minibatch in enumerate(minibatches)
            for draw in minibatch[(runtime.rank - m) % runtime.world :: runtime.world]
        )
        rows = self.prompt_order.rows(mine)
        return self.sample(self.train_prompts, rows, mine, args.num_generations, args.temperature)

    def sample(
        self, prompts: Prompts, rows: list[int], draws: list[int], n: int, temperature: float
    ) -> Samples:
        """Sample `n` completions of dataset rows; the draws key the noise and name the groups."""
        args = self.args
        params = SamplingParams(
            temperature=temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            max_tokens=args.max_completion_length,
            stop=args.stop,
        )
        with self.sampling(), self.guarded(RolloutError):
            return collect(
                self.engine,
                self.processing_class,
                prompts,
                rows,
                draws,
                n,
                params,
                self.args.seed,
                dtype=torch.promote_types(self.dtype, torch.float32),
                device=self.runtime.device,
                player=self._player(),
            )

    def _player(self) -> EpisodeRunner | None:
        """Of episodes whose prompts, of their environments' choice, leave room for completions."""
        if self.player is None:
            return None
        longest = self._limit and self._limit - self.args.max_completion_length
        return dataclasses.replace(self.player, longest_prompt=longest)

    @property
    def _limit(self) -> int | None:
        """Tokens that a prompt of an environment's own and a completion may come to; None: any."""
        limits = [models.max_positions(self.model)]
        if "micro_batch_tokens" not in self.found:  # which never changes what is sampled
            limits.append(self.args.token_budget)
        return min((limit for limit in limits if limit), default=None)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Around several calls of `sample`: the engine takes over the weights once, put together
        before where they lie in pieces.
        """
        with ExitStack() as weights:
            # Nobody samples before every process is here: one may speak for all to a server.
            with self.guarded(RolloutError):
                weights.enter_context(self.learner.whole["model"].gathered(self.runtime.device))
                weights.enter_context(self.engine.weights_synced())
            yield

    @contextmanager
    def guarded(self, kind: type[Exception]) -> Iterator[None]:
        """Around what may fail on one process; collective.

        Raises:
            kind: it was raised here, or on another process. What was trained so far has been saved
                by then.
        """
        failure = None
        try:
            yield
        except kind as error:
            failure = error
        reason = self.runtime.first_error(None if failure is None else str(failure))
        if reason is None:
            return
        if self.state.step:
            self.take_back_step()
            try:
                reason = f"{reason} (saved so far: {self._checkpoint()})"
            except OSError as error:  # which is not what ends the run
                reason = f"{reason} (and {error})"
        raise kind(reason) from failure

    def reward(self, samples: Samples) -> Tensor:
        """Raw scores (B,T,K) of the sources in `reward_names`, at the tokens that end what they
        judge; NaN elsewhere.

        Raises:
            ValueError: a reward function failed, on this process or on another. What was trained so
                far has been saved by then.
        """
        with self.guarded(ValueError):
            scores = self.rewards(
                samples.prompts,
                samples.completions,
                samples.completion_ids,
                samples.columns,
                samples.rollout.action_mask,
                paid(samples.episodes) if self.rewards.has_environment else None,
                self._ended(samples),
                self._trainer_state(),
                samples.rollout.truncated.tolist(),
            )
        rollout = samples.rollout
        return self.shaping.penalized(scores.to(rollout.sampler_logprobs), rollout)

    def _ended(self, samples: Samples) -> list[bool]:
        """Which completions the policy ended by an EOS."""
        ends = models.stop_token_ids(self.model, self.processing_class)
        return [bool(ids) and ids[-1] in ends for ids in samples.completion_ids]

    def _trainer_state(self) -> TrainerState:
        """What reward functions may ask for."""
        return TrainerState(
            epoch=self.state.draws / len(self.train_prompts),
            global_step=self.state.step,
            max_steps=self.total_steps,
        )

    def episode_metrics(self, parts: Sequence[Samples]) -> dict[str, float]:
        """Over all processes, for a run with an environment or tools."""
        if self.player is None:
            return {}
        counts, _ = self.runtime.gather(
            torch.cat([episode_counts(p.episodes, p.rollout.groups.device) for p in parts])
        )
        return episode_metrics(counts, tools=bool(self.player.tools))

    @property
    def reward_names(self) -> list[str]:
        """Of the sources of `reward`: the reward functions, and the penalties that are set."""
        return self.shaping.names

    def make_experience(
        self, rollout: Rollout, scores: Tensor, meter: Meter, greedy: ScoredSamples | None = None
    ) -> tuple[Experience, dict[str, float]]:
        """Score the rollout under policy and reference, and estimate advantages.

        Args:
            scores: (B,T,K) from `reward`.
            greedy: one greedy completion per group, for an estimator that needs them.

        Returns:
            The experience of this rank, and metrics over all ranks.
        """
        return make_experience(self, rollout, scores, meter, greedy)

    # --------------------------------------------------------------------- evaluate, save, resume

    @broadcasts_failure
    def evaluate(
        self,
        eval_dataset: Dataset | None = None,
        temperature: float | None = None,
        metric_key_prefix: str = "eval",
        answer: Answer | None = None,
    ) -> dict[str, float]:
        """Score completions of every evaluation prompt, with the same noise at every call: one, or
        `args.num_generations_eval` if they are sampled.

        Args:
            eval_dataset: by default the one given to the trainer.
            temperature: 0 is greedy. By default both: that of training, and greedy under
                `eval_greedy_`.
            answer: what a completion, as the reward functions see it, says: a string or a number,
                for the majority vote. By default all of its text, without the spaces around it.

        Returns:
            `eval_reward`, `eval_rewards/{name}/mean`, `eval_completions/mean_length` and so on,
            and `eval_greedy_reward` and so on, over all processes. With several completions per
            prompt, n, also `eval_pass@k` for k = 1, 2, 4 ... n, and `eval_majority@n`, the reward
            of the most frequent answer: see `rlhf_pg.report.pass_at_k`.

        Raises:
            ValueError: there is no evaluation dataset, a reward function failed, or there is an
                `answer` and one completion.
        """
        if answer is not None and self.args.num_generations_eval == 1:
            raise ValueError(
                "answer is for the vote among several completions: set num_generations_eval to "
                "how many, or leave it out"
            )
        prompts = self.eval_prompts
        if eval_dataset is not None:
            prompts = self._prompts(eval_dataset, "eval_dataset")
        if prompts is None:
            raise ValueError("no eval_dataset: give one to the trainer or to evaluate()")
        temperatures = {"": self.args.temperature if temperature is None else temperature}
        if temperature is None:
            temperatures["greedy_"] = 0.0
        self._keep_to_model()
        with self.sampling():
            return {
                f"{metric_key_prefix}_{mode}{name}": value
                for mode, heat in temperatures.items()
                for name, value in evaluate(self, prompts, heat, answer or stripped_text).items()
            }

    def _keep_if_best(self, reward: float) -> None:
        best = self.state.best_reward
        # NaN, where no source applied, is above nothing, and nothing is above it.
        if self.args.save_best and not math.isnan(reward) and (best is None or reward > best):
            self.state.best_reward = reward
            self.checkpointer.save(self.runtime, Path(self.args.output_dir) / "best")

    def _checkpoint(self) -> Path:
        """Of the last step that was finished, which is saved unless it is there."""
        saved = self.checkpointer.saved == self.state.step
        return self.checkpointer.path() if saved else self.save_checkpoint()

    @broadcasts_failure
    def save_checkpoint(self) -> Path:
        """Save everything that a resumed run needs, under `output_dir/checkpoints/`."""
        path = self.checkpointer.save(self.runtime)
        self._tell("on_save", path)
        return path

    @broadcasts_failure
    def save_model(self, path: str | Path) -> None:
        """Save model (or its adapter) and tokenizer as `from_pretrained` reads them.

        A critic goes to `critic/` in it, and with `save_merged` the model without an adapter, the
        same function of its input, to `merged/`.

        Raises:
            OSError: on all processes, it could not be written.
        """
        writing = Writing(self.runtime, Path(path))
        self._write_model(writing, writing.path)
        writing.check()
        self.runtime.barrier()

    def _save_final(self, path: Path) -> None:
        """`save_model`, sealed like a checkpoint: all of it is there, or what was there before."""
        writing, unnamed = Writing(self.runtime, path), atomic.partial_of(path)
        writing.main(lambda: atomic.begin(path))
        self._write_model(writing, unnamed)
        writing.main(lambda: atomic.seal(unnamed, {"step": self.state.step}))
        writing.main(lambda: atomic.publish(path))
        writing.check(undo=lambda: atomic.abandon(path))
        self.runtime.barrier()

    def _write_model(self, writing: Writing, path: Path) -> None:
        whole = self.learner.whole["model"]
        self.checkpointer.save_models(writing, path, final=True)
        if self.args.save_merged:
            with whole.gathered(self.runtime.main_host):
                writing.main(lambda: models.merged(whole.module).save_pretrained(path / "merged"))
                writing.main(lambda: self.processing_class.save_pretrained(path / "merged"))

    def _prompts(self, dataset: Dataset | None, name: str) -> Prompts:
        tools = self.player.tools if self.player else ()
        args = self.args
        return fitting_prompts(
            dataset,
            name,
            self.processing_class,
            max_prompt_length=args.max_prompt_length,
            long_prompts=args.long_prompts,
            max_completion_length=args.max_completion_length,
            positions=models.max_positions(self.model),
            micro_batch_tokens=args.micro_batch_tokens,
            tools=tools,
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
