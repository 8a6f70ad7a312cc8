"""Process rewards: which text is a step, where it is judged, and what the score is."""

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast

from tests.examples import load
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


def test_completion_beyond_the_judge_is_refused():
    text = "abcdef" * 20
    with pytest.raises(ValueError, match="max_position_embeddings"):
        judge()(["hi"], [text], [ids_of(text)])
