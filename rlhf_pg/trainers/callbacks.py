"""Callbacks, which observe a run: ours, and those of transformers through an adapter."""

import dataclasses
import inspect
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState

from rlhf_pg.boundary.quoted import quoted, shown
from rlhf_pg.config.foreign_keys import explained
from rlhf_pg.config.run import RunConfig

logger = logging.getLogger(__name__)

Request = Literal["should_training_stop", "should_evaluate", "should_save", "should_log"]


class Callback:
    """User code that observes a run; every process calls it, at the same moments.

    Override what is needed. `trainer.stop()` ends the run after the step.
    """

    def on_start(self, trainer: Any) -> None:
        """Called before the first step, also of a resumed run."""

    def on_step_begin(self, trainer: Any) -> None:
        """Called before each step."""

    def on_step_end(self, trainer: Any) -> None:
        """Called when a step is taken, before anything is evaluated."""

    def on_evaluate(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Called after an evaluation that is part of the run; `metrics` are those of the step."""

    def on_step(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Called after each step; `metrics` is the line of metrics.jsonl, and may be added to."""

    def on_log(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Called when trackers get the line of a step."""

    def on_save(self, trainer: Any, path: Path) -> None:
        """Called after a checkpoint has been written."""

    def on_end(self, trainer: Any) -> None:
        """Called after the last step, when `final/` has been written."""

    def requests(self, request: Request) -> bool:
        """Return whether the callback requests something, in the words of transformers."""
        return False


def adapted(callbacks: Sequence[Callback | TrainerCallback] | None) -> list[Callback]:
    """Return the callbacks as the loop calls them.

    Raises:
        ValueError: one is a class, or no callback.
    """
    return [_adapted(callback) for callback in callbacks or ()]


def _adapted(callback: Any) -> Callback:
    if isinstance(callback, Callback):
        return callback
    if isinstance(callback, TrainerCallback):
        return TransformersCallback(callback)
    if inspect.isclass(callback):
        name = quoted(callback.__name__)
        raise ValueError(f"callbacks must be objects, got the class {name}: write {name}()")
    raise ValueError(
        "callbacks must be objects of rlhf_pg.Callback or transformers.TrainerCallback, got "
        f"{shown(callback)}"
    )


class TransformersCallback(Callback):
    """A `TrainerCallback` of transformers, which sees this run as one of `transformers.Trainer`.

    It gets `args` as `SeenArguments`, a `TrainerState` and a `TrainerControl`, and by name the
    model, the tokenizer, the optimizer and its schedule. A step is one rollout batch with every
    update on it, so the moments within an optimizer step do not occur, nor those of a prediction.
    """

    def __init__(self, callback: TrainerCallback) -> None:
        self.callback = callback
        self.name = type(callback).__name__  # as an error calls it
        self.control, self.state = TrainerControl(), TrainerState()
        self._epoch = 0
        self._has_warned = False

    def requests(self, request: Request) -> bool:
        return bool(getattr(self.control, request))

    def on_start(self, trainer: Any) -> None:
        self.control = TrainerControl()
        self.state = TrainerState(best_metric=trainer.state.best_reward)
        self._happen("on_train_begin", trainer)
        self._epoch = int(self.state.epoch)
        self._happen("on_epoch_begin", trainer)

    def on_step_begin(self, trainer: Any) -> None:
        control = self.control
        control.should_save = control.should_evaluate = control.should_log = False
        self._happen("on_step_begin", trainer)

    def on_step_end(self, trainer: Any) -> None:
        self._happen("on_step_end", trainer)

    def on_evaluate(self, trainer: Any, metrics: dict[str, Any]) -> None:
        own = {key: value for key, value in metrics.items() if key.startswith("eval_")}
        self._happen("on_evaluate", trainer, metrics=own)
        reward, best = own["eval_reward"], self.state.best_metric
        if not math.isnan(reward) and (best is None or reward > best):
            self.state.best_metric, self.state.best_global_step = reward, trainer.state.step

    def on_log(self, trainer: Any, metrics: dict[str, Any]) -> None:
        logs = {k: v for k, v in metrics.items() if v is not None} | {"epoch": self.state.epoch}
        self.state.log_history.append(logs)
        self._happen("on_log", trainer, logs=dict(logs))

    def on_step(self, trainer: Any, metrics: dict[str, Any]) -> None:
        if int(_progress(trainer).epoch) > self._epoch:
            self._happen("on_epoch_end", trainer)
            self._epoch = int(self.state.epoch)
            if trainer.state.step < trainer.total_steps:
                self._happen("on_epoch_begin", trainer)

    def on_save(self, trainer: Any, path: Path) -> None:
        self._happen("on_save", trainer)

    def on_end(self, trainer: Any) -> None:
        if _progress(trainer).epoch > self._epoch:  # it ends within one
            self._happen("on_epoch_end", trainer)
        self._happen("on_train_end", trainer)

    def _happen(self, moment: str, trainer: Any, **more: Any) -> None:
        """Tell the callback of a moment; it may answer with another control."""
        self._look(trainer)
        answer = getattr(self.callback, moment)(
            SeenArguments(trainer.args, trainer.runtime),
            self.state,
            self.control,
            model=trainer.model,
            processing_class=trainer.processing_class,
            optimizer=trainer.learner.trained.optimizer,
            lr_scheduler=trainer.learner.scheduler,
            train_dataloader=None,
            eval_dataloader=None,
            **more,
        )
        if answer is not None:
            self.control = answer
        if self.control.should_epoch_stop and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s set should_epoch_stop, which is not obeyed, since steps do not end with an "
                "epoch: set should_training_stop",
                quoted(self.name),
            )

    def _look(self, trainer: Any) -> None:
        """Bring the state up to date."""
        args, now = trainer.args, _progress(trainer)
        every = {"logging_steps": args.logging_steps}
        every |= {"eval_steps": args.eval_steps, "save_steps": args.save_steps}
        seen = every | {
            "epoch": now.epoch,
            "global_step": now.global_step,
            "max_steps": now.max_steps,
            "num_train_epochs": args.num_train_epochs,
            "num_input_tokens_seen": trainer.state.num_tokens,
            "is_local_process_zero": trainer.runtime.is_main,
            "is_world_process_zero": trainer.runtime.is_main,
        }
        for name, value in seen.items():
            setattr(self.state, name, value)


def _progress(trainer: Any) -> TrainerState:
    progress: TrainerState = trainer._progress()
    return progress


class SeenArguments:
    """The config as a callback of transformers reads it, with the names of `TrainingArguments`."""

    def __init__(self, args: RunConfig, runtime: Any) -> None:
        every = {"eval": args.eval_steps, "save": args.save_steps, "logging": args.logging_steps}
        strategies = {
            f"{name}_strategy": "steps" if steps else "no" for name, steps in every.items()
        }
        self.__dict__ |= strategies | {
            "_args": args,
            "metric_for_best_model": "eval_reward",
            "greater_is_better": True,
            "load_best_model_at_end": args.save_best and args.eval_steps > 0,
            "process_index": runtime.rank,
            "world_size": runtime.world,
            "device": runtime.device,
            "should_save": runtime.is_main,
            "should_log": runtime.is_main,
            "logging_dir": str(Path(args.output_dir) / "tensorboard"),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return every key of the config."""
        return dataclasses.asdict(self._args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by copy and pickle, before there is a config
            raise AttributeError(name)
        if hasattr(self._args, name):
            return getattr(self._args, name)
        raise AttributeError(explained(name) or f"the config has no key {name!r}")
