"""The sources of reward of a run, called on the completions of a prompt.

Shapes: B completions, T columns, F functions (the environment's rewards among them).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Literal, TypeAlias

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import show
from rlhf_pg.boundary.user_code import CallFailed, begin
from rlhf_pg.rewards.functions import CallResult, RewardInputs, Source, call, call_async
from rlhf_pg.rewards.scores import last_true

RewardSource: TypeAlias = Callable[..., Any] | str | PathLike[str] | PreTrainedModel
PendingCalls = dict[int, Future[CallResult]]  # calls for one prompt, by number of the source

MODELS = (str, PathLike, PreTrainedModel)
CONCURRENT = ("worker", "async")  # kinds of sources that are called during sampling
RESERVED = ("environment", "missing_eos_penalty", "overlong_penalty")  # not names of functions


@dataclass(kw_only=True)
class RewardResult:
    """Scores of a batch, with the functions' logged values and failures."""

    # (B,T,F) float64 on the CPU, unweighted: a score is at the last token of its step, or for a
    # whole completion at its last action token; NaN elsewhere, and where a source gave None.
    scores: Tensor
    lost: Tensor  # (B,) True where sources failed and none gave a score
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns with B values each
    metrics: dict[str, list[float]] = field(default_factory=dict)  # a number per call
    called: int  # number of completions that each function was called for
    failed: dict[str, int]  # how many of these failed, by function
    first_failure: str | None = None


