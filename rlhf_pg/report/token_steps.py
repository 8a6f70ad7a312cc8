"""Completions of a step with the numbers of their tokens, packed for the token view of a page.

A packed step is gzip of: the length of a header (4 bytes, little-endian), the header (JSON), and
arrays of M tokens each, one after another: the entry of the header's vocabulary (2 or 4 bytes),
whether the policy chose the token (1 byte), and each column as float16. The bytes of a number lie
in planes, first all lowest bytes, which compress better so.

Everything that a model, an environment or a server has said is made visible here already: what the
page gets has no control characters but line breaks.
"""

import gzip
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_pg.boundary.quoted import visible
from rlhf_pg.report.run_files import COLUMNS, StepTokens
from rlhf_pg.report.troubles import is_number

LONGEST_TEXT = 200_000  # characters of a text without tokens, or of a prompt
LONGEST_EXTRA = 300  # characters of a further column
OWN = {"step", "prompt_index", "sample", "prompt", "completion", "advantage", "truncated", "error"}
WIDE = 1 << 16

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A number that tokens have: its name, what it is, and how it is coloured.

    Attributes:
        label: for readers.
        what: one line.
        key: that chooses it, a letter; "" if only its number does.
        diverging: whether the colour shows the sign; otherwise the size, whatever the sign.
    """

    label: str
    what: str = ""
    key: str = ""
    diverging: bool = True


KNOWN = {
    "advantage": Column("advantage", COLUMNS["advantage"], "a"),
    "reward": Column("reward", COLUMNS["reward"], "r"),
    "log_ratio": Column("log-ratio", COLUMNS["log_ratio"], "l"),
    "kl": Column("KL", COLUMNS["kl"], "k"),
    "entropy": Column("entropy", COLUMNS["entropy"], "e", diverging=False),
    "value": Column("value", COLUMNS["value"], "v"),
    "sampler_logprob": Column("log-probability", COLUMNS["sampler_logprob"], "p", diverging=False),
}


@dataclass(frozen=True, kw_only=True)
class TokenStep:
    """The completions of a step, as the token view shows them.

    Attributes:
        step: its number.
        records: lines of completions.jsonl; those that have `prompt_index` and `sample` are shown
            with their tokens.
        tokens: None if there are none, and the texts of the records are shown.
        note: a line for readers, for example of what was left out.
        weights: of the sources of reward, by name, with which their scores are added up; 1 where
            not given.
    """

    step: int
    records: Sequence[Record] = ()
    tokens: StepTokens | None = None
    note: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """The tokens of all completions; 0 if they are not kept."""
        return 0 if self.tokens is None else len(self.tokens.ids)

    def summary(self) -> dict[str, Any]:
        """Return what a page needs of a step before it is opened: its size, best and worst."""
        totals = [
            (total, record.get("prompt_index"), record.get("sample"))
            for record in self.records
            if (total := total_score(record, self.weights)) is not None
        ]
        count = len(self.records) if self.tokens is None else len(self.tokens.lengths)
        return {
            "step": self.step,
            "completions": count,
            "tokens": self.num_tokens,
            "best": max(totals, key=lambda one: one[0], default=None),
            "worst": min(totals, key=lambda one: one[0], default=None),
        }


def total_score(record: Record, weights: Mapping[str, float]) -> float | None:
    """Return the weighted sum of a completion's scores; None if it has none."""
    scores = _scores(record)
    if not scores:
        return None
    return math.fsum(weights.get(name, 1.0) * score for name, score in scores.items())


def reward_weights(config: Mapping[str, Any], records: Sequence[Record]) -> dict[str, float]:
    """Return the weights of the config by the sources' names, which the records have in order."""
    given = config.get("reward_weights")
    names = list(dict.fromkeys(name for record in records[:100] for name in _sources(record)))
    if not isinstance(given, list) or len(given) != len(names):
        return {}
    return {n: float(w) for n, w in zip(names, given, strict=True) if is_number(w)}


def packed(step: TokenStep) -> bytes:
    """Pack a step for a page."""
    tokens = step.tokens
    header: dict[str, Any] = {"step": step.step, "note": visible(step.note)}
    header |= _completions(step)
    arrays: list[bytes] = []
    header["tokens"] = step.num_tokens
    header["columns"] = [] if tokens is None else _in_order(tokens.numbers)
    if tokens is not None:
        entries, header["vocabulary"] = _vocabulary(tokens)
        header["wide"] = entries.itemsize == 4
        arrays += [_planes(entries), tokens.action.astype(np.uint8).tobytes()]
        arrays += [_planes(_half(tokens.numbers[name])) for name in header["columns"]]
    said = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    return gzip.compress(b"".join([struct.pack("<I", len(said)), said, *arrays]), 6, mtime=0)


def cut(step: TokenStep, most_completions: int, most_tokens: int) -> TokenStep:
    """Return the first prompts of a step, whole groups each, that stay within limits."""
    tokens = step.tokens
    if tokens is None:
        if len(step.records) <= most_completions:
            return step
        note = f"{most_completions:,} of {len(step.records):,} completions are shown."
        return replace(step, records=step.records[:most_completions], note=note)
    count, room = len(tokens.lengths), np.cumsum(tokens.lengths)
    if count <= most_completions and len(tokens.ids) <= most_tokens:
        return step
    kept = min(most_completions, int(np.searchsorted(room, most_tokens, side="right")))
    index = tokens.prompt_index
    whole = [i for i in range(1, kept + 1) if i == count or index[i] != index[i - 1]]
    kept = whole[-1] if whole else kept
    note = f"{kept:,} of {count:,} completions are shown: the page would be too large with all."
    return replace(step, tokens=_first(tokens, kept), note=note)


