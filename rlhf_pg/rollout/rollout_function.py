"""A user's own function in place of the sampling (`rollout_func`), with the contract of TRL."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import shown, told
from rlhf_pg.boundary.user_code import finite, foreign, wait_for
from rlhf_pg.boundary.worker import plain
from rlhf_pg.rollout.engine import RolloutError
from rlhf_pg.rollout.multi_turn.episodes import Episode

NEEDED = ("prompt_ids", "completion_ids", "logprobs")
MASK = "env_mask"  # 1 where the policy chose the token, 0 where something else did
TAKEN = ("prompts", "completions", "prompt")
ROUNDING = 1e-3  # by which a log-probability may exceed 0


@dataclass(frozen=True, kw_only=True)
class RolloutFunction:
    """A function that samples, and the check of what it returns.

    Attributes:
        function: takes prompts as the dataset has them, each as often as completions of it are
            wanted, and returns a dictionary of lists with one entry per prompt: `prompt_ids`,
            `completion_ids` and `logprobs` (of the completion's tokens, as they were sampled).
            `env_mask` says which tokens of the completion the policy chose, 1 or 0. Any other entry
            is a column for the reward functions; one that is no list is the same for all rows.
        tokenizer: of the policy.
        stop_token_ids: a completion that ends with another token was truncated.
        vocabulary: the number of tokens that the policy knows.
        longest_prompt: tokens that a prompt may have; None for any number.
    """

    function: Callable[[list[Any]], Any]
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]
    vocabulary: int
    longest_prompt: int | None = None

    def sample(self, prompts: Sequence[Any], max_tokens: int) -> list[Episode]:
        """Return one completion per prompt.

        Args:
            max_tokens: the longest completion.

        Raises:
            RolloutError: the function failed, or what it returned does not fit.
        """
        if not prompts:
            return []
        said = self._called(prompts)
        try:
            with foreign("rollout_func"):
                return self._episodes(prompts, _listed(said, len(prompts)), max_tokens)
        except Exception as error:
            if type(error) is ValueError:
                raise RolloutError(f"rollout_func {error}") from error
            raise RolloutError(
                f"rollout_func returned what cannot be read: {told(error)}"
            ) from error

    def _called(self, prompts: Sequence[Any]) -> Any:
        try:
            with foreign("rollout_func"):
                said = self.function(copy.deepcopy(list(prompts)))
                return wait_for(said) if inspect.isawaitable(said) else said
        except Exception as error:
            raise RolloutError(f"rollout_func raised {told(error)}") from error

    def _episodes(
        self, prompts: Sequence[Any], said: dict[str, list[Any]], max_tokens: int
    ) -> list[Episode]:
        others = {name: said[name] for name in said.keys() - {*NEEDED, MASK}}
        episodes = []
        for i, prompt in enumerate(prompts):
            row = f"for prompt {i}"
            ids = self._tokens(said["prompt_ids"][i], f"prompt_ids {row}", self.longest_prompt)
            tokens = self._tokens(said["completion_ids"][i], f"completion_ids {row}", max_tokens)
            mask = said[MASK][i] if MASK in said else [1] * len(tokens)
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            episodes.append(
                Episode(
                    prompt=prompt,
                    prompt_ids=ids,
                    tokens=tokens,
                    logprobs=_logprobs(said["logprobs"][i], len(tokens), row),
                    actions=_actions(mask, len(tokens), row),
                    rewards=[math.nan] * len(tokens),
                    messages=[{"role": "assistant", "content": text}],
                    turns=1,
                    truncated=tokens[-1] not in self.stop_token_ids,
                    columns={name: values[i] for name, values in others.items()},
                )
            )
        return episodes

    def _tokens(self, said: Any, what: str, most: int | None) -> list[int]:
        ids: list[int] = plain(said)
        whole = isinstance(ids, list) and all(type(token) is int for token in ids)
        if not whole or not ids:
            raise ValueError(f"must return {what} as a list of token ids, got {shown(said)}")
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            wrong = next(token for token in ids if not 0 <= token < self.vocabulary)
            raise ValueError(
                f"returned the token {wrong} in {what}: the policy has {self.vocabulary} tokens"
            )
        if most is not None and len(ids) > most:
            raise ValueError(
                f"returned {len(ids)} tokens as {what}, for at most {most}: let it stop there, or "
                "raise max_completion_length (for a prompt: micro_batch_tokens)"
            )
        return ids


def _listed(said: Any, rows: int) -> dict[str, list[Any]]:
    """Return every entry as a list with one value per row."""
    if not isinstance(said, Mapping):
        raise ValueError(f"must return a dictionary with {', '.join(NEEDED)}, got {shown(said)}")
    missing = [name for name in NEEDED if said.get(name) is None]
    if missing:
        raise ValueError(f"must return {', '.join(missing)} in its dictionary")
    if taken := sorted(said.keys() & set(TAKEN)):
        raise ValueError(f"returned {taken[0]!r}, which reward functions get anyway: rename it")
    listed = {}
    for name, value in said.items():
        values = plain(value)
        if not isinstance(values, list) and name not in (*NEEDED, MASK):
            values = [values] * rows
        if not isinstance(values, list) or len(values) != rows:
            got = f"{len(values)} entries" if isinstance(values, list) else shown(value)
            raise ValueError(
                f"must return one entry of {name} for each of the {rows} prompts, got {got}"
            )
        listed[name] = values
    return listed


def _logprobs(said: Any, length: int, row: str) -> list[float]:
    values = plain(said)
    if not isinstance(values, list) or len(values) != length:
        got = f"{len(values)} entries" if isinstance(values, list) else shown(said)
        raise ValueError(f"must return one of the logprobs {row} per token ({length}), got {got}")
    numbers = []
    for value in values:
        # Of the likeliest tokens that TRL's vLLM returns, the first is the sampled one.
        number = finite(value[0] if isinstance(value, list) and value else value)
        if number is None or number > ROUNDING:
            raise ValueError(
                f"must return logprobs {row} as finite numbers up to 0, got {shown(value)}"
            )
        numbers.append(min(number, 0.0))
    return numbers


def _actions(said: Any, length: int, row: str) -> list[bool]:
    mask = plain(said)
    if not isinstance(mask, list) or len(mask) != length or any(m not in (0, 1) for m in mask):
        raise ValueError(f"must return {MASK} {row} as {length} numbers 0 or 1, got {shown(said)}")
    return [bool(m) for m in mask]
