"""The reference stays what the policy was."""

import pytest
import torch

from rlhf_pg.data.batch import Batch
from rlhf_pg.models import Policy, Reference, add_adapter, fingerprint
from tests.tiny import adapter, stir, tiny_model

ARCHS = ["gpt2", "llama"]


def rollout():
    return Batch.from_tokens(
        prompts=[[5, 9, 2], [17]],
        completions=[[7, 2], [4, 11, 19]],
        logprobs=[[0.0] * 2, [0.0] * 3],
        truncated=[False, True],
        groups=[0, 1],
        pad_token_id=0,
    )


def train_a_step(policy):
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    policy(rollout()).logprobs.sum().backward()
    optimizer.step()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("arch", ARCHS)
@torch.no_grad()
def test_initial_reference_matches_policy_exactly(arch, temperature):
    policy = Policy(tiny_model(arch), temperature)
    assert Reference(policy)(rollout()).equal(policy(rollout()).logprobs)


@pytest.mark.parametrize("arch", ARCHS)
def test_training_policy_leaves_reference_unchanged(arch):
    policy = Policy(tiny_model(arch))
    reference = Reference(policy)
    before, print_before = reference(rollout()), fingerprint(reference)
    train_a_step(policy)
    assert not policy(rollout()).logprobs.equal(before)
    assert reference(rollout()).equal(before)
    assert fingerprint(reference) == print_before
    own = {p.data_ptr() for p in policy.parameters()}
    assert own.isdisjoint(p.data_ptr() for p in reference.parameters())


def test_reference_stays_in_eval_mode_and_policy_in_train():
    policy = Policy(tiny_model("gpt2", resid_pdrop=0.5)).train()
    reference = Reference(policy)
    expected = reference(rollout())
    assert reference.train() is reference
    assert not any(module.training for module in reference.modules())
    assert reference(rollout()).equal(expected)
    assert policy.training


def test_reference_has_no_gradients_but_policy_does():
    policy = Policy(tiny_model("gpt2"))
    reference = Reference(policy)
    assert not any(p.requires_grad for p in reference.parameters())
    assert not reference(rollout()).requires_grad
    assert all(p.requires_grad for p in policy.parameters())


