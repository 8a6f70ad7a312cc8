"""The sources of reward of a run, called on the same completions.

Shapes: B completions, T columns, K sources.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import TrainerState

from rlhf_pg.boundary.quoted import shown as quote
from rlhf_pg.data.records import pad_rows
from rlhf_pg.rewards.answers import Answer, Failed, answered, placed, refusal
from rlhf_pg.rewards.calls import (
    AsyncCall,
    Shown,
    begin_in_worker,
    call_here,
)
from rlhf_pg.rewards.judgement import Begun, Judgement, described, joined
from rlhf_pg.rewards.sources import RewardSource, Source, Tokenizers, is_model, sources_of
from rlhf_pg.rewards.workers import WorkerPool

logger = logging.getLogger(__name__)

ENVIRONMENT = "environment"  # name of an environment's rewards


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """The config's keys for calls of reward functions.

    Attributes:
        workers: `reward_workers`.
        timeout: `reward_timeout`.
        on_error: `on_reward_error`.
        error_value: `reward_error_value`.
    """

    workers: int = 0
    timeout: float | None = None
    on_error: Literal["error", "drop", "value"] = "error"
    error_value: float = 0.0


class Rewards:
    """One or several reward functions, called on the same completions.

    Args:
        functions: callables `(prompts, completions, completion_ids, **columns)` that return one
            float per completion, or None where the reward does not apply; plain, or async, all on
            one event loop for the run. Instead of a float, a list with one entry per token of
            `completion_ids` gives a score to every step, at the token that ends it, and None to
            the other tokens. A sequence classifier, or the path or Hub id of one, becomes a
            `RewardModel`.
        weights: one per function; None gives each weight 1.
        processing_classes: tokenizers of the reward models: one for all, or a list with one entry
            per function. None stands for the tokenizer saved beside the model.
        device: device of the reward models; None leaves a model where it is.
        environment: an environment pays too, as the last source, "environment".
        sees_eos, trust_remote_code: options of reward models made here.
        options: where functions are called, for how long, and what follows if they fail.

    A function gets what its signature names, all columns if it has **kwargs. One that names them
    also gets `ended` (a bool per completion: the policy ended it by an EOS), `truncated` (a bool
    per completion: a limit ended it; a stop string sets neither) and `step` (number of steps so
    far). One that names them or has **kwargs also gets `trainer_state` (a copy of a
    `transformers.TrainerState` with `global_step`, `max_steps` and `epoch`), `log_extra(column,
    values)` and `log_metric(name, value)`, and in a run with environments `environments`, those of
    the completions. A dataset column of one of these names takes precedence.

    Raises:
        ValueError: no source, another number of weights or tokenizers, a reward model that cannot
            be used, or a function that cannot be sent to a worker.
        TypeError: something that cannot be called.
    """

    def __init__(
        self,
        functions: RewardSource | Sequence[RewardSource],
        weights: Sequence[float] | None = None,
        processing_classes: Tokenizers = None,
        device: torch.device | None = None,
        environment: bool = False,
        sees_eos: bool = True,
        trust_remote_code: bool = False,
        options: CallOptions | None = None,
    ) -> None:
        self.options = options or CallOptions()
        models = (device, sees_eos, trust_remote_code)
        self.sources = sources_of(functions, processing_classes, self.options.workers > 0, *models)
        if not self.sources and not environment:
            raise ValueError(
                "reward_funcs is empty: give at least one reward function (or an environment)"
            )
        self.names = [source.name for source in self.sources]
        if environment and ENVIRONMENT in self.names:
            raise ValueError(
                f"a reward function has the name of the source {ENVIRONMENT}: rename it"
            )
        self.names += [ENVIRONMENT] * environment
        self.has_environment = environment
        weights = [1.0] * len(self.names) if weights is None else weights
        self.weights = torch.tensor(weights, dtype=torch.float64)
        if len(self.weights) != len(self.names):
            raise ValueError(
                f"reward_weights must have one entry per source of reward, got {len(self.weights)} "
                f"for {', '.join(self.names)}"
            )
        _check_places(self.sources, self.options, environment)
        self._in_workers = {s.name: s.function for s in self.sources if s.place == "worker"}
        self.pool: WorkerPool | None = None
        if self._in_workers:
            self.pool = WorkerPool(self._in_workers, self.options.workers, self.options.timeout)

    @property
    def run_beside(self) -> bool:
        """True if a source can be called while other completions are sampled."""
        return any(source.place != "trainer" for source in self.sources)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Score B completions; the arguments are those of `judge`.

        Returns:
            (B,T,K) float64 on the CPU, unweighted, one slice per source and as wide as the widest
            completion: a score stands at the token that ends its step, or for a whole completion
            at its last action token. NaN elsewhere, and where a function returned None.
        """
        return self.judge(*args, **kwargs).scores

    def judge(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        action_mask: Tensor | None = None,
        paid: Tensor | None = None,
        ended: Sequence[bool] | None = None,
        state: TrainerState | None = None,
        truncated: Sequence[bool] | None = None,
        environments: Sequence[Any] | None = None,
        groups: Sequence[int] | None = None,
        begun: Mapping[int, Begun] | None = None,
    ) -> Judgement:
        """Score B completions, and say what was logged and what failed.

        Args:
            ended, state, truncated, environments: arguments for functions that name them; see the
                class.
            action_mask: (B,T) True where the policy chose the token; by default it chose them all.
                A row without such a token is not shown to functions and has no score.
            paid: (B,T) rewards of the environment, if there is one; NaN for none.
            groups: the prompt's number of each completion, for functions that are called once for
                every prompt; without numbers they are called once for all.
            begun: what `begin` returned, for some of the groups.

        Raises:
            ValueError: a function failed, returned the wrong number of scores, something else than
                a finite number, or a score for a token that the policy did not choose; or all of
                them returned None for the same completion.
        """
        mask = pad_rows(completion_ids, 0)[1] if action_mask is None else action_mask.cpu()
        scores = torch.full((*mask.shape, len(self.names)), math.nan, dtype=torch.float64)
        if paid is not None:
            scores[:, :, -1] = paid.cpu()
        judgement = Judgement(scores=scores, lost=torch.zeros(len(mask), dtype=torch.bool))
        rows = mask.any(1).nonzero().flatten().tolist()
        if not rows:
            return judgement
        shown = show(
            prompts, completions, completion_ids, columns, ended, state, truncated, environments
        ).select(rows)
        numbers = [0] * len(rows) if groups is None else [groups[i] for i in rows]
        for k, answer in enumerate(self._answers(shown, numbers, begun or {})):
            said = self._accepted(self.sources[k], answer, rows, shown, mask, judgement)
            scores[:, :, k] = placed(self.names[k], said, rows, completion_ids, mask)
        silent = [i for i in rows if scores[i].isnan().all() and not judgement.lost[i]]
        if silent:
            raise ValueError(
                f"no reward function applies to completion {silent[0]} of the batch: every one of "
                f"{', '.join(self.names)} returned None for prompt {quote(prompts[silent[0]])}"
            )
        judgement.lost &= scores.isnan().all(2).all(1)
        return judgement

    # ------------------------------------------------------------------------------- the calls

    def begin(self, shown: Shown) -> Begun:
        """Begin the calls on the completions of one prompt that can be made beside sampling."""
        begun: Begun = {}
        numbers = list(self._in_workers)
        for k, source in enumerate(self.sources):
            if source.place == "event loop":
                begun[k] = AsyncCall(source, shown, self.options.timeout)
            elif source.place == "worker":
                assert self.pool is not None
                number = numbers.index(source.name)
                begun[k] = begin_in_worker(self.pool, number, source, shown)
        return begun

    def _answers(
        self, shown: Shown, groups: Sequence[int], begun: Mapping[int, Begun]
    ) -> list[Answer]:
        """Return an answer of every source.

        Args:
            groups: the prompts of the rows, by number.
        """
        places: dict[int, list[int]] = {}
        for place, group in enumerate(groups):
            places.setdefault(group, []).append(place)
        calls: dict[int, Begun] = {}
        try:
            if self.run_beside:
                for group, rows in places.items():
                    calls[group] = begun.get(group) or self.begin(shown.select(rows))
            answers: dict[int, Answer] = {}
            # One call, as TRL makes it; but a failure that is survived is to cost one prompt.
            survives = self.options.on_error != "error"
            for k, source in enumerate(self.sources):  # while the others are at work
                if source.place == "trainer":
                    apart = survives and not is_model(source.function)
                    of_calls = places if apart else {0: range(len(shown))}
                    of_groups = {
                        group: answered(partial(call_here, source, shown.select(rows)), len(rows))
                        for group, rows in of_calls.items()
                    }
                    answers[k] = joined(of_groups, of_calls, len(shown))
            for k in set(range(len(self.sources))) - answers.keys():
                of_groups = {group: made[k].result() for group, made in calls.items()}
                answers[k] = joined(of_groups, places, len(shown))
            return [answers[k] for k in range(len(self.sources))]
        except BaseException:
            give_up(calls.values())
            raise

    # ---------------------------------------------------------------------------- what they said

    def _accepted(
        self,
        source: Source,
        answer: Answer,
        rows: Sequence[int],
        shown: Shown,
        mask: Tensor,
        judgement: Judgement,
    ) -> list[Any]:
        """Note what a source logged and where it failed; return its entries for `placed`.

        Raises:
            ValueError: it failed, and `on_error` is "error".
        """
        options, ids = self.options, shown.inputs["completion_ids"]
        said = list(answer.scores)
        if options.on_error != "error":
            for place, (i, score) in enumerate(zip(rows, said, strict=True)):
                if not isinstance(score, Failed):
                    why = refusal(source.name, i, score, mask[i, : len(ids[place])].tolist())
                    said[place] = (
                        score if why is None else Failed(why.removeprefix(f"{source.who} "))
                    )
        failed = [place for place, score in enumerate(said) if isinstance(score, Failed)]
        if failed:
            first = failed[0]
            error = described(source, said[first], rows[first], shown.inputs["prompts"][first])
            if options.on_error == "error":
                raise ValueError(error) from said[first].cause
            judgement.first_failure = judgement.first_failure or error
        judgement.called[source.name] = len(rows)
        judgement.failed[source.name] = len(failed)
        for place in failed:
            said[place] = options.error_value if options.on_error == "value" else None
            judgement.lost[rows[place]] = True
        judgement.note(answer, rows)
        return said


