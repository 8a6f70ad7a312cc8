"""Drafts: whatever is suggested, what is sampled is what would be sampled without it."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from peft import get_peft_model
from transformers import PreTrainedModel

from rlhf_pg.rollout import Completion, NativeEngine, Request, SamplingParams
from rlhf_pg.rollout.native.drafts import (
    CONTEXT,
    LONGEST,
    MOST_SEQUENCES,
    Contexts,
    History,
    Writer,
)
from rlhf_pg.rollout.native.pace import Pace
from tests.rollout.native.test_engine import (
    EOS,
    PAD,
    PARAMS,
    PROMPTS,
    assert_same,
    assert_teacher_forced,
    char_tokenizer,
    teacher_forced,
)
from tests.rollout.stats import chi_square_p
from tests.tiny import adapter, tiny_model


class Eager(Pace):
    """Drafts of one length, whatever they cost, and the number of tokens that they gave."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.kept, self.sizes = length, 0, []

    def begin(self) -> bool:
        return True

    def tries(self, rows: int) -> bool:
        return True

    def worth(self, rate: float) -> int:
        return self.length

    def passed(self, rows: int, gained: int, drafts: bool, seconds: float) -> None:
        super().passed(rows, gained, drafts, seconds)
        self.kept += gained - rows
        self.sizes.append((rows, gained, drafts))


def drafting(
    model: PreTrainedModel, length: int, eos: Sequence[int] = EOS, cache_tokens: int | None = None
) -> tuple[NativeEngine, Eager]:
    """An engine that drafts whenever it can, and what counts its tokens from drafts."""
    engine = NativeEngine(model, eos, PAD, char_tokenizer(), cache_tokens, drafts=True)
    assert engine.history is not None
    pace = engine.history.pace = Eager(length)
    return engine, pace


def check(
    model: PreTrainedModel,
    params: SamplingParams,
    length: int,
    eos: Sequence[int] = EOS,
    cache_tokens: int | None = None,
    atol: float = 1e-4,
) -> list[Completion]:
    """Compare three rollouts, of which the second repeats the first, with those of no drafts."""
    engine, pace = drafting(model, length, eos, cache_tokens)
    plain = NativeEngine(model, eos, PAD, char_tokenizer())
    tokens = 0
    for seed in (0, 0, 1):
        completions = engine.generate(PROMPTS, 6, params, seed)
        expected = plain.generate(PROMPTS, 6, params, seed)
        assert_same(completions, expected, atol)
        for completion, other in zip(completions, expected, strict=True):
            kept, known = completion.support, other.support
            assert kept is None or len(kept) == len(completion.tokens)
            assert [ids.tolist() for ids in kept or ()] == [ids.tolist() for ids in known or ()]
        tokens += sum(len(completion.tokens) for completion in completions)
    assert pace.kept > tokens / 8
    return expected


# --- tokens are the same --------------------------------------------------------------------------

LONG = SamplingParams(temperature=0.8, max_tokens=40)


@pytest.mark.parametrize("length", [1, 5, LONGEST])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "phi", "mixtral"])  # no mixtral is lean
def test_drafts_change_no_token(arch, length):
    check(tiny_model(arch), LONG, length, eos=[])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_p": 0.8, "top_k": 7, "temperature": 0.7},
        {"stop": ["bd", "k"]},
    ],
)
def test_sampling_options_hold_under_drafts(fields):
    check(tiny_model("llama"), replace(LONG, **fields), 5, eos=[])


def test_end_within_draft_ends_row():
    completions = check(tiny_model("llama"), replace(LONG, temperature=0.5), 5, eos=EOS[:2])
    assert sum(c.finish_reason == "stop" and len(c.tokens) > CONTEXT + 2 for c in completions) > 5


def test_adapter_is_sampled_under_drafts():
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama"), adapter(init_lora_weights=False))
    check(model, LONG, 5, eos=[])


def test_float64_is_sampled_under_drafts():
    check(tiny_model("gpt2", dtype=torch.float64), LONG, 5, eos=[], atol=1e-9)


@pytest.mark.parametrize("cache_tokens", [36, 100])
def test_rows_wait_for_small_cache_under_drafts(cache_tokens):
    params = replace(LONG, max_tokens=12)
    check(tiny_model("llama"), params, 5, eos=EOS[:1], cache_tokens=cache_tokens)


@pytest.mark.parametrize("length", [5, LONGEST])
def test_drafts_cross_spans(length):
    """The second store begins at column 64, the third at 128."""
    model = tiny_model("llama", max_position_embeddings=256)
    params = SamplingParams(temperature=0.6, max_tokens=140)
    engine, pace = drafting(model, length, [])
    first = engine.generate(PROMPTS, 2, params, seed=0)
    assert_same(engine.generate(PROMPTS, 2, params, seed=0), first)
    assert pace.kept > 140 * len(first) / 2
    assert_teacher_forced(model, PROMPTS, first, temperature=0.6)


