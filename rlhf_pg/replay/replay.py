"""Replay a step of a run from the checkpoint before it, bit for bit: ids and scores come from the
record of the step, so no engine or reward is called.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_pg.boundary.quoted import quote, show, tell
from rlhf_pg.checkpoint import atomic
from rlhf_pg.config.fields import EFFECTS
from rlhf_pg.config.parse import parse
from rlhf_pg.config.run import effect_of
from rlhf_pg.data import Batch
from rlhf_pg.data.row_files import UNREADABLE, StepTokens
from rlhf_pg.replay.comparison import Mismatch, compare_metrics, compare_tokens, compare_weights
from rlhf_pg.report.metrics import Meter
from rlhf_pg.report.run_files import (
    METRICS,
    RunFiles,
    StepRecord,
    tokens_file,
)
from rlhf_pg.rewards.named import PYTHON, make_rewards
from rlhf_pg.trainers import TRAINERS, PolicyGradientTrainer, trainer_type


@dataclass(frozen=True, kw_only=True)
class Made:
    """A replayed step."""

    step: int
    metrics: Mapping[str, Any]  # of the step, with new times
    record: StepRecord  # complete only on the main process
    differs: Sequence[Mismatch]  # differences from the recorded step; empty on other processes


class Replay:
    """Replays the steps of a run with a trainer that has its config and Python arguments.

    It neither writes to the run directory nor calls a callback. All methods are collective.
    ValueError if there is no run, or its initial weights are not the trainer's.
    """

    def __init__(self, trainer: PolicyGradientTrainer, run: RunFiles | None = None) -> None:
        self.trainer = trainer
        self.run = RunFiles(Path(trainer.args.output_dir)) if run is None else run
        if not self.run.metrics:
            raise ValueError(f"{self.run.directory} holds no run: it has no line in {METRICS}")
        self.last: int = self.run.metrics[-1]["step"]
        self.has_episodes = trainer.episode_runner is not None
        if self.has_episodes and trainer.privileged_prompt is not None:
            raise ValueError(
                "privileged_prompt is a function of messages, which the record of an episode lacks"
            )
        trainer.observers = ()  # do not write records
        trainer.agreement.refuses = False  # other hardware may round differently
        trainer.on_resume(self.run.config)
        began = self.run.starts[0] if self.run.starts else None
        if began is None or began.step or trainer.state.step or trainer.runtime.splits:
            return  # fingerprints of shards depend on how they were split
        now = trainer.began()
        if began.backend != now.backend:
            return
        for name, number in began.weights.items():
            if now.weights.get(name) != number:
                raise ValueError(
                    f"the run began from other weights: {name} was {number} and is "
                    f"{now.weights.get(name, 'not there')}. Give the model as it was then"
                )

    def make(self, step: int, resample: bool = False) -> Made:
        """Replay a step, counted from 1; with `resample` sample and score again, too. ValueError if
        the run did not take it, its record or an earlier checkpoint is missing, or something
        external would be called.
        """
        self.go_to(step - 1)
        recorded = self.run.tokens(step)
        if recorded is None:
            file = tokens_file(self.run.directory, step)
            raise ValueError(f"{file} is missing or unreadable: step {step} cannot be compared")
        trainer = self.trainer
        meter = Meter()
        if resample:
            if trainer.ahead is not None:
                raise ValueError("--resample: with rollout_ahead, earlier weights sampled the step")
            asked = [s.name for s in trainer.rewards.sources if s.kind == "async"]
            if self.has_episodes:
                asked.append("the environment")
            if trainer.engine_name != "native":
                asked.append(trainer.engine_name)
            if asked:
                raise ValueError(
                    f"--resample would ask {', '.join(asked)} again, which may not answer as before"
                )
            with torch.no_grad():
                batch = trainer.sampler.next_batch(trainer.state.prompt_index, meter)
        else:
            batch = self.batch(step)
        records: list[StepRecord] = []
        trainer.observers = [lambda seen: records.append(trainer.recorder.record(step, seen, 0))]
        metrics = trainer.learn(batch, meter)
        trainer.observers = ()
        [record] = records
        weights = trainer.recorder.fingerprints(trained=True) if step in self.run.weights else {}
        differs: list[Mismatch] = []
        if record.tokens is not None:
            line = next((x for x in self.run.metrics if x["step"] == step), {})
            differs += compare_tokens(recorded, record.tokens, trainer.shaping.names)
            differs += compare_metrics(line, metrics)
            # Fingerprints of shards depend on how they were split.
            runtime = trainer.runtime
            starts = [start for start in self.run.starts if start.step < step]
            if starts and starts[-1].backend == runtime.kind:
                is_split_alike = not runtime.splits or starts[-1].processes == runtime.world
                if is_split_alike:
                    differs += compare_weights(self.run.weights.get(step, {}), weights)
        return Made(step=step, metrics=metrics, record=record, differs=differs)

    def go_to(self, step: int) -> None:
        """Bring the trainer to its state after a step."""
        began = self.run.starts[0].step if self.run.starts else 0
        if not began <= step < self.last:
            raise ValueError(
                f"the run took steps {began + 1} to {self.last}: step {step + 1} is not among them"
            )
        trainer = self.trainer
        found = self._checkpoint(step)
        now = trainer.state.step
        if found is not None and (now > step or found[0] > now):
            trainer.on_resume(trainer.checkpointer.restore(found[1], trainer.runtime.rank))
        elif now > step:
            raise ValueError(
                f"the trainer has taken {now} steps, and there is no checkpoint before step "
                f"{step + 1} to go back to: make a new one"
            )
        elif now < began:
            raise ValueError(
                f"the run was resumed from a checkpoint of step {began} that is missing "
                f"(resume_from_checkpoint), and has none before step {step + 1}: put one back"
            )
        while trainer.state.step < step:
            trainer.learn(self.batch(trainer.state.step + 1), Meter())

    def batch(self, step: int) -> Batch:
        """Return this rank's completions of a step with their scores; ValueError without record."""
        trace = self.run.traces.get(step)
        tokens = self.run.tokens(step)
        if trace is None or tokens is None:
            raise ValueError(
                f"{tokens_file(self.run.directory, step)} or its line in trace.jsonl is missing or "
                f"of an earlier version: step {step} cannot be made again"
            )
        greedy = self.run.tokens(step, greedy=True)
        try:
            return self._recorded_batch(tokens).with_columns(
                num_prompts=trace["num_prompts"],
                other_tokens=trace["other_tokens"],
                greedy=None if greedy is None else self._recorded_batch(greedy),
            )
        except torch.OutOfMemoryError:
            raise
        except (*UNREADABLE, RuntimeError) as error:
            raise ValueError(
                f"{tokens_file(self.run.directory, step)} is not of this model and data: "
                f"{tell(error)}"
            ) from error

    def _recorded_batch(self, record: StepTokens) -> Batch:
        trainer = self.trainer
        runtime = trainer.runtime
        tokenizer = trainer.processing_class
        local_rows = [
            i for i, rank in enumerate(record.rank) if rank % runtime.world == runtime.rank
        ]
        embeddings: Any = trainer.model.get_input_embeddings()
        tokens = np.concatenate([record.ids, record.prompt_ids])
        if not len(tokens) or not 0 <= tokens.min() <= tokens.max() < embeddings.num_embeddings:
            raise ValueError("there is no token, or one that the model does not have")
        rows = []
        recorded = record.rows(local_rows)
        drawn = trainer.train_prompts.take(
            [row.dataset_row for row in recorded],
            [row.group for row in recorded],
        )
        for row, prompt in zip(recorded, drawn, strict=True):
            opened = prompt.example.get("prompt")
            if self.has_episodes:
                opened = tokenizer.decode(row.prompt_ids)
            opened, completion = trainer.sampler.player.texts(opened, row.ids)
            row = dataclasses.replace(
                row,
                prompt=opened,
                completion=completion,
                columns=prompt.columns(),
            )
            rows.append(row)
        return trainer.sampler.batch_of(rows, record.scores.shape[1])

    def _checkpoint(self, step: int) -> tuple[int, Path] | None:
        """Return the newest complete checkpoint up to this step, and its step."""
        directory = self.run.directory
        candidates = [*(directory / "checkpoints").glob("step-*"), directory / "best"]
        other = self.trainer.args.resume_from_checkpoint
        if other not in (None, "latest"):  # a checkpoint of another run
            candidates.append(Path(other))
        sealed = {candidate: atomic.state(candidate).get("step", -1) for candidate in candidates}
        for candidate in sorted(candidates, key=sealed.__getitem__, reverse=True):
            if 0 < sealed[candidate] <= step:
                reason = atomic.find_damage(candidate, contents=self.trainer.runtime.is_main)
                if self.trainer.runtime.first_error(reason) is None:
                    return sealed[candidate], candidate
        return None