class Rewards:
    """One or several reward functions, called on the completions of one prompt after another.

    Args:
        functions: plain or async callables. They take arguments of `RewardInputs` and return one
            float per completion, or None where the reward does not apply; or a list with one entry
            per token of `completion_ids`, a score at the last token of a step and None elsewhere. A
            sequence classifier, or its path or Hub id, becomes a `RewardModel`.
        weights: one per function; None gives each weight 1.
        processing_classes: tokenizers of the reward models: one for all, or a list with one entry
            per function. None stands for the tokenizer saved beside the model.
        device, sees_eos, trust_remote_code: see `RewardModel`.
        environment: an environment gives rewards too, as the last source, "environment".
        workers: number of processes that call plain functions. Ready-made rewards, which have their
            own limits, and functions that take `environments` are called in this process.
        timeout, on_error, error_value: `reward_timeout`, `on_reward_error`, `reward_error_value`.

    ValueError or TypeError if an argument cannot be used, or a function not be sent to a worker.
    """

    def __init__(
        self,
        functions: RewardSource | Sequence[RewardSource],
        weights: Sequence[float] | None = None,
        processing_classes: PreTrainedTokenizerBase | Sequence[Any] | None = None,
        device: torch.device | None = None,
        environment: bool = False,
        sees_eos: bool = True,
        trust_remote_code: bool = False,
        workers: int = 0,
        timeout: float | None = None,
        on_error: Literal["error", "drop", "value"] = "error",
        error_value: float = 0.0,
    ) -> None:
        listed: Any = functions
        if callable(functions) or isinstance(functions, MODELS):
            listed = [functions]
        if not listed and not environment:
            raise ValueError("reward_funcs is empty: give a reward function or an environment")
        tokenizers: Any = processing_classes
        if not isinstance(tokenizers, list | tuple):
            tokenizers = [tokenizers] * len(listed)
        if len(tokenizers) != len(listed):
            raise ValueError(
                f"reward_processing_classes must have one entry per reward function, got "
                f"{len(tokenizers)} for {len(listed)}; None stands for a function's own"
            )
        if workers:
            from rlhf_pg.boundary.pool import START, Pool

            self.pool = Pool(workers)
        self.sources: list[Source] = []
        for function, tokenizer in zip(listed, tokenizers, strict=True):
            if isinstance(function, MODELS):
                from rlhf_pg.rewards.reward_model import RewardModel

                function = RewardModel(function, tokenizer, device, trust_remote_code, sees_eos)
            if not callable(function) or isinstance(function, PeftModel):
                raise TypeError(
                    "reward_funcs must be callables or reward models (one with an adapter by "
                    f"merge_and_unload()), got {show(function)}"
                )
            taken = {*RESERVED, *(source.name for source in self.sources)}
            unnumbered = getattr(function, "__name__", type(function).__name__)
            name = unnumbered
            number = 1
            while name in taken:
                number += 1
                name = f"{unnumbered}_{number}"
            source = Source.of(name, function)
            is_ready_made = getattr(function, "__module__", "") == "rlhf_pg.rewards.verifiers"
            stays = is_ready_made or "environments" in source.parameters
            if workers and source.kind == "plain" and not stays:
                source = replace(source, kind="worker")
                try:
                    self.pool.schedule(id, function, timeout=START).result()
                except CallFailed as error:
                    raise ValueError(
                        f"reward function {source.name} cannot be sent to a worker ({error}): "
                        "define it at the top level of a file of its own, or unset reward_workers"
                    ) from error
            self.sources.append(source)
        self.names = [source.name for source in self.sources]
        if environment:
            self.names.append("environment")
        self.has_environment = environment
        weights = [1.0] * len(self.names) if weights is None else weights
        self.weights = torch.tensor(weights, dtype=torch.float64)
        if len(self.weights) != len(self.names):
            got = f"{len(self.weights)} for {', '.join(self.names)}"
            raise ValueError(f"reward_weights must have one entry per source of reward, got {got}")
        self.timeout = timeout
        self.on_error = on_error
        self.error_value = error_value
        self.run_concurrently = any(source.kind in CONCURRENT for source in self.sources)
        if timeout is not None and not self.run_concurrently:
            raise ValueError(
                "reward_timeout cannot end a call in the trainer's own process: set "
                "reward_workers, or make the function async"
            )

    def begin(self, inputs: RewardInputs) -> PendingCalls:
        """Begin the calls on the completions of one prompt that can run during sampling."""
        return {
            k: self._call(source, inputs)
            for k, source in enumerate(self.sources)
            if source.kind in CONCURRENT
        }

    def _call(self, source: Source, inputs: RewardInputs) -> Future[CallResult]:
        """Call a function in a worker, on the event loop, or right here."""
        answer = CallResult(len(inputs.completions))
        arguments = (source.function, inputs.arguments(source, answer), answer)
        if source.kind == "worker":
            return self.pool.schedule(call, *arguments, timeout=self.timeout)
        if source.kind == "async":
            return begin(lambda: call_async(*arguments, self.timeout))
        done: Future[CallResult] = Future()
        try:
            done.set_result(call(*arguments))
        except CallFailed as failure:
            done.set_exception(failure)
        return done

    def score(
        self,
        inputs: RewardInputs,
        action_mask: Tensor,
        paid: Tensor | None = None,
        groups: Sequence[int] | None = None,
        begun: Mapping[int, PendingCalls] | None = None,
    ) -> RewardResult:
        """Score B completions.

        ValueError if a function failed and `on_error` is "error", or none scores a completion.

        Args:
            action_mask: (B,T) True where the policy chose the token. Rows without such a token are
                not given to functions and have no score.
            paid: (B,T) rewards of the environment, if there is one; NaN for none.
            groups: the prompt number of each completion; functions are called once for each number,
                or once for all without numbers.
            begun: results of `begin`, for some of the groups.
        """
        mask = action_mask.cpu()
        scores = torch.full((*mask.shape, len(self.names)), math.nan, dtype=torch.float64)
        if paid is not None:
            scores[:, :, -1] = paid.cpu()
        active: list[int] = mask.any(1).nonzero().flatten().tolist()
        rows_of: dict[int, list[int]] = {}  # rows of each group
        for i in active:
            rows_of.setdefault(0 if groups is None else groups[i], []).append(i)
        result = RewardResult(
            scores=scores,
            lost=torch.zeros(len(mask), dtype=torch.bool),
            called=len(active),
            failed={source.name: 0 for source in self.sources},
        )
        pending: dict[int, PendingCalls] = dict(begun or {})
        try:
            by_group = []
            for group, rows in rows_of.items():
                part = inputs.select(rows)
                if group not in pending:
                    pending[group] = self.begin(part)
                by_group.append((rows, part, pending[group]))
            for k, source in enumerate(self.sources):
                parts = by_group
                is_model = source.kind == "model"
                if is_model:
                    parts = [(active, inputs.select(active), PendingCalls())] if active else []
                for rows, part, calls in parts:
                    try:
                        answer = (calls.get(k) or self._call(source, part)).result()
                        columns = _at_tokens(answer.scores, part.completion_ids, mask[rows])
                    except CallFailed as failure:
                        about = "" if is_model else f" (prompt {show(part.prompts[0])})"
                        what, end, where = str(failure).partition("\n")
                        error = f"reward function {source.name} {what}{about}{end}{where}"
                        if self.on_error == "error":
                            raise ValueError(error) from failure.__cause__
                        result.first_failure = result.first_failure or error
                        result.failed[source.name] += len(rows)
                        result.lost[rows] = True
                        value = self.error_value if self.on_error == "value" else None
                        answer = CallResult(len(rows))
                        columns = _at_tokens([value] * len(rows), part.completion_ids, mask[rows])
                    scores[rows, :, k] = columns
                    for name, values in answer.extra.items():
                        column = result.extra.setdefault(name, [None] * len(mask))
                        for row, entry in zip(rows, values, strict=True):
                            column[row] = entry
                    for name, numbers in answer.metrics.items():
                        result.metrics.setdefault(name, []).extend(numbers)
        finally:
            give_up(pending.values())  # after an error
        unscored = scores.isnan().all(2).all(1)
        for i in active:
            if unscored[i] and not result.lost[i]:
                raise ValueError(
                    f"no reward function applies to completion {i} of the batch: each of "
                    f"{', '.join(self.names)} returned None for prompt {show(inputs.prompts[i])}"
                )
        result.lost &= unscored
        return result


def give_up(calls: Iterable[PendingCalls]) -> None:
    """Cancel calls whose results are not needed any more."""
    for of_prompt in calls:
        for pending in of_prompt.values():
            pending.cancel()


def _at_tokens(
    scores: Sequence[Any], completion_ids: Sequence[Sequence[int]], mask: Tensor
) -> Tensor:
    """Place scores at their tokens, (rows,T), NaN elsewhere; CallFailed if that is impossible."""
    table = torch.full(mask.shape, math.nan, dtype=torch.float64)
    last = last_true(mask).tolist()
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
                    "policy did not choose: score the last policy token before that one"
                )
            table[i, t] = math.nan if step is None else step
    return table
