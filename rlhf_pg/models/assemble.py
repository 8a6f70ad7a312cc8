"""The modules that a run trains, built from its config: the policy, its adapter and its critic."""

import os
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.inputs import AdapterConfig
from rlhf_pg.models.critic import ActorCritic, Critic
from rlhf_pg.models.loading import init_options, load_policy, quantization
from rlhf_pg.models.modes import checkpoint_activations, checkpoints, disable_dropout
from rlhf_pg.models.policy import Policy
from rlhf_pg.models.pretrained import about
from rlhf_pg.models.reference import Reference


def policy_of(
    model: str | os.PathLike[str] | PreTrainedModel,
    args: PolicyGradientConfig,
    device: torch.device,
    peft_config: Any,
    quantization_config: Any,
) -> PreTrainedModel:
    """Load the model in `args.dtype` on its device, with its adapter."""
    dtype: torch.dtype = getattr(torch, args.dtype)
    if args.load_in_4bit and quantization_config is not None:
        raise ValueError("give quantization_config or set load_in_4bit, not both")
    if args.load_in_4bit:
        quantization_config = quantization(dtype)
    with about("model_name_or_path") if isinstance(model, str | os.PathLike) else nullcontext():
        code, options = args.trust_remote_code, init_options(args)
        loaded = load_policy(model, dtype, device, peft_config, quantization_config, code, options)
    if args.save_merged and (quantization_config or not isinstance(loaded, PeftModel)):
        raise ValueError("save_merged is for a model with an adapter on unquantized weights")
    return loaded


def adapter_of(args: AdapterConfig, given: Any) -> Any:
    """Return the adapter's config: the given one, or with `use_peft` that of LoRA (Hu et al. 2021),
    by default on every linear layer but the head.
    """
    if not args.use_peft:
        return given
    if given is not None:
        raise ValueError("there are two adapters: give peft_config or set use_peft, not both")
    return LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=list(args.lora_target_modules or ()) or "all-linear",
        task_type="CAUSAL_LM",
    )


class Models(NamedTuple):
    """The models of a run: those that it trains, and the reference that it compares them with."""

    policy: Policy
    critic: Critic | None
    reference: Reference | None
    module: nn.Module  # the one that is trained: the policy, or policy and critic


def assembled(
    model: PreTrainedModel,
    args: PolicyGradientConfig,
    critic: Critic | None,
    most_tokens: int,
    chunk_size: int,
) -> tuple[Policy, nn.Module]:
    """Return the policy, and the module that is trained: the policy, or policy and critic."""
    has_bonus = args.entropy_coef > 0 or args.entropy_target is not None
    balanced = args.router_aux_loss_coef > 0
    policy = Policy(model, args.temperature, has_bonus, most_tokens, chunk_size, balanced)
    module: nn.Module = policy
    if critic is not None:
        # With adapters, activations take most of the memory. Checkpointing recomputes by itself.
        recompute = isinstance(critic.model, PeftModel) and not args.gradient_checkpointing
        module = ActorCritic(policy, critic, recompute)
    if args.disable_dropout:
        disable_dropout(module)
    else:
        policy.keep_dropout()
        if critic is not None:
            critic.keep_dropout()
    for part in (model, critic.model if critic else None):
        # The user may have turned it on in the model itself, in another form than ours.
        if args.gradient_checkpointing or checkpoints(part):
            checkpoint_activations(part, args.gradient_checkpointing == "offload")
    return policy, module
