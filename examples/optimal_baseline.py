"""REINFORCE with the baseline of least variance (Weaver & Tao 2001): each of the other completions
weighs as much as |grad log pi(y)|^2, measured, where `returns_minus_optimal` takes the length.

    python examples/optimal_baseline.py --task arithmetic --max_completion_length 6

It is unbiased, and costs an additional forward and backward pass for every completion.
"""

from typing import Literal

import torch
from torch import Tensor

from rlhf_pg import ReinforceConfig, ReinforceTrainer
from rlhf_pg.advantages import AdvantageInputs, optimal_baseline
from rlhf_pg.config import config, parse
from rlhf_pg.data import Batch
from rlhf_pg.report.metrics import Meter


@config
class OptimalBaselineConfig(ReinforceConfig):
    """REINFORCE, whose returns get the baseline of this example."""

    output_dir: str = "runs/optimal_baseline"
    """Directory of everything that the run leaves behind."""
    advantage_estimator: Literal["returns"] = "returns"
    """Must be the return itself."""


class OptimalBaselineTrainer(ReinforceTrainer):
    """`ReinforceTrainer` with `advantages` of its own."""

    config_type = OptimalBaselineConfig
    args: OptimalBaselineConfig

    def credit(self, batch: Batch, meter: Meter) -> Batch:
        """Measure the gradients of this rank's completions, then go on as ever."""
        if self.runtime.splits:
            raise ValueError("this example takes gradients of whole weights: launch it with DDP")
        self.squares, _ = self.runtime.gather(self.squared_gradients(batch))
        return super().credit(batch, meter)

    def squared_gradients(self, batch: Batch) -> Tensor:
        """|grad log pi(y)|^2 of every completion over the trained parameters, (B,) float64."""
        policy = self.learner.policy
        trained = [p for p in policy.parameters() if p.requires_grad]
        squares = torch.zeros(batch.num_rows, dtype=torch.float64, device=self.runtime.device)
        for i in batch.action_mask.any(1).nonzero().flatten().tolist():
            log_p = policy(batch.select(torch.tensor([i]))).logprobs.sum()
            grads = torch.autograd.grad(log_p, trained, allow_unused=True)
            squares[i] = sum(g.double().square().sum() for g in grads if g is not None)
        return squares

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        """A_t = G_t - b, where b is the mean score of the others by their squared gradients.

        Where every prompt has one completion, the others are those of the batch.
        """
        groups = inputs.groups
        if len(groups.unique()) == len(groups):
            groups = torch.zeros_like(groups)
        scores = inputs.scores.unbind(1)
        baselines = [optimal_baseline(source, self.squares, groups) for source in scores]
        return super().advantages(inputs) - inputs.per_token(torch.stack(baselines).sum(0))


if __name__ == "__main__":
    args = parse(OptimalBaselineConfig)
    OptimalBaselineTrainer(args=args).train()
