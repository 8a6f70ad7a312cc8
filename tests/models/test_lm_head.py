"""Log-probabilities and entropies from hidden states, against softmax written out row by row."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from rlhf_pg.kl import divergence
from rlhf_pg.models import lm_head as module
from rlhf_pg.models.adapters import add_adapter
from rlhf_pg.models.lm_head import (
    ChunkedLMHead,
    LogitTransform,
    TeacherHead,
    TokenDistribution,
    chunk_size_for,
    num_chunks,
    token_statistics,
    trunk,
)
from tests.tiny import adapter, stir, tiny_model

N, V = 11, 40
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def rows(count=N, width=32, seed=0, dtype=torch.float64):
    """Hidden states and tokens; row 3 has the token of row 2 again."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, width, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, V, (count,), generator=generator)
    tokens[3:4] = tokens[2:3]
    return hidden.to(dtype).requires_grad_(), tokens


def by_hand(logits, tokens, temperature=1.0):
    """The same from logits, one row after another, in float64."""
    logprobs, entropies = [], []
    for row, token in zip(logits.double(), tokens.tolist(), strict=True):
        ids = [v for v in range(len(row)) if row[v] > -math.inf]
        z = row[ids] / temperature
        logprob = z - (z - z.max()).exp().sum().log() - z.max()
        logprobs.append(logprob[ids.index(token)])
        entropies.append(-(logprob.exp() * logprob).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def loss(scores, entropy=True):
    """Every row with a weight of its own, of either sign."""
    logprobs, entropies = scores
    weights = torch.linspace(-1, 2, len(logprobs), dtype=torch.float64)
    return (weights * logprobs).sum() + ((weights + 0.3) * entropies).sum() * entropy


def assert_same(found, expected, inputs, tolerances, entropy=True):
    """Values, and gradients of `inputs`."""
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.detach().double(), other.detach(), **tolerances)
    own = torch.autograd.grad(loss(found, entropy), inputs)
    other = torch.autograd.grad(loss(expected, entropy), inputs)
    for a, b in zip(own, other, strict=True):
        assert b.any()
        torch.testing.assert_close(a.double(), b.double(), **tolerances)


@pytest.mark.parametrize(
    ("parts", "entropy", "temperature"),
    [(1, True, 0.6), (1, False, 1.0), (3, True, 0.6), (N + 4, False, 0.6)],
)
def test_scores_match_explicit_softmax(monkeypatch, parts, entropy, temperature) -> None:
    monkeypatch.setattr(module, "BLOCK", 2 * V + 1)  # two rows at a time
    model = tiny_model("llama", dtype=torch.float64)
    hidden, tokens = rows()
    found = ChunkedLMHead(model, temperature, entropy, parts)(hidden, tokens)
    assert found[0].shape == found[1].shape == tokens.shape
    assert found[1].requires_grad == entropy
    expected = by_hand(hidden @ model.lm_head.weight.T, tokens, temperature)
    assert_same(found, expected, [hidden, model.lm_head.weight], EXACT, entropy)


