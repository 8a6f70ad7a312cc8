"""A task of short reviews with a hidden taste: "very fresh and not cold ." may follow "our soup
here was ".

The gold reward is the reader's true taste; a reward model sees it only through noisy preferences
between pairs of reviews. Logging it beside the learned reward shows where the two diverge (Gao et
al. 2023, "Scaling Laws for Reward Model Overoptimization").
"""

import math
import random
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

from datasets import Dataset

from rlhf_pg.tasks.task import Task
from rlhf_pg.tasks.tiny import word_tokenizer

OWNERS = ["our", "my", "their", "the"]
FOODS = [
    "soup",
    "bread",
    "fish",
    "cake",
    "tea",
    "rice",
    "salad",
    "coffee",
]
ROOMS = [
    "room",
    "cabin",
    "kitchen",
    "office",
    "hall",
    "tent",
    "cellar",
    "attic",
]
TIMES = ["here", "there", "today", "again", "tonight"]

MODIFIERS = {"very": 1.5, "quite": 0.7, "not": -1.0}
MODIFIER_ODDS = [3, 2, 1, 1]  # odds of no modifier, and of each of these
CONNECTIVES = ["and", "but"]
STOP = "."

# Value of an adjective, for a food and for a room.
VALENCES = {
    "good": (1.0, 1.0),
    "fine": (0.6, 0.6),
    "bad": (-1.0, -1.0),
    "poor": (-0.8, -0.8),
    "fresh": (1.2, 0.6),
    "stale": (-1.2, -0.6),
    "rich": (0.8, 0.4),
    "bland": (-0.8, -0.4),
    "sweet": (0.6, 0.4),
    "bitter": (-0.6, -0.4),
    "tender": (0.8, 0.4),
    "burnt": (-1.2, -1.2),
    "bright": (0.4, 1.0),
    "dark": (0.4, -0.8),
    "calm": (0.4, 0.8),
    "loud": (-0.4, -1.0),
    "big": (0.6, 1.0),
    "small": (-0.6, -0.6),
    "clean": (0.4, 1.2),
    "dirty": (-1.2, -1.2),
    "hot": (1.0, -1.0),
    "cold": (-1.0, -0.4),
    "dry": (-1.0, 0.8),
    "soft": (0.6, -0.6),
}

# The grammar: the kinds of word that may follow each kind. A review begins after "start"; no word
# may follow "stop" or an "other" word.
FOLLOWS = {
    "start": {"modifier", "adjective"},
    "modifier": {"adjective"},
    "adjective": {"connective", "stop"},
    "connective": {"modifier", "adjective"},
}
KINDS = {
    **dict.fromkeys(MODIFIERS, "modifier"),
    **dict.fromkeys(VALENCES, "adjective"),
    **dict.fromkeys(CONNECTIVES, "connective"),
    STOP: "stop",
}
MISPLACED_COST = 0.5
UNFINISHED_COST = 1.0

HELD_OUT_PROMPTS = 64
ANSWERS_PER_PROMPT = 64
TRAIN_PAIRS = 16384
EVAL_PAIRS = 1024
OFF_MOOD_SHARE = 0.3
CORRUPTED_SHARE = 0.3
NOISE_SCALE = 0.35


def preference() -> Task:
    """Make the task of every prompt "<owner> <thing> <time> was "; 64 of the 320 are held out."""
    parts = product(OWNERS, FOODS + ROOMS, TIMES)
    prompts = [f"{owner} {thing} {time} was " for owner, thing, time in parts]
    random.Random(0).shuffle(prompts)
    train = prompts[HELD_OUT_PROMPTS:]
    held_out = prompts[:HELD_OUT_PROMPTS]
    return Task(
        name="preference",
        train_dataset=_reviews(train, ANSWERS_PER_PROMPT, random.Random(1)),
        eval_dataset=_reviews(held_out, 1, random.Random(2)),
        reward=gold,
        make_tokenizer=lambda: word_tokenizer([*OWNERS, *FOODS, *ROOMS, *TIMES, "was", *KINDS]),
        draw_pairs=lambda: (
            draw_pairs(train, TRAIN_PAIRS, random.Random(3)),
            draw_pairs(held_out, EVAL_PAIRS, random.Random(4)),
        ),
    )


