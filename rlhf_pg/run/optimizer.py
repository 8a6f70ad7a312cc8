"""AdamW and a schedule, with separate rates and warm-ups for policy and critic."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from rlhf_pg.config import PolicyGradientConfig, PPOConfig
from rlhf_pg.config.run import TrainingConfig
from rlhf_pg.models.critic import Critic

Optimizers = tuple[Optimizer | None, LRScheduler | None]


def optimizer_and_schedule(
    policy: nn.Module,
    critic: Critic | None,
    args: PolicyGradientConfig,
    total_steps: int,
    optimizers: Optimizers = (None, None),
) -> tuple[Optimizer, LRScheduler]:
    """Make the optimizer and the learning-rate schedule of a run of `total_steps`, or take those
    that the user has given; ValueError if these lack a parameter or do not fit the config.
    """
    users_optimizer, users_schedule = optimizers
    if users_schedule is not None and args.kl_adaptive_lr is not None:
        raise ValueError("kl_adaptive_lr would scale a scheduler of your own: leave one out")
    if optimizers != (None, None) and args.policy_frozen_until > 0:
        raise ValueError("value_pretraining_steps needs the trainer's own optimizer: leave one out")
    optimizer = users_optimizer or _optimizer(policy, critic, args)
    _check_complete(optimizer, policy, critic)
    if users_schedule is not None:
        return optimizer, users_schedule
    if users_optimizer is not None or critic is None:
        warmup = args.warmup_steps
        return optimizer, get_scheduler(args.lr_scheduler_type, optimizer, warmup, total_steps)
    return optimizer, _schedule(optimizer, critic, args, total_steps)


def group_of(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the parameter group of a module's first trained parameter; `["lr"]` is its rate."""
    first = next(p for p in module.parameters() if p.requires_grad)
    return next(g for g in optimizer.param_groups if any(p is first for p in g["params"]))


def _optimizer(policy: nn.Module, critic: Critic | None, args: PolicyGradientConfig) -> Optimizer:
    """Make the optimizer of policy and critic; the critic has its own rate."""
    modules: list[tuple[nn.Module, float]] = [(policy, args.learning_rate)]
    if critic is not None and isinstance(args, PPOConfig):
        modules.append((critic, args.value_learning_rate or args.learning_rate))
    return adamw(modules, args)


def adamw(modules: Sequence[tuple[nn.Module, float]], args: TrainingConfig) -> Optimizer:
    """Make AdamW of the trained parameters of modules, each with its peak learning rate; vectors
    (biases, norms) do not decay.
    """
    groups = []
    for module, rate in modules:
        trained = [p for p in module.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim >= 2]
        vectors = [p for p in trained if p.ndim < 2]
        for parameters, decay in (
            (matrices, args.weight_decay),
            (vectors, 0.0),
        ):
            if parameters:  # DeepSpeed refuses an empty group
                groups.append(
                    {
                        "params": parameters,
                        "weight_decay": decay,
                        "lr": rate,
                    }
                )
    options: Any = {
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    if args.optim != "adamw_8bit":
        return AdamW(
            groups,
            fused=args.optim == "adamw_torch_fused" or None,
            **options,
        )
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError("optim adamw_8bit needs bitsandbytes: pip install bitsandbytes") from error
    eight_bit: Optimizer = AdamW8bit(groups, **options)
    return eight_bit


def _schedule(
    optimizer: Optimizer,
    critic: Critic,
    args: PolicyGradientConfig,
    total_steps: int,
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
