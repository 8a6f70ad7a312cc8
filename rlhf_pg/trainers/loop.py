"""The loop around the steps of a run, which any algorithm may take: evaluate, save, resume, end."""

import dataclasses
import inspect
import logging
import math
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from transformers.trainer_utils import TrainOutput

from rlhf_pg.boundary.quoted import show
from rlhf_pg.boundary.user_code import foreign
from rlhf_pg.checkpoint import Checkpointer, atomic, export
from rlhf_pg.checkpoint.run_dir import run_dir_lock
from rlhf_pg.config import PolicyGradientConfig, dump
from rlhf_pg.data import Batch, vocabulary_fingerprint
from rlhf_pg.failpoints import failpoint
from rlhf_pg.report.journal import Journal, due
from rlhf_pg.report.run_files import Start, versions
from rlhf_pg.rng import restore_rng, rng_tensors
from rlhf_pg.rollout.factory import with_engine
from rlhf_pg.runtime import Terminated, broadcasts_failure
from rlhf_pg.trainers.parts import Parts
from rlhf_pg.trainers.recorder import Recorder

logger = logging.getLogger(__name__)


class Callback:
    """User code that observes a run; every process calls it, at the same moments.

    Override what is needed. `trainer.stop()` ends the run after the step.
    """

    def on_start(self, trainer: Any) -> None:
        """Called before the first step, also when the run was resumed."""

    def on_step_begin(self, trainer: Any) -> None:
        """Called before each step."""

    def on_step_end(self, trainer: Any) -> None:
        """Called after each step, before an evaluation."""

    def on_evaluate(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Called after an evaluation in the run; entries may be added to `metrics`."""

    def on_step(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Called after each step and its evaluation; entries may be added to `metrics`."""

    def on_log(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Called after a step's metrics were sent to the trackers."""

    def on_save(self, trainer: Any, path: Path) -> None:
        """Called after a checkpoint has been written."""

    def on_end(self, trainer: Any) -> None:
        """Called after the last step, when `final/` has been written."""


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse what is no callback (ValueError)."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ValueError(
                f"callbacks must be objects of rlhf_pg.Callback, got {show(callback)}: "
                "instantiate a class; write a transformers callback's on_step_end and on_log as "
                "on_step(trainer, metrics), and should_training_stop as trainer.stop()"
            )


class TrainingLoop(Parts, ABC):
    """Runs the steps of a run, and what happens between them. It has the parts as attributes, which
    are never replaced (`Parts` is frozen; the attributes of its own are not).
    """

    config_type: ClassVar[type[PolicyGradientConfig]]

    def __init__(self, parts: Parts, callbacks: Sequence[Callback]) -> None:
        super().__init__(**vars(parts))
        self.callbacks = list(callbacks)
        self.history: list[dict[str, Any]] = []  # lines of metrics.jsonl of this process's steps
        self.journal: Journal | None = None  # while the run trains
        # Called with a batch that was trained on.
        self.observers: Sequence[Callable[[Batch], None]] = ()
        self.engine_name, self.why_engine = self.chosen_engine  # until a run is resumed
        self.checkpointer = Checkpointer(
            directory=Path(self.args.output_dir) / "checkpoints",
            parts=self.learner.parts,
            tokenizer=self.processing_class,
            backend=self.learner.backend,
            scheduler=self.learner.scheduler,
            state=self.state,
            config=self.saved_config(),
            fingerprints=lambda: self.learner.fingerprints | self.fingerprints,
            running=self.running,
            limit=self.args.save_total_limit,
            found=self.open_keys,
            ahead=self.ahead,
        )
        self.recorder = Recorder(
            self.runtime,
            self.processing_class,
            self.shaping.names,
            parameters=lambda: self.checkpointer.parameters,
        )

    @abstractmethod
    def step(self) -> dict[str, Any]:
        """Take one step and count it in `state`; return the line for metrics.jsonl."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return metrics of the evaluation dataset, `eval_reward` among them."""

    @broadcasts_failure
    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the last step, write `final/`, and return the metrics of the last step.

        Args:
            resume_from_checkpoint: a checkpoint directory, or True or "latest" for the newest one
                in `output_dir`; by default `args.resume_from_checkpoint`.

        Raises:
            ValueError: the checkpoint is missing, incomplete or beyond the last step; `output_dir`
                holds another run's checkpoints, is in use by a run or cannot be written to; or a
                tracker cannot start.
            SystemExit: with code 143 (128 + SIGTERM) after SIGTERM to any process, 129 after
                SIGHUP, or 130 after SIGINT (Ctrl-C): the step has been finished, and a checkpoint
                saved. After any other error the last finished step is saved, unless the run has
                diverged; with several processes, only if all raise it together.
        """
        choice = resume_from_checkpoint
        with run_dir_lock(Path(self.args.output_dir), self.runtime):
            try:
                self._train(self.args.resume_from_checkpoint if choice is None else choice)
            finally:
                if self.ahead is not None:
                    self.ahead.drop()
        losses = [line["loss"] for line in self.history]
        losses = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        mean = sum(losses) / len(losses) if losses else math.nan
        last = self.history[-1] if self.history else {}
        return TrainOutput(self.state.step, mean, last)

    def _train(self, choice: str | bool | None) -> None:
        if self.runtime.is_main:
            export.check_hub(self.args)
        saved = self.checkpointer.resume(choice, self.runtime)
        if self.state.step > self.total_steps:
            raise ValueError(
                f"the checkpoint is from step {self.state.step}, beyond the {self.total_steps} of "
                "max_steps or num_train_epochs: raise them, or load the checkpoint as a model"
            )
        self.on_resume(saved)
        directory = Path(self.args.output_dir)
        self.journal = journal = Journal(directory, self.state.step, self.runtime.is_main)
        origin = self.checkpointer.origin
        args = dataclasses.replace(self.resolved_args(), resume_from_checkpoint=origin)
        if self.runtime.is_main:
            dump(args, directory / "config.yaml")
        journal.say(self.describe())
        journal.trace(vars(self.began()))
        if self._record not in self.observers:
            self.observers = [*self.observers, self._record]
        tracked = self.trackers.open(
            directory, args.run_name, dataclasses.asdict(args), self.state.step > 0
        )
        progress = journal.progress(self.total_steps)
        with self.termination.handle_signals(), tracked, progress, self._save_on_error():
            self._tell("on_start")
            while self.state.step < self.total_steps and not self.termination.stopping:
                self._take_step(journal)
            # Before closing the trackers, which may wait for a network.
            export.save_final(self.checkpointer, self.runtime, directory / "final")
        # Also of a signal during the last report. The caller has to end as well.
        if number := self.termination.agree():
            self._end_by_signal(number, journal)
        journal.say(f"saved {directory / 'final'}, with report.html beside it")
        if args.push_to_hub and (address := self.push_to_hub()):
            journal.say(f"uploaded to {address}")
        self._tell("on_end")

    def stop(self) -> None:
        """End the run on all processes after the current step, with a checkpoint and `final/`."""
        self.termination.stop()

    def push_to_hub(self) -> str | None:
        """Upload `final/`, which `train` has written; return its address, or None if it fails."""
        final = Path(self.args.output_dir) / "final"
        if self.runtime.is_main:
            return export.push(final, self.args)
        return None

    def add_callback(self, callback: Callback) -> None:
        """Add a callback, as the argument `callbacks` does."""
        check_callbacks([callback])
        self.callbacks.append(callback)

    def _take_step(self, journal: Journal) -> None:
        """Take one step, then evaluate, log and save if due."""
        self._tell("on_step_begin")
        rng = rng_tensors()
        snapshot = self.checkpointer.snapshot()
        try:
            metrics = self.step()
        except BaseException:  # updates that reached the weights are not undone
            restore_rng(rng)
            self.checkpointer.roll_back(snapshot)
            raise
        failpoint("stepped")
        args = self.args
        step = self.state.step
        reported = due(step, args.logging_steps, self.total_steps)
        try:
            self._tell("on_step_end")
            if due(step, args.eval_steps):
                metrics |= self.evaluate()
                reward = metrics["eval_reward"]
                best = self.state.best_reward
                # NaN (no source applied) would never be exceeded as the best reward.
                if not math.isnan(reward) and (best is None or reward > best):
                    self.state.best_reward = reward  # which best/ holds too
                    try:
                        if args.save_best:
                            self.checkpointer.save(self.runtime, Path(args.output_dir) / "best")
                    except BaseException:
                        self.state.best_reward = best
                        raise
                self._tell("on_evaluate", metrics)
            self._tell("on_step", metrics)
        finally:  # log the step even if something fails after it
            self.history.append(metrics)
            journal.step(metrics)
            reported = reported or "eval_reward" in metrics
            if reported:
                self.trackers.log(metrics)
        if reported:
            self._tell("on_log", metrics)
        if due(step, args.save_steps, self.total_steps):
            self.save_checkpoint()
        number = self.termination.agree()
        if self.termination.stopping and not reported:
            self.trackers.log(metrics)
            self._tell("on_log", metrics)
        if number:
            self._end_by_signal(number, journal)
        if self.termination.stopping:
            journal.say(f"stopped at step {step}; the run can be resumed from there")
            self._latest_checkpoint()

    def _record(self, batch: Batch) -> None:
        """Record a step that is not yet counted in `state`; collective."""
        assert self.journal is not None
        step = self.state.step + 1
        args = self.args
        every = args.log_completions_steps
        logged = due(step, every, self.total_steps) or (step == 1 and every > 0)
        shown = args.num_completions_to_print if logged else None
        self.journal.record(self.recorder.record(step, batch, shown))

    # ------------------------------------------------------------------------- resume and leave

    def on_resume(self, saved: dict[str, Any]) -> None:
        """Take over what the resumed run found for open keys; ValueError without its engine."""
        found = {key for key in self.open_keys if saved.get(key, "auto") != "auto"}
        if "micro_batch_tokens" in found:  # another order of sums rounds differently
            self.learner.token_budget = saved["micro_batch_tokens"]
        if "rollout_engine" in found:  # another engine samples differently
            engine = saved["rollout_engine"]
            here = self.engine_name
            if (engine, here) == ("native", "vllm"):
                self.engine_name = "native"
                self.sampler.engine = self.make_engine("native")
            elif engine != here:
                raise ValueError(
                    f"the resumed run samples with rollout_engine {engine}, but auto chooses "
                    f"{here} here ({self.why_engine}): set rollout_engine to {engine} and provide "
                    "what it needs, or start a new run from its weights"
                )
            self.why_engine = "auto: as in the resumed run"
        self.checkpointer.config = self.saved_config()

    def _end_by_signal(self, number: int, journal: Journal) -> None:
        name = signal.Signals(number).name
        journal.say(f"{name}: --resume_from_checkpoint latest resumes {self._latest_checkpoint()}")
        raise Terminated(number)

    @contextmanager
    def _save_on_error(self) -> Iterator[None]:
        """Save the last finished step when an error ends the run, and add a note to the error.

        With several processes this happens only if all raise it together: an error of one alone
        leaves the others in a collective. A failure to save is logged, and the original error
        raised. A run that has diverged or was interrupted twice is not saved. Older checkpoints are
        kept: weights of half a step do not replace those of a whole one.
        """
        try:
            yield
        except FloatingPointError:  # it diverged: older checkpoints are better
            raise
        except BaseException as error:
            step = self.state.step
            begun = self.learner.updates_begun
            saver = self.checkpointer
            if step == 0 or (isinstance(error, KeyboardInterrupt) and self.termination.asked):
                raise
            try:
                if saver.saved_step != step and self.runtime.is_shared(error):
                    self.save_checkpoint(prunes=False)
                    if begun and self.runtime.is_main:
                        logger.warning(
                            "%s contains %d updates of the interrupted step %d; that step will be "
                            "repeated, so the run will not be bit-identical",
                            saver.path(),
                            begun,
                            step + 1,
                        )
            except Exception as another:
                logger.warning("training since the last checkpoint is lost: %s", another)
            if saver.saved_step == step:
                error.add_note(f"Resume from {saver.path()} (--resume_from_checkpoint latest).")
            raise

    # ------------------------------------------------------------------------------------- save

    def _latest_checkpoint(self) -> Path:
        """Return the checkpoint of the last finished step; save it if there is none yet."""
        saved = self.checkpointer.saved_step == self.state.step
        if saved:
            return self.checkpointer.path()
        return self.save_checkpoint()

    @broadcasts_failure
    def save_checkpoint(self, prunes: bool = True) -> Path:
        """Save everything that a resumed run needs, under `output_dir/checkpoints/`; if it
        `prunes`, older checkpoints beyond `save_total_limit` are removed.
        """
        path = self.checkpointer.save(self.runtime, prunes=prunes)
        if self.journal is not None and not self.learner.updates_begun:  # else of half a step
            self.journal.trace(
                {"step": self.state.step, "weights": self.recorder.fingerprints(trained=True)}
            )
        self._tell("on_save", path)
        return path

    @broadcasts_failure
    def save_model(self, path: str | Path) -> None:
        """Save model (or its adapter) and tokenizer as `from_pretrained` reads them; OSError on all
        processes if that fails.

        A critic is saved in the subdirectory `critic/`, and with `save_merged` the model with its
        adapter merged in `merged/`.
        """
        save = atomic.Save(self.runtime, Path(path))
        self.checkpointer.save_models(save, save.path, final=True)

    # ------------------------------------------------------------------------------- description

    def describe(self) -> str:
        """Describe the run in one line, and each source of reward in another."""
        trained = (
            f"{type(self).__name__}: {self.runtime.describe()}; {self.learner.size}; "
            f"{len(self.train_prompts)} prompts, {self.total_steps} steps; "
            f"rollout_engine {self.engine_name} ({self.why_engine})"
        )
        return "\n".join([trained, *self.described])

    def resolved_args(self) -> PolicyGradientConfig:
        """Return the config with the data, rewards, engine and token budget that were found."""
        resolved: dict[str, Any] = {
            "micro_batch_tokens": self.learner.token_budget,
            "dataset_fingerprint": self.train_prompts.fingerprint,
        }
        kind = type(self)
        with suppress(OSError, TypeError):  # a notebook's class has no file
            if not kind.__module__.startswith("rlhf_pg.") and (file := inspect.getsourcefile(kind)):
                resolved["trainer"] = f"{os.path.abspath(file)}:{kind.__qualname__}"
        chosen = with_engine(self.args, self.engine_name)
        return dataclasses.replace(chosen, **resolved, **self.recorded)

    def saved_config(self) -> dict[str, Any]:
        """Return the config as a checkpoint holds it."""
        return dataclasses.asdict(self.resolved_args()) | {"algorithm": self.algorithm}

    @property
    def algorithm(self) -> str:
        """The name of the algorithm, for example "GRPO"."""
        return self.config_type.__name__.removesuffix("Config")

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the tokenizer and data, which a resumed run must be given again."""
        return {
            "tokenizer": vocabulary_fingerprint(self.sampler.player.tokenizer),
            "train_dataset": self.train_prompts.fingerprint,
        }

    @property
    def open_keys(self) -> set[str]:
        """Keys set to "auto"; a resumed run takes the values found before."""
        keys = ("micro_batch_tokens", "rollout_engine")
        return {key for key in keys if getattr(self.args, key) == "auto"}

    def began(self) -> Start:
        """Describe the environment and the weights that the run begins from; collective."""
        return Start(
            step=self.state.step,
            versions=versions(),
            processes=self.runtime.world,
            backend=self.runtime.kind,
            device=self.runtime.device_name,
            weights=self.recorder.fingerprints(),
        )

    # -------------------------------------------------------------------------------- callbacks

    def _tell(self, moment: str, *arguments: Any) -> None:
        """Call a method of every callback."""
        for callback in self.callbacks:
            with foreign(f"{moment} of the callback {type(callback).__name__}"):
                getattr(callback, moment)(self, *arguments)
