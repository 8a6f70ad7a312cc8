"""Calls of reward functions, and the refusal of what is not a score."""

import copy
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from rlhf_pg.boundary.quoted import shown, told
from rlhf_pg.boundary.user_code import finite, foreign, wait_for
from rlhf_pg.data.records import pad_rows
from rlhf_pg.rewards.reward_model import RewardModel
from rlhf_pg.rewards.scores import ends

Score = float | None
Scores = Sequence[Score | Sequence[Score]]
RewardFunction = Callable[..., Scores | Awaitable[Scores]]
RewardSource: TypeAlias = RewardFunction | str | PathLike[str] | PreTrainedModel
Tokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None

MODELS = (str, PathLike, PreTrainedModel)
ENVIRONMENT = "environment"  # name of an environment's rewards


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
        sees_eos, closes_truncated, trust_remote_code: options of reward models made here.

    A function whose signature names them also gets `ended` (a bool per completion: the policy ended
    it by an EOS), `truncated` (a bool per completion: a limit ended it; a stop string sets
    neither), `step` (number of steps so far) and `trainer_state` (a copy of a
    `transformers.TrainerState` with `global_step`, `max_steps` and `epoch`). A dataset column of
    that name takes precedence.

    Raises:
        ValueError: no source, another number of weights or tokenizers, or a reward model that
            cannot be used.
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
        closes_truncated: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        given: Any = functions
        one = callable(given) or isinstance(given, MODELS)
        sources = [given] if one else list(given)
        if not sources and not environment:
            raise ValueError(
                "reward_funcs is empty: give at least one reward function (or an environment)"
            )
        tokenizers = _one_each(processing_classes, len(sources))
        self.functions = [
            _function(source, tokenizer, device, sees_eos, closes_truncated, trust_remote_code)
            for source, tokenizer in zip(sources, tokenizers, strict=True)
        ]
        self.names = _unique_names(self.functions)
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

    def __call__(
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
    ) -> Tensor:
        """Score B completions.

        Args:
            ended, state, truncated: arguments for functions that name them; see the class.
            action_mask: (B,T) True where the policy chose the token; by default it chose them all.
                A row without such a token is not shown to functions and has no score.
            paid: (B,T) rewards of the environment, if there is one; NaN for none.

        Returns:
            (B,T,K) float64 on the CPU, unweighted, one slice per source and as wide as the widest
            completion: a score stands at the token that ends its step, or for a whole completion
            at its last action token. NaN elsewhere, and where a function returned None.

        Raises:
            ValueError: a function failed, returned the wrong number of scores, something else than
                a finite number, or a score for a token that the policy did not choose; or all of
                them returned None for the same completion.
        """
        mask = pad_rows(completion_ids, 0)[1] if action_mask is None else action_mask.cpu()
        scores = torch.full((*mask.shape, len(self.names)), math.nan, dtype=torch.float64)
        if paid is not None:
            scores[:, :, -1] = paid.cpu()
        rows = mask.any(1).nonzero().flatten().tolist()
        if not rows:
            return scores
        inputs: dict[str, Sequence[Any]] = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
        }
        if taken := inputs.keys() & columns.keys():
            raise ValueError(
                f"the dataset column {taken.pop()!r} has the name of what reward functions are "
                "given: rename it"
            )
        inputs |= columns
        inputs = {name: [column[i] for i in rows] for name, column in inputs.items()}
        offered = _offered(rows, state, ended=ended, truncated=truncated)
        for k, (name, function) in enumerate(zip(self.names, self.functions, strict=False)):
            said = self._call(name, function, inputs, _wanted(function, offered, columns))
            scores[:, :, k] = _placed(name, said, rows, completion_ids, mask)
        silent = [i for i in rows if scores[i].isnan().all()]
        if silent:
            raise ValueError(
                f"no reward function applies to completion {silent[0]} of the batch: every one of "
                f"{', '.join(self.names)} returned None for prompt {shown(prompts[silent[0]])}"
            )
        return scores

    def _call(
        self, name: str, function: RewardFunction, inputs: dict[str, Any], wanted: dict[str, Any]
    ) -> Any:
        # Each function gets a copy, so that its changes reach neither the others nor the trainer.
        who = f"reward function {name}"
        try:
            with foreign(who):
                lists = {key: list(value) for key, value in inputs.items()}
                result = function(**copy.deepcopy(lists | wanted))
                result = wait_for(result) if inspect.isawaitable(result) else result
        except Exception as error:
            raise ValueError(f"{who} raised {told(error)}") from error
        try:
            with foreign(who):
                result = _plain(result)
                return [_listed(score) for score in result] if _is_list(result) else result
        except Exception as error:  # a tensor without values, for example
            raise ValueError(f"{who} returned what cannot be read: {told(error)}") from error


