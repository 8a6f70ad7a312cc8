"""Rewards for answers that can be compared as text, as numbers, by a pattern or by a schema."""

import json
import re
import unicodedata
from collections import deque
from collections.abc import Iterator, Sequence
from decimal import Context, Decimal
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from rlhf_pg.boundary.quoted import quoted, shown
from rlhf_pg.rewards.verifiers.texts import (
    Columns,
    Scores,
    Seconds,
    Unreadable,
    against_truths,
    answer_of,
    last_boxed,
    require,
    several,
    text_of,
    truths_in,
    warn_once,
)

Tolerance = Annotated[float, Field(ge=0)]


def exact(
    completions: Sequence[Any],
    ids: Any,
    columns: Columns,
    *,
    ignore_case: bool = False,
    column: str = "answer",
    opened: bool = False,
) -> Scores:
    """Reward an answer that is the truth, letter by letter, with 1, any other with 0.

    Args:
        ignore_case: take capitals for small letters.
        column, opened: see `against_truths`; a list in the column holds several right answers.
    """

    def read(truth: Any) -> set[str]:
        return {normalized(str(one), ignore_case) for one in several(truth)}

    def judge(answers: list[str], truths: list[Any]) -> Scores:
        pairs = zip(answers, truths, strict=True)
        return [float(normalized(answer, ignore_case) in right) for answer, right in pairs]

    return against_truths("exact", completions, columns, column, opened, read, judge)


def normalized(text: str, ignore_case: bool) -> str:
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
    completions: Sequence[Any],
    ids: Any,
    columns: Columns,
    *,
    abs_tol: Tolerance = 1e-6,
    rel_tol: Tolerance = 0.0,
    column: str = "answer",
    opened: bool = False,
) -> Scores:
    """Reward an answer whose number is that of the truth with 1, else with 0; see `number_in`.

    Args:
        abs_tol, rel_tol: largest difference, absolute or as a share of the larger number, as in
            `math.isclose`.
        column, opened: see `against_truths`; a list in the column holds several right answers.
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
        said = map(number_in, answers)
        return [
            float(answer is not None and any(close(answer, one) for one in right))
            for answer, right in zip(said, truths, strict=True)
        ]

    return against_truths("numeric", completions, columns, column, opened, read, judge)


# ------------------------------------------------------------------------------------ patterns


def regex(
    completions: Sequence[Any],
    ids: Any,
    columns: Columns,
    *,
    pattern: str,
    column: str | None = None,
    ignore_case: bool = False,
    whole: bool = False,
    timeout: Seconds = 1.0,
) -> Scores:
    """Reward a completion in which a pattern is found with 1, else with 0.

    Args:
        pattern: regular expression, searched in the whole completion.
        column: column with the truth, where finding is not enough: the pattern's first group, or
            all of it if it has none, is then compared with the truth where it is found last.
        ignore_case: take capitals for small letters.
        whole: the pattern has to fit the completion from its first to its last character.
        timeout: seconds that a completion may take; one that takes longer gets 0, with a warning.
    """
    compiled(pattern, ignore_case)
    said = [found("regex", pattern, text_of(c), whole, timeout, ignore_case) for c in completions]
    if column is None:
        return [float(one is not None) for one in said]
    scores: Scores = []
    for one, truth in zip(said, truths_in("regex", completions, columns, column), strict=True):
        right = {normalized(str(x), ignore_case) for x in several(truth)}
        fits = one is not None and normalized(one, ignore_case) in right
        scores.append(None if truth is None else float(fits))
    return scores


def found(
    name: str, pattern: str, text: str, whole: bool, seconds: float, ignore_case: bool = False
) -> str | None:
    """Return `last`; None with a warning, in the name of a reward, if the pattern is too slow."""
    try:
        return last(pattern, text, whole, seconds, ignore_case)
    except TimeoutError:
        warn_once(
            f"reward {name}: the pattern {shown(pattern)} takes more than {seconds:g} s on a text "
            f"of {len(text)} characters; such a completion gets 0"
        )
        return None


def last(
    pattern: str, text: str, whole: bool, seconds: float, ignore_case: bool = False
) -> str | None:
    """Return the first group, or all if there is none, of where a pattern is found last.

    Args:
        whole: the pattern has to fit the whole text.
        seconds: time that the search may take, in whatever thread: it may backtrack for ages.

    Raises:
        TimeoutError: it takes longer.
    """
    search = compiled(pattern, ignore_case)
    if whole:
        match = search.fullmatch(text, timeout=seconds)
    else:
        match = next(iter(deque(search.finditer(text, timeout=seconds), maxlen=1)), None)
    if match is None:
        return None
    return (match[1] or "") if search.groups else str(match[0])


@lru_cache(maxsize=64)
def compiled(pattern: str, ignore_case: bool = False) -> Any:
    """Compile a pattern of the package `regex`, which has Python's syntax and a time limit.

    Raises:
        ValueError: it is no regular expression.
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
# What JSON or a schema may bring a reader to raise: nests without end, numbers beyond all bounds.
BEYOND = (ValueError, RecursionError, ArithmeticError, TimeoutError)


