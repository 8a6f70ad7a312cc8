"""The loop around the steps of any run: resume, evaluate, report, save, end."""

import dataclasses
import logging
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import TrainOutput

from rlhf_pg.boundary.quoted import show
from rlhf_pg.boundary.user_code import foreign
from rlhf_pg.checkpoint import Checkpointer, TrainState, atomic, export
from rlhf_pg.checkpoint.run_dir import run_dir_lock
from rlhf_pg.config import dump
from rlhf_pg.config.run import TrainingConfig
from rlhf_pg.data import vocabulary_fingerprint
from rlhf_pg.failpoints import failpoint
from rlhf_pg.report.journal import Journal, due, summarize
from rlhf_pg.rng import restore_rng, rng_tensors
from rlhf_pg.run.device import warn_of_attention
from rlhf_pg.run.learner import Learner
from rlhf_pg.runtime import Runtime, Terminated, Termination, broadcasts_failure
from rlhf_pg.runtime.trackers import Trackers

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
    """Refuse objects that are not callbacks (ValueError)."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ValueError(
                f"callbacks must be objects of rlhf_pg.Callback, got {show(callback)}: "
                "instantiate a class; write a transformers callback's on_step_end and on_log as "
                "on_step(trainer, metrics), and should_training_stop as trainer.stop()"
            )


class TrainingLoop(ABC):
    """Runs the steps of a run, and what happens between them; it knows no algorithm and no loss.

    A subclass sets the annotated attributes before it calls `__init__`.

    Attributes:
        running: records that change during the run, which checkpoints hold, by name.
        ahead: batches that were sampled ahead, which belong to the state; None without.
        history: the lines of metrics.jsonl of this process's steps.
    """

    args: TrainingConfig
    runtime: Runtime
    trackers: Trackers
    termination: Termination
    state: TrainState
    learner: Learner
    processing_class: PreTrainedTokenizerBase
    data_fingerprint: str  # of the training data
    total_steps: int
    running: Mapping[str, Any] = {}
    ahead: Any = None
    shown: ClassVar[Sequence[str]] = ("loss", "grad_norm")  # metrics on the console
    shown_held_out: ClassVar[Sequence[str]] = ()  # of an evaluation; empty: all
    auto_keys: ClassVar[Sequence[str]] = ("micro_batch_tokens",)  # which a resumed run takes over
    # Evaluations may fail, so checkpoints are saved first, unless evaluations change the state.
    saves_after_evaluation: ClassVar[bool] = False

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)
        warn_of_attention(self.args, self.learner)
        self.history: list[dict[str, Any]] = []
        self.journal: Journal | None = None  # while the run trains
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

    @abstractmethod
    def step(self) -> dict[str, Any]:
        """Take one step and count it in `state`; return the line for metrics.jsonl."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return metrics of the held-out data, whose names begin with "eval_"."""

    def describe(self) -> str:
        """Describe the run in one or more lines."""
        return f"{type(self).__name__}: {self.runtime.describe()}; {self.learner.size}"

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation follows a step."""
        return due(step, self.args.eval_steps)

    def after_evaluation(self, metrics: dict[str, Any]) -> None:  # noqa: B027 (may do nothing)
        """Act on the metrics of an evaluation in the run."""

    def before_first_step(self, journal: Journal) -> None:  # noqa: B027
        """Act before the first step."""

    def before_final(self, journal: Journal) -> None:  # noqa: B027
        """Act after the last step, before `final/` is written."""

    def after_save(self) -> None:  # noqa: B027
        """Act after a checkpoint has been written."""

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
            self._train(self.args.resume_from_checkpoint if choice is None else choice)
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
        self.journal = journal = Journal(
            directory,
            self.state.step,
            self.runtime.is_main,
            self.shown,
        )
        origin = self.checkpointer.origin
        args = dataclasses.replace(self.resolved_args(), resume_from_checkpoint=origin)
        if self.runtime.is_main:
            dump(args, directory / "config.yaml")
        journal.say(self.describe())
        self.before_first_step(journal)
        tracked = self.trackers.open(
            directory, args.run_name, dataclasses.asdict(args), self.state.step > 0
        )
        progress = journal.progress(self.total_steps)
        with self.termination.handle_signals(), tracked, progress, self._save_on_error():
            self._tell("on_start")
            while self.state.step < self.total_steps and not self.termination.stopping:
                self._take_step(journal)
            # Before closing the trackers, which may wait for a network.
            self.before_final(journal)
            export.save_final(
                self.checkpointer,
                self.runtime,
                directory / "final",
                self.write_model,
            )
        # A signal may come during the last report too. The caller has to end as well.
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
            self.learner.updates_begun = 0
        except BaseException:  # updates that reached the weights are not undone
            restore_rng(rng)
            self.checkpointer.roll_back(snapshot)
            raise
        failpoint("stepped")
        args = self.args
        step = self.state.step
        evaluates = self.evaluates(step)
        reported = evaluates or due(step, args.logging_steps, self.total_steps)
        saves = due(step, args.save_steps, self.total_steps)
        try:
            self._tell("on_step_end")
            if saves and not self.saves_after_evaluation:
                self.save_checkpoint()
            if evaluates:
                metrics |= self.evaluate_in_run(journal)
                self.after_evaluation(metrics)
                self._tell("on_evaluate", metrics)
            self._tell("on_step", metrics)
        finally:  # log the step even if something fails after it
            self.history.append(metrics)
            journal.step(metrics)
            if reported:
                self.trackers.log(metrics)
        if reported:
            self._tell("on_log", metrics)
        if saves and self.saves_after_evaluation:
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

    def evaluate_in_run(self, journal: Journal) -> dict[str, float]:
        """Evaluate, and show the metrics on the console."""
        metrics = self.evaluate()
        names = self.shown_held_out or tuple(metrics)
        if summary := summarize(metrics, *names):
            journal.say(f"step {self.state.step}  held out: {summary}")
        return metrics

    # ------------------------------------------------------------------------- resume and leave

    def on_resume(self, saved: dict[str, Any]) -> None:
        """Use the values that the resumed run found for keys set to "auto"."""
        tokens = saved.get("micro_batch_tokens", "auto")
        if "micro_batch_tokens" in self.open_keys and tokens != "auto":
            self.learner.token_budget = tokens  # another order of sums rounds differently
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
        if self.checkpointer.saved_step == self.state.step:
            return self.checkpointer.path()
        return self.save_checkpoint()

    @broadcasts_failure
    def save_checkpoint(self, prunes: bool = True) -> Path:
        """Save everything that a resumed run needs, under `output_dir/checkpoints/`; if it
        `prunes`, older checkpoints beyond `save_total_limit` are removed.
        """
        path = self.checkpointer.save(self.runtime, prunes=prunes)
        self.after_save()
        self._tell("on_save", path)
        return path

    def write_model(self, save: atomic.Save, path: Path) -> None:
        """Write the final model and the tokenizer as `from_pretrained` reads them."""
        self.checkpointer.save_models(save, path, final=True)

    # ------------------------------------------------------------------------------- description

    def resolved_args(self) -> TrainingConfig:
        """Return the config with the data and the token budget that were found."""
        resolved: dict[str, Any] = {
            "micro_batch_tokens": self.learner.token_budget,
            "dataset_fingerprint": self.data_fingerprint,
        }
        return dataclasses.replace(self.args, **resolved)

    def saved_config(self) -> dict[str, Any]:
        """Return the config as a checkpoint holds it."""
        return dataclasses.asdict(self.resolved_args())

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the tokenizer and data, which a resumed run must be given again."""
        return {
            "tokenizer": vocabulary_fingerprint(self.processing_class),
            "train_dataset": self.data_fingerprint,
        }

    @property
    def open_keys(self) -> set[str]:
        """Keys set to "auto"; a resumed run takes the values found before."""
        return {key for key in self.auto_keys if getattr(self.args, key) == "auto"}

    # -------------------------------------------------------------------------------- callbacks

    def _tell(self, moment: str, *arguments: Any) -> None:
        """Call a method of every callback."""
        for callback in self.callbacks:
            with foreign(f"{moment} of the callback {type(callback).__name__}"):
                getattr(callback, moment)(self, *arguments)