@pytest.mark.parametrize("limit", [1, 2, 7, 23])
def test_limit_within_draft_ends_row(limit):
    engine, pace = drafting(tiny_model("llama"), LONGEST, [])
    longer = engine.generate(PROMPTS, 4, LONG, seed=0)
    pace.kept = 0
    shorter = engine.generate(PROMPTS, 4, replace(LONG, max_tokens=limit), seed=0)
    cut = [Completion(c.tokens[:limit], c.logprobs[:limit], "length") for c in longer]
    assert_same(shorter, cut)
    assert (pace.kept > 0) == (limit > 2)


def episode(engine: NativeEngine, params: SamplingParams) -> dict[tuple[int, int], list[int]]:
    """Groups of several sizes, of which some go on after what they sampled first."""
    found: dict[tuple[int, int], list[int]] = {}
    with engine.session(params, seed=3) as session:
        for i, prompt in enumerate(PROMPTS):
            first = Request(tokens=prompt, prompt_index=i, samples=range(1 + 2 * i), max_tokens=9)
            session.add(first)
        while not session.idle:
            for request, sample, completion in session.step():
                key = (request.prompt_index, sample)
                found[key] = found.get(key, []) + completion.tokens
                if request.position == 0 and sample % 2:
                    tokens = [*request.tokens, *completion.tokens]
                    rest = Request(
                        tokens=tokens, prompt_index=key[0], samples=(sample,), position=9
                    )
                    session.add(rest)
    return found


def test_continued_rows_and_groups_of_several_sizes_are_same_under_drafts():
    model = tiny_model("llama")
    engine, pace = drafting(model, 5, [])
    expected = episode(NativeEngine(model, [], PAD), LONG)
    assert {len(tokens) for tokens in expected.values()} == {9, 9 + LONG.max_tokens}
    for _ in range(2):
        assert episode(engine, LONG) == expected
    assert pace.kept > sum(map(len, expected.values())) / 4
    # Later turns are kept with the first ones, by the prompt that both began with.
    assert engine.history is not None
    kept = {array("i", prompt).tobytes() for prompt in PROMPTS}
    assert engine.history.sequences.keys() == kept


def test_wrong_draft_costs_no_token():
    """What was kept for a prompt agrees for `CONTEXT` tokens and then goes another way."""
    model = tiny_model("llama")
    engine, pace = drafting(model, LONGEST, [])
    expected = NativeEngine(model, [], PAD).generate(PROMPTS[:1], 1, LONG, seed=0)
    tokens, prompt = expected[0].tokens, PROMPTS[0]
    wrong = [*prompt, *tokens[:2], *((token + 1) % 40 for token in tokens[2:20])]
    assert engine.history is not None
    engine.history.add(array("i", prompt).tobytes(), array("i", wrong))
    assert_same(engine.generate(PROMPTS[:1], 1, LONG, seed=0), expected)
    assert pace.kept == 1  # tokens[1]
    assert any(drafts for _, _, drafts in pace.sizes)
    assert all(gained >= rows for rows, gained, _ in pace.sizes)


def test_drafts_are_off_unless_asked_for():
    assert NativeEngine(tiny_model("llama"), EOS, PAD).history is None


def test_nothing_is_drafted_while_drafts_nap(monkeypatch):
    engine, pace = drafting(tiny_model("llama"), 5, [])
    first = engine.generate(PROMPTS, 2, LONG, seed=0)
    pace.kept = 0
    monkeypatch.setattr(pace, "begin", lambda: False)
    assert_same(engine.generate(PROMPTS, 2, LONG, seed=0), first)
    assert pace.kept == 0
    monkeypatch.undo()
    engine.generate(PROMPTS, 2, LONG, seed=0)
    assert pace.kept > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_not_drafted(dtype):
    """Its rounding decides so many draws that computing them again would cost more."""
    engine, pace = drafting(tiny_model("llama", dtype=dtype), 5, [])
    for _ in range(2):
        engine.generate(PROMPTS, 2, PARAMS, seed=0)
    assert pace.kept == 0


# --- the exact distribution -----------------------------------------------------------------------