def json_schema(
    completions: Sequence[Any],
    ids: Any,
    columns: Columns,
    *,
    schema: dict[str, Any] | bool | str | None = None,
    column: str = "",
    opened: bool = False,
    timeout: Seconds = 1.0,
) -> Scores:
    """Reward an answer that is JSON and that a schema allows with 1, else with 0.

    The answer is the JSON alone, or stands in a fenced block, the last of which counts.

    Args:
        schema: JSON schema for all rows, as an object or as text.
        column: column with a schema for each row, if `schema` is not given. Text is best:
            `datasets` adds to each object the keys of the others, with None, which is ignored.
        opened: see `against_truths`.
        timeout: seconds that a pattern in a schema may take on one string.
    """
    if (schema is None) == (not column):
        raise ValueError("give either a schema or the column that has one for each row")
    require("jsonschema", "json")

    def judge(answers: list[str], schemas: list[Any]) -> Scores:
        return [float(_fits(*pair, timeout)) for pair in zip(answers, schemas, strict=True)]

    if schema is None:
        return against_truths(
            "json_schema", completions, columns, column, opened, read_schema, judge
        )
    before = "<think>" if opened else ""
    answers = [answer_of(before + text_of(said)) for said in completions]
    return judge(answers, [read_schema(schema)] * len(answers))


def read_schema(truth: Any) -> str:
    """Return a schema as text, always the same for the same schema.

    Raises:
        Unreadable: it is not one.
    """
    import jsonschema

    try:
        schema = json.loads(truth) if isinstance(truth, str) else _without_none(truth)
        if not isinstance(schema, dict | bool):
            raise Unreadable(f"a JSON schema is an object, got {shown(schema)}")
        newest = jsonschema.Draft202012Validator
        jsonschema.validators.validator_for(schema, newest).check_schema(schema)
        return json.dumps(schema, sort_keys=True)
    except jsonschema.SchemaError as error:
        raise Unreadable(f"it is not a JSON schema: {quoted(error.message)}") from error
    except BEYOND as error:
        raise Unreadable(f"it cannot be read as a JSON schema: {quoted(str(error))}") from error


def _fits(answer: str, schema: str, timeout: float) -> bool:
    blocks = FENCED.findall(answer)
    try:
        value = json.loads(blocks[-1] if blocks else answer, parse_constant=_refuse)
    except BEYOND:
        return False
    from referencing.exceptions import Unresolvable

    try:
        return bool(_validator(schema, timeout).is_valid(value))
    except (Unresolvable, *BEYOND) as error:  # nothing is fetched
        warn_once(f"reward json_schema: a schema cannot be applied: {quoted(str(error))}: 0")
    return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _without_none(value: Any) -> Any:
    """Return nested objects without the keys that are None."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


@lru_cache(maxsize=256)
def _validator(schema: str, timeout: float) -> Any:
    """Return a validator that fetches nothing, and whose patterns have a time limit."""
    import jsonschema
    import referencing

    def fits(pattern: str, text: str) -> bool:
        return last(pattern, text, False, timeout) is not None

    def pattern(_: Any, wanted: str, value: Any, __: Any) -> Iterator[Any]:
        if isinstance(value, str) and not fits(wanted, value):
            yield jsonschema.ValidationError(f"{value!r} does not match {wanted!r}")

    def pattern_properties(validator: Any, wanted: Any, value: Any, __: Any) -> Iterator[Any]:
        for key, inner in wanted.items() if isinstance(value, dict) else ():
            for name in (name for name in value if fits(key, name)):
                yield from validator.descend(value[name], inner, path=name, schema_path=key)

    plain = json.loads(schema)
    kind = jsonschema.validators.validator_for(plain, jsonschema.Draft202012Validator)
    own = {"pattern": pattern, "patternProperties": pattern_properties}
    return jsonschema.validators.extend(kind, own)(plain, registry=referencing.Registry())
