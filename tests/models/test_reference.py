"""The reference stays what the policy was."""

import pytest
import torch

from rlhf_pg.models.adapters import add_adapter
from rlhf_pg.models.policy import Policy, Reference, fingerprint
from tests.models.test_policy import rollout
from tests.tiny import adapter, stir, tiny_model


def train_a_step(policy):
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    policy(rollout()).logprobs.sum().backward()
    optimizer.step()


def test_training_policy_leaves_reference_unchanged():
    policy = Policy(tiny_model("llama", dtype=torch.bfloat16), 0.6)
    reference = Reference(policy)
    before, print_before = reference(rollout()), fingerprint(reference)
    assert before.equal(policy(rollout()).logprobs)
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
    assert not reference.requires_grad_(True)(rollout()).requires_grad
    assert not any(module.training for module in reference.modules())
    assert reference(rollout()).equal(expected)
    assert policy.training


def test_any_change_of_weights_or_names_changes_fingerprint():
    def made():
        return Reference(Policy(tiny_model("llama", dtype=torch.bfloat16), temperature=0.5).train())

    reference = made()
    prints = [fingerprint(reference)]
    assert fingerprint(made()) == prints[0]
    layers = reference.policy.model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    prints.append(fingerprint(reference))
    for name in ("scale", "shift"):
        other = made()
        other.policy.model.register_buffer(name, torch.tensor(1.0))
        prints.append(fingerprint(other))
    for parameter in reference.parameters():
        flat = parameter.data.view(-1)
        flat[-1] = torch.nextafter(flat[-1], flat[-1] + 1)
        prints.append(fingerprint(reference))
    assert len(set(prints)) == len(prints) > 10


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
@pytest.mark.proves("rlhf_pg.models.Reference.follow")
def test_follow_interpolates_towards_policy_in_place(kind, dtype, close):
    policy, reference = pair(kind, dtype)
    theirs, before = tensors(policy), tensors(reference.policy)
    where = [p.data_ptr() for p in reference.parameters()]
    reference.follow(policy, 0.25)
    for name, now in tensors(reference.policy).items():
        expected = theirs[name]
        if now.is_floating_point():
            expected = (0.25 * theirs[name].double() + 0.75 * before[name].double()).to(now)
        torch.testing.assert_close(now, expected, rtol=close, atol=close)
    assert [p.data_ptr() for p in reference.parameters()] == where
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(t.equal(theirs[name]) for name, t in tensors(policy).items())
    assert any(p.requires_grad for p in policy.parameters())


@pytest.mark.parametrize(("kind", "dtype"), [("full", torch.bfloat16), ("lora", torch.float32)])
@torch.no_grad()
def test_follow_with_alpha_one_matches_policy_exactly(kind, dtype):
    policy, reference = pair(kind, dtype)
    assert not reference(rollout()).equal(policy(rollout()).logprobs)
    reference.follow(policy, 1.0)
    assert reference(rollout()).equal(policy(rollout()).logprobs)
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


@pytest.mark.parametrize(("kind", "dtype"), [("full", torch.float32), ("lora", torch.bfloat16)])
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
