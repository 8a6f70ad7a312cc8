"""The native engine against teacher-forced forwards of its own completions."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from peft import get_peft_model
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf_pg.rollout import Completion, NativeEngine, SamplingParams
from tests.rollout.stats import chi_square_p
from tests.tiny import ARCHS, adapter, stir, tiny_model

VOCAB, PAD = 40, 0
EOS = [3, 7, 11, 17, 26, 33]
PARAMS = SamplingParams(temperature=0.8, max_tokens=10)
# Of several lengths, so that all but one are padded; an EOS id within a prompt ends nothing.
PROMPTS = [[5, 9, 2, 31], [17], [8, 3, 30, 12, 25, 6, 39], [21, 22], [36]]


def engine_of(model: PreTrainedModel, eos: int | Sequence[int] = EOS, **kwargs) -> NativeEngine:
    return NativeEngine(model, eos, kwargs.pop("pad", PAD), **kwargs)


def teacher_forced(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float
) -> torch.Tensor:
    """Log-probabilities (len(tokens), V) from one forward without padding, cache or mask."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


def assert_teacher_forced(
    model: PreTrainedModel,
    prompts: list[list[int]],
    completions: list[Completion],
    atol: float = 1e-4,
    temperature: float = PARAMS.temperature,
) -> None:
    n = len(completions) // len(prompts)
    for i, completion in enumerate(completions):
        exact = teacher_forced(model, prompts[i // n], completion.tokens, temperature)
        exact = exact[range(len(completion.tokens)), completion.tokens]
        logprobs = torch.tensor(completion.logprobs, dtype=exact.dtype)
        torch.testing.assert_close(logprobs, exact, rtol=0, atol=atol)


def assert_same(actual: list[Completion], expected: list[Completion], atol: float = 1e-4) -> None:
    assert [c.tokens for c in actual] == [c.tokens for c in expected]
    assert [c.finish_reason for c in actual] == [c.finish_reason for c in expected]
    for a, e in zip(actual, expected, strict=True):
        assert a.logprobs == pytest.approx(e.logprobs, abs=atol)


def cut(completion: Completion, ends: Sequence[int], max_tokens: int) -> Completion:
    """What is left of an endless completion when these ids end it."""
    tokens = completion.tokens[:max_tokens]
    length = next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
    reason = "length" if length is None else "stop"
    return Completion(tokens[:length], completion.logprobs[:max_tokens][:length], reason)


EXACT = {"gpt2": (torch.float64, 1e-9), "gpt_neox": (torch.float64, 1e-9)}


@pytest.mark.parametrize("arch", ARCHS)
def test_logprobs_match_teacher_forced_forward(arch):
    dtype, atol = EXACT.get(arch, (torch.float32, 1e-4))
    model = tiny_model(arch, dtype=dtype)
    completions = engine_of(model).generate(PROMPTS, 8, PARAMS, seed=0)
    assert len({len(c.tokens) for c in completions}) > 4  # rows left the batch at many moments
    assert_teacher_forced(model, PROMPTS, completions, atol)


def test_samples_do_not_depend_on_batch():
    engine = engine_of(tiny_model("llama"))
    together = engine.generate(PROMPTS, 3, PARAMS, seed=1)
    alone = [
        completion
        for i, prompt in enumerate(PROMPTS)
        for completion in engine.generate([prompt], 3, PARAMS, seed=1, prompt_ids=[i])
    ]
    assert_same(together, alone)
    backward = engine.generate(PROMPTS[::-1], 2, PARAMS, seed=1, prompt_ids=[4, 3, 2, 1, 0])
    assert_same(backward, [together[3 * p + s] for p in range(4, -1, -1) for s in range(2)])
    assert engine.generate([], 3, PARAMS, seed=0) == []


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_padding_width_leaves_samples_unchanged(arch):
    engine = engine_of(tiny_model(arch))
    alone = engine.generate([[17, 4]], 3, PARAMS, seed=2)
    for width in (2, 3, 20, 40):
        batch = engine.generate([[17, 4], [6] * width], 3, PARAMS, seed=2)
        assert_same(batch[:3], alone)


def test_sliding_window_shorter_than_row_is_respected():
    model = tiny_model("mistral", sliding_window=4)
    prompts = [*PROMPTS, [1, 2, 4, 5, 6, 8, 9, 10, 12]]
    completions = engine_of(model).generate(prompts, 3, PARAMS, seed=3)
    assert_teacher_forced(model, prompts, completions, atol=1e-5)
    unbounded = tiny_model("mistral", sliding_window=None)
    with pytest.raises(AssertionError, match="not close"):
        assert_teacher_forced(unbounded, prompts, completions, atol=1e-2)


def test_seeds_draws_and_samples_all_differ():
    engine = engine_of(tiny_model("llama"), eos=[])
    same = [[17, 4]] * 4
    completions = [c for s in range(2) for c in engine.generate(same, 4, PARAMS, seed=s)]
    assert len({tuple(c.tokens) for c in completions}) == 2 * 4 * 4
    again = [c for s in range(2) for c in engine.generate(same, 4, PARAMS, seed=s)]
    assert again == completions


def test_global_random_state_is_neither_read_nor_advanced():
    engine = engine_of(tiny_model("llama"))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = engine.generate(PROMPTS, 2, PARAMS, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert engine.generate(PROMPTS, 2, PARAMS, seed=0) == first


def test_short_completions_have_exact_probabilities():
    """Every completion of up to two tokens, enumerated: 1 that ends at once and 5 * 6 others."""
    model, prompt, eos = tiny_model("llama", vocab_size=6), [1, 4], 2
    params = SamplingParams(temperature=1.5, max_tokens=2)
    exact: dict[tuple[int, ...], float] = {}
    for a in range(6):
        first, second = teacher_forced(model, prompt, [a, 0], params.temperature).double().exp()
        followed = {(a, b): (first[a] * second[b]).item() for b in range(6)}
        exact |= {(a,): first[a].item()} if a == eos else followed
    completions = engine_of(model, eos).generate([prompt] * 20, 500, params, 0)
    index = {tokens: i for i, tokens in enumerate(exact)}
    drawn = torch.tensor([index[tuple(c.tokens)] for c in completions])
    probs = torch.tensor(list(exact.values()))
    assert chi_square_p(torch.bincount(drawn, minlength=31), probs) > 1e-6
    claimed = torch.tensor([sum(c.logprobs) for c in completions])
    torch.testing.assert_close(claimed, probs.log()[drawn], rtol=0, atol=1e-4)


@pytest.mark.fault(39, "completions of full length")
def test_generation_without_eos_has_full_length():
    for completion in engine_of(tiny_model("llama"), eos=[]).generate(PROMPTS, 4, PARAMS, seed=0):
        assert len(completion.tokens) == len(completion.logprobs) == PARAMS.max_tokens
        assert completion.finish_reason == "length"
        assert {type(token) for token in completion.tokens} == {int}
        assert {type(logprob) for logprob in completion.logprobs} == {float}


def test_eos_only_truncates_completion():
    model = tiny_model("llama")
    endless = engine_of(model, eos=[]).generate(PROMPTS, 8, PARAMS, seed=4)
    for eos in (7, EOS, {30, 4}):
        ends = [eos] if isinstance(eos, int) else eos
        completions = engine_of(model, eos).generate(PROMPTS, 8, PARAMS, seed=4)
        assert_same(completions, [cut(c, ends, PARAMS.max_tokens) for c in endless])


@pytest.mark.fault(38, "a completion of one token")
def test_every_token_as_eos_gives_one_token():
    completions = engine_of(tiny_model("llama"), range(VOCAB)).generate(PROMPTS, 3, PARAMS, seed=0)
    assert [len(c.tokens) for c in completions] == [1] * 15
    assert {c.finish_reason for c in completions} == {"stop"}


def test_eos_as_last_allowed_token_is_stop():
    model = tiny_model("llama")
    [endless] = engine_of(model, eos=[]).generate([[17, 4]], 1, PARAMS, seed=0)
    for length in range(1, PARAMS.max_tokens + 1):
        last = endless.tokens[length - 1]
        if last in endless.tokens[: length - 1]:
            continue
        params = replace(PARAMS, max_tokens=length)
        [completion] = engine_of(model, last).generate([[17, 4]], 1, params, seed=0)
        assert completion.tokens == endless.tokens[:length]
        assert completion.finish_reason == "stop"


@pytest.mark.parametrize("pad", [EOS[0], 39])
def test_pad_id_does_not_matter_even_as_eos(pad):
    model = tiny_model("gpt2")
    expected = engine_of(model).generate(PROMPTS, 3, PARAMS, seed=0)
    assert_same(engine_of(model, pad=pad).generate(PROMPTS, 3, PARAMS, seed=0), expected)


def char_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 25 are the letters, 26 to 38 the pairs "aa" "bb" ..., 39 the special "</s>"."""
    letters = [chr(ord("a") + i) for i in range(26)]
    tokens = [*letters, *(2 * letter for letter in letters[:13]), "</s>"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def cut_at_text(completion: Completion, stop: Sequence[str]) -> Completion:
    """The shortest start of an endless completion whose text holds one of the strings."""
    tokenizer = char_tokenizer()
    for length in range(1, len(completion.tokens) + 1):
        tokens = completion.tokens[:length]
        if any(s in tokenizer.decode(tokens) for s in stop):
            return Completion(tokens, completion.logprobs[:length], "stop")
    return completion


@pytest.mark.parametrize("width", [1, 3])
def test_stop_string_ends_completion_and_is_kept(width):
    model, tokenizer = tiny_model("llama"), char_tokenizer()
    endless = engine_of(model, eos=[]).generate(PROMPTS, 3, PARAMS, seed=0)
    engine = engine_of(model, eos=[], tokenizer=tokenizer)
    for completion in endless[::8]:
        said = tokenizer.decode(completion.tokens)
        for stop in ([said[4 : 4 + width]], ["!", said[-width:]]):  # the last allowed tokens
            completions = engine.generate(PROMPTS, 3, replace(PARAMS, stop=stop), seed=0)
            assert_same(completions, [cut_at_text(c, stop) for c in endless])
            assert "stop" in {c.finish_reason for c in completions}


def test_stop_string_in_prompt_is_ignored():
    model, tokenizer = tiny_model("llama"), char_tokenizer()
    [endless] = engine_of(model, eos=[]).generate([[17, 4]], 1, PARAMS, seed=0)
    engine = engine_of(model, eos=[], tokenizer=tokenizer)
    across = tokenizer.decode([4, endless.tokens[0]])
    for stop in (tokenizer.decode([17, 4]), across):
        assert stop not in tokenizer.decode(endless.tokens)
        [completion] = engine.generate([[17, 4]], 1, replace(PARAMS, stop=stop), seed=0)
        assert completion == endless


def mixed_modes(model: PreTrainedModel) -> dict[str, bool]:
    """Sets every third module to train mode, and says which."""
    for i, module in enumerate(model.modules()):
        module.training = i % 3 == 0
    return {name: module.training for name, module in model.named_modules()}


def test_module_modes_are_restored_even_after_error():
    model = tiny_model("llama")
    modes, seen = mixed_modes(model), []

    def fail(module, args):
        seen.append(module.training)
        if len(seen) == 3:
            raise RuntimeError("out of memory")

    engine_of(model).generate(PROMPTS, 2, PARAMS, seed=0)
    assert {name: module.training for name, module in model.named_modules()} == modes
    model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine_of(model).generate(PROMPTS, 2, PARAMS, seed=0)
    assert seen == [False] * 3
    assert {name: module.training for name, module in model.named_modules()} == modes


@pytest.mark.parametrize(
    ("arch", "dropout"),
    [
        ("gpt2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
        ("llama", {"attention_dropout": 0.5}),
    ],
)
def test_dropout_is_disabled_in_sampling(arch, dropout):
    model = tiny_model(arch, **dropout)
    completions = engine_of(model.train()).generate(PROMPTS, 3, PARAMS, seed=0)
    assert model.training
    assert_same(completions, engine_of(model.eval()).generate(PROMPTS, 3, PARAMS, seed=0))
    assert_teacher_forced(model, PROMPTS, completions)


def test_sampling_builds_no_graph():
    model, tracked = tiny_model("llama").train(), []
    model.register_forward_hook(lambda *call: tracked.append(call[-1].logits.requires_grad))
    engine_of(model).generate(PROMPTS, 2, PARAMS, seed=0)
    assert tracked
    assert not any(tracked)
    assert torch.is_grad_enabled()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_unusable_arguments_raise():
    engine = engine_of(tiny_model("llama"))
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        engine.generate([[1], [2, 3], [], [4]], 1, PARAMS, seed=0)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        engine.generate([], 0, PARAMS, seed=0)
    with pytest.raises(ValueError, match="prompt_ids has"):
        engine.generate([[1], [2]], 1, PARAMS, 0, prompt_ids=[5])
    with pytest.raises(ValueError, match="tokenizer"):
        engine.generate([[1]], 1, SamplingParams(stop="a"), seed=0)


def test_context_may_be_filled_but_not_exceeded():
    model = tiny_model("gpt2", max_position_embeddings=16)
    prompts = [[1], [5, 6, 7, 8, 9, 10]]
    completions = engine_of(model, eos=[]).generate(prompts, 2, PARAMS, seed=0)
    assert_teacher_forced(model, prompts, completions)
    with pytest.raises(ValueError, match=r"prompt 1 has 6 tokens.*11.*max_position_embeddings.*16"):
        engine_of(model).generate(prompts, 2, replace(PARAMS, max_tokens=11), seed=0)


def test_out_of_range_sampling_param_raises_with_name():
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=1, max_tokens=1)
    with pytest.raises(ValueError, match="temperature must be"):
        SamplingParams(temperature=-0.1)
    with pytest.raises(ValueError, match="empty string"):
        SamplingParams(stop=["b", ""])


@pytest.mark.parametrize("plain", [False, True])
def test_nan_logits_raise(monkeypatch, plain):
    model = tiny_model("llama")
    model.lm_head.weight.data.fill_(float("nan"))
    engine = engine_of(model)
    if plain:
        monkeypatch.setattr(engine, "unsupported_reason", lambda longest: "of this test")
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=4, temperature=temperature)
        with pytest.raises(FloatingPointError, match="NaN"):
            engine.generate([[1]], 2, params, 0)


@pytest.mark.parametrize(("size", "is_merged"), [(1e-5, False), (1.0, True)])
def test_small_bf16_adapter_is_not_rounded_away(size, is_merged):
    """What is sampled from is the policy itself, where its merge would be the base model."""
    model = stir(get_peft_model(tiny_model("llama", dtype=torch.bfloat16), adapter()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(size)
    engine = engine_of(model)
    with engine.weights_synced():
        assert (engine.weights is not model) == is_merged
    assert engine.weights is model
    if not is_merged:
        completions = engine.generate(PROMPTS, 4, PARAMS, seed=0)
        assert_teacher_forced(model, PROMPTS, completions, atol=0.15)


def test_special_token_may_be_stop_string():
    model = tiny_model("llama")
    endless = engine_of(model, eos=[]).generate(PROMPTS, 8, PARAMS, seed=0)
    engine = engine_of(model, eos=[], tokenizer=char_tokenizer())
    completions = engine.generate(PROMPTS, 8, replace(PARAMS, stop="</s>"), seed=0)
    assert_same(completions, [cut(c, [39], PARAMS.max_tokens) for c in endless])
    assert "stop" in {c.finish_reason for c in completions}


def test_eos_ends_completion_beside_stop_strings():
    model = tiny_model("llama")
    endless = engine_of(model, eos=[]).generate(PROMPTS, 8, PARAMS, seed=0)
    engine = engine_of(model, tokenizer=char_tokenizer())
    completions = engine.generate(PROMPTS, 8, replace(PARAMS, stop=["e", "k"]), seed=0)
    by_text = [cut_at_text(c, ["e", "k"]) for c in endless]
    by_eos = [cut(c, EOS, PARAMS.max_tokens) for c in endless]
    first = [
        min(pair, key=lambda c: (len(c.tokens), c.finish_reason == "length"))
        for pair in zip(by_text, by_eos, strict=True)
    ]
    assert_same(completions, first)