def show(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    ended: Sequence[bool] | None = None,
    state: TrainerState | None = None,
    truncated: Sequence[bool] | None = None,
    environments: Sequence[Any] | None = None,
) -> Shown:
    """Return what reward functions may be told of completions.

    Raises:
        ValueError: a column of the dataset has the name of an input.
    """
    inputs = {
        "prompts": list(prompts),
        "completions": list(completions),
        "completion_ids": list(completion_ids),
    }
    if taken := inputs.keys() & columns.keys():
        raise ValueError(
            f"the dataset column {taken.pop()!r} has the name of what reward functions are "
            "given: rename it"
        )
    facts = {"ended": ended, "truncated": truncated, "environments": environments}
    progress = {} if state is None else {"step": state.global_step, "trainer_state": state}
    return Shown(
        inputs=inputs,
        columns={name: list(column) for name, column in columns.items()},
        facts={name: list(fact) for name, fact in facts.items() if fact is not None},
        progress=progress,
    )


def give_up(begun: Any) -> None:
    """Cancel calls that nobody will ask about: of several prompts."""
    for calls in begun:
        for call in calls.values():
            call.cancel()


def _check_places(sources: Sequence[Source], options: CallOptions, environment: bool) -> None:
    """Refuse options that a function's place cannot follow.

    Raises:
        ValueError: the message names the function and the key.
    """
    places = {source.place for source in sources}
    if options.workers and "worker" not in places:
        raise ValueError(
            "reward_workers has nothing to run: reward models and async functions stay in the "
            "trainer; leave it out"
        )
    for source in sources:
        if source.place == "worker" and environment and "environments" in source.asked:
            raise ValueError(
                f"{source.who} takes environments, which cannot be sent to a worker: leave out "
                "reward_workers"
            )
    if options.timeout is not None and places <= {"trainer"}:
        raise ValueError(
            "reward_timeout cannot end a call in the trainer's own process: set reward_workers, or "
            "make the function async"
        )
