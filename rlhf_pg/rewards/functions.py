"""Calling reward functions, and refusing what is not a score."""

import asyncio
import copy
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from typing import Any, TypeAlias

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.rewards.model import RewardModel

Scores = Sequence[float | None]
RewardFunction = Callable[..., Scores | Awaitable[Scores]]
RewardSource: TypeAlias = RewardFunction | str | PathLike[str] | PreTrainedModel
Tokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None

MODELS = (str, PathLike, PreTrainedModel)


class Rewards:
    """One or several reward functions, called on the same completions.

    Args:
        functions: callables `(prompts, completions, completion_ids, **columns)` that return one
            float per completion, or None where the reward does not apply; plain or async. A
            sequence classifier, or the path or Hub id of one, becomes a `RewardModel`.
        weights: one per function; None weighs each by 1.
        processing_classes: tokenizers of the reward models: one for all, or a list with one entry
            per function. None stands for the tokenizer saved beside the model.
        device: of the reward models; None leaves a model where it is.

    Raises:
        ValueError: no functions, another number of weights or tokenizers, or a reward model that
            cannot be used.
        TypeError: something that cannot be called.
    """

    def __init__(
        self,
        functions: RewardSource | Sequence[RewardSource],
        weights: Sequence[float] | None = None,
        processing_classes: Tokenizers = None,
        device: torch.device | None = None,
    ) -> None:
        given: Any = functions
        one = callable(given) or isinstance(given, MODELS)
        sources = [given] if one else list(given)
        if not sources:
            raise ValueError("reward_funcs is empty: give at least one reward function")
        tokenizers = _one_each(processing_classes, len(sources))
        self.functions = [
            _function(source, tokenizer, device)
            for source, tokenizer in zip(sources, tokenizers, strict=True)
        ]
        self.names = _unique_names(self.functions)
        weights = [1.0] * len(self.names) if weights is None else weights
        self.weights = torch.tensor(weights, dtype=torch.float64)
        if len(self.weights) != len(self.names):
            raise ValueError(
                f"reward_weights must have one entry per reward function, got {len(self.weights)} "
                f"for {', '.join(self.names)}"
            )

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Tensor:
        """Score B completions.

        Returns:
            (B,K) float64 on the CPU, unweighted, one column per function; NaN where a function
            said None.

        Raises:
            ValueError: a function failed, returned the wrong number of scores or something that is
                no finite number, or all of them said None of the same completion.
        """
        if not prompts:
            return torch.zeros((0, len(self.names)), dtype=torch.float64)
        inputs: dict[str, Sequence[Any]] = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
        }
        taken = inputs.keys() & columns.keys()
        if taken:
            raise ValueError(
                f"the dataset column {taken.pop()!r} has the name of what reward functions are "
                "given: rename it"
            )
        inputs |= columns
        table = [
            _checked(name, self._call(name, function, inputs), len(prompts))
            for name, function in zip(self.names, self.functions, strict=True)
        ]
        scores = torch.tensor(table, dtype=torch.float64).T
        silent = scores.isnan().all(dim=1).nonzero().flatten().tolist()
        if silent:
            raise ValueError(
                f"no reward function applies to completion {silent[0]} of the batch: every one of "
                f"{', '.join(self.names)} returned None for prompt {prompts[silent[0]]!r}"
            )
        return scores

    def _call(self, name: str, function: RewardFunction, inputs: dict[str, Any]) -> Any:
        # Each function has its own copy: what it does to it, the others and the trainer never see.
        try:
            arguments = copy.deepcopy({key: list(value) for key, value in inputs.items()})
            result = function(**arguments)
            return _wait_for(result) if inspect.isawaitable(result) else result
        except Exception as error:
            raise ValueError(
                f"reward function {name} raised {type(error).__name__}: {error}"
            ) from error


def _one_each(tokenizers: Any, count: int) -> list[Any]:
    if not isinstance(tokenizers, list | tuple):
        return [tokenizers] * count
    if len(tokenizers) != count:
        raise ValueError(
            f"reward_processing_classes must have one entry per reward function, got "
            f"{len(tokenizers)} for {count}; None stands for a function's own"
        )
    return list(tokenizers)


def _function(source: Any, tokenizer: Any, device: torch.device | None) -> RewardFunction:
    if isinstance(source, MODELS):
        return RewardModel(source, tokenizer, device)
    if isinstance(source, PeftModel):
        raise ValueError(
            "a reward model with an adapter cannot be scored: give merge_and_unload() of it"
        )
    if not callable(source):
        raise TypeError(f"reward_funcs must be callables or reward models, got {source!r}")
    function: RewardFunction = source
    return function


def _wait_for(result: Awaitable[Any]) -> Any:
    """The result of a coroutine, also where an event loop is running already (a notebook)."""

    async def outcome() -> Any:
        return await result

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, outcome()).result()


def _checked(name: str, scores: Any, count: int) -> list[float]:
    scores = scores.tolist() if hasattr(scores, "tolist") else scores
    if not isinstance(scores, Sequence) or len(scores) != count:
        got = f"{len(scores)} scores" if isinstance(scores, Sequence) else repr(scores)
        raise ValueError(
            f"reward function {name} must return a list of {count} scores, one per completion, "
            f"got {got}"
        )
    return [_number(name, i, score) for i, score in enumerate(scores)]


def _number(name: str, completion: int, score: Any) -> float:
    if score is None:
        return math.nan
    try:
        number = math.nan if isinstance(score, str) else float(score)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"reward function {name} returned {score!r} for completion {completion} of the batch: "
            "return a finite number, or None where the reward does not apply"
        )
    return number


def _unique_names(functions: Sequence[RewardFunction]) -> list[str]:
    """The name of each function or of its class; one that is taken gets a number."""
    names: list[str] = []
    for function in functions:
        name = own = getattr(function, "__name__", type(function).__name__)
        count = 1
        while name in names:
            count += 1
            name = f"{own}_{count}"
        names.append(name)
    return names
