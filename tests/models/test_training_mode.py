"""What is trained is what samples: train mode switches on more than dropout."""

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_pg.models.critic import ActorCritic, Critic, ValueHead, new_critic
from rlhf_pg.models.loading import load_policy
from rlhf_pg.models.policy import Policy, checkpoint_activations, disable_dropout
from tests.models.architectures import build, with_vision
from tests.models.test_loading import make_tokenizer
from tests.models.test_packing import batch_of, trained_gradient
from tests.tiny import adapter, tiny_model

CPU = torch.device("cpu")
# What each does in train mode, and with which of its options.
SWITCHED_ON = {
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
    "mixtral": {"router_jitter_noise": 0.3},
    "gemma3n_text": {"activation_sparsity_pattern": None, "altup_coef_clip": 0.05},
    "falcon": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5},
}


def policy_of(arch, checkpointing=False):
    """As the learner makes it."""
    policy = Policy(build(arch, **SWITCHED_ON[arch]))
    disable_dropout(policy)
    if checkpointing:
        checkpoint_activations(policy.model)
    return policy


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("arch", SWITCHED_ON)
def test_train_mode_logprobs_match_eval_mode(arch, checkpointing):
    policy, batch = policy_of(arch, checkpointing), batch_of()
    weights = [p.clone() for p in policy.parameters()]
    scored, trained = policy.eval()(batch), policy.train()(batch)
    assert trained.logprobs.equal(scored.logprobs)
    assert trained.logprobs.requires_grad
    assert all(a.equal(b) for a, b in zip(weights, policy.parameters(), strict=True))


@pytest.mark.parametrize("arch", ["phimoe", "gemma3n_text", "opt"])
def test_recomputation_leaves_gradient_unchanged(arch):
    plain, recomputing = (policy_of(arch, checkpointing).train() for checkpointing in (False, True))
    calls, expected = [], trained_gradient(plain)
    layer = next(m for m in recomputing.modules() if isinstance(m, GradientCheckpointingLayer))
    next(layer.children()).register_forward_hook(lambda *_: calls.append(1))
    assert (trained_gradient(recomputing) - expected).norm() <= 1e-6 * expected.norm()
    assert len(calls) == 2  # forward, and again in the backward pass


@pytest.mark.parametrize("lora", [False, True])
def test_vision_model_trains_every_trainable_weight(lora):
    """Otherwise DDP waits for that of the tower, which no text goes through."""
    model = load_policy(with_vision(), torch.float32, CPU, adapter() if lora else None)
    critic = new_critic(model, make_tokenizer(), torch.float32, value_model=with_vision())
    module = ActorCritic(Policy(model), critic).train()
    out = module(batch_of())
    (out.logprobs.sum() + out.values.sum()).backward()
    trained = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in trained.values())
    assert any("q_proj" in name for name in trained)


def test_kept_dropout_is_active():
    policy, batch = Policy(tiny_model("opt", dropout=0.5)), batch_of()
    checkpoint_activations(policy.model)
    policy.keep_dropout()
    layer = policy.model.model.decoder.layers[1]
    seen = []
    layer.fc1.register_forward_pre_hook(lambda *_: seen.append(layer.training))
    assert not policy.train()(batch).logprobs.equal(policy(batch).logprobs)
    assert seen == [True, True]


def test_only_transformers_critic_stays_in_eval_mode():
    of_transformers = Critic(
        tiny_model("opt", dropout=0.5).base_model, ValueHead(32, torch.float32)
    )
    assert not of_transformers.train().model.training
    assert of_transformers.head.training
    assert Critic(torch.nn.LSTM(4, 4), None).train().model.training
