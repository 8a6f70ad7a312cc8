"""Rewards for answers that can be compared, and for the shape of a completion."""

import json
import logging
import re
import unicodedata
from collections import deque
from collections.abc import Sequence
from decimal import Decimal
from functools import cache, lru_cache
from typing import Annotated, Any

from pydantic import Field

from rlhf_pg.boundary.pool import NotStarted, Pool
from rlhf_pg.boundary.quoted import quote, show
from rlhf_pg.boundary.user_code import CallFailed, once_per_process
from rlhf_pg.rewards.verifiers.texts import (
    Count,
    Positive,
    Seconds,
    Unreadable,
    as_list,
    cores_of_process,
    last_boxed,
    require,
    warn_once,
)

NotNegative = Annotated[float, Field(ge=0)]


def exact(answer: str, truth: Any, *, ignore_case: bool = False, column: str = "answer") -> float:
    """Reward an answer that equals the truth, except for whitespace, with 1, else 0.

    The truth 4.0, a number, is both 4.0 and 4.
    """

    def normalize(text: str) -> str:
        text = " ".join(unicodedata.normalize("NFC", text).split())
        return text.casefold() if ignore_case else text

    right = []
    for value in as_list(truth):
        right.append(normalize(str(value)))
        if isinstance(value, float) and value.is_integer():
            right.append(str(int(value)))
    return float(normalize(answer) in right)


# ------------------------------------------------------------------------------------- numbers

_BLANKS = "\u00a0\u2009\u202f"
_DIGITS = rf"(?:\d{{1,3}}(?:[,{_BLANKS}]\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_UNSIGNED = rf"[$€£¥]?(?:{_DIGITS})(?:[eE][-+]?\d{{1,4}}(?!\w))?"
# A sign after a word or a bracket is an operator, or the hyphen of a range.
_NUMBER = re.compile(
    rf"(?<![\w.])((?:(?<![\w)])[-+])?{_UNSIGNED})(?:\s*/\s*([-+]?{_UNSIGNED}))?", re.ASCII
)
_SPELLINGS = str.maketrans({"\u2212": "-", "\u2012": "-", "\u2013": "-", "\ufe63": "-"})
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_IGNORED = re.compile(rf"[,$€£¥\s{_BLANKS}]")


def number_in(text: str) -> Decimal | None:
    r"""Return the number that a text gives as its answer; None if there is none.

    It is the first number after the last `####` (GSM8K), else the last one in the last `\boxed{}`,
    else the last one of the text. Thousands may be separated, and a fraction is one number.
    """
    text = text.translate(_SPELLINGS).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    text = _FRACTION.sub(r"\1/\2", text)
    _, marked, behind = text.rpartition("####")
    match = _NUMBER.search(behind) if marked else None
    for part in (last_boxed(text) or "", text):
        if match is None:
            match = next(iter(deque(_NUMBER.finditer(part), maxlen=1)), None)
    if match is None:
        return None
    above, below = (Decimal(_IGNORED.sub("", group or "1")) for group in match.groups())
    try:
        if match[2] is None:
            return above
        return above / below
    except ArithmeticError:  # division by zero
        return None


def numeric(
    answer: str, truth: Any, *, abs_tol: NotNegative = 1e-6, column: str = "answer"
) -> float:
    """Reward an answer with the same number as the truth with 1, else 0; see `number_in`."""
    truths = [number for text in as_list(truth) if (number := number_in(str(text))) is not None]
    if not truths:
        raise Unreadable("there is no number in it")
    number = number_in(answer)
    if number is None:
        return 0.0
    most = Decimal(str(abs_tol))
    return float(any(abs(number - right) <= most for right in truths))


# ---------------------------------------------------------------------------------- mathematics

LONGEST = 10_000  # characters that are read at a completion's end
MEMORY = 4 << 30  # memory limit of a process in bytes
LATEX = re.compile(r"\\boxed|\\\(|\\\[|\$[^$]+\$")


