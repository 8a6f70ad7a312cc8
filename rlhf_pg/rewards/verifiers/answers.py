"""Rewards for answers that can be compared, and for the shape of a completion."""

import json
import re
import unicodedata
from collections import deque
from collections.abc import Sequence
from decimal import Context, Decimal
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_pg.boundary.quoted import quoted, shown
from rlhf_pg.rewards.verifiers.texts import (
    Said,
    Scores,
    Unreadable,
    last_boxed,
    require,
    several,
    warn_once,
)

Tolerance = Annotated[float, Field(ge=0)]
Unit = Literal["tokens", "words", "characters"]
Natural = Annotated[int, Field(ge=0)] | None
Positive = Annotated[int, Field(ge=1)]


def exact(said: Said, *, ignore_case: bool = False, column: str = "answer") -> Scores:
    """Reward an answer that is the truth, letter by letter, with 1, any other with 0.

    Args:
        ignore_case: take capitals for small letters.
        column: with the truth; a list in it holds several right answers.
    """

    def read(truth: Any) -> set[str]:
        return {_normalized(str(one), ignore_case) for one in several(truth)}

    def judge(answers: list[str], truths: list[Any]) -> Scores:
        pairs = zip(answers, truths, strict=True)
        return [float(_normalized(answer, ignore_case) in right) for answer, right in pairs]

    return said.against(column, read, judge)


