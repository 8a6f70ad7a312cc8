"""The logged steps of a run: the choice of steps for a page, and their packed tokens.

A packed step is gzip of: the length of a header (4 bytes, little-endian), the header (JSON), and
arrays of M tokens each, one after another: the entry of the header's vocabulary (4 bytes),
whether the policy chose the token (1 byte), and each column as float16. The bytes of numbers are
in planes, first all lowest bytes, which compresses better.

All texts of models, environments and servers are made visible here: the page gets no control
characters except line breaks.
"""

import gzip
import json
import math
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from rlhf_pg.boundary.quoted import visible
from rlhf_pg.report.run_files import UNREADABLE, RunFiles, half, tokens_file
from rlhf_pg.report.troubles import is_number

MOST_COMPLETIONS = 10_000
MOST_TOKENS = 3_000_000
LONGEST_TEXT = 200_000  # characters of a text without tokens, or of a prompt
LONGEST_EXTRA = 300  # characters of an extra column
OWN = {"step", "prompt_index", "sample", "prompt", "completion", "advantage", "truncated", "error"}

# The numbers of a token in display order; a run has those that it computes. Colours show the sign
# of diverging columns, and the size of the others.
COLUMNS = [
    {"name": name, "label": label, "what": what, "key": key, "diverging": key != "p"}
    for name, label, key, what in (
        ("advantage", "advantage", "a", "advantage of the token, as the loss has it"),
        ("reward", "reward", "r", "scores that end at the token, less the KL penalty"),
        ("log_ratio", "log-ratio", "l", "log-probability before the update less the sampler's"),
        ("kl", "KL", "k", "log-probability before the update less the reference's (k1)"),
        ("teacher", "teacher", "t", "log-probability of the teacher less the policy's"),
        ("value", "value", "v", "the critic's value of what stands before the token"),
        ("sampler_logprob", "log-probability", "p", "log-probability of the sampler"),
    )
]
NAMES = [str(column["name"]) for column in COLUMNS]


