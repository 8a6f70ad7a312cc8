"""What the options of a run make of scores: from raw scores to training rewards."""

import torch
from torch import Tensor

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.records import Rollout
from rlhf_pg.rewards.functions import Rewards
from rlhf_pg.rewards.scores import (
    at_end,
    clipped,
    min_max,
    overlong,
    replaced,
    sum_step_scores,
)
from rlhf_pg.running_stats import RunningMoments


class Shaping:
    """The sources of reward of a run, and the way from a raw score to what is trained on.

    raw        what a reward function said; behind the functions, as sources of their own at the
               last action token, missing_eos_penalty and overlong_penalty
    clip       each score by itself to reward_clip_range
    squash     each score by itself into [0, 1] (reward_squash), min_max by those of the step
    normalise  divided by the running std of its source's totals (normalize_rewards)
    weight     reward_weights
    replace    minus missing_eos_penalty in place of all else (missing_eos_mode "replace")
    KL         subtracted at every token (kl_placement "reward")
    whiten     the sum of all that, over the tokens of the step (whiten_rewards)

    Penalties are in the units of the result: they are not clipped, squashed, normalised or
    weighted. Squashing shifts, so that a further step is paid for being there. No mean
    is subtracted from normalised scores: shifted, each further step would be paid or fined for
    being there, and the length that pays best would be another. (Whitening does shift, by a share
    of the mean: Ziegler et al. 2019, in their code.)

    `rewards/{name}/mean` and the samples show raw scores, steps summed; `reward` is what is trained
    on before the KL, and in evaluation before normalising and min_max too: what moves would set
    scores of different steps apart.

    Attributes:
        names: of the sources.
        moments: of the totals of each reward function, where they are normalised.

    Raises:
        ValueError: a reward function with the name of a penalty.
    """

    def __init__(self, args: PolicyGradientConfig, rewards: Rewards) -> None:
        self.args = args
        self.functions = len(rewards.names)
        penalties = {
            "missing_eos_penalty": args.missing_eos_penalty,
            "overlong_penalty": args.overlong_buffer,
        }
        added = [name for name, key in penalties.items() if key is not None]
        for name in added:
            if name in rewards.names:
                raise ValueError(f"a reward function has the name of the penalty {name}: rename it")
        self.names = [*rewards.names, *added]
        self.weights = torch.cat([rewards.weights, rewards.weights.new_ones(len(added))])
        normalized = rewards.names if args.normalize_rewards else []
        self.moments = {f"rewards/{name}": RunningMoments() for name in normalized}
        self._bounds: tuple[Tensor, Tensor] | None = None  # of a step, (functions,) each

    def penalized(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """The scores of the functions, (B,T,functions), with those of the penalties behind them."""
        args, added = self.args, []
        if args.missing_eos_penalty is not None:
            added.append(-args.missing_eos_penalty * rollout.truncated.double())
        if args.overlong_buffer is not None:
            lengths, longest = rollout.completion_mask.sum(1), args.max_completion_length
            added.append(overlong(lengths, longest, args.overlong_buffer, args.overlong_penalty))
        # Where the policy chose nothing, nothing is to be said of it.
        silent = ~rollout.action_mask.any(1)
        added = [penalty.masked_fill(silent, torch.nan) for penalty in added]
        columns = [at_end(penalty, rollout.action_mask) for penalty in added]
        return torch.cat([scores, *(column[:, :, None].to(scores) for column in columns)], dim=2)

    def measured(self, scores: Tensor) -> Tensor | None:
        """(B,3F) of a step's raw scores (B,T,K), for F functions: lowest, negated highest, totals.

        These are of clipped scores, which is what is divided by them. None where nothing moves.
        """
        if self.args.reward_squash != "min_max" and not self.moments:
            return None
        own = self._clipped(scores)[:, :, : self.functions]
        low = own.where(~own.isnan(), torch.inf).amin(1)
        high = own.where(~own.isnan(), -torch.inf).amax(1)
        return torch.cat([low, -high, sum_step_scores(own)], dim=1)

    def observe(self, everyone: Tensor) -> None:
        """Take in a step before its scores are shaped: what was `measured` on all processes."""
        low, negated_high, step_totals = everyone.chunk(3, dim=1)
        if self.args.reward_squash == "min_max":
            self._bounds = low.amin(0), -negated_high.amin(0)
        for column, moments in zip(step_totals.double().T, self.moments.values(), strict=False):
            valid = column[~column.isnan()]
            if len(valid):
                var = valid.var(correction=0).item()
                moments.update(len(valid), valid.mean().item(), var)

    def __call__(self, scores: Tensor, rollout: Rollout, normalize: bool = True) -> Tensor:
        """(B,T,K) raw -> (B,T,K) weighted, up to the KL; `normalize`: also by what moves."""
        scores = self._squashed(self._clipped(scores), normalize)
        if normalize and self.moments:
            stds = [moments.std for moments in self.moments.values()]
            ones = [1.0] * (len(self.names) - len(stds))
            scores = scores / scores.new_tensor(stds + ones)
        scores = scores * self.weights.to(scores)
        if self.args.missing_eos_mode == "replace":
            source = self.names.index("missing_eos_penalty")
            return replaced(scores, rollout.truncated, rollout.action_mask, source)
        return scores

    def judged(self, scores: Tensor) -> Tensor:
        """(B,T,K) raw -> (B,T,functions): what the functions say, clipped and weighted.

        Without penalties, which tell completions of one group apart that are equally wrong.
        """
        weights = self.weights[: self.functions].to(scores)
        return self._clipped(scores)[:, :, : self.functions] * weights

    def steps(self, shaped: Tensor) -> tuple[Tensor, Tensor]:
        """Step scores (B,T), summed over sources, and where there is one (B,T).

        A penalty of 0 is no step: process supervision would count it as one more, worth nothing.
        """
        functions, penalties = shaped.tensor_split([self.functions], dim=2)
        there = ~functions.isnan().all(2) | (penalties.nansum(2) != 0)
        return shaped.nansum(2), there

    def _squashed(self, scores: Tensor, normalize: bool) -> Tensor:
        """Of the functions; penalties stay."""
        how = self.args.reward_squash
        if how == "none" or (how == "min_max" and not normalize):
            return scores
        functions, penalties = scores.tensor_split([self.functions], dim=2)
        if how == "sigmoid":
            return torch.cat([functions.sigmoid(), penalties], dim=2)
        assert self._bounds is not None  # a step is observed first
        return torch.cat([min_max(functions, *self._bounds), penalties], dim=2)

    def _clipped(self, scores: Tensor) -> Tensor:
        """Of the functions; penalties stay."""
        if self.args.reward_clip_range is None:
            return scores
        functions, penalties = scores.tensor_split([self.functions], dim=2)
        low, high = self.args.reward_clip_range
        return torch.cat([clipped(functions, low, high), penalties], dim=2)
