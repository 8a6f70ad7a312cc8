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
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from rlhf_pg.boundary.quoted import visible
from rlhf_pg.data.row_files import UNREADABLE, half
from rlhf_pg.report.run_files import (
    OWN_COLUMNS,
    Record,
    RunFiles,
    tokens_file,
)
from rlhf_pg.report.troubles import MetricsLine, is_number

MOST_COMPLETIONS = 10_000
MOST_TOKENS = 3_000_000
LONGEST_TEXT = 200_000  # characters of a text without tokens, or of a prompt
LONGEST_EXTRA = 300  # characters of an extra column

# The numbers of a token in display order; a run has those that it computes. Colours show the sign
# of diverging columns, and the size of the others.
COLUMNS = [
    {"name": name, "label": label, "what": what, "key": key, "diverging": key != "p"}
    for name, label, key, what in (
        ("advantage", "advantage", "a", "advantage of the token, as the loss has it"),
        ("reward", "reward", "r", "scores that end at the token, less the KL penalty"),
        (
            "log_ratio",
            "log-ratio",
            "l",
            "log-probability before the update less the sampler's",
        ),
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
        self.records: dict[int, list[Record]] = {}  # lines of completions.jsonl by step
        names: dict[str, None] = {}
        for record in sorted(files.completions, key=itemgetter("step")):
            self.records.setdefault(record["step"], []).append(record)
            for name in record:
                if name.startswith("rewards/"):
                    names[name] = None
        weights = files.config.get("reward_weights")
        if not isinstance(weights, list) or not all(map(is_number, weights)):
            weights = []
        # Weights of the sources of reward by name; 1 if not given, as for penalties, the last.
        self.weights = dict(zip(names, weights, strict=False))

    def pack(self, step: int) -> bytes:
        """Pack a step for a page; without tokens it has the texts of its completions."""
        tokens = self.files.tokens(step)
        records = self.records[step]
        header: Record = {"step": step, "tokens": 0, "columns": []}
        arrays: list[bytes] = []
        if tokens is None or tokens.texts is None:
            identities = [
                (record.get("prompt_index"), record.get("sample", i))
                for i, record in enumerate(records)
            ]
            lengths: list[int | None] = [None] * len(records)
        else:
            by_identity = {
                (record.get("prompt_index"), record.get("sample")): record for record in records
            }
            samples = tokens.sample.tolist()
            identities = list(zip(tokens.prompt_index.tolist(), samples, strict=True))
            records = [by_identity.get(identity, {}) for identity in identities]
            lengths = tokens.lengths.tolist()
            # An id may have several texts if a character is spread over tokens.
            vocabulary: dict[tuple[int, str], int] = {}
            entries = []
            for pair in zip(tokens.ids.tolist(), tokens.texts, strict=True):
                entries.append(vocabulary.setdefault(pair, len(vocabulary)))
            header["vocabulary"] = {
                "ids": [number for number, _ in vocabulary],
                "texts": [visible(text) for _, text in vocabulary],
            }
            header["tokens"] = len(entries)
            arrays.append(_planes(np.array(entries, "<u4")))
            arrays.append(tokens.action.astype(np.uint8).tobytes())
            for name in NAMES:
                if name in tokens.numbers:
                    header["columns"].append(name)
                    arrays.append(_planes(half(tokens.numbers[name])))
        prompt_numbers: dict[Any, int] = {}
        prompts: list[Record] = []
        completions = []
        for (index, sample), record, length in zip(identities, records, lengths, strict=True):
            if index not in prompt_numbers:
                prompt_numbers[index] = len(prompts)
                prompts.append({"index": index, "turns": _turns(record.get("prompt"))})
            completion = {
                "prompt": prompt_numbers[index],
                "sample": sample,
                "length": length,
                "turns": None,
            }
            if length is None:
                completion["turns"] = _turns(record.get("completion"))
            completions.append(completion | _facts(record, self.weights))
        header["prompts"] = prompts
        header["completions"] = completions
        text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
        packed = b"".join([struct.pack("<I", len(text)), text, *arrays])
        return gzip.compress(packed, 6, mtime=0)

    def summary(self, step: int) -> Record:
        """Return the summary of a step before it is opened: its size, best and worst."""
        records = self.records[step]
        totals = []
        for record in records:
            total = _facts(record, self.weights)["total"]
            if total is not None:
                totals.append((total, record.get("prompt_index"), record.get("sample")))
        completions = len(records)
        tokens = 0
        path = tokens_file(self.files.directory, step)
        if path.is_file():
            with suppress(*UNREADABLE), safe_open(path, "numpy") as file:
                lengths = file.get_tensor("lengths")
                completions = len(lengths)
                tokens = int(lengths.sum())
        return {
            "step": step,
            "completions": completions,
            "tokens": tokens,
            "best": max(totals, key=itemgetter(0), default=None),
            "worst": min(totals, key=itemgetter(0), default=None),
        }

    def chosen(self) -> tuple[list[int], str]:
        """Return the steps that fit in a page, and a note if some do not."""
        steps = list(self.records)
        sizes = {step: self.summary(step) for step in steps}
        scored = [size for size in sizes.values() if size["best"]]
        marked = steps[:1]
        if scored:
            best = max(scored, key=lambda size: size["best"][0])
            worst = min(scored, key=lambda size: size["worst"][0])
            marked += [best["step"], worst["step"]]
        room = MOST_COMPLETIONS
        tokens_left = MOST_TOKENS
        chosen: list[int] = []
        for step in dict.fromkeys([*marked, *reversed(steps)]):
            room -= sizes[step]["completions"]
            tokens_left -= sizes[step]["tokens"]
            if chosen and (room < 0 or tokens_left < 0):
                break
            chosen.append(step)
        note = ""
        if len(chosen) < len(steps):
            note = (
                f"{len(chosen):,} of {len(steps):,} logged steps are in this page: of the first, "
                "the best, the worst and the latest, in this order, as many as have up to "
                f"{MOST_COMPLETIONS:,} completions and {MOST_TOKENS:,} tokens."
            )
        return sorted(chosen), note


def _facts(record: MetricsLine, weights: Mapping[str, float]) -> Record:
    """Return the data of a completion other than its tokens."""
    scores = []
    terms = []
    extra = []
    for name, value in record.items():
        if name.startswith("rewards/"):
            if is_number(value):
                scores.append([visible(name.removeprefix("rewards/")), value])
                terms.append(weights.get(name, 1.0) * value)
        elif name not in OWN_COLUMNS - {"turns"} and value is not None:
            extra.append((visible(name), _text(value, LONGEST_EXTRA)))
    advantage = record.get("advantage")
    error = record.get("error")
    return {
        "total": math.fsum(terms) if terms else None,
        "scores": scores,
        "advantage": advantage if is_number(advantage) else None,
        "truncated": record.get("truncated") is True,
        "error": _text(error, LONGEST_EXTRA) if error else None,
        "extra": extra,
    }


def _turns(messages: Any) -> list[list[str]]:
    """Return roles and texts of a chat, or one text without a role; other parts are JSON."""
    if not isinstance(messages, list):
        messages = [messages] if messages else []
    turns = []
    for message in messages:
        if not isinstance(message, dict):
            message = {"content": message}
        parts = message.get("content") or []
        if not isinstance(parts, list):
            parts = [parts]
        texts = []
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            texts.append(text if isinstance(text, str) else _string(part))
        others = {}
        for key, value in message.items():
            if value and key not in ("role", "content"):
                others[key] = value
        if others:
            texts.append(_string(others))
        role = str(message.get("role", ""))
        turns.append([visible(role), _text("\n".join(texts))])
    return turns


def _string(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _text(value: Any, longest: int = LONGEST_TEXT) -> str:
    text = _string(value)
    shown = visible(text[:longest])
    if len(text) > longest:
        shown += f" ... ({len(text):,} characters)"
    return shown


def _planes(numbers: NDArray[Any]) -> bytes:
    """Return all lowest bytes, then all second bytes, and so on."""
    return numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize).T.tobytes()
