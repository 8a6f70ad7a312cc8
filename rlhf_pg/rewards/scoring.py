"""The sources of reward of a run, called on the completions of a prompt.

Shapes: B completions, T columns, K sources.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any, Literal, TypeAlias

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import shown as quote
from rlhf_pg.boundary.user_code import PATIENCE, begin
from rlhf_pg.data.records import pad_rows
from rlhf_pg.rewards.functions import (
    Answer,
    CallFailed,
    Shown,
    Source,
    call,
    call_async,
    late,
    show,
)
from rlhf_pg.rewards.pool import NotStarted, Pool
from rlhf_pg.rewards.process import ProcessRewardModel
from rlhf_pg.rewards.reward_model import RewardModel
from rlhf_pg.rewards.scores import at_end, ends
from rlhf_pg.rewards.verifiers import Verifier

Scores = Sequence[float | Sequence[float | None] | None]
RewardFunction = Callable[..., Scores | Awaitable[Scores]]
RewardSource: TypeAlias = RewardFunction | str | PathLike[str] | PreTrainedModel
Tokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None
Begun = dict[int, Future[Answer]]  # calls on the completions of one prompt, by number of the source

MODELS = (str, PathLike, PreTrainedModel)
ENVIRONMENT = "environment"  # name of an environment's rewards


@dataclass(kw_only=True)
class Judgement:
    """Scores of a batch, with what the functions logged and where they failed."""

    scores: Tensor  # (B,T,K), see `Rewards.__call__`
    lost: Tensor  # (B,) True where sources failed and no other gave a score
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns, of B values each
    metrics: dict[str, list[float]] = field(default_factory=dict)  # a number per call
    called: dict[str, int] = field(default_factory=dict)  # completions, by function
    failed: dict[str, int] = field(default_factory=dict)  # of these
    first_failure: str | None = None


class Rewards:
    """One or several reward functions, called on the completions of one prompt after another.

    Args:
        functions: callables `(prompts, completions, completion_ids, **columns)`, plain or async,
            that return one float per completion, or None where the reward does not apply; or a
            list with one entry per token of `completion_ids`, a score at the token that ends a
            step and None elsewhere. A sequence classifier, or the path or Hub id of one, becomes a
            `RewardModel`, which is called once for all prompts.
        weights: one per function; None gives each weight 1.
        processing_classes: tokenizers of the reward models: one for all, or a list with one entry
            per function. None stands for the tokenizer saved beside the model.
        device, sees_eos, trust_remote_code: of reward models made here.
        environment: an environment pays too, as the last source, "environment".
        workers: `reward_workers`, processes that call plain functions; ready-made ones, which have
            limits of their own, stay here.
        timeout, on_error, error_value: `reward_timeout`, `on_reward_error`, `reward_error_value`.

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
        workers: int = 0,
        timeout: float | None = None,
        on_error: Literal["error", "drop", "value"] = "error",
        error_value: float = 0.0,
    ) -> None:
        given: Any = functions
        listed = [given] if callable(given) or isinstance(given, MODELS) else list(given)
        if not listed and not environment:
            raise ValueError(
                "reward_funcs is empty: give at least one reward function (or an environment)"
            )
        tokenizers: Any = processing_classes
        if not isinstance(tokenizers, list | tuple):
            tokenizers = [tokenizers] * len(listed)
        if len(tokenizers) != len(listed):
            raise ValueError(
                f"reward_processing_classes must have one entry per reward function, got "
                f"{len(tokenizers)} for {len(listed)}; None stands for a function's own"
            )
        self.sources: list[Source] = []
        for function, tokenizer in zip(listed, tokenizers, strict=True):
            source = _source(function, tokenizer, device, sees_eos, trust_remote_code)
            if workers and source.kind == "plain" and not isinstance(function, Verifier):
                source = replace(source, kind="worker")
            taken = [other.name for other in self.sources]
            numbered = (f"{source.name}_{n}" for n in range(2, len(listed) + 1))
            name = next(name for name in (source.name, *numbered) if name not in taken)
            self.sources.append(replace(source, name=name))
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
        self.timeout, self.on_error, self.error_value = timeout, on_error, error_value
        self.run_beside = any(source.kind in ("worker", "async") for source in self.sources)
        if timeout is not None and not self.run_beside:
            raise ValueError(
                "reward_timeout cannot end a call in the trainer's own process: set "
                "reward_workers, or make the function async"
            )
        self.pool = Pool(workers)
        for source in self.sources:
            if source.kind == "worker":
                if environment and "environments" in source.asked:
                    raise ValueError(
                        f"reward function {source.name} takes environments, which cannot be sent "
                        "to a worker: leave out reward_workers"
                    )
                self.pool.check(source)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        action_mask: Tensor | None = None,
        **known: Any,
    ) -> Tensor:
        """Score B completions; see `judge`, whose `shown` is made of the arguments by `show`.

        Returns:
            (B,T,K) float64 on the CPU, unweighted, one slice per source and as wide as the widest
            completion: a score stands at the token that ends its step, or for a whole completion
            at its last action token. NaN elsewhere, and where a function returned None.
        """
        groups = known.pop("groups", None)
        shown = show(prompts, completions, completion_ids, columns, **known)
        mask = pad_rows(completion_ids, 0)[1] if action_mask is None else action_mask
        return self.judge(shown, mask, groups=groups).scores

    def judge(
        self,
        shown: Shown,
        action_mask: Tensor,
        paid: Tensor | None = None,
        groups: Sequence[int] | None = None,
        begun: Mapping[int, Begun] | None = None,
    ) -> Judgement:
        """Score B completions, and say what was logged and what failed.

        Args:
            action_mask: (B,T) True where the policy chose the token. A row without such a token is
                not shown to functions and has no score.
            paid: (B,T) rewards of the environment, if there is one; NaN for none.
            groups: the prompt's number of each completion: functions are called once for every
                number, without numbers once.
            begun: what `begin` returned, for some of the groups.

        Raises:
            ValueError: a function failed and `on_error` is "error", or all of them returned None
                for the same completion.
        """
        mask = action_mask.cpu()
        scores = torch.full((*mask.shape, len(self.names)), math.nan, dtype=torch.float64)
        if paid is not None:
            scores[:, :, -1] = paid.cpu()
        judgement = Judgement(scores=scores, lost=torch.zeros(len(mask), dtype=torch.bool))
        of_group: dict[int, list[int]] = {}
        for i in (rows := mask.any(1).nonzero().flatten().tolist()):
            of_group.setdefault(0 if groups is None else groups[i], []).append(i)
        parts = {group: shown.select(own) for group, own in of_group.items()}
        calls: dict[int, Begun] = dict(begun or {})
        try:
            for group, part in parts.items():
                if group not in calls:
                    calls[group] = self.begin(part)
            for k, source in enumerate(self.sources if rows else ()):
                judgement.called[source.name], judgement.failed[source.name] = len(rows), 0
                if source.kind == "model":
                    self._take(judgement, k, None, shown.select(rows), rows, mask)
                    continue
                for group, own in of_group.items():
                    self._take(judgement, k, calls[group].get(k), parts[group], own, mask)
        except BaseException:
            give_up(calls.values())
            raise
        silent = [i for i in rows if scores[i].isnan().all() and not judgement.lost[i]]
        if silent:
            prompt = quote(shown.inputs["prompts"][silent[0]])
            raise ValueError(
                f"no reward function applies to completion {silent[0]} of the batch: every one of "
                f"{', '.join(self.names)} returned None for prompt {prompt}"
            )
        judgement.lost &= scores.isnan().all(2).all(1)
        return judgement

    def begin(self, shown: Shown) -> Begun:
        """Begin the calls on the completions of one prompt that can be made beside sampling."""
        begun: Begun = {}
        for k, source in enumerate(self.sources):
            if source.kind not in ("worker", "async"):
                continue
            given = (source, shown.arguments(source), len(shown), self.timeout)
            try:
                if source.kind == "worker":
                    begun[k] = self.pool.call(*given)
                else:
                    begun[k] = begin(partial(call_async, *given))
            except CallFailed as error:
                begun[k] = Future()
                begun[k].set_exception(error)
        return begun

    def _take(
        self,
        judgement: Judgement,
        k: int,
        future: Future[Answer] | None,
        shown: Shown,
        rows: Sequence[int],
        mask: Tensor,
    ) -> None:
        """Take in the answer of source `k` about these rows, or its failure."""
        source = self.sources[k]
        try:
            if future is None:
                answer = call(source, shown.arguments(source), len(shown))
            else:
                answer = self._waited(source, future)
            placed = _placed(answer.scores, shown.inputs["completion_ids"], mask[rows])
        except CallFailed as failure:
            error = f"reward function {source.name} {failure}"
            if source.kind != "model":
                error += f" (prompt {quote(shown.inputs['prompts'][0])})"
            if self.on_error == "error":
                raise ValueError(error) from failure.__cause__
            judgement.first_failure = judgement.first_failure or error
            judgement.failed[source.name] += len(rows)
            judgement.lost[rows] = True
            if self.on_error == "drop":
                return
            placed = at_end(torch.full((len(rows),), self.error_value).double(), mask[rows])
            answer = Answer([], {}, {})
        judgement.scores[rows, :, k] = placed
        for name, values in answer.extra.items():
            column = judgement.extra.setdefault(name, [None] * len(mask))
            for row, value in zip(rows, values, strict=True):
                column[row] = value
        for name, numbers in answer.metrics.items():
            judgement.metrics.setdefault(name, []).extend(numbers)

    def _waited(self, source: Source, future: Future[Answer]) -> Answer:
        """Wait for a call that has begun; an interrupt gives it up."""
        # A call that holds up the event loop is not late until somebody looks.
        patience = self.timeout and self.timeout + PATIENCE if source.kind == "async" else None
        try:
            return future.result(patience)
        except TimeoutError as error:
            raise CallFailed(late(self.timeout)) from error
        except NotStarted as error:
            raise CallFailed(f"cannot be called: {error}") from error
        finally:
            future.cancel()


