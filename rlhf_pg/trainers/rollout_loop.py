"""The loop of a run with rewards, which adds a rollout engine, step records and the best model."""

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from rlhf_pg.checkpoint import atomic
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data import Batch
from rlhf_pg.report.journal import Journal, due
from rlhf_pg.report.run_files import Start, versions
from rlhf_pg.rollout.factory import with_engine
from rlhf_pg.run.loop import Callback, TrainingLoop
from rlhf_pg.runtime import broadcasts_failure
from rlhf_pg.trainers.learner import PolicyLearner
from rlhf_pg.trainers.parts import Parts
from rlhf_pg.trainers.recorder import Recorder


class RolloutLoop(Parts, TrainingLoop):
    """The loop of a run that samples. The parts are attributes of it that are never replaced
    (`Parts` is frozen); its own attributes may be.
    """

    args: PolicyGradientConfig
    learner: PolicyLearner
    running: dict[str, Any]
    config_type: ClassVar[type[PolicyGradientConfig]]
    shown = ("reward", "teacher/divergence", "kl", "entropy")
    shown_held_out = ("eval_reward", "eval_greedy_reward")
    auto_keys = (*TrainingLoop.auto_keys, "rollout_engine")
    saves_after_evaluation = True  # with the best reward

    def __init__(self, parts: Parts, callbacks: Sequence[Callback]) -> None:
        Parts.__init__(self, **vars(parts))
        self.data_fingerprint = self.train_prompts.fingerprint
        # Called with a batch that was trained on.
        self.observers: Sequence[Callable[[Batch], None]] = ()
        self.engine_name, self.why_engine = self.chosen_engine  # until a run is resumed
        TrainingLoop.__init__(self, callbacks)
        self.recorder = Recorder(
            self.runtime,
            self.processing_class,
            self.shaping.names,
            parameters=lambda: self.checkpointer.parameters,
        )

    def _train(self, choice: str | bool | None) -> None:
        try:
            super()._train(choice)
        finally:
            if self.ahead is not None:
                self.ahead.drop()

    def before_first_step(self, journal: Journal) -> None:
        """Record the environment and the weights that the run begins from."""
        journal.trace(vars(self.began()))
        if self._record not in self.observers:
            self.observers = [*self.observers, self._record]

    def after_evaluation(self, metrics: dict[str, Any]) -> None:
        """Keep the checkpoint of the highest reward, in best/."""
        reward = metrics["eval_reward"]
        best = self.state.best_reward
        # NaN (no source applied) would never be exceeded as the best reward.
        if math.isnan(reward) or (best is not None and reward <= best):
            return
        self.state.best_reward = reward  # which best/ holds too
        try:
            if self.args.save_best:
                self.checkpointer.save(self.runtime, Path(self.args.output_dir) / "best")
        except BaseException:
            self.state.best_reward = best
            raise

    def _record(self, batch: Batch) -> None:
        """Record a step that is not yet counted in `state`; collective."""
        assert self.journal is not None
        step = self.state.step + 1
        args = self.args
        every = args.log_completions_steps
        logged = due(step, every, self.total_steps) or (step == 1 and every > 0)
        shown = args.num_completions_to_print if logged else None
        self.journal.record(self.recorder.record(step, batch, shown))

    def on_resume(self, saved: dict[str, Any]) -> None:
        """Use the values that the resumed run found for "auto"; ValueError without its engine."""
        engine = saved.get("rollout_engine", "auto")
        if "rollout_engine" in self.open_keys and engine != "auto":  # another samples differently
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
        super().on_resume(saved)

    def after_save(self) -> None:
        """Record the weights of the checkpoint."""
        if self.journal is not None and not self.learner.updates_begun:  # else of half a step
            weights = self.recorder.fingerprints(trained=True)
            self.journal.trace({"step": self.state.step, "weights": weights})

    @broadcasts_failure
    def save_model(self, path: str | Path) -> None:
        """Save model (or its adapter) and tokenizer as `from_pretrained` reads them; OSError on all
        processes if that fails.

        A critic is saved in the subdirectory `critic/`, and with `save_merged` the model with its
        adapter merged in `merged/`.
        """
        save = atomic.Save(self.runtime, Path(path))
        self.checkpointer.save_models(save, save.path, final=True)

    def describe(self) -> str:
        """Describe the run in one line, and each source of reward in another."""
        first = (
            f"{super().describe()}; {len(self.train_prompts)} prompts, {self.total_steps} steps; "
            f"rollout_engine {self.engine_name} ({self.why_engine})"
        )
        return "\n".join([first, *self.described])

    def resolved_args(self) -> PolicyGradientConfig:
        """Return the config with the data, rewards, engine and token budget that were found."""
        resolved = super().resolved_args()
        assert isinstance(resolved, PolicyGradientConfig)
        changes = dict(self.recorded)
        kind = type(self)
        with suppress(OSError, TypeError):  # a notebook's class has no file
            if not kind.__module__.startswith("rlhf_pg.") and (file := inspect.getsourcefile(kind)):
                changes["trainer"] = f"{os.path.abspath(file)}:{kind.__qualname__}"
        return dataclasses.replace(with_engine(resolved, self.engine_name), **changes)

    def saved_config(self) -> dict[str, Any]:
        """Return the config as a checkpoint holds it."""
        return super().saved_config() | {"algorithm": self.algorithm}

    @property
    def algorithm(self) -> str:
        """The name of the algorithm, for example "GRPO"."""
        return self.config_type.__name__.removesuffix("Config")

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
