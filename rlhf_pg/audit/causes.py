"""How much of the bias of a config's expected gradient comes from which of its choices."""

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.audit.expectation import MeasuredGradient, changed, measure
from rlhf_pg.config.fields import default_of, metadata
from rlhf_pg.models.policy import PolicyOutput

# The estimator or loss that is without its bias.
LIKE = {
    "clipped_surrogate": "surrogate",
    "cispo": "surrogate",
    "sapo": "surrogate",
    "dppo": "surrogate",
    "kl_penalty": "surrogate",
    "returns_minus_mean": "returns_minus_others",
    "process_group_normalized": "leave_one_out",
    "group_normalized": "leave_one_out",
    "group_normalized_per_source": "leave_one_out",
    "gae": "returns_minus_values",
    "n_step": "returns_minus_values",
}
# What the keys are without a bias, where that is not their default.
UNBIASED = {
    "vf_coef": 0.0,
    "scale_rewards": "none",
    "normalize_advantages": False,
    "aggregation": "constant",
    "num_iterations": 1,
    "kl_estimator": "k1_to_go",
    "kl_placement": "loss",
    "teacher_gamma": 1.0,
    "sampler_correction": "none",
}


def audit(args: Any, foreign: Any = None) -> Iterator[tuple[str, MeasuredGradient, str]]:
    """Yield a name, a measurement and an explanation: of the config, then without each choice that
    changes its expected gradient, and at last without all.
    """
    measured = measure(args, foreign)
    gradient = measured.gradient
    unbiased = dict[str, Any]()
    yield "this config", measured, ""
    if foreign is not None:
        ours = measure(args)
        factor = (gradient @ ours.gradient / ours.gradient.square().sum()).item()
        yield f"policy_loss: {args.policy_loss}", ours, f"the loss has {factor:.4g} times this"
    for keys, effect in causes(args).items():
        changes = {}
        for key in keys:
            value = unbiased_value(args, key)
            if value != getattr(args, key):
                changes[key] = value
        other = changed(args, changes)
        if other == args:
            continue
        unbiased |= changes
        measured = measure(other, foreign)
        if (measured.gradient - gradient).norm() > 1e-4 * gradient.norm():
            name = ", ".join(f"{key}: {value}" for key, value in changes.items())
            yield name, measured, effect
    if unbiased:
        yield "all of these", measure(changed(args, unbiased), foreign), ""


def unbiased_value(args: Any, key: str) -> Any:
    """Return the value of a key that does not bias the expected gradient."""
    if key in ("advantage_estimator", "policy_loss"):
        name = getattr(args, key)
        return LIKE.get(name, name)
    return UNBIASED.get(key, default_of(args, key))


def causes(args: Any) -> dict[tuple[str, ...], str]:
    """Return what may bias the expected gradient: keys tried together, and their effect."""
    words = metadata(args)
    effects = {key: of_key.get("bias", "") or "" for key, of_key in words.items()}
    groups = {}
    for key, effect in effects.items():
        if effect and effect not in words:
            partners = [other for other, first in effects.items() if first == key]
            groups[(key, *partners)] = effect
    return groups


def adapt(function: Callable[..., Any], micro_batches: int) -> Callable[..., Tensor]:
    """Return the sum over an update's micro-batches of a loss with the parameters of verl's policy
    losses, or with names of TRL's `GRPOTrainer._compute_loss`; TypeError if it needs others.
    """
    parameters = inspect.signature(function).parameters

    def loss(args: Any, batch: Any, new: PolicyOutput) -> Tensor:
        mask = batch.action_mask.long()
        now = new.logprobs
        old = now.detach() if batch.old_logprobs is None else batch.old_logprobs
        columns = {
            "old_log_prob": old,
            "log_prob": now,
            "response_mask": mask,
            "old_per_token_logps": old,
            "per_token_logps": now,
            "completion_mask": mask,
            "advantages": batch.advantages,
            "rewards": batch.scores.nansum((1, 2)),
        }
        if batch.ref_logprobs is not None:
            columns["ref_per_token_logps"] = batch.ref_logprobs
        counts = {"batch_num_tokens": mask.sum(), "global_batch_size": len(mask), "dp_size": 1}
        low = args.epsilon
        high = args.epsilon_high or args.epsilon
        config = {
            "clip_ratio": low,
            "clip_ratio_low": low,
            "clip_ratio_high": high,
            "clip_ratio_c": args.delta or 3.0,
            "global_batch_info": counts,
        }
        modes = {"sequence_mean": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
        settings = {
            "config": SimpleNamespace(**config, get=config.get),
            "loss_agg_mode": modes.get(args.aggregation, "token-mean"),
            "num_items_in_batch": mask.sum() * args.num_mini_batches,  # of a whole rollout
            "current_gradient_accumulation_steps": micro_batches,
            "steps_per_generation": micro_batches * args.num_mini_batches,
        }
        total = torch.zeros(())
        for rows in torch.arange(len(mask)).chunk(micro_batches):
            known: Any = settings | {name: column[rows] for name, column in columns.items()}
            known["inputs"] = known | {"advantages": known["advantages"][:, 0]}
            found = function(**{name: known[name] for name in parameters if name in known})
            total = total + (found[0] if isinstance(found, tuple) else found)
        return total

    return loss
