"""Prompts that are computed once, against a forward pass of their own for every row."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from rlhf_pg.models import prefix_tree
from rlhf_pg.models.adapters import add_adapter
from rlhf_pg.models.attention import AttentionOptions, attention_support, replace_attention
from rlhf_pg.models.packing import lay_out_packed, lay_out_padded
from rlhf_pg.models.policy import Policy, checkpoint_activations, disable_dropout
from rlhf_pg.models.prefix_tree import PrefixTree
from rlhf_pg.models.recurrent import mix_in_one_call, mixers
from tests.models.architectures import build
from tests.models.test_policy import EXACT, gradient_of, teacher_forced, with_garbage
from tests.rows import batch_of as rows_to_batch
from tests.tiny import ARCHS, adapter, stir, tiny_model

PROMPTS = [[5, 9, 2, 31], [17], [8, 3, 30, 12, 25, 6, 39]]
COMPLETIONS = [
    [[7, 2], [4, 11, 19, 35, 36], [2], [9, 9]],
    [[33, 1, 28, 2], [6, 4, 4, 2]],
    [[3], [14, 22, 23, 24, 25, 26, 27, 20, 3, 4, 5], [12, 13]],
]


def batch_of(prompts=PROMPTS, completions=COMPLETIONS):
    groups = [(i, c) for i, rows in enumerate(completions) for c in rows]
    return rows_to_batch(
        [prompts[i] for i, _ in groups],
        [c for _, c in groups],
        groups=[i for i, _ in groups],
    )


def one_by_one(model, batch):
    """The gradient of `gradient_of`, from rows that know nothing of each other."""
    weights = torch.arange(1.0, batch.action_mask.numel() + 1).view(batch.action_mask.shape)
    total = []
    for i, mask in enumerate(batch.completion_mask):
        prompt = batch.prompt_ids[i][batch.prompt_mask[i]].tolist()
        logprobs, _ = teacher_forced(model, prompt, batch.completion_ids[i][mask].tolist())
        total.append((logprobs * weights[i][mask]).sum())
    grads = torch.autograd.grad(torch.stack(total).sum(), list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def assert_close(actual, expected, rel):
    assert (actual - expected).norm() <= rel * expected.norm()


@pytest.mark.parametrize("arch", ARCHS)
def test_packed_gradients_match_single_rows(arch):
    dtype, _ = EXACT.get(arch, (torch.float32, 0))
    model = tiny_model(arch, dtype=dtype)
    policy, batch = Policy(model), with_garbage(batch_of())
    assert policy.window
    expected = one_by_one(model, batch)
    assert_close(gradient_of(policy, batch), expected, 1e-10 if arch in EXACT else 1e-5)


# RMSNorm computes in float32 in Qwen2, whatever the dtype.
@pytest.mark.parametrize(("arch", "rel"), [("gpt2", 1e-10), ("qwen2", 1e-5)])
def test_packed_gradients_with_checkpointing_and_adapters(arch, rel):
    def build():
        torch.manual_seed(0)
        model = add_adapter(tiny_model(arch, dtype=torch.float64), adapter())
        disable_dropout(model.train())
        return stir(model, seed=1).double()

    plain, fast = Policy(build()), Policy(build())
    plain.window = 0
    checkpoint_activations(fast.model)
    assert_close(trained_gradient(fast), trained_gradient(plain), rel)


def trained_gradient(policy):
    logprobs = policy(batch_of()).logprobs
    weights = torch.arange(1.0, logprobs.numel() + 1).view_as(logprobs)
    (logprobs * weights).sum().backward()
    grads = [p.grad.flatten() for p in policy.parameters() if p.requires_grad]
    assert all(grad.isfinite().all() for grad in grads)
    return torch.cat(grads)


def test_model_requiring_contiguous_attention_is_packed():
    grouped = {"intermediate_size": 48, "num_key_value_heads": 2}
    model = tiny_model("jetmoe", num_local_experts=2, kv_channels=8, **grouped)
    policy, batch = Policy(model), batch_of()
    assert policy.window
    assert_close(gradient_of(policy, batch), one_by_one(model, batch), 1e-4)


def test_attention_dropout_disables_packing():
    """Ours has none; that of other modules is theirs."""
    dropping, others = (tiny_model("gpt2", attn_pdrop=p, resid_pdrop=0.5) for p in (0.1, 0.0))
    for model, packs in ((dropping, False), (others, True)):
        for mode in (False, True):
            policy = Policy(model.train(mode))
            assert policy.window
            policy.keep_dropout()
            assert (policy.window > 0) == packs
            assert model.training == mode


def test_packed_layout_computes_every_real_token_once():
    inputs, states = lay_out_packed(batch_of())
    ids = [t for p, rows in zip(PROMPTS, COMPLETIONS, strict=True) for t in sum(rows, p)]
    assert inputs["input_ids"].tolist() == [ids]
    rows = zip(PROMPTS, COMPLETIONS, strict=True)
    positions = [
        t
        for p, completions in rows
        for t in [*range(len(p)), *(len(p) + t for c in completions for t in range(len(c)))]
    ]
    assert inputs["position_ids"].tolist() == [positions]
    # The prompt ends at 3; the last column is the end.
    assert states[:2, [0, 1, -1]].tolist() == [[3, 4, 5], [3, 6, 10]]
    assert states.shape == (9, 12)
    assert lay_out_padded(batch_of()).inputs["input_ids"].numel() == 9 * 18


def test_different_prompts_in_group_are_not_shared():
    batch = batch_of([[5, 9], [5, 8], [6, 8]], [[[7], [8]], [[7, 7]], [[9], [2]]])
    batch = replace(batch, groups=torch.zeros_like(batch.groups))
    assert batch.shared_prefixes().tolist() == [0, 0, 1, 2, 2]
    inputs = lay_out_packed(batch).inputs
    assert inputs["input_ids"].numel() == 3 * 2 + 6
    # The prompt of a single row is no segment of its own: its attention is one call, not three.
    assert [span.length for span in inputs["layout"].spans] == [2, 1, 1, 4, 2, 1, 1]
    model = tiny_model("gpt2", dtype=torch.float64)
    assert_close(gradient_of(Policy(model), batch), one_by_one(model, batch), 1e-10)


def test_rows_beyond_the_original_length_of_longrope_are_padded():
    rope = {"rope_type": "longrope", "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
    shape = {"intermediate_size": 48, "num_key_value_heads": 2, "rope_scaling": rope}
    model = tiny_model("phi3", **shape, original_max_position_embeddings=17)
    policy, batch, seen = Policy(model), batch_of(), []
    model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    policy(batch.select(torch.arange(6)))
    assert seen == [1]
    policy(batch)  # of 18 tokens
    assert seen == [1, 9]


# Windows shorter than the rows, sinks, capped scores, and layers that carry states, of these kinds:
# gated delta nets, short convolutions, Mamba 1 and 2 (beside attention in one layer too).
KINDS = {
    "mistral": {"sliding_window": 3},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 5},
    "gpt_oss": {"sliding_window": 4},
    "qwen3_5_text": {},
    "lfm2": {},
    "kimi_linear": {},
    "jamba": {},
    "falcon_h1": {},
    "nemotron_h": {},
}


@pytest.mark.parametrize("repeated", [2, 1000])
@pytest.mark.parametrize("arch", KINDS)
def test_windows_sinks_and_states_match_single_rows(monkeypatch, arch, repeated):
    """States of prompts are continued by their completions, or computed again by each."""
    monkeypatch.setattr(prefix_tree, "REPEATED", repeated)
    model = build(arch, **KINDS[arch])
    policy, batch = Policy(model), with_garbage(batch_of())
    assert policy.window == math.inf
    assert_close(gradient_of(policy, batch), one_by_one(model, batch), 1e-5)


@pytest.mark.parametrize("arch", ["qwen3_5_text", "jamba"])
def test_states_in_one_call(monkeypatch, arch):
    """Under ZeRO-3 every call gathers weights, so that processes must make the same number."""
    monkeypatch.setattr(prefix_tree, "REPEATED", 2)
    model = build(arch, **KINDS[arch])
    policy, batch, calls = Policy(model), with_garbage(batch_of()), []
    mix_in_one_call(model)
    linears = [next(m for m in x.modules() if isinstance(m, nn.Linear)) for x in mixers(model)]
    for linear in linears:
        linear.register_forward_hook(lambda *_: calls.append(1))
    gradient = gradient_of(policy, batch)
    assert len(calls) == len(linears)
    assert_close(gradient, one_by_one(model, batch), 1e-5)


@pytest.mark.parametrize("arch", ["qwen3_5_text", "gpt_oss"])
def test_states_and_sinks_with_checkpointing_and_adapters(arch):
    def trained():
        torch.manual_seed(0)
        model = add_adapter(build(arch, **KINDS[arch]), adapter(target_modules="all-linear"))
        disable_dropout(model.train())
        return stir(model, seed=1)

    plain, fast = Policy(trained()), Policy(trained())
    plain.window = 0
    checkpoint_activations(fast.model)
    assert fast.window
    assert_close(trained_gradient(fast), trained_gradient(plain), 1e-5)


@pytest.mark.parametrize("arch", ["recurrent_gemma", "minimax", "rwkv"])
def test_model_with_states_of_its_own_is_padded(arch):
    """It is known before rows are compared, which is not done in 16 bits."""
    model = build(arch)
    assert attention_support(model).unsupported_reason is not None
    assert not Policy(model).window


# Parent and length of each segment: families of a prompt and its completions, then branches of
# branches, in an order in which they are not laid out.
FAMILIES = [(-1, 4), (0, 2), (0, 5), (0, 2), (0, 2), (-1, 1), (-1, 3), (6, 1), (-1, 2), (8, 3)]
TREES = [*FAMILIES, (8, 3), (9, 4), (2, 3), (11, 1), (9, 4), (2, 2), (-1, 2), (12, 6), (0, 1)]


def layout(segments):
    return PrefixTree(segments, torch.device("cpu"))


def visible(segments, window=None):
    """Which token sees which, (N,N): a walk from each token to its root, of at most `window`."""
    spans, count = layout(segments).spans, sum(length for _, length in segments)
    sees = torch.zeros(count, count, dtype=torch.bool)
    for number, (_, length) in enumerate(segments):
        for t in range(length):
            path, at, seen = [], number, t + 1
            while at >= 0:
                path += reversed(range(spans[at].start, spans[at].start + seen))
                at = segments[at][0]
                seen = segments[at][1]
            sees[spans[number].start + t, path[:window]] = True
    return sees


def explicit(query, key, value, scale, window=None, sinks=None, softcap=None):
    copies = len(query) // len(key)
    key, value = (x.repeat_interleave(copies, 0) for x in (key, value))
    scores = query @ key.transpose(1, 2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.exp() * visible(TREES, window)
    sums = weights.sum(-1, keepdim=True)
    if sinks is not None:
        sums = sums + sinks.exp()[:, None, None]
    return (weights / sums @ value).transpose(0, 1)


OPTIONS = {
    "plain": {},
    "window_1": {"window": 1},
    "window_3": {"window": 3},
    "window_9": {"window": 9},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 0.8},
    "all": {"window": 4, "sinks": True, "softcap": 0.8},
}


@pytest.mark.parametrize("strip", [2, 256])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("way", ["by_blocks", "densely", "by_flex"])
@pytest.mark.filterwarnings("ignore:.*flex_attention")
def test_attention_matches_softmax_over_visible_tokens(monkeypatch, way, options, strip):
    if way == "by_blocks" and "softcap" in options:
        pytest.skip("the kernel has none")
    monkeypatch.setattr(prefix_tree, "STRIP_OF_WINDOW", strip)
    count = len(visible(TREES))
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if way == "by_flex" else torch.float64
    shapes = [(4, count, 8), (2, count, 8), (2, count, 8), (4,)]
    operands = [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(way != "by_flex")
        for shape in shapes
    ]
    options, sinks = dict(options), operands[3]
    if "sinks" in options:
        options["sinks"] = sinks
    else:
        operands.pop()
    out = getattr(layout(TREES), way)(*operands[:3], AttentionOptions(0.7, **options))
    expected = explicit(*operands[:3], 0.7, **options)
    tolerance = {"rtol": 0, "atol": 1e-11 if dtype == torch.float64 else 1e-5}
    torch.testing.assert_close(out, expected, **tolerance)
    if way == "by_flex":  # which has a backward pass on GPUs alone
        return
    weights = torch.randn(out.shape, generator=generator, dtype=dtype)
    grads = torch.autograd.grad((out * weights).sum(), operands)
    torch.testing.assert_close(
        grads, torch.autograd.grad((expected * weights).sum(), operands), **tolerance
    )


def test_attention_takes_values_narrower_than_keys():
    count = len(visible(TREES))
    query, key, value = (torch.randn(2, count, width).double() for width in (8, 8, 5))
    out = layout(TREES).attend(0, query, key, value, AttentionOptions(0.3))
    torch.testing.assert_close(out, explicit(query, key, value, 0.3))


def test_bf16_attention_gradient_is_rounded_once():
    """It is off by 0.2 % of its norm; that of the bfloat16 kernel by 0.3 %."""
    torch.manual_seed(0)
    tree = layout([(-1, 40), (0, 30), (0, 30), (0, 17), (-1, 9), (4, 50)])
    shapes = [(heads, 176, 32) for heads in (4, 2, 2)] + [(176, 4, 32)]
    *operands, grad = (torch.randn(shape).bfloat16() for shape in shapes)

    def gradients(dtype):
        inputs = [x.to(dtype).requires_grad_() for x in operands]
        return torch.autograd.grad(
            tree.by_blocks(*inputs, AttentionOptions(32**-0.5)), inputs, grad.to(dtype)
        )

    for found, exact in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        assert (found.double() - exact).norm() <= 0.0025 * exact.norm()


def test_non_causal_attention_is_not_replaced():
    model = tiny_model("bert-generation", intermediate_size=48)
    assert "later tokens" in attention_support(model.base_model).unsupported_reason
    decoder = tiny_model("bert-generation", intermediate_size=48, is_decoder=True)
    assert attention_support(decoder.base_model).unsupported_reason is None


@pytest.mark.parametrize(
    ("arch", "argument"),
    [("minimax_m3_vl_text", "block_indices"), ("inkling_text", "position_bias")],
)
def test_attention_with_unknown_argument_is_not_replaced(arch, argument):
    model = build(arch)
    assert f"attention with {argument}" in attention_support(model).unsupported_reason
    assert not Policy(model).window


def test_attention_implementation_is_restored():
    model = tiny_model("gpt2")
    before = model.config._attn_implementation
    Policy(model)(batch_of())
    assert model.config._attn_implementation == before
    with pytest.raises(ZeroDivisionError), replace_attention([model.config]):
        _ = 1 / 0
    assert model.config._attn_implementation == before


def test_saved_activations_keep_shared_prompt_once():
    """Sixteen completions of one prompt: its keys are kept once."""

    def saved(n):
        kept = {}
        model = tiny_model("qwen2", max_position_embeddings=512)
        batch = batch_of([[7] * 400], [[[5] * 3] * n])
        keep = torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x
        )
        with keep:
            Policy(model)(batch)
        weights = {p.data_ptr() for p in model.parameters()}
        storages = [x.untyped_storage() for key, x in kept.items() if key not in weights]
        return sum(storage.nbytes() for storage in storages)

    assert saved(16) < 1.25 * saved(1)


def test_block_mask_made_in_strips_is_that_of_rows(monkeypatch) -> None:
    """A block counts if a token of it sees one of the other: itself or what it continues."""
    monkeypatch.setattr(prefix_tree, "STRIP", 256)
    segments = [(-1, 150), (0, 130), (0, 20), (-1, 7), (3, 90), (-1, 3), (5, 128), (6, 1), (5, 9)]
    sees = visible(segments)
    mask = layout(segments).mask(None)
    dense = torch.stack([part.any(1) for part in sees.split(128, 1)], dim=1)
    expected = torch.stack([part.any(0) for part in dense.split(128)]).int()
    assert mask.to_dense()[0, 0].equal(expected)
    assert mask.shape[-2:] == sees.shape
    places = torch.arange(len(sees))
    assert mask.mask_mod(0, 0, places[:, None], places).equal(sees)
