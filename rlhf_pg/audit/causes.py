"""How much of the bias of a config's expected gradient comes from which of its choices."""

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.advantages import PER_TOKEN
from rlhf_pg.audit.expectation import ForeignLoss, Measured, changed, measure
from rlhf_pg.data.batch import Batch
from rlhf_pg.models import PolicyOutput

UNBIASED = dict.fromkeys(("group_normalized", "process_group_normalized"), "leave_one_out")
UNBIASED |= {"returns_minus_mean": "returns_minus_others"}
UNBIASED |= dict.fromkeys(("gae", "n_step"), "returns_minus_values")


def choices(args: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield every choice that can bias, the keys without it, and its effect."""
    estimator = {"advantage_estimator": UNBIASED.get(args.advantage_estimator)}
    if estimator["advantage_estimator"] == "returns_minus_values":
        yield "critic", estimator, "past lambda or n_steps its guess stands for the scores"
    elif estimator["advantage_estimator"]:
        yield "own score in mean", estimator, "shrinks by 1 - 1/N (leave_one_out: no std either)"
    yield "scale_rewards", {"scale_rewards": "none"}, "every prompt weighs the same, hard or easy"
    whitened = "divides by a std of the same samples"
    yield "normalize_advantages", {"normalize_advantages": False}, whitened
    yield "aggregation", {"aggregation": "constant"}, "weighs by the lengths that were drawn"
    if args.updates_per_step > 1:
        yield "clipping", {"policy_loss": "surrogate"}, "ratios cut off tokens after an update"
    one = {"num_iterations": 1, "num_mini_batches": 1}
    yield "later updates", one, "their prefixes are an older policy's"
    exact = {"kl_placement": "loss", "kl_estimator": "k1_to_go"}
    if args.kl_placement == "loss":
        yield "KL form", exact, "is not grad KL(policy || reference) of completions"
    else:
        yield "KL form", {"kl_estimator": "k1"}, "is not grad KL(policy || reference)"
        if args.normalize_advantages or getattr(args, "scale_rewards", "none") != "none":
            yield "KL placement", exact, "the KL is divided with the scores"
    yield "gamma", {"gamma": 1.0}, "later rewards count less"
    truncation: dict[str, Any] = {"mask_truncated_completions": False, "bootstrap_truncated": False}
    truncation |= {"missing_eos_penalty": None, "overlong_buffer": None}
    yield "truncation", truncation, "truncated completions do not count by their scores"
    shaping: dict[str, Any] = {
        "reward_clip_range": None,
        "reward_squash": "none",
        "normalize_rewards": False,
    }
    yield "shaping", shaping | {"whiten_rewards": False}, "maximises other scores"
    entropy = {"entropy_coef": 0.0, "entropy_target": None}
    yield "entropy bonus", entropy, "maximises the entropy too"
    yield "likelihood term", {"positive_nll_coef": 0.0}, "maximises a likelihood too"
    sampler = {"rollout_engine": "native", "sampler_correction": "none", "top_k": 0}
    yield "sampler", sampler | {"top_p": 1.0, "min_p": 0.0}, "samples from another distribution"
    # A teacher's top-k belongs here.


def audit(args: Any, foreign: ForeignLoss | None = None) -> Iterator[tuple[str, Measured, str]]:
    """Yield a name, a measurement and an explanation: of the config, then without each choice that
    changes its expected gradient, and at last without all.
    """
    whole, removed = measure(args, foreign), dict[str, Any]()
    yield "this config", whole, ""
    if foreign is not None:
        own = measure(args)
        factor = (whole.gradient @ own.gradient / own.gradient.square().sum()).item()
        yield f"with {args.policy_loss}", own, f"the loss has {factor:.4g} times this gradient"
    for name, keys, effect in choices(args):
        keys = {key: value for key, value in keys.items() if getattr(args, key, value) != value}
        if not keys or (other := changed(args, keys)) == args:
            continue
        removed |= keys
        without = measure(other, foreign)
        if (without.gradient - whole.gradient).norm() > 1e-4 * whole.gradient.norm():
            yield f"without {name}", without, effect
    if removed:
        yield "without all", measure(changed(args, removed), foreign), ""


def adapt(function: Callable[..., Any], micro_batches: int) -> ForeignLoss:
    """Return the sum over micro-batches of a loss with the parameters of verl's policy losses, or
    with names of TRL's `GRPOTrainer._compute_loss`; ValueError if it needs others.
    """
    parameters = inspect.signature(function).parameters

    def loss(args: Any, batch: Batch, new: PolicyOutput) -> Tensor:
        parts = torch.arange(batch.num_rows).chunk(micro_batches)
        known = _arguments(args, batch, new, len(parts), "log_prob" in parameters)
        needed = {name for name, one in parameters.items() if one.default is one.empty}
        if unknown := needed - known.keys():
            raise ValueError(
                f"no {', '.join(unknown)} for the loss: it can have {', '.join(known)}"
            )
        own = {name: value for name, value in known.items() if name in parameters}
        found = [function(**_rows(own, rows)) for rows in parts]
        return torch.stack([one[0] if isinstance(one, tuple) else one for one in found]).sum()

    return loss


def _rows(value: Any, rows: Tensor) -> Any:
    if isinstance(value, dict):
        return {name: _rows(one, rows) for name, one in value.items()}
    return value[rows] if isinstance(value, Tensor) and value.ndim else value


def _arguments(
    args: Any, batch: Batch, new: PolicyOutput, micro_batches: int, of_verl: bool
) -> dict[str, Any]:
    assert batch.advantages is not None
    assert batch.scores is not None
    mask, updates, now = batch.action_mask.long(), args.num_mini_batches, new.logprobs
    old = now.detach() if batch.old_logprobs is None else batch.old_logprobs
    per_row = args.advantage_estimator not in PER_TOKEN and not of_verl
    trl = {
        "completion_mask": mask,
        "old_per_token_logps": old,
        "ref_per_token_logps": batch.ref_logprobs,
        "advantages": batch.advantages[:, 0] if per_row else batch.advantages,
        "num_items_in_batch": mask.sum() * updates,  # of all updates on a rollout
    }
    modes = {"sequence_mean": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
    counts = {"dp_size": 1, "batch_num_tokens": mask.sum(), "global_batch_size": len(mask)}
    settings = {"clip_ratio": args.epsilon, "clip_ratio_low": args.epsilon}
    settings |= {"clip_ratio_high": args.epsilon_high or args.epsilon, "global_batch_info": counts}
    settings |= {"clip_ratio_c": args.delta or 3.0}
    verl: dict[str, Any] = {"old_log_prob": old, "log_prob": now, "response_mask": mask}
    verl |= {"loss_agg_mode": modes.get(args.aggregation, "token-mean")}
    verl |= {"config": SimpleNamespace(**settings, get=settings.get)}
    steps = {"current_gradient_accumulation_steps": micro_batches}
    steps |= {"steps_per_generation": micro_batches * updates}
    rewards = batch.scores.nansum((1, 2))
    return verl | trl | steps | {"inputs": trl, "per_token_logps": now, "rewards": rewards}
