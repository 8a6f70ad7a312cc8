"""The policy against one forward per row, without padding, mask or positions, in float64."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf_pg.models.policy import Policy, checkpoint_activations, disable_dropout
from tests.rows import batch_of
from tests.tiny import ARCHS, tiny_model

EOS = 2
PROMPTS = [[5, 9, 2, 31], [17], [8, 3, 30, 12, 25, 6, 39], [21, 22]]
COMPLETIONS = [[7, EOS], [4, 11, 19, 35, 36], [EOS], [33, 1, 28, EOS]]
PADDINGS = [(0, 0), (5, 3), (64, 0)]

# Architectures that compute in their own dtype throughout; the others have float32 islands.
EXACT = {"gpt2": (torch.float64, 1e-9), "gpt_neox": (torch.float64, 1e-9)}


def rollout(prompts=PROMPTS, completions=COMPLETIONS, left=0, right=0, pad=0):
    """Rows padded further on either side, with ids of no meaning in every padded slot."""
    batch = batch_of(prompts, completions)
    batch = replace(
        batch,
        prompt_ids=batch.prompt_ids.masked_fill(~batch.prompt_mask, pad),
        completion_ids=batch.completion_ids.masked_fill(~batch.completion_mask, pad),
    )
    prompt_mask = nn.functional.pad(batch.prompt_mask, (left, 0))
    mask = nn.functional.pad(batch.completion_mask, (0, right))
    return replace(
        batch,
        prompt_ids=nn.functional.pad(batch.prompt_ids, (left, 0), value=pad),
        prompt_mask=prompt_mask,
        completion_ids=nn.functional.pad(batch.completion_ids, (0, right), value=pad),
        completion_mask=mask,
        action_mask=mask,
    )


def with_garbage(batch, seed=0):
    """Other ids wherever no token is."""
    generator = torch.Generator().manual_seed(seed)

    def scrambled(ids, mask):
        return torch.where(mask, ids, torch.randint(0, 40, ids.shape, generator=generator))

    return replace(
        batch,
        prompt_ids=scrambled(batch.prompt_ids, batch.prompt_mask),
        completion_ids=scrambled(batch.completion_ids, batch.completion_mask),
    )


def teacher_forced(model, prompt, completion):
    """log-probability and entropy of every token of one completion, in float64."""
    logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0].double()
    p = logits[len(prompt) - 1 : -1].softmax(-1)
    chosen = torch.stack([p[t, token] for t, token in enumerate(completion)])
    return chosen.log(), -(p * p.log()).sum(-1)


def assert_teacher_forced(model, batch, atol):
    out = Policy(model)(batch)
    assert out.logprobs.shape == out.entropy.shape == batch.completion_ids.shape
    for i, completion in enumerate(COMPLETIONS):
        logprobs, entropy = teacher_forced(model, PROMPTS[i], completion)
        n = len(completion)
        torch.testing.assert_close(out.logprobs[i, :n].double(), logprobs, rtol=0, atol=atol)
        torch.testing.assert_close(out.entropy[i, :n].double(), entropy, rtol=0, atol=atol)
        assert not out.logprobs[i, n:].any()
        assert not out.entropy[i, n:].any()


def gradient_of(policy, batch, weights=None):
    """Of the weighted sum of the log-probabilities, flat."""
    logprobs = policy(batch).logprobs
    weights = torch.arange(1.0, logprobs.numel() + 1) if weights is None else weights.flatten()
    grads = torch.autograd.grad((logprobs.flatten() * weights).sum(), list(policy.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


class Bigram(nn.Module):
    """The next token depends on the last one alone, by a table (ids, vocabulary) of logits."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, input_ids, logits_to_keep, **_):
        return SimpleNamespace(logits=self.table[input_ids][:, -logits_to_keep:])


def table(rows=40, columns=40, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("left", "right"), PADDINGS)
@pytest.mark.parametrize("arch", ARCHS)
@torch.no_grad()
def test_scores_match_unpadded_teacher_forced_forward(arch, left, right):
    dtype, atol = EXACT.get(arch, (torch.float32, 1e-4))
    model = tiny_model(arch, dtype=dtype)
    assert_teacher_forced(model, with_garbage(rollout(left=left, right=right)), atol)