def computed_changes(before: Any, after: Any) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two configs of a run differ, with both values. ValueError if one
    would change the completions, or none changes what becomes of them.
    """
    values = vars(after)
    differing = {key: (x, values[key]) for key, x in vars(before).items() if x != values[key]}
    changes = {}
    for key, pair in differing.items():
        replay = EFFECTS[effect_of(key)].replay
        if replay == "other run":
            raise ValueError(f"{key} cannot be changed for existing completions: train another run")
        if replay == "computed":
            changes[key] = pair
    if not changes:
        same = f"a step does not depend on {', '.join(differing)}"
        raise ValueError(
            f"{same if differing else 'no key differs'}: name another key, such as --beta 0.1"
        )
    return changes


def rebuild(run: RunFiles, keys: Sequence[str] = ()) -> PolicyGradientTrainer:
    """Make the trainer of a run from its config.yaml, with other keys; else ValueError. A reward
    given in Python that cannot be found by name is not called.
    """
    if not run.config:
        raise ValueError(f"{run.directory} holds no run: it lacks config.yaml")
    algorithm = run.config.get("algorithm")
    if algorithm not in [*TRAINERS]:
        raise ValueError(
            f"{run.directory / 'config.yaml'}: the key algorithm must be one of "
            f"{', '.join(TRAINERS)}, got {show(algorithm)}"
        )
    trainer = run.config.get("trainer")
    kind = trainer_type(algorithm, trainer and str(trainer))
    recipe = ["--config", str(run.directory / "config.yaml")]
    args: Any = parse(kind.config_type, [*recipe, *keys], "rlhf-pg replay")
    if keys:  # before anything is loaded
        computed_changes(parse(kind.config_type, recipe), args)
    in_python = [*args.given_in_python]
    if args.model_name_or_path is None:
        in_python.append("its model")
    if args.task is None and not args.dataset_name:
        in_python.append("its data")
    if in_python:
        raise ValueError(
            f"the run was given {', '.join(in_python)} in Python: make its trainer in Python, and "
            "give it to rlhf_pg.replay.replay.Replay"
        )
    if not keys:  # the same run, perhaps in another directory now
        args = dataclasses.replace(args, output_dir=str(run.directory))
    names = args.reward_funcs
    options = args.reward_options
    functions = []
    if any(name.startswith(PYTHON) for name in names):
        args = dataclasses.replace(args, reward_funcs=(), reward_options={})
        for name in names:
            own = {name: options[name]} if name in options else {}
            functions += [_missing(name)] if name.startswith(PYTHON) else make_rewards([name], own)
    return kind(args=args, reward_funcs=functions)


def _missing(name: str) -> Any:
    def missing(**_: Any) -> Any:
        raise ValueError(f"{quote(name)} was given in Python, and is not there to be asked")

    missing.__name__ = name.removeprefix(PYTHON)
    return missing