def gold(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Score each review by its hidden reward, `gold_score`."""
    return [gold_score(p, c) for p, c in zip(prompts, completions, strict=True)]


def gold_score(prompt: str, completion: str) -> float:
    """Sum the valence of every adjective times its modifier's factor, minus penalties for form.

    It is defined for any words. An adjective counts once, and only before the first ".". Each word
    that the grammar does not allow after the previous one costs 0.5; a review that does not end in
    "." costs 1.
    """
    words = completion.split()
    kinds = ["start", *(KINDS.get(word, "other") for word in words)]
    misplaced = sum(kind not in FOLLOWS.get(before, ()) for before, kind in pairwise(kinds))
    unfinished = kinds[-1] != "stop"
    return _content(prompt, words) - MISPLACED_COST * misplaced - UNFINISHED_COST * unfinished


def _content(prompt: str, words: Sequence[str]) -> float:
    if STOP in words:
        words = words[: words.index(STOP)]
    column = 0 if any(word in FOODS for word in prompt.split()) else 1  # of VALENCES
    values = []
    for i, (before, word) in enumerate(pairwise(["", *words])):
        if word in VALENCES and word not in words[:i]:
            values.append(MODIFIERS.get(before, 1.0) * VALENCES[word][column])
    return sum(values)


def draw_pairs(prompts: Sequence[str], count: int, chance: random.Random) -> Dataset:
    """Draw pairs of different reviews of one prompt, ordered by a noisy reader.

    P(first of two is preferred) = sigmoid(their difference in gold score / NOISE_SCALE).
    """
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        prompt = chance.choice(prompts)
        chosen = _draft(prompt, chance)
        rejected = _draft(prompt, chance)
        if chosen == rejected:
            continue
        worse = gold_score(prompt, rejected) - gold_score(prompt, chosen)
        if chance.random() >= 1 / (1 + math.exp(worse / NOISE_SCALE)):
            chosen, rejected = rejected, chosen
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(rows)


def _reviews(prompts: Sequence[str], per_prompt: int, chance: random.Random) -> Dataset:
    """Make answers of every quality, which the warm start imitates before RL."""
    rows = []
    for prompt in prompts:
        for _ in range(per_prompt):
            rows.append({"prompt": prompt, "answer": _review(prompt, chance)})
    return Dataset.from_list(rows)


def _review(prompt: str, chance: random.Random) -> str:
    """Write one to four phrases, which mostly praise or mostly blame."""
    mood = chance.choice([-1, 1])
    review = _phrase(prompt, mood, chance)
    for _ in range(chance.randrange(4)):
        review += [chance.choice(CONNECTIVES), *_phrase(prompt, mood, chance)]
    return " ".join([*review, STOP])


def _phrase(prompt: str, mood: int, chance: random.Random) -> list[str]:
    while True:
        [modifier] = chance.choices(["", *MODIFIERS], MODIFIER_ODDS)
        phrase = [chance.choice(list(VALENCES))]
        if modifier:
            phrase.insert(0, modifier)
        if _content(prompt, phrase) * mood > 0 or chance.random() < OFF_MOOD_SHARE:
            return phrase


def _draft(prompt: str, chance: random.Random) -> str:
    """Write a review, sometimes corrupted, since a reward model must see bad form."""
    words = _review(prompt, chance).split()
    if chance.random() < CORRUPTED_SHARE:
        i = chance.randrange(len(words))
        change = chance.choice(["drop", "double", "move the last", "cut", "repeat"])
        if change == "drop":
            del words[i]
        elif change == "double":
            words.insert(i, words[i])
        elif change == "move the last":
            words.insert(i, words.pop())
        elif change == "cut":
            del words[i:]
        else:
            words = [*words[:-1], chance.choice(CONNECTIVES), *words]
    return " ".join(words)