def _normalized(text: str, ignore_case: bool) -> str:
    """Return a text with single blanks, none at its ends, and one code per character (NFC)."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if ignore_case else text


# ------------------------------------------------------------------------------------- numbers

_BLANKS = "\u00a0\u2009\u202f"
_DIGITS = rf"(?:\d{{1,3}}(?:[,{_BLANKS}]\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_UNSIGNED = rf"[$€£¥]?(?:{_DIGITS})(?:[eE][-+]?\d{{1,4}}(?!\w))?"
# A sign behind a word or a bracket is an operation, or the hyphen of a range.
_NUMBER = re.compile(
    rf"(?<![\w.])((?:(?<![\w)])[-+])?{_UNSIGNED})(?:\s*/\s*([-+]?{_UNSIGNED}))?", re.ASCII
)
_SPELLINGS = str.maketrans({"\u2212": "-", "\u2012": "-", "\u2013": "-", "\ufe63": "-"})
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_IGNORED = re.compile(rf"[,$€£¥\s{_BLANKS}]")
_ROUNDING = Context(prec=60)


def number_in(text: str) -> Decimal | None:
    r"""Return the number that a text gives as its answer; None if there is none.

    That is the first one behind the last `####` (GSM8K), else the last one in the last `\boxed{}`,
    else the last one of all. Thousands may be separated, and a fraction is one number.
    """
    text = text.translate(_SPELLINGS).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    text = _FRACTION.sub(r"\1/\2", text)
    _, marked, behind = text.rpartition("####")
    if marked and (first := _NUMBER.search(behind)):
        return _value(first)
    for part in (last_boxed(text) or "", text):
        if last := deque(_NUMBER.finditer(part), maxlen=1):
            return _value(last[0])
    return None


def _value(match: re.Match[str]) -> Decimal | None:
    above, below = (Decimal(_IGNORED.sub("", group or "1")) for group in match.groups())
    try:
        return above if match[2] is None else _ROUNDING.divide(above, below)
    except ArithmeticError:  # division by zero
        return None


def numeric(
    said: Said, *, abs_tol: Tolerance = 1e-6, rel_tol: Tolerance = 0.0, column: str = "answer"
) -> Scores:
    """Reward an answer whose number is that of the truth with 1, else with 0; see `number_in`.

    Args:
        abs_tol, rel_tol: largest difference, absolute or as a share of the larger number, as in
            `math.isclose`.
        column: with the truth; a list in it holds several right answers.
    """

    def read(truth: Any) -> list[Decimal]:
        numbers = [number_in(str(one)) for one in several(truth)]
        if found := [one for one in numbers if one is not None]:
            return found
        raise Unreadable("there is no number in it")

    def close(a: Decimal, b: Decimal) -> bool:
        share = _ROUNDING.multiply(Decimal(str(rel_tol)), max(abs(a), abs(b)))
        return a == b or abs(_ROUNDING.subtract(a, b)) <= max(Decimal(str(abs_tol)), share)

    def judge(answers: list[str], truths: list[Any]) -> Scores:
        numbers = zip(map(number_in, answers), truths, strict=True)
        return [
            float(x is not None and any(close(x, one) for one in right)) for x, right in numbers
        ]

    return said.against(column, read, judge)


# ------------------------------------------------------------------------------------ patterns

SECONDS = 1.0  # that a search may take, in whatever thread: it may backtrack for ages


def regex(
    said: Said,
    *,
    pattern: str,
    column: str | None = None,
    ignore_case: bool = False,
    whole: bool = False,
) -> Scores:
    """Reward a completion in which a pattern is found with 1, else with 0.

    Args:
        pattern: regular expression, searched in the whole completion.
        column: column with the truth, where finding is not enough: the pattern's first group, or
            all of it if it has none, is then compared with the truth where it is found last.
        ignore_case: take capitals for small letters.
        whole: the pattern has to fit the completion from its first to its last character.
    """
    compiled(pattern, ignore_case)
    found = [_found(pattern, text, whole, ignore_case) for text in said.texts]
    if column is None:
        return [float(one is not None) for one in found]
    scores: Scores = []
    for one, truth in zip(found, said.truths(column), strict=True):
        right = {_normalized(str(x), ignore_case) for x in several(truth)}
        fits = one is not None and _normalized(one, ignore_case) in right
        scores.append(None if truth is None else float(fits))
    return scores


def _found(pattern: str, text: str, whole: bool, ignore_case: bool) -> str | None:
    """Return the first group, or all if there is none, of where a pattern is found last."""
    search, match = compiled(pattern, ignore_case), None
    try:
        if whole:
            match = search.fullmatch(text, timeout=SECONDS)
        else:
            match = next(iter(deque(search.finditer(text, timeout=SECONDS), maxlen=1)), None)
    except TimeoutError:
        warn_once(
            f"reward regex: the pattern {shown(pattern)} takes more than {SECONDS:g} s on a text "
            f"of {len(text)} characters; such a completion gets 0"
        )
    if match is None:
        return None
    return (match[1] or "") if search.groups else str(match[0])


@lru_cache(maxsize=64)
def compiled(pattern: str, ignore_case: bool = False) -> Any:
    """Compile a pattern of the package `regex`, which has Python's syntax and a time limit.

    Raises:
        ValueError: it is not a regular expression.
    """
    import regex as package

    try:
        return package.compile(pattern, package.IGNORECASE if ignore_case else 0)
    except package.error as error:
        raise ValueError(
            f"pattern {shown(pattern)} is not a regular expression: {quoted(str(error))}"
        ) from error


# ----------------------------------------------------------------------------------------- JSON

FENCED = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)```", re.DOTALL)
# What JSON of a model may bring a reader to raise.
BEYOND = (ValueError, RecursionError)


def json_schema(
    said: Said, *, schema: dict[str, Any] | bool | str | None = None, column: str = ""
) -> Scores:
    """Reward an answer that is JSON and that a schema allows with 1, else with 0.

    The answer is the JSON alone, or stands in a fenced block, the last of which counts.

    Args:
        schema: JSON schema for all rows, as an object or as text.
        column: column with a schema for each row, if `schema` is not given. Text is best:
            `datasets` adds to each object the keys of the others, with None, which is ignored.
    """
    if (schema is None) == (not column):
        raise ValueError("give either a schema or the column that has one for each row")
    require("jsonschema", "json")

    def judge(answers: list[str], schemas: list[Any]) -> Scores:
        return [_fits(*pair) for pair in zip(answers, schemas, strict=True)]

    if schema is not None:
        column, rows = "schema", [_read_schema(schema)] * len(said.completions)
        said = said._replace(columns={column: rows})
    return said.against(column, _read_schema, judge)


def _read_schema(truth: Any) -> str:
    """Return a schema as text.

    Raises:
        Unreadable: it is not one.
    """
    import jsonschema

    try:
        schema = json.loads(truth) if isinstance(truth, str) else _without_none(truth)
        newest = jsonschema.Draft202012Validator
        jsonschema.validators.validator_for(schema, newest).check_schema(schema)
        return json.dumps(schema)
    except (jsonschema.SchemaError, *BEYOND) as error:
        why = getattr(error, "message", str(error))
        raise Unreadable(f"it is not a JSON schema: {quoted(why)}") from error


def _fits(answer: str, schema: str) -> float:
    blocks = FENCED.findall(answer)
    try:
        value = json.loads(blocks[-1] if blocks else answer, parse_constant=_refuse)
        return float(_validator(schema).is_valid(value))
    except BEYOND:
        return 0.0


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _without_none(value: Any) -> Any:
    """Return nested objects without the keys that are None."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """Return a validator that fetches nothing."""
    import jsonschema
    import referencing

    plain = json.loads(schema)
    kind = jsonschema.validators.validator_for(plain, jsonschema.Draft202012Validator)
    return kind(plain, registry=referencing.Registry())


# ---------------------------------------------------------------------------------------- shape


def format(said: Said, *, tags: tuple[str, ...] = ("think", "answer")) -> Scores:
    """Reward a completion that consists of tagged parts, each once, in order, with 1, else with 0.

    Args:
        tags: their names; between and around them only blanks may stand.
    """
    if not tags or not all(tags) or len(set(tags)) < len(tags):
        raise ValueError(f"tags must be different names, got {tags}")
    before = f"<{tags[0]}>" * said.opened
    return [_tagged(before + text, tags) for text in said.texts]


def _tagged(text: str, tags: Sequence[str]) -> float:
    """Return 1 if a text is `<tag>...</tag>` for each tag in order, with no tag inside, else 0."""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    for opening, closing in zip(marks[::2], marks[1::2], strict=True):
        text = text.lstrip()
        inside, closed, rest = text.removeprefix(opening).partition(closing)
        if not text.startswith(opening) or not closed or any(mark in inside for mark in marks):
            return 0.0
        text = rest
    return float(not text.strip())


def length(
    said: Said,
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

    return [score(len(one)) for one in _units(said, unit)]


def repetition(
    said: Said,
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

    return [score(one) for one in _units(said, unit)]


def _units(said: Said, unit: Unit) -> list[Sequence[Any]]:
    """Return each completion as a sequence of tokens, words or characters.

    Raises:
        ValueError: tokens are wanted, and none are given.
    """
    if unit != "tokens":
        return [text.lower().split() if unit == "words" else text for text in said.texts]
    if said.ids is None:
        raise ValueError(f"reward {said.reward} counts tokens and was given no completion_ids")
    return list(said.ids)
