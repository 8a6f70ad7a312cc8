"""Rewards, called on completions at once, as none but a test does."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlhf_pg import rewards
from rlhf_pg.data.batch import pad_rows
from rlhf_pg.rewards.functions import RewardInputs


class Rewards(rewards.Rewards):
    """Rewards that are called like a function."""

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        action_mask: Tensor | None = None,
        groups: Sequence[int] | None = None,
        **facts: Any,
    ) -> Tensor:
        """The scores (B,T,K) of `score`; the facts are those of `RewardInputs`."""
        inputs = RewardInputs(prompts, completions, completion_ids, columns, **facts)
        mask = pad_rows(completion_ids, 0)[1] if action_mask is None else action_mask
        return self.score(inputs, mask, groups=groups).scores