@once_per_process
def workers() -> Pool:
    return Pool(cores_of_process(), MEMORY, _get_ready)


def _get_ready() -> None:
    """Import the slow package in a new process, before the timeout of a comparison starts."""
    import math_verify  # noqa: F401

    logging.disable(logging.CRITICAL)


def math(
    answer: str, truth: Any, *, boxed: bool = False, timeout: Seconds = 5.0, column: str = "answer"
) -> float:
    r"""Reward an answer that is mathematically equal to the truth with 1, else 0, by math-verify.

    `\boxed{}` takes precedence, then what follows the last `####`; several boxes are one set.

    Args:
        boxed: only `\boxed{}` counts; otherwise any formula or number in the answer.
        timeout: seconds for one comparison; one that takes longer gives 0.
        column: with the truth: an expression, or a solution with its answer boxed or after `####`.
    """
    require("math_verify", "math")
    pool = workers()  # made by the call that checks the options, not by many threads at once
    golds = [text for one in as_list(truth) if (text := str(one)).strip()]
    score = None
    try:
        if golds:
            asked = (golds, answer[-LONGEST:], boxed)
            score = pool.schedule(compare, *asked, timeout=timeout).result()
    except NotStarted:
        raise
    except CallFailed:  # timed out, or the process died
        return 0.0
    if score is None:
        raise Unreadable("it cannot be parsed")
    return float(score)


def compare(golds: list[str], answer: str, boxed: bool) -> float | None:
    """Return 1 if an answer is one of the golds, else 0; None if no gold can be parsed.

    SymPy may take very long, in C code that no exception interrupts.
    """
    from math_verify import verify

    parsed_golds = [parsed for gold in golds if (parsed := _parse_gold(gold))]
    if not parsed_golds:
        return None
    answer = answer.replace("\u2212", "-")
    _, marks, behind = answer.rpartition("####")
    try:
        parsed_answer = []
        if marks and "\\boxed{" not in answer:
            # By itself math-verify prefers what follows words such as "answer".
            parsed_answer = _parse(behind, boxed)
        if not parsed_answer:
            parsed_answer = _parse(answer, boxed)
        return float(
            any(verify(gold, parsed_answer, timeout_seconds=None) for gold in parsed_golds)
        )
    except Exception:
        return 0.0


@lru_cache(maxsize=256)
def _parse_gold(gold: str) -> list[Any]:
    """Parse a truth: an expression alone, or a solution with its answer boxed or after `####`."""
    gold = gold.rpartition("####")[2].strip().replace("\u2212", "-")
    try:
        parsed = _parse(gold, False) if LATEX.search(gold) else []
        return parsed or _parse(f"\\boxed{{{gold}}}", True)
    except Exception:
        return []