@pytest.mark.parametrize("parts", [1, 3])
def test_smoothed_log_probabilities_match_cross_entropy(monkeypatch, parts) -> None:
    """Of torch, which has the same smoothing; tokens that the head calls likeliest are argmax."""
    monkeypatch.setattr(module, "BLOCK", 2 * V + 1)
    model = tiny_model("llama", dtype=torch.float64)
    hidden, tokens = rows()
    head = ChunkedLMHead(model, 1.0, False, parts)
    found, _ = head(hidden, tokens, smoothing=0.3)
    logits = hidden @ model.lm_head.weight.T
    expected = -nn.functional.cross_entropy(logits, tokens, reduction="none", label_smoothing=0.3)
    torch.testing.assert_close(found, expected, **EXACT)
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)
    inputs = [hidden, model.lm_head.weight]
    own, other = (torch.autograd.grad((weights * x).sum(), inputs) for x in (found, expected))
    for a, b in zip(own, other, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    assert head.likeliest(hidden).equal(logits.argmax(1))


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_divergence_from_teacher_matches_explicit_softmax(monkeypatch, parts, entropy) -> None:
    """Of another width, with a cap of its own, at the policy's temperature."""
    monkeypatch.setattr(module, "BLOCK", 2 * V + 1)
    policy, heat = tiny_model("llama", dtype=torch.float64), 0.6
    hidden, tokens = rows()
    theirs = rows(width=8, seed=1)[0].detach()
    weight = torch.randn(V, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    distribution = TokenDistribution(heat, LogitTransform(2.0, 3.0), False)
    head = TeacherHead(weight, None, distribution, divergence)
    *found, apart = ChunkedLMHead(policy, heat, entropy, parts)(hidden, tokens, (head, theirs))
    q = (3 * (2 / 3 * theirs @ weight.T).tanh() / heat).log_softmax(-1)
    p = (hidden @ policy.lm_head.weight.T / heat).log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(apart, expected, **EXACT)
    own = by_hand(hidden @ policy.lm_head.weight.T, tokens, heat)
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)
    inputs = [hidden, policy.lm_head.weight]
    both = [
        torch.autograd.grad((weights * d).sum() + loss(scores, entropy), inputs)
        for d, scores in ((apart, found), (expected, own))
    ]
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_head_with_adapter_matches_explicit_softmax() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    adapted = stir(add_adapter(model, adapter(target_modules=["lm_head"], lora_alpha=6)))
    weights = dict(adapted.named_parameters())
    [a] = [w for name, w in weights.items() if "lora_A" in name]
    [b] = [w for name, w in weights.items() if "lora_B" in name]
    [base] = [w for name, w in weights.items() if "lm_head.base_layer" in name]
    hidden, tokens = rows()
    expected = by_hand(hidden @ (base + 3 * b @ a).T, tokens)
    found = ChunkedLMHead(adapted, 1.0, True, 3)(hidden, tokens)
    assert_same(found, expected, [hidden, a, b], EXACT)


def test_fully_trained_head_beside_adapter_is_used() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    adapted = stir(add_adapter(model, adapter(**options)))
    [copy] = [w for n, w in adapted.named_parameters() if "lm_head" in n and w.requires_grad]
    hidden, tokens = rows()
    expected = by_hand(hidden @ copy.T, tokens)
    found = ChunkedLMHead(adapted, 1.0, True, 3)(hidden, tokens)
    assert_same(found, expected, [hidden, copy], EXACT)
    with adapted.disable_adapter():
        found = ChunkedLMHead(adapted, 1.0, True, 3)(hidden, tokens)
    before = by_hand(hidden @ tiny_model("llama", dtype=torch.float64).lm_head.weight.T, tokens)
    assert_same(found, before, [hidden], EXACT)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def as_another_layer(layer):
    layer.__class__ = Doubled


def by_a_hook(layer):
    layer.register_forward_hook(lambda _, __, out: 2 * out)


def by_a_wrapper(layer):
    forward = layer.forward
    layer.forward = lambda x: 2 * forward(x)


@pytest.mark.parametrize("double", [as_another_layer, by_a_hook, by_a_wrapper])
def test_modified_head_is_called_for_its_logits(double) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    double(model.lm_head)
    hidden, tokens = rows()
    weight = model.lm_head.weight
    expected = by_hand(2 * hidden @ weight.T, tokens)
    found = ChunkedLMHead(model, 1.0, True, 3)(hidden, tokens)
    assert_same(found, expected, [hidden, weight], EXACT)


def test_head_is_unchanged_after_call_or_error() -> None:
    model = tiny_model("llama")
    hidden, tokens = rows(dtype=torch.float32)
    expected = model.lm_head(hidden)
    ChunkedLMHead(model, 1.0, True, 3)(hidden, tokens)
    with pytest.raises(RuntimeError, match="out of bounds"):
        ChunkedLMHead(model, 1.0, True, 3)(hidden, tokens + V)
    assert model.lm_head(hidden).equal(expected)


def test_head_dropout_is_same_in_forward_and_backward() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    options = {"target_modules": ["lm_head"], "lora_dropout": 0.5}
    adapted = stir(add_adapter(model, adapter(**options))).train()
    made = []
    adapted.get_output_embeddings().register_forward_hook(lambda _, __, out: made.append(out))
    hidden, tokens = rows()
    found = ChunkedLMHead(adapted, 1.0, True, 2)(hidden, tokens)
    logits = torch.cat([out.detach() for out in made]).requires_grad_()  # with this dropout
    for own, other in zip(found, by_hand(logits, tokens), strict=True):
        torch.testing.assert_close(own, other, **EXACT)
    [expected] = torch.autograd.grad(loss(by_hand(logits, tokens)), [logits])
    gradients = []
    for out in made:
        out.register_hook(gradients.append)
    loss(found).backward()
    torch.testing.assert_close(torch.cat(gradients[::-1]), expected, **EXACT)


@pytest.mark.parametrize(
    "transform", [LogitTransform(), LogitTransform(0.4), LogitTransform(3.0, 1.5)]
)
@pytest.mark.parametrize("entropy", [True, False])
def test_gradient_matches_finite_differences(transform, entropy) -> None:
    logits = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([3, 0, 11, 11, 7])

    def scores(x):
        def once(x):  # the backward pass overwrites the logits
            return token_statistics(x.clone(), tokens, 0.7, entropy, transform)

        found = checkpoint(once, x, use_reentrant=False)
        return found if entropy else found[0]

    assert torch.autograd.gradcheck(scores, [logits.requires_grad_()])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("entropy", [True, False])
def test_compiled_passes_match(monkeypatch, entropy, smoothing) -> None:
    """What a GPU compiles, traced as one graph each."""
    results = []
    for is_compiled in (False, True):
        logits = torch.randn(N, V, generator=torch.Generator().manual_seed(1)).requires_grad_()
        _, tokens = rows()
        if is_compiled:
            traced = partial(torch.compile, backend="eager", fullgraph=True, dynamic=True)
            monkeypatch.setattr(module, "_compiled", traced)
            monkeypatch.setattr(module, "_compiles", lambda output, compare: True)
        found = token_statistics(
            logits * 1, tokens, 0.7, entropy, LogitTransform(3.0, 1.5), smoothing=smoothing
        )
        loss(found, entropy).backward()
        results.append((*found, logits.grad))
    for plain, compiled in zip(*results, strict=True):
        assert plain.equal(compiled)


def test_impossible_logits_keep_results_finite() -> None:
    logits = torch.randn(N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, tokens = rows()
    logits[:, ::3] = -math.inf
    logits[torch.arange(N), tokens] = 2.0
    logits[0] = torch.where(torch.arange(V) == tokens[0], 2.0, -math.inf)  # no rival
    logits[1, (tokens[1] + 1) % V] = -1e6  # finite, and impossible
    logits.requires_grad_()
    found = token_statistics(logits.clone(), tokens, entropy_gradient=True)
    assert found[0][0] == found[1][0] == 0
    assert_same(found, by_hand(logits, tokens), [logits], EXACT)
    logits.grad = None
    loss(token_statistics(logits.clone(), tokens, entropy_gradient=True)).backward()
    assert not logits.grad[logits == -math.inf].any()


def test_nearly_impossible_token_keeps_its_logprob() -> None:
    logits = torch.tensor([[0.0, -3e5]], dtype=torch.float64)
    assert token_statistics(logits, torch.tensor([1]))[0].item() == pytest.approx(-3e5, abs=1e-9)


def test_second_backward_raises() -> None:
    logits, tokens = torch.randn(2, 5, requires_grad=True), torch.tensor([1, 2])
    logprobs, _ = token_statistics(logits * 1, tokens)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


@pytest.mark.parametrize("parts", [1, 3])
def test_half_precision_logits_are_scored_in_float32(parts) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    hidden, tokens = rows(dtype=torch.bfloat16)
    made = []
    model.lm_head.register_forward_hook(lambda _, __, out: made.append(out))
    found = ChunkedLMHead(model, 0.7, True, parts)(hidden, tokens)
    assert found[0].dtype == found[1].dtype == torch.float32
    at_once = ChunkedLMHead(tiny_model("llama", dtype=torch.bfloat16), 0.7, True, parts)(
        hidden, tokens
    )
    assert all(own.equal(other) for own, other in zip(at_once, found, strict=True))
    logits = torch.cat([out.detach().double() for out in made]).requires_grad_()
    expected = by_hand(logits, tokens, 0.7)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-5)
    gradients = []
    for out in made:
        out.register_hook(gradients.append)
    loss(found).backward()
    [exact] = torch.autograd.grad(loss(expected), [logits])
    # What bfloat16 keeps of a number, and no more is lost: 1 - p of a likely token, for one.
    rounded = torch.cat(gradients[::-1]).double()
    torch.testing.assert_close(rounded, exact, rtol=2**-8, atol=1e-6)


def error_of_the_gradient(parts, arch):
    """Of weight and bias in bfloat16, against float64, by their norms."""
    model, exact = (tiny_model(arch, dtype=dtype) for dtype in (torch.bfloat16, torch.float64))
    exact.load_state_dict(model.state_dict())
    hidden, tokens = rows(512, dtype=torch.bfloat16)
    loss(ChunkedLMHead(model, 1.0, True, parts)(hidden, tokens)).backward()
    loss(ChunkedLMHead(exact, 1.0, True, 1)(hidden.detach().double(), tokens)).backward()
    pairs = zip(model.lm_head.parameters(), exact.lm_head.parameters(), strict=True)
    return [float((p.grad.double() - q.grad).norm() / q.grad.norm()) for p, q in pairs]


@pytest.mark.parametrize("arch", ["llama", "phi"])
def test_gradient_rounding_does_not_grow_with_chunks(arch) -> None:
    """Rounded after each of 256 pieces that of the weight is wrong by 2 percent."""
    one, many = (error_of_the_gradient(parts, arch) for parts in (1, 256))
    for whole, split in zip(one, many, strict=True):
        assert split < 1.05 * whole < 0.01


def test_float32_keeps_precision_over_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 20_000, generator=generator) + 1000).requires_grad_()
    tokens = torch.tensor([1, 19_999])
    tolerances = {"rtol": 1e-5, "atol": 1e-8}
    found = token_statistics(logits * 1, tokens, 1.0, True)
    assert_same(found, by_hand(logits, tokens), [logits], tolerances)