class LoggedSteps:
    """The logged steps of a run; tokens are read one step at a time."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.records: dict[int, list[dict[str, Any]]] = {}  # lines of completions.jsonl by step
        names: dict[str, None] = {}
        for record in sorted(files.completions, key=lambda record: int(record["step"])):
            self.records.setdefault(record["step"], []).append(record)
            names |= dict.fromkeys(name for name in record if name.startswith("rewards/"))
        given = files.config.get("reward_weights")
        given = given if isinstance(given, list) and all(map(is_number, given)) else []
        # Weights of the sources of reward by name; 1 if not given, as for penalties, the last.
        self.weights = dict(zip(names, given, strict=False))

    def pack(self, step: int) -> bytes:
        """Pack a step for a page; without tokens it has the texts of its completions."""
        tokens = self.files.tokens(step)
        records = self.records[step]
        header: dict[str, Any] = {"step": step, "tokens": 0, "columns": []}
        arrays: list[bytes] = []
        if tokens is None or tokens.texts is None:
            said = [((x.get("prompt_index"), x.get("sample", i)), x) for i, x in enumerate(records)]
            lengths: list[int | None] = [None] * len(records)
        else:
            by_place = {(x.get("prompt_index"), x.get("sample")): x for x in records}
            places = zip(tokens.prompt_index.tolist(), tokens.sample.tolist(), strict=True)
            said = [(place, by_place.get(place, {})) for place in places]
            lengths = tokens.lengths.tolist()
            # An id may have several texts if a character is spread over tokens.
            entries: dict[tuple[int, str], int] = {}
            pairs = zip(tokens.ids.tolist(), tokens.texts, strict=True)
            entry = [entries.setdefault(pair, len(entries)) for pair in pairs]
            ids, texts = zip(*entries, strict=True) if entries else ((), ())
            header["vocabulary"] = {"ids": ids, "texts": list(map(visible, texts))}
            header["columns"] = [name for name in NAMES if name in tokens.numbers]
            header["tokens"] = len(tokens.ids)
            arrays.append(_planes(np.array(entry, "<u4")))
            arrays.append(tokens.action.astype(np.uint8).tobytes())
            arrays += [_planes(half(tokens.numbers[name])) for name in header["columns"]]
        numbers: dict[Any, int] = {}
        prompts: list[dict[str, Any]] = []
        completions: list[dict[str, Any]] = []
        for ((index, sample), record), length in zip(said, lengths, strict=True):
            if index not in numbers:
                numbers[index] = len(prompts)
                prompts.append({"index": index, "turns": _turns(record.get("prompt"))})
            turns = _turns(record.get("completion")) if length is None else None
            own = {"prompt": numbers[index], "sample": sample, "length": length, "turns": turns}
            completions.append(own | _facts(record, self.weights))
        header |= {"prompts": prompts, "completions": completions}
        text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
        return gzip.compress(b"".join([struct.pack("<I", len(text)), text, *arrays]), 6, mtime=0)

    def summary(self, step: int) -> dict[str, Any]:
        """Return the summary of a step before it is opened: its size, best and worst."""
        totals = [
            (total, record.get("prompt_index"), record.get("sample"))
            for record in self.records[step]
            if (total := _facts(record, self.weights)["total"]) is not None
        ]
        completions = len(self.records[step])
        tokens = 0
        if (path := tokens_file(self.files.directory, step)).is_file():
            with suppress(*UNREADABLE), safe_open(path, "numpy") as file:
                lengths = file.get_tensor("lengths")
                completions = len(lengths)
                tokens = int(lengths.sum())
        return {
            "step": step,
            "completions": completions,
            "tokens": tokens,
            "best": max(totals, key=lambda one: one[0], default=None),
            "worst": min(totals, key=lambda one: one[0], default=None),
        }

    def chosen(self) -> tuple[list[int], str]:
        """Return the steps that fit in a page, and a note if some do not."""
        steps = list(self.records)
        sizes = {step: self.summary(step) for step in steps}
        scored = [step for step in steps if sizes[step]["best"] is not None]
        marked = steps[:1]
        if scored:
            marked.append(max(scored, key=lambda step: float(sizes[step]["best"][0])))
            marked.append(min(scored, key=lambda step: float(sizes[step]["worst"][0])))
        room = MOST_COMPLETIONS
        tokens_left = MOST_TOKENS
        chosen: list[int] = []
        for step in dict.fromkeys([*marked, *reversed(steps)]):
            room -= sizes[step]["completions"]
            tokens_left -= sizes[step]["tokens"]
            if chosen and (room < 0 or tokens_left < 0):
                break
            chosen.append(step)
        note = (
            f"{len(chosen):,} of {len(steps):,} logged steps are in this page: the first, the "
            f"best, the worst and the latest, up to {MOST_COMPLETIONS:,} completions and "
            f"{MOST_TOKENS:,} tokens."
        )
        return sorted(chosen), note if len(chosen) < len(steps) else ""


def _facts(record: Mapping[str, Any], weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the data of a completion other than its tokens."""
    names = [name for name in record if name.startswith("rewards/")]
    scores = {name: record[name] for name in names if is_number(record[name])}
    extra = [
        (visible(name), _text(value, LONGEST_EXTRA))
        for name, value in record.items()
        if name not in OWN and name not in names and value is not None
    ]
    total = math.fsum(weights.get(name, 1.0) * score for name, score in scores.items())
    return {
        "total": total if scores else None,
        "scores": [[visible(n.removeprefix("rewards/")), score] for n, score in scores.items()],
        "advantage": record["advantage"] if is_number(record.get("advantage")) else None,
        "truncated": record.get("truncated") is True,
        "error": _text(record["error"], LONGEST_EXTRA) if record.get("error") else None,
        "extra": extra,
    }


def _turns(said: Any) -> list[list[str]]:
    """Return roles and texts of a chat, or one text without a role; other parts are JSON."""
    turns = []
    for one in said if isinstance(said, list) else [said] if said else []:
        turn = one if isinstance(one, dict) else {"content": one}
        content = turn.get("content") or []
        said = []
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            said.append(text if isinstance(text, str) else _string(part))
        if others := {k: v for k, v in turn.items() if k not in ("role", "content") and v}:
            said.append(_string(others))
        turns.append([visible(str(turn.get("role", ""))), _text("\n".join(said))])
    return turns


def _string(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _text(value: Any, longest: int = LONGEST_TEXT) -> str:
    text = _string(value)
    more = f" ... ({len(text):,} characters)" if len(text) > longest else ""
    return visible(text[:longest]) + more


def _planes(numbers: NDArray[Any]) -> bytes:
    """Return all lowest bytes, then all second bytes, and so on."""
    return numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize).T.tobytes()