def test_temperature_half_squares_odds():
    logits = torch.tensor([[0.0, math.log(3.0)]] * 2, dtype=torch.float64)
    out = Policy(Bigram(logits), temperature=0.5)(rollout([[0]], [[1, 0]]))
    assert out.logprobs[0].exp().tolist() == pytest.approx([0.9, 0.1], abs=1e-12)
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert out.entropy[0].tolist() == pytest.approx([entropy] * 2, abs=1e-12)


def test_token_is_scored_by_previous_token_logits():
    logits = table()
    out = Policy(Bigram(logits))(rollout(left=3, right=2))
    p = logits.softmax(-1)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        before = [prompt[-1], *completion[:-1]]
        by_hand = [math.log(p[a, b]) for a, b in zip(before, completion, strict=True)]
        n = len(completion)
        assert out.logprobs[i, :n].tolist() == pytest.approx(by_hand, abs=1e-12)
        spread = [-sum(q * math.log(q) for q in p[a].tolist()) for a in before]
        assert out.entropy[i, :n].tolist() == pytest.approx(spread, abs=1e-12)


def test_tool_tokens_are_attended_but_not_scored():
    model, said = tiny_model("gpt2", dtype=torch.float64), [[7, 11, 12, EOS]]
    mask = torch.tensor([[True, False, False, True]])
    batch = replace(rollout(PROMPTS[:1], said), action_mask=mask)
    out = Policy(model)(batch)
    logprobs, entropy = teacher_forced(model, PROMPTS[0], said[0])
    torch.testing.assert_close(out.logprobs[0], logprobs * mask[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(out.entropy[0], entropy * mask[0], rtol=0, atol=1e-9)
    other = replace(batch, completion_ids=torch.tensor([[7, 11, 13, EOS]]))
    assert (Policy(model)(other).logprobs - out.logprobs)[0, 3].abs() > 1e-3


def test_masked_slots_give_no_gradient():
    model, mask = tiny_model("gpt2", dtype=torch.float64), rollout().completion_mask.clone()
    mask[1, 1:3] = mask[3, 0] = False
    batch = replace(rollout(), action_mask=mask)
    ones = torch.ones(mask.shape)
    large = torch.where(mask, 1.0, 1e6)
    assert gradient_of(Policy(model), batch, large).equal(gradient_of(Policy(model), batch, ones))
    assert not gradient_of(Policy(model), batch, large * ~mask).any()


def test_undefined_logits_at_padding_stay_out_of_scores():
    logits = table()
    logits[0] = math.nan  # what the pad id is followed by
    out = Policy(Bigram(logits))(rollout(left=2, right=2, pad=0))
    assert out.logprobs.isfinite().all()
    assert out.entropy.isfinite().all()


@pytest.mark.parametrize(
    ("weights", "numbers"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_scores_have_at_least_float32(weights, numbers):
    out = Policy(tiny_model("gpt2", dtype=weights))(rollout())
    assert out.logprobs.dtype == out.entropy.dtype == numbers
    assert out.logprobs.requires_grad
    assert not out.entropy.requires_grad


@pytest.mark.parametrize(("arch", "offload"), [("gpt2", False), ("llama", True)])
def test_gradient_checkpointing_leaves_gradient_unchanged(arch, offload):
    calls = []
    model = tiny_model(arch, dtype=torch.float64)
    disable_dropout(model.train())
    plain = gradient_of(Policy(model), rollout(left=2))
    checkpoint_activations(model, offload)
    policy = Policy(model)
    model.get_input_embeddings().register_forward_hook(lambda *_: calls.append("embedding"))
    layer = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0]
    inner = next(m for m in layer.modules() if not list(m.children()))
    inner.register_forward_hook(lambda *_: calls.append("layer"))
    checkpointed = gradient_of(policy, rollout(left=2))
    assert calls.count("layer") == 2 * calls.count("embedding")  # it was computed again
    torch.testing.assert_close(checkpointed, plain, rtol=0, atol=1e-9)
