"""Rewards for the shape of a completion, whatever it says: tags, length, repetition."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_pg.rewards.verifiers.answers import compiled, found
from rlhf_pg.rewards.verifiers.texts import Columns, Scores, Seconds, text_of

Unit = Literal["tokens", "words", "characters"]
Natural = Annotated[int, Field(ge=0)] | None
Positive = Annotated[int, Field(ge=1)]


def units(name: str, unit: Unit, completions: Sequence[Any], ids: Any) -> list[Sequence[Any]]:
    """Return each completion as a sequence of tokens, words or characters.

    Raises:
        ValueError: tokens are wanted, and none are given.
    """
    if unit == "tokens":
        if ids is None:
            raise ValueError(f"reward {name} counts tokens and was given no completion_ids")
        return list(ids)
    texts = map(text_of, completions)
    return [text.lower().split() if unit == "words" else text for text in texts]


def format(
    completions: Sequence[Any],
    ids: Any,
    columns: Columns,
    *,
    tags: tuple[str, ...] = ("think", "answer"),
    opened: bool = False,
    pattern: str | None = None,
    timeout: Seconds = 1.0,
) -> Scores:
    """Reward a completion that consists of tagged parts, each once, in order, with 1, else with 0.

    Args:
        tags: their names; between and around them only blanks may stand.
        opened: the prompt ends with the first tag, as some chat templates have it.
        pattern: regular expression that the whole completion has to fit, in place of tags.
        timeout: seconds that the pattern may take; a completion that takes longer gets 0.
    """
    texts = [text_of(said) for said in completions]
    if pattern is not None:
        compiled(pattern)
        return [float(found("format", pattern, x, True, timeout) is not None) for x in texts]
    if not tags or not all(tags) or len(set(tags)) < len(tags):
        raise ValueError(f"tags must be different names, got {tags}")
    return [float(tagged(f"<{tags[0]}>{text}" if opened else text, tags)) for text in texts]


def tagged(text: str, tags: Sequence[str]) -> bool:
    """Return whether a text is `<tag>...</tag>` for each tag in order, with no tag inside."""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    for opening, closing in zip(marks[::2], marks[1::2], strict=True):
        text = text.lstrip()
        inside, closed, rest = text.removeprefix(opening).partition(closing)
        if not text.startswith(opening) or not closed or any(mark in inside for mark in marks):
            return False
        text = rest
    return not text.strip()


def length(
    completions: Sequence[Any],
    ids: Any,
    columns: Columns,
    *,
    target: Positive | None = None,
    shortest: Natural = None,
    longest: Natural = None,
    slack: Annotated[float, Field(ge=0)] | None = None,
    unit: Unit = "tokens",
) -> Scores:
    """Reward a completion as long as it should be with 1, and down to 0 for others.

        score = max(0, 1 - d / slack), d the distance of the length from [shortest, longest]

    Args:
        target: the length, in place of limits.
        shortest, longest: the limits; one of them suffices.
        slack: distance at which nothing is left of the reward; by default the target, and where
            there are limits, 0: there is no reward beyond them.
        unit: what is counted: "tokens" (with the last one, EOS), "words" or "characters".
    """
    limits = [limit for limit in (shortest, longest) if limit is not None]
    if (target is None) != bool(limits):
        raise ValueError("give either a target or limits (shortest, longest)")
    if limits != sorted(limits):
        raise ValueError(f"shortest ({limits[0]}) must not be above longest ({limits[1]})")
    low, high = (shortest or 0, longest) if target is None else (target, target)
    room = (target or 0) if slack is None else slack

    def score(count: int) -> float:
        beyond = max(low - count, 0 if high is None else count - high, 0)
        return 1.0 if not beyond else max(0.0, 1 - beyond / room) if room else 0.0

    return [score(len(one)) for one in units("length", unit, completions, ids)]


def repetition(
    completions: Sequence[Any],
    ids: Any,
    columns: Columns,
    *,
    ngram_size: Positive = 3,
    max_penalty: Annotated[float, Field(le=0)] = -1.0,
    unit: Unit = "words",
) -> Scores:
    """Penalise repeated n-grams (Yeo et al. 2025, and open-r1).

        score = max_penalty * (1 - distinct n-grams / n-grams)

    It is 0 for a completion shorter than one n-gram.

    Args:
        ngram_size: n, the number of words or tokens that are looked at together.
        max_penalty: score that is approached when all n-grams are the same; at most 0.
        unit: "words" (between blanks, small letters), "characters" or "tokens".
    """

    def score(one: Sequence[Any]) -> float:
        grams = [tuple(one[i : i + ngram_size]) for i in range(len(one) - ngram_size + 1)]
        return max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0

    return [score(one) for one in units("repetition", unit, completions, ids)]
