"""Process rewards: which text is a step, where it is judged, and what the score is."""

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast

from rlhf_pg.advantages import process_group_normalized
from tests.examples import load
from tests.rewards.calling import Rewards
from tests.rewards.test_reward_model import letters
from tests.tiny import tiny_model

EXAMPLE = load("process_reward")


def judge(labels=2, **options):
    model = tiny_model("llama", kind=AutoModelForTokenClassification, num_labels=labels, scale=0.5)
    return EXAMPLE.ProcessReward(model, fused(), separator=".", **options)


def fused():
    """Letters that are text again without blanks between them."""
    tokenizer = letters()
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return tokenizer


def ids_of(text, ends=True):
    return [letters().convert_tokens_to_ids(c) for c in text] + [2] * ends


@torch.no_grad()
def by_hand(model, text):
    """At the last character, with nothing beside it."""
    logits = model.model(torch.tensor([ids_of(text, ends=False)])).logits[0, -1]
    if len(logits) == 1:
        return logits.item()
    bad, good = logits.tolist()
    return 1 / (1 + math.exp(bad - good))


@pytest.mark.parametrize("labels", [1, 2])
def test_step_judged_at_separator_is_scored_at_last_token(labels):
    model = judge(labels)
    texts = ["ab.c.de", "x.", "..q.", ""]
    scores = model(["hi"] * 4, texts, [ids_of(text) for text in texts])
    none = None
    expected = [
        [none, none, "hiab.", none, "hiab.c.", none, none, "hiab.c.de."],
        [none, "hix.", none],
        [none, none, none, "hiq.", none],
        ["hi."],
    ]
    for own, wanted in zip(scores, expected, strict=True):
        assert [score is None for score in own] == [text is None for text in wanted]
        for score, text in zip(own, wanted, strict=True):
            if text is not None:
                assert score == pytest.approx(by_hand(model, text), abs=2e-5)


def test_steps_end_at_tokens_of_other_policy_tokenizer():
    """Of whose tokens one has the end of a step and all of the next: both count."""

    class Pairs:
        words = ("ab", "c.", ".d", "e")

        def decode(self, ids, skip_special_tokens):
            return "".join(self.words[i] for i in ids)

    model = judge(policy_tokenizer=Pairs())
    [scores] = model(["hi"], ["abc.e.d"], [[0, 1, 3, 2]])
    assert [score is None for score in scores] == [True, False, True, False]
    assert scores[1] == pytest.approx(by_hand(model, "hiabc."), abs=2e-5)
    both = [by_hand(model, text) for text in ("hiabc.e.", "hiabc.e.d.")]
    assert scores[3] == pytest.approx(sum(both) / 2, abs=2e-5)


def bytewise():
    """Of UTF-8, three bytes of which may be a character."""
    vocabulary = {char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("text", ["a\u20ac.b.\u20ac\u20ac.", "\u20ac\ufffd.\ufffd", "."])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_multi_token_characters_are_read_whole(text, cut):
    tokenizer = bytewise()
    ids = tokenizer(text)["input_ids"]
    ids = ids[: len(ids) - cut] or ids
    whole = tokenizer.decode(ids)
    prefixes = [tokenizer.decode(ids[: t + 1]).count(".") for t in range(len(ids))]
    ends = [prefixes.index(n) for n in range(1, whole.count(".") + 1)] + [len(ids) - 1]
    expected = [(step, end) for step, end in zip(whole.split("."), ends, strict=True) if step]
    assert judge(policy_tokenizer=tokenizer).steps(ids) == (expected or [("", len(ids) - 1)])


@pytest.mark.parametrize(
    ("labels", "completion", "ids", "key"),
    [
        (3, "a.", "a.", "num_labels"),
        (2, [{"role": "assistant", "content": "a."}] * 2, "a.", "tools"),
        (2, "abcdef" * 20, "abcdef" * 20, "max_position_embeddings"),
    ],
)
def test_what_cannot_be_judged_is_refused(labels, completion, ids, key):
    with pytest.raises(ValueError, match=key):
        judge(labels)(["hi"], [completion], [ids_of(ids)])


def test_step_scores_reach_process_estimator():
    """Of two completions with two steps and one, by the numbers of the class."""
    model = judge()
    texts = ["a.b", "c"]
    ids = [ids_of(text) for text in texts]
    scores = Rewards([model])(["hi"] * 2, texts, ids, {})[:, :, 0]
    there = ~scores.isnan()
    assert there.tolist() == [[False, True, False, True], [False, True, False, False]]
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    groups = torch.tensor([0, 0])
    advantages = process_group_normalized(scores, there, groups, mask)
    said = [by_hand(model, text) for text in ("hia.", "hia.b.", "hic.")]
    mean = sum(said) / 3
    std = math.sqrt(sum((x - mean) ** 2 for x in said) / 2)
    first, second, other = ((x - mean) / (std + 1e-4) for x in said)
    assert advantages[0].tolist() == pytest.approx([first + second] * 2 + [second] * 2, rel=1e-3)
    assert advantages[1].tolist() == pytest.approx([other] * 2 + [0, 0], rel=1e-3)