def _parse(text: str, boxed: bool) -> list[Any]:
    """Parse a text by math-verify; `\\boxed{}` takes precedence, or with `boxed` alone counts."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if boxed and "\\boxed{" not in text:
        return []
    latex = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=not boxed)
    kinds = [latex] if boxed else [latex, ExprExtractionConfig()]
    return list(parse(text, kinds, parsing_timeout=None))


# ------------------------------------------------------------------------------- patterns and JSON

SECONDS = 1.0  # time limit of a search, which may backtrack for very long
FENCED = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)```", re.DOTALL)


def regex(text: str, *, pattern: str, ignore_case: bool = False, whole: bool = False) -> float:
    """Reward a completion in which a pattern is found (`whole`: that it matches) with 1, else 0."""
    search = "fullmatch" if whole else "search"
    import regex as package  # Python's syntax with a time limit

    find = getattr(package, search)
    flags = package.IGNORECASE if ignore_case else 0
    try:
        return float(find(pattern, text, flags, timeout=SECONDS) is not None)
    except package.error as error:
        raise ValueError(
            f"pattern {show(pattern)} is not a regular expression: {quote(str(error))}"
        ) from error
    except TimeoutError:
        warn_once(
            f"reward regex: the pattern {show(pattern)} takes more than {SECONDS:g} s on a text "
            f"of {len(text)} characters; such a completion gets 0"
        )
        return 0.0


def json_schema(answer: str, *, schema: dict[str, Any]) -> float:
    """Reward an answer that is JSON and valid by a JSON schema with 1, else 0.

    The answer is JSON alone, or the last fenced block. References in the schema are not fetched.
    """
    require("jsonschema", "json")
    validator = schema_validator(json.dumps(schema, default=str))

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    blocks = FENCED.findall(answer)
    try:
        value = json.loads(blocks[-1] if blocks else answer, parse_constant=refuse)
        return float(validator.is_valid(value))
    except (ValueError, RecursionError, TimeoutError):  # including too deep nesting
        return 0.0


@cache
def schema_validator(text: str) -> Any:
    """Return the validator of a schema; ValueError if the schema itself is invalid."""
    import jsonschema
    import referencing
    import regex as package

    def pattern(_: Any, pattern: str, value: Any, schema: Any) -> Any:  # with a time limit
        if isinstance(value, str) and not package.search(pattern, value, timeout=SECONDS):
            yield jsonschema.ValidationError(f"no match of {pattern}")

    schema = json.loads(text)
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"schema is not a JSON schema: {quote(error.message)}") from error
    kind = jsonschema.validators.extend(kind, {"pattern": pattern})
    return kind(schema, registry=referencing.Registry())


# ---------------------------------------------------------------------------------------- shape


def format(text: str, opened: bool, *, tags: tuple[str, ...] = ("think", "answer")) -> float:
    """Reward a completion that consists of tagged parts, each once and in order, with 1, else 0.

    Only whitespace may be between and around them.
    """
    if not tags or not all(tags) or len(set(tags)) < len(tags):
        raise ValueError(f"tags must be different names, got {tags}")
    marks = [(f"<{tag}>", f"</{tag}>") for tag in tags]
    if opened:
        text = marks[0][0] + text
    for opening, closing in marks:
        text = text.lstrip()
        inside, closed, remainder = text.removeprefix(opening).partition(closing)
        is_nested = any(mark in inside for pair in marks for mark in pair)
        if not text.startswith(opening) or not closed or is_nested:
            return 0.0
        text = remainder
    return float(not text.strip())


def length(
    ids: Sequence[int],
    *,
    shortest: Count = 0,
    longest: Count | None = None,
    slack: NotNegative = 0.0,
) -> float:
    """Reward a completion with a length within limits with 1, falling to 0 outside them.

        score = max(0, 1 - d / slack), d the distance of the length from [shortest, longest]

    The limits are in tokens, including EOS; one of them is enough. With a slack of 0 the reward
    outside them is 0.
    """
    if not shortest and longest is None:
        raise ValueError("give limits: shortest, longest or both")
    if longest is not None and shortest > longest:
        raise ValueError(f"shortest ({shortest}) must not be above longest ({longest})")
    beyond = max(shortest - len(ids), 0 if longest is None else len(ids) - longest, 0)
    if slack:
        return max(0.0, 1 - beyond / slack)
    return float(not beyond)


def repetition(
    text: str, *, ngram_size: Positive = 3, max_penalty: Annotated[float, Field(le=0)] = -1.0
) -> float:
    """Penalise repeated n-grams of words (Yeo et al. 2025, and open-r1).

        score = max_penalty * (1 - distinct n-grams / n-grams)

    Words are separated by whitespace, and case is ignored. The score is 0 for a completion shorter
    than one n-gram, and approaches `max_penalty` if all n-grams are the same.
    """
    words = text.lower().split()
    grams = [tuple(words[i : i + ngram_size]) for i in range(len(words) - ngram_size + 1)]
    if grams:
        return max_penalty * (1 - len(set(grams)) / len(grams))
    return 0.0
