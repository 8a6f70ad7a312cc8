"""The policy, its entropy and the reference on the tokens that the sampler kept."""

from dataclasses import replace

import pytest
import torch

from rlhf_pg.models import Critic, Policy, Reference
from rlhf_pg.models.critic import ActorCritic, ValueHead
from tests.models.test_policy import COMPLETIONS, PROMPTS, Bigram, rollout, table
from tests.tiny import tiny_model

WIDTH = max(map(len, COMPLETIONS))


def supports(seed=0):
    """Per completion and token a set with the token in it; the third token of every row has none,
    and was drawn from the whole vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)

    def one(token, t):
        others = torch.randperm(40, generator=generator)[: 1 + (token + t) % 5]
        return [] if t == 2 else sorted({token, *others.tolist()})

    return [[one(token, t) for t, token in enumerate(row)] for row in COMPLETIONS]


def with_support(batch, sets):
    """The sets padded with -1, in slots without a token too."""
    columns = batch.completion_ids.shape[1]
    widest = max(len(ids) for row in sets for ids in row)
    support_ids = torch.full((len(sets), columns, widest), -1, dtype=torch.int32)
    for i, row in enumerate(sets):
        for t, ids in enumerate(row):
            support_ids[i, t, : len(ids)] = torch.tensor(ids)
    return replace(batch, support_ids=support_ids)


def by_hand(model, i, sets, temperature=1.0):
    """log-probability and entropy of every token of completion i, from an unpadded forward."""
    prompt, completion = PROMPTS[i], COMPLETIONS[i]
    logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0].double()
    logits = logits[len(prompt) - 1 : -1] / temperature
    numbers = []
    for t, token in enumerate(completion):
        ids = sets[i][t] or list(range(40))
        p = logits[t, ids].softmax(0)
        numbers.append([p[ids.index(token)].log(), -(p * p.log()).sum()])
    return torch.tensor(numbers).unbind(1)


def assert_by_hand(logprobs, entropy, model, sets, temperature=1.0):
    for i, completion in enumerate(COMPLETIONS):
        n = len(completion)
        expected = by_hand(model, i, sets, temperature)
        torch.testing.assert_close(logprobs[i, :n].double(), expected[0], rtol=0, atol=1e-5)
        assert not logprobs[i, n:].any()
        if entropy is not None:
            torch.testing.assert_close(entropy[i, :n].double(), expected[1], rtol=0, atol=1e-5)
            assert not entropy[i, n:].any()


@pytest.mark.parametrize("arch", ["gpt2", "qwen3"])
@pytest.mark.parametrize("right", [0, 3])
@torch.no_grad()
def test_scores_are_renormalized_over_kept_tokens(arch, right) -> None:
    model, sets = tiny_model(arch), supports()
    out = Policy(model, temperature=0.7)(with_support(rollout(left=2, right=right), sets))
    assert_by_hand(out.logprobs, out.entropy, model, sets, temperature=0.7)


@torch.no_grad()
def test_reference_is_renormalized() -> None:
    model, sets = tiny_model("gpt2"), supports()
    assert_by_hand(Reference(Policy(model))(with_support(rollout(), sets)), None, model, sets)


@torch.no_grad()
def test_policy_with_shared_critic_is_renormalized() -> None:
    model, sets = tiny_model("gpt2"), supports()
    both = ActorCritic(Policy(model), Critic(None, ValueHead(32, torch.float32)))
    out = both(with_support(rollout(), sets))
    assert_by_hand(out.logprobs, out.entropy, model, sets)


def test_full_vocabulary_support_leaves_scores_unchanged() -> None:
    policy, batch = Policy(tiny_model("gpt2", dtype=torch.float64)), rollout(right=2)
    everything = [[list(range(40))] * len(row) for row in COMPLETIONS]
    plain = policy(batch)
    for sets in (everything, [[[]] * len(row) for row in COMPLETIONS]):
        sets = [*sets[:-1], [list(range(40))] * 4]  # at least one is not empty
        out = policy(with_support(batch, sets))
        assert out.logprobs.equal(plain.logprobs)
        assert out.entropy.equal(plain.entropy)


def test_gradient_is_renormalized_and_finite() -> None:
    sets = supports()
    policy = Policy(Bigram(table()), entropy_gradient=True)
    out = policy(with_support(rollout(left=1, right=2), sets))
    [found] = torch.autograd.grad((2 * out.logprobs + out.entropy).sum(), [policy.model.table])
    logits = table().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for prompt, completion, row in zip(PROMPTS, COMPLETIONS, sets, strict=True):
        before = [prompt[-1], *completion[:-1]]
        for last, token, ids in zip(before, completion, row, strict=True):
            ids = ids or list(range(40))
            p = logits[last, ids].softmax(0)
            total = total + 2 * p[ids.index(token)].log() - (p * p.log()).sum()
    [expected] = torch.autograd.grad(total, [logits])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_token_without_rival_has_no_gradient() -> None:
    policy = Policy(Bigram(table()), entropy_gradient=True)
    alone = [[[token] for token in row] for row in COMPLETIONS]
    out = policy(with_support(rollout(right=1), alone))
    assert not out.logprobs.any()
    assert not out.entropy.any()
    [gradient] = torch.autograd.grad((out.logprobs + out.entropy).sum(), [policy.model.table])
    assert not gradient.any()