def give_up(begun: Any) -> None:
    """Cancel calls that nobody will ask about: of several prompts."""
    for calls in begun:
        for future in calls.values():
            future.cancel()


def _source(function: Any, tokenizer: Any, device: Any, *options: Any) -> Source:
    """Return a source of a function, or of a reward model made of a path or a model."""
    if isinstance(function, MODELS):
        function = RewardModel(function, tokenizer, device, *options)
    if isinstance(function, PeftModel):
        raise ValueError(
            "a reward model with an adapter cannot be scored: give merge_and_unload() of it"
        )
    if not callable(function):
        raise TypeError(f"reward_funcs must be callables or reward models, got {quote(function)}")
    source = Source.of(getattr(function, "__name__", type(function).__name__), function)
    is_model = isinstance(function, RewardModel | ProcessRewardModel)
    return replace(source, kind="model") if is_model else source


def _placed(scores: Sequence[Any], completion_ids: Sequence[Sequence[int]], mask: Tensor) -> Tensor:
    """Return (rows,T) scores, each at its token; NaN elsewhere.

    Raises:
        CallFailed: a list of another length than the completion's, or a score for a token that the
            policy did not choose.
    """
    table = torch.full(mask.shape, math.nan, dtype=torch.float64)
    last = ends(mask).tolist()
    for i, (score, ids) in enumerate(zip(scores, completion_ids, strict=True)):
        if not isinstance(score, list):
            table[i, last[i]] = math.nan if score is None else score
            continue
        if len(score) != len(ids):
            raise CallFailed(
                f"returned a list of {len(score)} scores for completion {i} of the call, which has "
                f"{len(ids)} tokens: return one entry per token, None where no step ends"
            )
        for t, step in enumerate(score):
            if step is not None and not mask[i, t]:
                raise CallFailed(
                    f"returned {step} for token {t} of completion {i} of the call, which the "
                    "policy did not choose: score the last token of its own before that one"
                )
            table[i, t] = math.nan if step is None else step
    return table