def test_reference_with_requires_grad_gives_no_gradient():
    reference = Reference(Policy(tiny_model("gpt2"))).requires_grad_(True)
    assert not reference(rollout()).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fingerprint_depends_only_on_weights(dtype):
    policy = Policy(tiny_model("llama", dtype=dtype))
    reference = Reference(policy)
    assert len(fingerprint(reference)) == 64
    assert fingerprint(reference) == fingerprint(reference)
    assert fingerprint(reference) == fingerprint(Reference(policy))
    again = Reference(Policy(tiny_model("llama", dtype=dtype), temperature=0.5).train())
    assert fingerprint(again) == fingerprint(reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_change_of_any_weight_changes_fingerprint(dtype):
    reference = Reference(Policy(tiny_model("llama", dtype=dtype)))
    prints = [fingerprint(reference)]
    for parameter in reference.parameters():
        flat = parameter.data.view(-1)
        flat[-1] = torch.nextafter(flat[-1], flat[-1] + 1)
        prints.append(fingerprint(reference))
    assert len(set(prints)) == len(prints) > 10


def test_swapping_layers_changes_fingerprint():
    reference = Reference(Policy(tiny_model("llama")))
    before = fingerprint(reference)
    layers = reference.policy.model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    assert fingerprint(reference) != before


def test_fingerprint_covers_names():
    prints = set()
    for name in ("scale", "shift"):
        model = tiny_model("gpt2")
        model.register_buffer(name, torch.ones(1))
        prints.add(fingerprint(Reference(Policy(model))))
    assert len(prints) == 2


def test_scalar_buffer_has_fingerprint():
    model = tiny_model("gpt2")
    model.register_buffer("scale", torch.tensor(1.0))
    assert len(fingerprint(Reference(Policy(model)))) == 64


def test_bf16_reference_gives_float32_logprobs():
    reference = Reference(Policy(tiny_model("gpt2", dtype=torch.bfloat16)))
    assert reference(rollout()).dtype == torch.float32


# ------------------------------------------------------------------------------ one that follows


def pair(kind, dtype=torch.float32):
    """A policy and a reference that have drifted apart."""
    torch.manual_seed(0)
    model = tiny_model("llama", dtype=dtype, tie_word_embeddings=True)
    if kind == "lora":
        model = add_adapter(model, adapter())
    model.register_buffer("scale", torch.tensor([1.0, 2.0], dtype=dtype))
    model.register_buffer("count", torch.tensor(3))
    policy = Policy(model)
    reference = Reference(policy, moves=True)
    stir(policy)
    model.scale += 1
    model.count += 1
    return policy, reference


def tensors(module):
    return {n: t.detach().clone() for n, t in [*module.named_parameters(), *module.named_buffers()]}


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-14), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("alpha", [0.25, 0.6])
@pytest.mark.proves("rlhf_pg.models.Reference.follow")
def test_follow_interpolates_towards_policy_in_place(kind, dtype, close, alpha):
    policy, reference = pair(kind, dtype)
    theirs, before = tensors(policy), tensors(reference.policy)
    where = [p.data_ptr() for p in reference.parameters()]
    reference.follow(policy, alpha)
    for name, now in tensors(reference.policy).items():
        expected = theirs[name]
        if now.is_floating_point():
            expected = (alpha * theirs[name].double() + (1 - alpha) * before[name].double()).to(now)
        torch.testing.assert_close(now, expected, rtol=close, atol=close)
    assert [p.data_ptr() for p in reference.parameters()] == where
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(t.equal(theirs[name]) for name, t in tensors(policy).items())
    assert any(p.requires_grad for p in policy.parameters())


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_follow_with_alpha_one_matches_policy_exactly(kind, dtype):
    policy, reference = pair(kind, dtype)
    assert not reference(rollout()).equal(policy(rollout()).logprobs)
    reference.follow(policy, 1.0)
    assert reference(rollout()).equal(policy(rollout()).logprobs)
    now = tensors(policy)
    assert all(t.equal(now[name]) for name, t in tensors(reference.policy).items())


@pytest.mark.parametrize("alpha", [0.1, 0.6])
def test_follow_of_unmoved_policy_keeps_reference_unchanged(alpha):
    policy = Policy(tiny_model("llama"))
    reference = Reference(policy, moves=True)
    reference.follow(policy, alpha)
    now = tensors(policy)
    assert all(t.equal(now[name]) for name, t in tensors(reference.policy).items())


def test_moving_reference_copies_only_fresh_adapter():
    policy, reference = pair("lora")
    own = {p.data_ptr() for p in reference.parameters()}
    frozen = {p.data_ptr() for p in policy.parameters() if not p.requires_grad}
    trained = {p.data_ptr() for p in policy.parameters() if p.requires_grad}
    assert frozen < own
    assert own.isdisjoint(trained)
    assert len(own - frozen) == len(trained)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_fingerprint_excludes_moving_weights(kind):
    policy, reference = pair(kind)
    before = fingerprint(reference)
    reference.follow(policy, 0.5)
    assert fingerprint(reference) == before
    del reference.policy.model.scale
    assert fingerprint(reference) != before


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_weights_are_restored_in_place(kind, dtype, tmp_path):
    torch.manual_seed(0)
    model = tiny_model("llama", dtype=dtype)
    policy = Policy(add_adapter(model, adapter()) if kind == "lora" else model)
    reference = Reference(policy, moves=True)
    start = tensors(reference)
    reference.follow(stir(policy), 0.4)
    moved, where = tensors(reference), [p.data_ptr() for p in reference.parameters()]
    reference.save(tmp_path / "reference")
    reference.follow(policy, 1.0)
    reference.restore(tmp_path / "reference")
    assert all(t.equal(moved[name]) for name, t in tensors(reference).items())
    assert not all(t.equal(start[name]) for name, t in moved.items())
    assert [p.data_ptr() for p in reference.parameters()] == where
    assert not any(p.requires_grad for p in reference.parameters())
