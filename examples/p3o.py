"""P3O, clipped separately (Wu et al. 2023, arXiv 2310.00212): a loss that compares the rows of a
prompt.

    python examples/p3o.py --task arithmetic --max_completion_length 6

Deviations: all pairs of a prompt's completions, where the paper has two; the detached ratio of the
other completion is not clipped, as in the paper's formula and not in its authors' code.
"""

import sys
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.config import config, parse
from rlhf_pg.data import Batch
from rlhf_pg.losses import MAX_LOG_RATIO, Loss, bounds, clip_metrics, ratio_terms
from rlhf_pg.models.policy import PolicyOutput
from rlhf_pg.run import Term


@config
class P3OConfig(GRPOConfig):
    """P3O: every completion against each other one of its prompt."""

    output_dir: str = "runs/p3o"
    """Directory of everything that the run leaves behind."""
    scale_rewards: Literal["none"] = "none"
    """Must be none: the loss compares the scores themselves."""
    advantage_estimator: Literal["group_normalized"] = "group_normalized"
    """Must be a number per completion that keeps the differences between scores."""
    aggregation: Literal["constant"] = "constant"
    """Must be constant, since the loss of a completion is shared among its tokens already."""


class P3OTrainer(GRPOTrainer):
    """`P3OTrainer(model=..., reward_funcs=..., args=P3OConfig(...), train_dataset=...)`."""

    config_type = P3OConfig
    args: P3OConfig

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.learner.token_budget = sys.maxsize  # all rows of a prompt in one micro-batch

    def terms(self) -> list[Term]:
        """Take the loss of P3O in place of `args.policy_loss`."""
        return [*super().terms(), Term(name="policy", loss=self.p3o)]

    def p3o(self, new: PolicyOutput, batch: Batch) -> Loss:
        """Compare the completions of a prompt."""
        per_token, metrics = p3o(
            new.logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.action_mask,
            groups=batch.groups,
            epsilon=self.args.epsilon,
            epsilon_high=self.args.epsilon_high,
        )
        return per_token, metrics | {"policy_loss": per_token.detach()}


def p3o(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    groups: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Loss:
    """Compare every row with the others of its prompt (P3O, clipped separately; Wu et al. 2023).

        rho_i = prod_t rho_t of row i,   q_ij = sg(rho_j) (r_i - r_j)
        c_i = clip(rho_i, 1 - epsilon, 1 + epsilon_high)
        loss_i = -1/(n-1) sum_{j != i} min(rho_i q_ij, c_i q_ij)

    shared evenly among the tokens of row i. A constant added to all scores of a prompt changes
    nothing. At rho = 1 the gradient is RLOO's; without a clip it stays unbiased when pi has moved
    away from pi_old, since rho_i is the ratio of the whole row.

    Args:
        logprobs, old_logprobs, mask: as in `clipped_surrogate`. A row without a True slot is in no
            pair.
        advantages: (B,1), or (B,T) equal along a row: r_i, possibly minus a number that is the same
            for the whole group, such as `group_normalized` with scale "none" (`leave_one_out`
            stretches the differences by n/(n-1)).
        groups: (B,) ids; every group must be in the batch as a whole. A row that is alone in its
            group has loss 0.

    Returns:
        per_token (B,T) and the metrics of `clipped_surrogate`, where `ratio` is the row's and the
        `clip_ratio/*` are the share of a row's pairs that are cut off.

    Elsewhere: the authors' code also clips the detached rho_j, to [1/c, c]. Their "V2" clips log
    rho_i - log rho_j instead.
    """
    terms = ratio_terms(logprobs, old_logprobs, advantages, mask)
    log_rho = torch.where(mask, logprobs - old_logprobs.detach(), 0.0).sum(dim=1, keepdim=True)
    rho = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    score = terms.advantages.gather(1, mask.int().argmax(dim=1, keepdim=True))
    share = _pair_shares(groups, mask, rho.dtype)
    gap = rho.detach().T * (score - score.T) * share
    low_bound, high_bound = bounds(epsilon, epsilon_high)
    clipped = rho.clamp(low_bound, high_bound)
    loss = -torch.min(rho * gap, clipped * gap).sum(dim=1, keepdim=True)
    cut = [(rho < low_bound) & (gap < 0), (rho > high_bound) & (gap > 0)]
    low, high = (torch.where(mask, (x * share).sum(dim=1, keepdim=True), 0.0) for x in cut)
    metrics = terms.metrics | clip_metrics(low, high, rho.dtype)
    metrics["ratio"] = torch.where(mask, rho.detach(), 0.0)
    metrics["ratio_overflow"] = torch.where(mask, log_rho.abs() > MAX_LOG_RATIO, 0.0)
    return torch.where(mask, loss / lengths, 0.0), metrics


def _pair_shares(groups: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B,B): 1/(n-1) where j is another of the n rows of i's group that have a True slot."""
    rows = mask.any(dim=1)
    pairs = (groups[:, None] == groups) & rows[:, None] & rows
    pairs.fill_diagonal_(False)
    return pairs.to(dtype) / pairs.sum(dim=1, keepdim=True).clamp(min=1)


if __name__ == "__main__":
    args = parse(P3OConfig)
    P3OTrainer(args=args).train()
