"""AdamW or Muon, and a schedule, with separate rates and warm-ups for policy and critic."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel, get_scheduler

from rlhf_pg.config import PolicyGradientConfig, PPOConfig
from rlhf_pg.models import Critic

Optimizers = tuple[Optimizer | None, LRScheduler | None]


def optimizer_and_schedule(
    policy: nn.Module,
    critic: Critic | None,
    args: PolicyGradientConfig,
    total_steps: int,
    given: Optimizers = (None, None),
) -> tuple[Optimizer, LRScheduler]:
    """Make the optimizer and the learning-rate schedule of a run of `total_steps`, or take those
    that the user has given; ValueError if these lack a parameter or do not fit the config.
    """
    if given[1] is not None and args.kl_adaptive_lr is not None:
        raise ValueError("kl_adaptive_lr would scale a scheduler of your own: leave one out")
    if given != (None, None) and args.policy_frozen_until > 0:
        raise ValueError("value_pretraining_steps needs the trainer's own optimizer: leave one out")
    optimizer = given[0] or _optimizer(policy, critic, args)
    _check_complete(optimizer, policy, critic)
    if given[1] is not None:
        return optimizer, given[1]
    if given[0] is not None or critic is None:
        warmup = args.warmup_steps
        return optimizer, get_scheduler(args.lr_scheduler_type, optimizer, warmup, total_steps)
    return optimizer, _schedule(optimizer, critic, args, total_steps)


def group_of(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the parameter group of a module's first trained parameter; `["lr"]` is its rate."""
    first = next(p for p in module.parameters() if p.requires_grad)
    return next(g for g in optimizer.param_groups if any(p is first for p in g["params"]))


class MuonAndAdamW(Optimizer):
    """Muon for its groups of matrices, AdamW for the other groups, with one state.

    A matrix moves by lr 0.2 sqrt(max(rows, columns)) times its orthogonalised momentum, which is as
    far as AdamW moves it on average, so rates and decays carry over (Moonlight; Liu et al. 2025).
    torch iterates in bfloat16: where gradients differ by rounding, as with another number of
    processes, weights part by a few percent of the way in five steps. Resuming is exact.
    """

    def __init__(self, matrices: list[Any], others: list[Any], rest: dict[str, Any]) -> None:
        muon = [Muon(matrices, rest["lr"], adjust_lr_fn="match_rms_adamw")] if matrices else []
        self.parts = [*muon, *([AdamW(others, fused=True, **rest)] if others else [])]
        groups = [group for part in self.parts for group in part.param_groups]
        super().__init__(groups, self.parts[-1].defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:  # which backends and checkpoints do not know
            own = isinstance(part, Muon)
            part.state = self.state
            part.param_groups = [g for g in self.param_groups if ("ns_steps" in g) == own]
            part.step()


def _matrices(module: nn.Module) -> set[int]:
    """Return the ids of the matrices of the blocks: not those of embeddings and heads."""
    parts = list(module.modules())
    outer: list[Any] = [part for part in parts if isinstance(part, nn.Embedding)]
    outer += [part.get_output_embeddings() for part in parts if isinstance(part, PreTrainedModel)]
    outside = {id(p) for part in filter(None, outer) for p in part.parameters()}
    return {id(p) for p in module.parameters() if p.ndim == 2 and min(p.shape) > 1} - outside


def _optimizer(policy: nn.Module, critic: Critic | None, args: PolicyGradientConfig) -> Optimizer:
    """Make an optimizer without decay for vectors (biases, norms), with the critic's own rate."""
    modules: list[tuple[nn.Module, float]] = [(policy, args.learning_rate)]
    if critic is not None and isinstance(args, PPOConfig):
        modules.append((critic, args.value_learning_rate or args.learning_rate))
    groups = list[Any]()
    matrices = list[Any]()
    for module, rate in modules:
        trained = [p for p in module.parameters() if p.requires_grad]
        muon = _matrices(module) if args.optim == "muon" else set[int]()
        for into, of_muon, decay, is_wide in (
            (matrices, True, args.weight_decay, True),
            (groups, False, args.weight_decay, True),
            (groups, False, 0.0, False),
        ):
            own = [p for p in trained if (p.ndim >= 2) == is_wide and (id(p) in muon) == of_muon]
            if own:  # DeepSpeed: none empty
                into.append({"params": own, "weight_decay": decay, "lr": rate})
    betas = (args.adam_beta1, args.adam_beta2)
    rest: Any = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
    if args.optim == "muon":
        return MuonAndAdamW(matrices, groups, rest)
    if args.optim != "adamw_8bit":
        return AdamW(groups, fused=args.optim == "adamw_torch_fused" or None, **rest)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError("optim adamw_8bit needs bitsandbytes: pip install bitsandbytes") from error
    eight_bit: Optimizer = AdamW8bit(groups, **rest)
    return eight_bit


def _schedule(
    optimizer: Optimizer, critic: Critic, args: PolicyGradientConfig, total_steps: int
) -> LambdaLR:
    """Schedule the critic from the first step, the policy after `value_pretraining_steps`."""
    alone = args.policy_frozen_until
    later = _rates(args, max(1, total_steps - alone))
    value = _rates(args, total_steps)

    def policy(step: int) -> float:
        if step < alone:
            return 0.0
        return later(step - alone)

    values = {id(p) for p in critic.parameters()}
    is_critic = [any(id(p) in values for p in g["params"]) for g in optimizer.param_groups]
    return LambdaLR(optimizer, [value if own else policy for own in is_critic])


def _rates(args: PolicyGradientConfig, steps: int) -> Callable[[int], float]:
    """Return the schedule `lr_scheduler_type`: from a step to the share of the peak rate."""
    unused = SGD([torch.zeros(())], lr=args.learning_rate)  # transformers asks for an optimizer
    schedule: Any = get_scheduler(args.lr_scheduler_type, unused, args.warmup_steps, steps)
    rates: Callable[[int], float] = schedule.lr_lambdas[0]
    return rates


def _check_complete(optimizer: Optimizer, policy: nn.Module, critic: Critic | None) -> None:
    has = {id(p) for group in optimizer.param_groups for p in group["params"]}
    critics = () if critic is None else critic.named_parameters(prefix="critic")
    for name, parameter in [*policy.named_parameters(), *critics]:
        if parameter.requires_grad and id(parameter) not in has:
            raise ValueError(
                f"optimizers: yours lacks the trained parameter {name}. A critic and an adapter of "
                "use_peft come later: leave optimizers out, or give a model with its adapter"
            )
