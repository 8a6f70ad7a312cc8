"""Trust Region Policy Optimization (Schulman et al. 2015), on the public names of rlhf_pg alone.

    maximise E[rho_t A_t]  subject to  E[KL(pi_old || pi)] <= max_kl

The step follows F^-1 g, found by conjugate gradients from products of the Fisher matrix F with
vectors, and is shortened until the surrogate really rises and the constraint really holds.

    python examples/trpo.py --max_steps 20 --output_dir runs/trpo

Where this differs from the paper: the advantage is REINFORCE's, without a critic; means are over
tokens, as `aggregation` says; the Fisher matrix is damped. `learning_rate` in the metrics is the
share of the step that was taken.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rlhf_pg import ReinforceConfig, ReinforceTrainer
from rlhf_pg.config import config, option, parse
from rlhf_pg.data import Batch
from rlhf_pg.report.metrics import Meter


@config
class TRPOConfig(ReinforceConfig):
    """TRPO: a step as long as the KL allows. The learning rate is not used."""

    output_dir: str = "runs/trpo"
    """Directory of everything that the run leaves behind."""
    policy_loss: Literal["surrogate"] = "surrogate"
    """Must be the unclipped surrogate, -rho_t A_t."""
    num_iterations: int = option(1, ge=1, le=1)
    """Must be 1: a rollout has one step, and the line search repeats that."""
    num_mini_batches: int = option(1, ge=1, le=1)
    """Must be 1: a step is taken on the whole rollout batch."""
    kl_placement: Literal["reward"] = "reward"
    """A KL to a reference is paid in the reward; the line search would not see one in the loss."""
    entropy_coef: float = option(0.0, ge=0, le=0)
    """Must be 0: the line search knows no entropy bonus."""
    entropy_target: None = None
    """Must be None: there is no entropy bonus to control."""
    positive_nll_coef: float = option(0.0, ge=0, le=0)
    """Must be 0: the line search knows no likelihood of right completions."""
    aggregation: Literal["token_mean"] = "token_mean"
    """Must be the mean over tokens, which the constraint takes too."""
    kl_adaptive_lr: None = None
    """Must be None: the line search decides how far a step goes."""
    truncated_sampling: Literal["refuse"] = "refuse"
    """Must refuse top_k and the like: the KL that bounds a step is over all tokens."""
    beta: float = 0.0
    """Coefficient of KL(policy || reference); at 0 no reference is kept."""
    max_kl: float = option(0.01, gt=0)
    """Mean KL(old || new) of a step, in nats per token."""
    cg_iterations: int = option(10, ge=1)
    """Of conjugate gradients."""
    damping: float = option(0.1, ge=0)
    """Added to the diagonal of the Fisher matrix."""
    backtracks: int = option(10, ge=1)
    """How often the step is halved before it is given up."""


class TRPOTrainer(ReinforceTrainer):
    """`TRPOTrainer(model=..., reward_funcs=..., args=TRPOConfig(...), train_dataset=...)`."""

    config_type = TRPOConfig
    args: TRPOConfig

    def update(self, batch: Batch, meter: Meter) -> dict[str, float]:
        """One step of length sqrt(2 max_kl / d'Fd) along d = F^-1 g, halved until it is good."""
        if self.runtime.kind != "DDP":
            raise ValueError("this example moves whole weights itself: launch it with DDP")
        self.learner.accumulate(batch, self.objective, meter)
        ascent = -torch.cat([p.grad.flatten() for p in self.parameters])
        self.learner.optimizer.zero_grad()

        def fisher(vector: Tensor) -> Tensor:
            return self.fisher_product(batch, vector)

        direction = conjugate_gradients(fisher, ascent, self.args.cg_iterations)
        curvature = direction @ fisher(direction)
        step = (2 * self.args.max_kl / curvature).sqrt() * direction
        share, kl = self.line_search(batch, step)
        self.learner.optimizer.step()  # without gradients: only the schedule counts it
        return {"grad_norm": ascent.norm().item(), "learning_rate": share, "trpo/kl": kl}

    def line_search(self, batch: Batch, step: Tensor) -> tuple[float, float]:
        """Take the largest share 1, 1/2, 1/4 ... of the step that is good, or none.

        Returns:
            The share, and the mean KL(old || new) that it made.
        """
        start = parameters_to_vector(self.parameters).detach().clone()
        old = [distributions.detach() for _, distributions in self.forward(batch)]
        self.learner.updates_begun = 1  # a checkpoint saved after an error says so
        for halvings in range(self.args.backtracks):
            vector_to_parameters(start + 0.5**halvings * step, self.parameters)
            gain, kl = self.compare(batch, old)
            if gain > 0 and kl <= self.args.max_kl:
                return 0.5**halvings, kl
        vector_to_parameters(start, self.parameters)
        self.learner.updates_begun = 0
        return 0.0, 0.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return [p for p in self.learner.module.parameters() if p.requires_grad]

    def forward(self, batch: Batch) -> Iterator[tuple[Batch, Tensor]]:
        """Micro-batches, and in each log pi(. | x, y_<t), (B,T,V), for all of its columns."""
        for rows in batch.micro_batches(self.learner.token_budget, window=0):
            part = batch.select(rows)
            logits = self.learner.policy.logits(part)
            yield part, (logits / self.args.temperature).log_softmax(dim=-1)

    def mean(self, total: Tensor, batch: Batch) -> Tensor:
        """A sum over the action tokens of this process as the mean over those of all."""
        return self.runtime.all_reduce_sum(total) / self.runtime.all_reduce_sum(
            batch.action_mask.sum()
        )

    @torch.no_grad()
    def compare(self, batch: Batch, old: list[Tensor]) -> tuple[float, float]:
        """By how much the surrogate E[rho_t A_t] has risen, and the mean KL(old || new)."""
        sums = torch.zeros(2, device=self.runtime.device)
        for (part, new), before in zip(self.forward(batch), old, strict=True):
            chosen = part.completion_ids[:, :, None]
            ratio = (new - before).gather(2, chosen).squeeze(2).exp()
            kl = (before.exp() * (before - new)).sum(dim=-1)
            for i, numbers in enumerate(((ratio - 1) * part.advantages, kl)):
                sums[i] += numbers[part.action_mask].sum()
        gain, kl = self.mean(sums, batch).tolist()
        return gain, kl

    def fisher_product(self, batch: Batch, vector: Tensor) -> Tensor:
        """(F + damping) v, with F the Hessian of the mean KL(old || new) where new = old."""
        total = torch.zeros_like(vector)
        with sdpa_kernel(SDPBackend.MATH):  # the kernel that can be differentiated twice
            for part, new in self.forward(batch):
                old = new.detach()
                kl = (old.exp() * (old - new)).sum(dim=-1)[part.action_mask].sum()
                first = self.flat_gradient(kl, create_graph=True)
                total += self.flat_gradient(first @ vector)
        return self.mean(total, batch) + self.args.damping * vector

    def flat_gradient(self, of: Tensor, create_graph: bool = False) -> Tensor:
        """Of a number, by all that is trained."""
        gradients = torch.autograd.grad(
            of, self.parameters, create_graph=create_graph, materialize_grads=True
        )
        return torch.cat([gradient.flatten() for gradient in gradients])


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], target: Tensor, iterations: int
) -> Tensor:
    """x with `product(x)` = target, for a symmetric positive definite matrix, or near it."""
    x, residual = torch.zeros_like(target), target.clone()
    direction, size = residual.clone(), residual @ residual
    for _ in range(iterations):
        if size < 1e-20:
            break
        moved = product(direction)
        rate = size / (direction @ moved)
        x += rate * direction
        residual -= rate * moved
        size, last = residual @ residual, size
        direction = residual + size / last * direction
    return x


if __name__ == "__main__":
    args = parse(TRPOConfig)
    TRPOTrainer(args=args).train()