def _first(tokens: StepTokens, kept: int) -> StepTokens:
    end = int(tokens.lengths[:kept].sum())
    return StepTokens(
        prompt_index=tokens.prompt_index[:kept],
        sample=tokens.sample[:kept],
        lengths=tokens.lengths[:kept],
        ids=tokens.ids[:end],
        action=tokens.action[:end],
        texts=tokens.texts[:end],
        numbers={name: numbers[:end] for name, numbers in tokens.numbers.items()},
    )


def _in_order(names: Iterable[str]) -> list[str]:
    """Return the names of columns, those that every run may have in front."""
    known = list(KNOWN)
    return sorted(names, key=lambda name: known.index(name) if name in known else len(known))


def _completions(step: TokenStep) -> dict[str, Any]:
    """Return the prompts of a step, and its completions in the order of the tokens."""
    numbers: dict[Any, int] = {}
    prompts: list[dict[str, Any]] = []
    completions: list[dict[str, Any]] = []
    for record, key, sample, length in _placed(step):
        if key not in numbers:
            numbers[key] = len(prompts)
            index = key if isinstance(key, int) else None
            prompts.append({"index": index, "turns": _turns(record.get("prompt"))})
        completions.append(
            {
                "prompt": numbers[key],
                "sample": sample,
                "length": length,
                "turns": _turns(record.get("completion")) if length is None else None,
                **_said_of(record, step.weights),
            }
        )
    return {"prompts": prompts, "completions": completions}


def _placed(step: TokenStep) -> Iterator[tuple[Record, Any, int, int | None]]:
    """Yield each completion's record, what is the same for its group, its sample and length."""
    tokens = step.tokens
    if tokens is None:  # an old run does not number its prompts: equal ones are one
        for i, record in enumerate(step.records):
            prompt = json.dumps(record.get("prompt"), sort_keys=True, default=str)
            yield record, record.get("prompt_index", prompt), record.get("sample", i), None
        return
    records = {
        (record.get("prompt_index"), record.get("sample")): record for record in step.records
    }
    places = zip(tokens.prompt_index, tokens.sample, tokens.lengths, strict=True)
    for index, sample, length in places:
        record = records.get((int(index), int(sample)), {})
        yield record, int(index), int(sample), int(length)


def _said_of(record: Record, weights: Mapping[str, float]) -> dict[str, Any]:
    """Return what is known of a completion beside its tokens."""
    extra = {
        visible(name): _short(value)
        for name, value in record.items()
        if name not in OWN and not name.startswith("rewards/") and value is not None
    }
    return {
        "total": total_score(record, weights),
        "scores": [[visible(name), score] for name, score in _scores(record).items()],
        "advantage": record["advantage"] if is_number(record.get("advantage")) else None,
        "truncated": record.get("truncated") is True,
        "error": _short(record["error"]) if record.get("error") else None,
        "extra": list(extra.items()),
    }


def _sources(record: Record) -> list[str]:
    return [name.removeprefix("rewards/") for name in record if name.startswith("rewards/")]


def _scores(record: Record) -> dict[str, float]:
    scores = {name: record[f"rewards/{name}"] for name in _sources(record)}
    return {name: float(score) for name, score in scores.items() if is_number(score)}


def _turns(prompt: Any) -> list[list[str]]:
    """Return the roles and texts of a chat; of a plain text one pair without a role."""
    if isinstance(prompt, str):
        return [["", _text(prompt)]]
    if not isinstance(prompt, list):
        return [] if prompt is None else [["", _text(_json(prompt))]]
    return [
        [visible(str(turn.get("role", ""))), _text(_content(turn))]
        if isinstance(turn, dict)
        else ["", _text(_json(turn))]
        for turn in prompt
    ]


def _content(turn: Mapping[str, Any]) -> str:
    """Return all that a message says: its text or parts, and calls of tools."""
    content = turn.get("content")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    texts = [
        str(part["text"])
        if isinstance(part, dict) and "text" in part
        else part
        if isinstance(part, str)
        else _json(part)
        for part in parts
    ]
    others = {k: v for k, v in turn.items() if k not in ("role", "content") and v}
    return "\n".join([*texts, *([_json(others)] if others else [])])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _text(text: str, longest: int = LONGEST_TEXT) -> str:
    more = f" ... ({len(text):,} characters)" if len(text) > longest else ""
    return visible(text[:longest]) + more


def _short(value: Any) -> str:
    return _text(value if isinstance(value, str) else _json(value), LONGEST_EXTRA)


def _vocabulary(tokens: StepTokens) -> tuple[NDArray[Any], dict[str, list[Any]]]:
    """Return the entry of each token, and the entries: ids with texts, as one id may have several
    where a character is spread over tokens.
    """
    entries: dict[tuple[int, str], int] = {}
    pairs = zip(tokens.ids.tolist(), tokens.texts, strict=True)
    index = [entries.setdefault(pair, len(entries)) for pair in pairs]
    kind = np.uint16 if len(entries) <= WIDE else np.uint32
    told: dict[str, list[Any]] = {
        "ids": [one for one, _ in entries],
        "texts": [visible(text) for _, text in entries],
    }
    return np.array(index, kind), told


def _half(numbers: NDArray[Any]) -> NDArray[Any]:
    largest = float(np.finfo(np.float16).max)
    return np.clip(numbers.astype(np.float64), -largest, largest).astype(np.float16)


def _planes(numbers: NDArray[Any]) -> bytes:
    """Return all lowest bytes, then all second ones, and so on."""
    own = np.ascontiguousarray(numbers.astype(numbers.dtype.newbyteorder("<")))
    return own.view(np.uint8).reshape(len(own), own.itemsize).T.tobytes()