def test_completions_under_drafts_have_exact_probabilities():
    """Every completion of three tokens, enumerated, over rollouts that draft each other's."""
    model, prompt = tiny_model("llama", vocab_size=4), [1, 3, 2, 1]
    params = SamplingParams(temperature=1.5, max_tokens=3)
    exact: dict[tuple[int, ...], float] = {}
    for a, b in product(range(4), repeat=2):
        first, second, third = teacher_forced(model, prompt, [a, b, 0], 1.5).double().exp()
        exact |= {(a, b, c): (first[a] * second[b] * third[c]).item() for c in range(4)}
    engine, pace = drafting(model, LONGEST, [])
    drawn: Counter[tuple[int, ...]] = Counter()
    for seed in range(20):
        completions = engine.generate([prompt] * 20, 32, params, seed)
        drawn.update(tuple(completion.tokens) for completion in completions)
    counts = torch.tensor([drawn[tokens] for tokens in exact])
    assert chi_square_p(counts, torch.tensor(list(exact.values()))) > 1e-6
    assert pace.kept > counts.sum() / 8


def accepted(p: Sequence[Fraction], q: Sequence[Fraction]) -> list[Fraction]:
    """What SPEC-RL (Liu et al. 2025) draws: an old token, from q, with min(1, p/q); else from p."""
    kept = [b * min(Fraction(1), a / b) for a, b in zip(p, q, strict=True)]
    return [k + (1 - sum(kept)) * a for k, a in zip(kept, p, strict=True)]


def test_accepting_old_tokens_by_their_ratio_is_not_exact():
    """The rule that drafts here do without: it gives (.74, .26) for a policy of (.8, .2)."""
    p, q = [Fraction(8, 10), Fraction(2, 10)], [Fraction(1, 2)] * 2
    assert accepted(p, q) == [Fraction(74, 100), Fraction(26, 100)]
    assert accepted(p, p) == p


# --- what is kept, and found ----------------------------------------------------------------------


def test_history_keeps_latest_sequences_of_prompt():
    history = History()
    for i in range(MOST_SEQUENCES + 3):
        history.add(b"a", array("i", [i] * 2))
    assert [sequence[0] for sequence in history.of(b"a")] == [*range(3, MOST_SEQUENCES + 3)]
    assert history.size == 2 * MOST_SEQUENCES
    assert history.of(b"b") == []


def test_history_forgets_prompt_that_was_sampled_longest_ago():
    history = History(most=10)
    for prompt in (b"a", b"b", b"a"):
        history.add(prompt, array("i", [0, 1, 2]))
    history.add(b"c", array("i", [0, 1]))
    assert [*history.sequences] == [b"a", b"c"]
    assert history.size == 8
    history.add(b"d", array("i", range(50)))  # the last one stays, however long
    assert [*history.sequences] == [b"d"]
    assert history.size == 50


def writer_of(texts: Sequence[Sequence[int]], tokens: Sequence[int]) -> Writer:
    return Writer(Contexts([array("i", text) for text in texts]), tokens)


def test_writer_suggests_what_followed_latest_place():
    texts = [[1, 2, 3, 4, 5, 6], [9, 1, 2, 3, 4, 7, 8]]
    writer = writer_of(texts, [0, 1, 2, 3, 4])
    assert writer.draft(Eager(9), 9).tolist() == [7, 8]
    assert writer.draft(Eager(9), 1).tolist() == [7]
    assert writer.draft(Eager(1), 9).tolist() == [7]
    writer.write([7])
    assert writer.draft(Eager(9), 9).tolist() == [8]
    assert writer_of(texts, [2, 2, 3, 4]).draft(Eager(9), 9).tolist() == []
    assert writer_of(texts, [3, 4]).draft(Eager(9), 9).tolist() == []


def test_draft_is_of_limited_length():
    writer = writer_of([range(50)], [0, 1, 2, 3])
    assert writer.draft(Eager(10**6), 10**6).tolist() == [*range(4, 4 + LONGEST)]
    assert writer.draft(Eager(10**6), 0).tolist() == []


def test_writer_looks_elsewhere_after_wrong_guess():
    writer = writer_of([[1, 2, 3, 4, 5], [2, 3, 4, 6, 7]], [1, 2, 3, 4])
    assert writer.draft(Eager(9), 9).tolist() == [5]
    writer.write([6])
    assert writer.draft(Eager(9), 9).tolist() == [7]


def test_writer_repeats_rows_beside_it():
    contexts = Contexts([])
    first, second = (Writer(contexts, [1, 2, 3, 4]) for _ in range(2))
    first.write([5, 6, 7])
    second.write([5])
    assert second.draft(Eager(9), 9).tolist() == [6, 7]


def test_rate_follows_latest_guesses():
    class Asked(Eager):
        def worth(self, rate: float) -> int:
            asked.append(rate)
            return 0

    asked: list[float] = []
    writer = writer_of([range(100)], [0, 1, 2, 3])
    writer.draft(Asked(0), 9)
    writer.write([4])
    writer.draft(Asked(0), 9)
    writer.write([6])
    writer.draft(Asked(0), 9)
    # Hits and misses begin with one each, and fade by 0.9.
    assert asked == pytest.approx([1 / 2, 1.9 / 2.8, 1.71 / 3.52])
