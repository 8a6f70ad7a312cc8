"""The reviews: the hidden reward on any words, the noisy pairs, the words as tokens."""

import itertools
import math
import random

import pytest
import torch

from rlhf_pg.data.chat import encode
from rlhf_pg.tasks import arithmetic, preference
from rlhf_pg.tasks.preference import (
    FOLLOWS,
    KINDS,
    NOISE_SCALE,
    gold,
    gold_score,
)
from rlhf_pg.tasks.warm_start import examples

FIRST = {
    "prompt": "my cake here was ",
    "chosen": "very bad and dirty .",
    "rejected": "dirty and very loud but very small but",
}
SOUP, TENT = "our soup here was ", "our tent here was "


@pytest.fixture(scope="module")
def task():
    return preference()


@pytest.fixture(scope="module")
def pairs(task):
    return task.pairs()


@pytest.fixture(scope="module")
def tokenizer(task):
    return task.new_model()[1]


def scores(pair):
    return [gold_score(pair["prompt"], pair[key]) for key in ("chosen", "rejected")]


@pytest.mark.parametrize(
    ("prompt", "said", "expected"),
    [
        (SOUP, "quite hot and not fresh but dry .", 0.7 - 1.2 - 1),
        (TENT, "quite hot and not fresh but dry .", -0.7 - 0.6 + 0.8),
        (SOUP, "very good and not stale but quite hot .", 1.5 + 1.2 + 0.7),
        ("", "hot .", -1),  # no food: a room
    ],
)
def test_gold_score_by_hand(prompt, said, expected):
    assert gold([prompt], [said]) == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", -1),  # unfinished
        (".", -0.5),  # misplaced: nothing was said
        ("good", 1 - 1),
        ("good . good and fresh .", 1 - 0.5),  # what comes after the end counts for nothing
        ("good and good .", 1),  # once
        ("not good and very good .", -1),
        ("good fresh .", 1 + 1.2 - 0.5),
        ("good and and fresh .", 1 + 1.2 - 0.5),
        ("very and good .", 1 - 0.5),  # a modifier only of the next word
        ("soup good .", 1 - 2 * 0.5),  # and what follows such a word is out of place
        ("<user> <pad>", -1 - 2 * 0.5),
    ],
)
def test_gold_score_is_defined_for_any_words(said, expected):
    assert gold_score(SOUP, said) == pytest.approx(expected)


def test_splits_share_no_prompt(task, pairs):
    train, held_out = set(task.train_dataset["prompt"]), set(task.eval_dataset["prompt"])
    assert (len(train), len(held_out), len(train & held_out)) == (256, 64, 0)
    assert [set(split["prompt"]) for split in pairs] == [train, held_out]
    assert pairs[0][0] == FIRST  # in every process and every run


def test_every_answer_is_well_formed(task):
    for row in task.train_dataset.select(range(0, len(task.train_dataset), 16)):
        kinds = ["start", *(KINDS[word] for word in row["answer"].split())]
        assert all(kind in FOLLOWS[before] for before, kind in itertools.pairwise(kinds))
        assert kinds[-1] == "stop"
        assert 1 <= kinds.count("adjective") <= 4


def preferred_probability(gap: float) -> float:
    return 1 / (1 + math.exp(-gap / NOISE_SCALE))


def test_better_review_wins_with_formula_frequency(pairs):
    gaps = [better - worse for better, worse in map(scores, pairs[0])]
    for low, high in ((0.0, 0.2), (0.2, 0.5), (0.5, 1.0), (1.0, 2.0), (2.0, 9.0)):
        near = [gap for gap in gaps if low < abs(gap) <= high]
        expected = [preferred_probability(abs(gap)) for gap in near]
        deviation = math.sqrt(sum(p * (1 - p) for p in expected))
        assert len(near) > 500
        assert abs(sum(gap > 0 for gap in near) - sum(expected)) < 4 * deviation
    assert any(gap == 0 for gap in gaps)


def test_sampled_words_round_trip_to_same_tokens(tokenizer):
    chance = random.Random(0)
    prompt = encode(SOUP, tokenizer)
    for _ in range(100):
        ids = [chance.randrange(4, len(tokenizer)) for _ in range(12)]
        text = tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True)
        assert tokenizer(SOUP + text)["input_ids"] == prompt + ids


def test_every_pair_and_review_fits_model(task, pairs, tokenizer):
    model, _ = task.new_model()
    limit = model.config.max_position_embeddings
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    longest = max(len(text.split()) for split in pairs for key in split[:] for text in split[key])
    assert 4 + longest < limit
    example = examples(task.demonstrations()[:1], tokenizer)[0]
    ids = torch.tensor([example["input_ids"]])
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))


def test_task_without_pairs_raises():
    with pytest.raises(ValueError, match=r"arithmetic has no preference pairs.*task preference"):
        arithmetic().pairs()