def _offered(
    rows: Sequence[int], state: TrainerState | None, **facts: Sequence[bool] | None
) -> dict[str, Any]:
    offered: dict[str, Any] = {
        name: [fact[i] for i in rows] for name, fact in facts.items() if fact is not None
    }
    if state is not None:
        offered |= {"step": state.global_step, "trainer_state": state}
    return offered


def _wanted(
    function: RewardFunction, offered: dict[str, Any], columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Select, of what is offered, the arguments that the function's signature names.

    A user's function that names a column of the dataset means the column; a reward model, which
    takes no columns, does not.
    """
    try:
        asked = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return {}
    other = () if isinstance(function, RewardModel) else columns
    return {key: value for key, value in offered.items() if key in asked and key not in other}


def _one_each(tokenizers: Any, count: int) -> list[Any]:
    if not isinstance(tokenizers, list | tuple):
        return [tokenizers] * count
    if len(tokenizers) != count:
        raise ValueError(
            f"reward_processing_classes must have one entry per reward function, got "
            f"{len(tokenizers)} for {count}; None stands for a function's own"
        )
    return list(tokenizers)


def _function(source: Any, *options: Any) -> RewardFunction:
    if isinstance(source, MODELS):
        return RewardModel(source, *options)
    if isinstance(source, PeftModel):
        raise ValueError(
            "a reward model with an adapter cannot be scored: give merge_and_unload() of it"
        )
    if not callable(source):
        raise TypeError(f"reward_funcs must be callables or reward models, got {shown(source)}")
    function: RewardFunction = source
    return function


def _placed(
    name: str,
    scores: Any,
    rows: Sequence[int],
    completion_ids: Sequence[Sequence[int]],
    mask: Tensor,
) -> Tensor:
    """Return (B,T) scores of these rows by one function, each at its token; NaN elsewhere."""
    if not _is_list(scores) or len(scores) != len(rows):
        got = f"{len(scores)} scores" if _is_list(scores) else shown(scores)
        raise ValueError(
            f"reward function {name} must return a list of {len(rows)} scores, one per "
            f"completion, got {got}"
        )
    table = torch.full(mask.shape, math.nan, dtype=torch.float64)
    last = ends(mask).tolist()
    for i, score in zip(rows, scores, strict=True):
        if _is_list(score):
            own = mask[i, : len(completion_ids[i])].tolist()
            steps = _steps(name, i, score, own)
            table[i, : len(own)] = torch.tensor(steps, dtype=torch.float64)
        else:
            table[i, last[i]] = _number(name, f"completion {i}", score)
    return table


def _plain(said: Any) -> Any:
    """Convert arrays, tensors and any other sequence to numbers and plain lists."""
    said = said.tolist() if hasattr(said, "tolist") else said
    return [said[i] for i in range(len(said))] if _is_list(said) else said


def _listed(score: Any) -> Any:
    """Convert scores of steps to a list; a single number stays as it is."""
    steps = _plain(score)
    return steps if _is_list(steps) else score


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str | bytes)


def _steps(name: str, completion: int, scores: Sequence[Any], own: Sequence[bool]) -> list[float]:
    """Return one number per token, NaN for None; `own` says which tokens the policy chose."""
    if len(scores) != len(own):
        raise ValueError(
            f"reward function {name} returned a list of {len(scores)} scores for completion "
            f"{completion} of the batch, which has {len(own)} tokens: return one entry per token, "
            "None where no step ends"
        )
    where = [f"token {t} of completion {completion}" for t in range(len(own))]
    numbers = [_number(name, at, score) for at, score in zip(where, scores, strict=True)]
    for at, number, chosen in zip(where, numbers, own, strict=True):
        if not chosen and not math.isnan(number):
            raise ValueError(
                f"reward function {name} returned {number} for {at} of the batch, which the policy "
                "did not choose: score the last token of its own before that one"
            )
    return numbers


def _number(name: str, where: str, score: Any) -> float:
    if score is None:
        return math.nan
    if (number := finite(score)) is None:
        raise ValueError(
            f"reward function {name} returned {shown(score)} for {where} of the batch: return a "
            "finite number, or None where the reward does not apply"
        )
    return number


def _unique_names(functions: Sequence[RewardFunction]) -> list[str]:
    """Return the name of each function or of its class; one that is taken gets a number."""
    names: list[str] = []
    for function in functions:
        name = own = getattr(function, "__name__", type(function).__name__)
        count = 1
        while name in names:
            count += 1
            name = f"{own}_{count}"
        names.append(name)
    return names