class Peak(TorchDispatchMode):
    """The most bytes of tensors that were alive at a time, of those that are made inside."""

    def __init__(self):
        super().__init__()
        self.alive, self.bytes = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.alive = {key: of for key, of in self.alive.items() if not of[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.bytes = max(self.bytes, sum(size for _, size in self.alive.values()))
        return out


def peak(model, count, parts, entropy=True):
    """Without the gradients of weights that were there before."""
    model.zero_grad()
    hidden, tokens = rows(count, dtype=torch.float32)
    with Peak() as measured:
        loss(ChunkedLMHead(model, 0.7, entropy, parts)(hidden, tokens)).backward()
    return measured.bytes


@pytest.mark.parametrize(("at_once", "entropy"), [(True, False), (False, True)])
def test_peak_memory_is_one_chunk(monkeypatch, at_once, entropy) -> None:
    monkeypatch.setattr(module, "BLOCK", 8000)
    model, piece = tiny_model("llama", vocab_size=2000), 4 * 64 * 2000
    if not at_once:
        model.lm_head.register_forward_hook(lambda *_: None)
    weight = 4 * 32 * 2000  # its gradient: of this piece, of those before, and their sum
    small = peak(model, 256, 4, entropy)
    assert small < 1.3 * piece + 3 * weight
    assert peak(model, 512, 8, entropy) < 1.2 * small


def test_frozen_head_accumulates_no_gradient(monkeypatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 8000)
    model, weight = tiny_model("llama", vocab_size=2000), 4 * 32 * 2000
    trained = peak(model, 512, 64)
    model.lm_head.requires_grad_(False)
    assert peak(model, 512, 64) < trained - weight


def test_kept_logits_are_reused_for_their_gradient(monkeypatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 8000)
    model, logits, weight = tiny_model("llama", vocab_size=2000), 4 * 512 * 2000, 4 * 32 * 2000
    assert logits < peak(model, 512, 1) < 1.1 * logits + 2 * weight


@pytest.mark.parametrize("count", [0, 2, 11])
def test_head_call_count_does_not_depend_on_rows(count) -> None:
    model, calls = tiny_model("llama"), []
    model.lm_head.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    hidden, tokens = rows(count, dtype=torch.float32)
    logprobs, _ = ChunkedLMHead(model, 1.0, False, 4)(hidden, tokens)
    assert calls == [True] * 4
    logprobs.sum().backward()
    assert calls == [True] * 8  # computed again


def test_micro_batch_is_chunked_by_logit_count() -> None:
    assert chunk_size_for(None) == module.CHUNK_SIZE
    assert num_chunks(8192, 256) == 1
    assert num_chunks(0, 32_768) == 1
    assert num_chunks(5, 10**9) == 5  # no piece without a row
    for tokens, vocabulary in ((8191, 151_936), (600, 32_769)):
        parts = num_chunks(tokens, vocabulary)
        assert parts > 1
        assert (tokens // parts) * vocabulary <= module.CHUNK_SIZE
        assert -(-tokens // (parts - 1)) * vocabulary > module.CHUNK_SIZE


def test_chunk_takes_tenth_of_gpu_memory() -> None:
    memory = 80 * 2**30
    piece = chunk_size_for(memory)
    assert piece == 2**29
    assert 14 * piece < memory / 10 < 17 * piece  # bytes of a logit, in bfloat16 and widened
    assert num_chunks(65_536, 151_936, piece) == 19
    assert chunk_size_for(2**30) == module.CHUNK_SIZE


def test_tied_weights_get_gradient_from_both_ends() -> None:
    model = tiny_model("gpt2", dtype=torch.float64)
    ids = torch.arange(N)[None]
    _, tokens = rows()
    hidden = trunk(model)(ids).last_hidden_state[0]
    expected = by_hand(model(ids).logits[0], tokens)
    found = ChunkedLMHead(model, 1.0, True, 3)(hidden, tokens)
    assert_same(found, expected, [model.get_input_embeddings().weight, model.lm_head.weight], EXACT)


def test_head_with_bias_matches_explicit_softmax() -> None:
    model = tiny_model("phi", dtype=torch.float64)
    weights = [model.lm_head.weight, model.lm_head.bias]
    hidden, tokens = rows()
    expected = by_hand(hidden @ weights[0].T + weights[1], tokens)
    found = ChunkedLMHead(model, 1.0, True, 3)(hidden, tokens)
    assert_same(found, expected, [hidden, *weights], EXACT)


def test_empty_input_gives_empty_scores_and_zero_gradient() -> None:
    model = tiny_model("llama")
    hidden, tokens = rows(0, dtype=torch.float32)
    logprobs, entropies = ChunkedLMHead(model, 1.0, True, 3)(hidden, tokens)
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert model.lm_head.weight.grad is not None
    assert not model.lm_head.weight.grad.any()
