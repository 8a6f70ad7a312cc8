"""Policy losses in the signatures of verl, TRL and this library: right ones, and three faults."""

import torch


def verl_policy_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None
):
    """The clipped surrogate, averaged over the tokens of all micro-batches."""
    ratio = (log_prob - old_log_prob).exp()
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    losses = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    assert config.get("clip_ratio_c") == 3.0
    assert loss_agg_mode == "token-mean"
    tokens = config.global_batch_info["batch_num_tokens"]
    return (losses * response_mask).sum() / tokens, {"actor/pg_clipfrac": 0.0}


def _dapo(per_token_logps, inputs):
    ratio = (per_token_logps - inputs["old_per_token_logps"]).exp()
    losses = -ratio * inputs["advantages"].unsqueeze(1) * inputs["completion_mask"]
    return losses.sum() / inputs["num_items_in_batch"].clamp(min=1.0)


def trl_5619(per_token_logps, inputs):
    """TRL #5619: num_items_in_batch is of all updates on a rollout, divided by in each of them."""
    return _dapo(per_token_logps, inputs)


def trl_fixed(per_token_logps, inputs, current_gradient_accumulation_steps, steps_per_generation):
    own = current_gradient_accumulation_steps / steps_per_generation
    return _dapo(per_token_logps, inputs) / own


def ms_swift_10117(per_token_logps, inputs, current_gradient_accumulation_steps):
    """ms-swift #10117: what is divided by all tokens is divided by the micro-batches as well."""
    return _dapo(per_token_logps, inputs) / current_gradient_accumulation_steps


def nemo_rl_fixed(log_prob, response_mask, rewards, config):
    """VAPO's likelihood term over the tokens of all micro-batches."""
    right = response_mask * (rewards > 0)[:, None]
    return -(log_prob * right).sum() / config.global_batch_info["batch_num_tokens"]


def nemo_rl_3791(log_prob, response_mask, rewards):
    """NeMo-RL #3791: over the tokens of its correct rows in every micro-batch alone."""
    right = response_mask * (rewards > 0)[:, None]
    return -(log_prob * right).sum() / right.sum().clamp(min=1)


def unknown(log_prob, waves):
    raise AssertionError
