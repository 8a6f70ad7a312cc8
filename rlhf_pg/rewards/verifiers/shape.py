"""Rewards for the shape of a completion, whatever it says: tags, length, repetition."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from rlhf_pg.config.fields import config, option
from rlhf_pg.rewards.verifiers.patterns import TooSlow, compiled
from rlhf_pg.rewards.verifiers.verifier import Scores, Verifier, warn_once

Unit = Literal["tokens", "words", "characters"]


def units(
    kind: str, unit: Unit, texts: Sequence[str], ids: Sequence[Sequence[int]] | None
) -> list[Sequence[Any]]:
    """Return each completion as a sequence of tokens, words or characters.

    Raises:
        ValueError: tokens are wanted, and none are given.
    """
    if unit == "tokens" and ids is None:
        raise ValueError(f"reward {kind} counts tokens and was given no completion_ids")
    if unit == "tokens":
        return list(ids or [])
    return [text.lower().split() if unit == "words" else text for text in texts]


@config
class Format(Verifier):
    """A reward of 1 for a completion that consists of tagged parts, each once, in order, else 0.

    Args:
        tags: their names; between and around them only blanks may stand.
        opened: the prompt ends with the first tag, as some chat templates have it.
        pattern: regular expression that the whole completion has to fit, in place of tags.
        timeout: seconds that the pattern may take; a completion that takes longer gets 0.
    """

    kind: ClassVar[str] = "format"
    tags: tuple[str, ...] = ("think", "answer")
    opened: bool = False
    pattern: str | None = None
    timeout: float = option(1.0, gt=0)

    def __post_init__(self) -> None:
        if self.pattern is not None:
            compiled(self.pattern)
        elif not self.tags or not all(self.tags) or len(set(self.tags)) < len(self.tags):
            raise ValueError(f"tags must be different names, got {self.tags}")

    def scores(
        self,
        texts: Sequence[str],
        ids: Sequence[Sequence[int]] | None,
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        return [float(self._fits(text)) for text in texts]

    def _fits(self, text: str) -> bool:
        if self.pattern is None:
            return tagged(f"<{self.tags[0]}>{text}" if self.opened else text, self.tags)
        try:
            return compiled(self.pattern).last(text, True, self.timeout) is not None
        except TooSlow as error:
            warn_once(f"reward {self.kind}: {error}; such a completion gets 0")
            return False


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


@config
class Length(Verifier):
    """A reward of 1 for a completion as long as it should be, and down to 0 for others.

        score = max(0, 1 - d / slack), d the distance of the length from [shortest, longest]

    Args:
        target: the length, in place of limits.
        shortest, longest: the limits; one of them suffices.
        slack: distance at which nothing is left of the reward; by default the target, and where
            there are limits, 0: there is no reward beyond them.
        unit: what is counted: "tokens" (with the last one, EOS), "words" or "characters".
    """

    kind: ClassVar[str] = "length"
    target: int | None = option(None, ge=1)
    shortest: int | None = option(None, ge=0)
    longest: int | None = option(None, ge=0)
    slack: float | None = option(None, ge=0)
    unit: Unit = "tokens"

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.shortest, self.longest) if limit is not None]
        if (self.target is None) != bool(limits):
            raise ValueError("give either a target or limits (shortest, longest)")
        if limits != sorted(limits):
            raise ValueError(f"shortest ({limits[0]}) must not be above longest ({limits[1]})")

    def scores(
        self,
        texts: Sequence[str],
        ids: Sequence[Sequence[int]] | None,
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        return [self.score(len(counted)) for counted in units(self.kind, self.unit, texts, ids)]

    def score(self, length: int) -> float:
        """Return the reward of a length."""
        low = self.shortest or 0 if self.target is None else self.target
        high = self.longest if self.target is None else self.target
        beyond = max(low - length, 0 if high is None else length - high, 0)
        slack = (self.target or 0) if self.slack is None else self.slack
        if not beyond:
            return 1.0
        return max(0.0, 1 - beyond / slack) if slack else 0.0


@config
class Repetition(Verifier):
    """A penalty for repeated n-grams (Yeo et al. 2025, and open-r1).

        score = max_penalty * (1 - distinct n-grams / n-grams)

    It is 0 for a completion shorter than one n-gram.

    Args:
        ngram_size: n, the number of words or tokens that are looked at together.
        max_penalty: score that is approached when all n-grams are the same; at most 0.
        unit: "words" (between blanks, small letters), "characters" or "tokens".
    """

    kind: ClassVar[str] = "repetition"
    ngram_size: int = option(3, ge=1)
    max_penalty: float = option(-1.0, le=0)
    unit: Unit = "words"

    def scores(
        self,
        texts: Sequence[str],
        ids: Sequence[Sequence[int]] | None,
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        return [self.score(counted) for counted in units(self.kind, self.unit, texts, ids)]

    def score(self, counted: Sequence[Any]) -> float:
        """Return the penalty of a sequence of words, characters or tokens."""
        n = self.ngram_size
        grams = [tuple(counted[i : i + n]) for i in range(len(counted) - n + 1)]
        return self.max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0
