"""From raw scores to training rewards, by the options of a run.

Shapes: B rows on this rank, T completion width, F functions, K sources of reward: these and then
the penalties.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_pg.boundary.user_code import LARGEST
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.batch import Batch
from rlhf_pg.rewards.scores import at_end, overlong, replace_sources, sum_step_scores
from rlhf_pg.rewards.scoring import Rewards
from rlhf_pg.running_stats import RunningMoments


class Shaping:
    """The sources of reward of a run, and the steps from raw scores to training rewards.

    raw        scores of reward functions; missing_eos_penalty and overlong_penalty follow as
               sources of their own, at the last action token
    clip       each score to reward_clip_range
    squash     each score into [0, 1] (reward_squash); min_max by the scores of the step
    normalise  divide by the running std of the source's totals (normalize_rewards)
    weight     by reward_weights
    replace    all else by minus missing_eos_penalty (missing_eos_mode "replace")

    The trainer's `credit` then subtracts a KL at every token (kl_placement "reward"), and whitens
    the sum over the tokens of the step (whiten_rewards).

    Penalties are in final units: only scores of functions are clipped, squashed, normalised and
    weighted. Normalising does not subtract a mean, which would reward or punish additional steps
    as such, and so change the best length. (Whitening does shift, by a share of the mean: Ziegler
    et al. 2019, in their code.)

    `rewards/{name}/mean` and the samples show raw scores, summed over steps. `reward` excludes the
    KL; in evaluation also normalising and min_max, which change during a run.
    """

    def __init__(self, args: PolicyGradientConfig, rewards: Rewards) -> None:
        self.args = args
        self.functions = len(rewards.names)
        penalties = []
        if args.missing_eos_penalty is not None:
            penalties.append("missing_eos_penalty")
        if args.overlong_buffer is not None:
            penalties.append("overlong_penalty")
        self.names = [*rewards.names, *penalties]
        self._function_weights = rewards.weights
        units = rewards.weights.new_ones(len(penalties))
        self.weights = torch.cat([rewards.weights, units])
        self.moments = {}  # of the totals of each source
        if args.normalize_rewards:
            for name in rewards.names:
                self.moments[f"rewards/{name}"] = RunningMoments()
        self._bounds: tuple[Tensor, Tensor]  # lowest and highest of a step, (F,) each

    def bound(self, scores: Tensor) -> Tensor:
        """Return raw scores (B,T,F) within `LARGEST`; ValueError if one, or one times
        its weight, is beyond it after reward_clip_range.
        """
        weights = self._function_weights.abs().clamp(min=1)
        sizes = self._clip(scores).abs().clamp(min=1)
        is_beyond = sizes * weights > LARGEST
        beyond = is_beyond.nonzero()
        if len(beyond):
            row, token, source = beyond[0].tolist()
            score = scores[row, token, source]
            raise ValueError(
                f"the score {score:g} of {self.names[source]} for completion "
                f"{row} of the batch, or its weight, is too large: it may be {LARGEST:g} at most, "
                "also when it is weighted. Set reward_clip_range, or lower reward_weights"
            )
        return scores.clamp(-LARGEST, LARGEST)

    def add_penalties(self, scores: Tensor, batch: Batch) -> Tensor:
        """Append the penalties as sources: (B,T,F) -> (B,T,K)."""
        args = self.args
        penalties = []
        if args.missing_eos_penalty is not None:
            penalties.append(-args.missing_eos_penalty * batch.truncated.double())
        if args.overlong_buffer is not None:
            lengths = batch.completion_mask.sum(1)
            if batch.parent_offsets is not None:  # the limit is on a path, not on the whole tree
                rows = batch.with_counts().host_rows or ()
                depths = [row.longest - row.prompt for row in rows]
                lengths = lengths.new_tensor(depths)
            penalty = overlong(
                lengths,
                args.max_completion_length,
                args.overlong_buffer,
                args.overlong_penalty,
            )
            penalties.append(penalty)
        mask = batch.action_mask
        is_silent = ~mask.any(1)  # a row without policy tokens has no penalty
        sources = [scores]
        for penalty in penalties:
            penalty = penalty.masked_fill(is_silent, torch.nan)
            source = at_end(penalty, mask)[:, :, None]
            sources.append(source.to(scores))
        return torch.cat(sources, dim=2)

    def observe(self, scores: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        """Update the statistics by a step's raw scores (B,T,K), before they are shaped.

        `gather` returns the rows of all processes; collective.
        """
        scores = self._clip(scores)
        if self.args.reward_squash == "min_max":
            is_missing = scores.isnan()
            low = scores.masked_fill(is_missing, torch.inf).amin(1)
            low = gather(low).amin(0)
            high = scores.masked_fill(is_missing, -torch.inf).amax(1)
            high = gather(high).amax(0)
            self._bounds = low, high
        if not self.moments:
            return
        totals = gather(sum_step_scores(scores)).double()
        for column, moments in zip(totals.T, self.moments.values(), strict=True):
            valid = column[~column.isnan()]
            if len(valid):
                mean = valid.mean().item()
                var = valid.var(correction=0).item()
                moments.update(len(valid), mean, var)

    def shape(
        self,
        scores: Tensor,
        batch: Batch,
        normalize: bool = True,
    ) -> Tensor:
        """Shape raw scores (B,T,K), without the KL; `normalize` adds running normalisation."""
        args = self.args
        shaped = self._clip(scores)
        penalties = scores[:, :, self.functions :]
        if args.reward_squash == "sigmoid":
            shaped = shaped.sigmoid()
        elif args.reward_squash == "min_max" and normalize:
            low, high = self._bounds
            width = (high - low).where(high > low, 1.0)  # the quotient is 0 if all are equal
            shaped = (shaped - low) / width
        if normalize and self.moments:
            stds = [moments.std for moments in self.moments.values()]
            shaped = shaped / shaped.new_tensor(stds)
        shaped = torch.cat([shaped, penalties], dim=2)
        shaped = shaped * self.weights.to(shaped)
        if args.missing_eos_mode == "replace":
            mask = batch.action_mask
            rows = batch.truncated & mask.any(1)  # a failed row scores nothing
            source = self.names.index("missing_eos_penalty")
            shaped = replace_sources(shaped, rows, mask, source)
        return shaped

    def paid(self, scores: Tensor) -> Tensor:
        """Return what the functions pay each completion, from raw scores (B,T,K): clipped and
        weighted, (B,F).

        Penalties are left out: they would distinguish equally wrong completions of a group.
        """
        return sum_step_scores(self._clip(scores) * self._function_weights.to(scores))

    def steps(self, shaped: Tensor) -> tuple[Tensor, Tensor]:
        """Return step scores (B,T), summed over sources, and a mask of the steps (B,T).

        A penalty of 0 is left out: process supervision would count it as another step.
        """
        functions, penalties = shaped.tensor_split([self.functions], dim=2)
        has_score = ~functions.isnan().all(2)
        has_penalty = penalties.nansum(2) != 0
        return shaped.nansum(2), has_score | has_penalty

    def _clip(self, scores: Tensor) -> Tensor:
        """Return the functions' scores, each clipped: (B,T,K) -> (B,T,F)."""
        scores = scores[:, :, : self.functions]
        limits = self.args.reward_clip_range
        if limits is None:
            return scores
        return scores.clamp(*scores.new_tensor(limits))
