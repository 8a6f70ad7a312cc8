"""The files of a run, and the record of a step.

Beside `config.yaml` and `metrics.jsonl` a run directory has

- `trace.jsonl`: a line for every start of the run (`Start`), every step and every checkpoint.
- `tokens/step-00000010.safetensors`: the completions that a step trained on (`StepTokens`).
- `completions.jsonl`: every completion of each `log_completions_steps`-th step, for readers.

Shapes: N completions of a step over all processes in the order prompt * n + sample, M their tokens,
one completion after another, K sources of reward.
"""

import importlib.metadata
import json
import logging
import math
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rlhf_pg.boundary.input_files import MOST_LINES, read_file, read_yaml
from rlhf_pg.boundary.output_files import open_own, write_file
from rlhf_pg.boundary.quoted import quote, tell
from rlhf_pg.data.row_files import UNREADABLE, StepTokens
from rlhf_pg.report.troubles import MetricsLine, is_number

logger = logging.getLogger(__name__)

Record = dict[str, Any]  # a line of a file of JSON lines, or another object
METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"
TRACE = "trace.jsonl"
OWN_COLUMNS = {  # the run's own columns of completions.jsonl
    "step",
    "prompt_index",
    "sample",
    "prompt",
    "completion",
    "advantage",
    "truncated",
    "turns",
    "error",
}
# What lines of trace.jsonl and completions.jsonl have; lists and objects hold texts.
KINDS: dict[str, type] = {
    "processes": int,
    "num_prompts": int,
    "other_tokens": int,
    "prompt_index": int,
    "sample": int,
    "backend": str,
    "device": str,
    "versions": dict,
    "weights": dict,
    "sources": list,
}
OF_A_START = ("versions", "processes", "backend", "device")
OF_A_STEP = ("sources", "num_prompts", "other_tokens")
OF_A_RUN = ("config.yaml", METRICS)
TOKENS = "tokens"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets")
ALSO = ("tokenizers", "safetensors", "numpy", "deepspeed", "vllm", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of a run, new or resumed: its environment and initial weights.

    `weights` are fingerprints of each tensor of the models, by name (a critic's begin with
    "critic.").
    """

    step: int  # steps taken before
    versions: Mapping[str, str]  # of Python and of packages, by name
    processes: int
    backend: str  # DDP, FSDP2, ZeRO-2 and so on
    device: str  # name of the accelerator, or "cpu" with the kind of processor
    weights: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The record of a step; complete only on the main process."""

    trace: MetricsLine
    tokens: StepTokens | None = None  # of all completions
    greedy: StepTokens | None = None  # of the greedy completions that an estimator needs
    completions: Sequence[MetricsLine] = ()  # for completions.jsonl, if due
    shown: Sequence[int] = ()  # indices of those for the console


@dataclass(frozen=True)
class RunFiles:
    """The directory of a run; any file may be missing."""

    directory: Path

    @cached_property
    def config(self) -> Record:
        """The resolved config; empty if there is none. ValueError if it is not one."""
        file = self.directory / "config.yaml"
        if os.path.lexists(file):
            return read_yaml(file)
        return {}

    @cached_property
    def metrics(self) -> list[Record]:
        """The line of each step: numbers, or None."""
        lines = read(self.directory / METRICS)
        for line in lines:
            for key, value in line.items():
                if not is_number(value):
                    line[key] = None
        return lines

    @cached_property
    def completions(self) -> list[Record]:
        """The completions of logged steps."""
        return read(self.directory / COMPLETIONS, KINDS)

    @cached_property
    def _trace(self) -> list[Record]:
        return read(self.directory / TRACE, KINDS)

    @property
    def starts(self) -> list[Start]:
        """The starts of the run: one, and another for each resume."""
        starts = []
        for line in self._trace:
            if _has(line, OF_A_START):
                names = [field.name for field in fields(Start) if _has(line, [field.name])]
                starts.append(Start(**{name: line[name] for name in names}))
        return starts

    @cached_property
    def traces(self) -> dict[int, Record]:
        """The line of each step in trace.jsonl."""
        return {line["step"]: line for line in self._trace if _has(line, OF_A_STEP)}

    @cached_property
    def weights(self) -> dict[int, dict[str, str]]:
        """Fingerprints of the trained tensors, by step of the checkpoint."""
        weights = {}
        for line in self._trace:
            if _has(line, ["weights"]) and "versions" not in line:
                weights[line["step"]] = line["weights"]
        return weights

    def tokens(self, step: int, greedy: bool = False) -> StepTokens | None:
        """Return the record of a step's completions; None if there is none that can be read."""
        file = tokens_file(self.directory, step, greedy)
        if not file.is_file():
            return None
        try:
            return StepTokens.load(file)
        except UNREADABLE as error:
            logger.warning("%s is left out: %s", quote(str(file)), tell(error))
            return None


def run_of(name: str) -> RunFiles:
    """Return the run in a directory; ValueError if there is none, or its config is not YAML."""
    run = RunFiles(Path(name))
    if not run.directory.exists():
        raise ValueError(f"{quote(name)} does not exist: pass the output_dir of a run")
    if not any((run.directory / file).is_file() for file in OF_A_RUN):
        files = " or ".join(OF_A_RUN)
        message = f"{quote(name)} is not a directory of a run, which has {files}"
        inside = {path.parent.name for x in OF_A_RUN for path in run.directory.glob(f"*/{x}")}
        if inside:
            message += f"; in it are the runs {', '.join(map(quote, sorted(inside)))}"
        raise ValueError(message)
    _ = run.config, run.metrics, run.starts  # or ValueError
    return run


def tokens_file(directory: Path, step: int, greedy: bool = False) -> Path:
    """Return the path of the record of a step's completions."""
    kind = "greedy-step" if greedy else "step"
    return directory / TOKENS / f"{kind}-{step:08d}.safetensors"


class JsonLines:
    """A file with one JSON object per line; each has its step.

    When it is opened again, lines after `keep_through_step`, which a resumed run repeats, are
    removed. So are unreadable lines from a crash or a disk fault. If that fails (OSError), the file
    is unchanged. Unless `synced`, the system decides when lines are flushed to disk.
    """

    def __init__(self, path: Path, keep_through_step: int, synced: bool = True) -> None:
        lines = []
        if path.is_file() and keep_through_step:
            lines = path.read_bytes().splitlines()
        steps = [_step(line) for line in lines]
        if math.inf in steps[:-1]:
            logger.warning("%s has unreadable lines, which are removed", path)
        kept = []
        for line, step in zip(lines, steps, strict=True):
            if step <= keep_through_step:
                kept.append(line + b"\n")
        write_file(path, kept)
        self.path = path
        self._synced = synced
        self._has_failed = False

    def write(self, *records: MetricsLine) -> None:
        """Append a line for each record; if the disk is full, warn once and drop them."""
        size = None
        try:
            with open(self.path, "a", opener=open_own) as file:
                size = file.tell()
                file.writelines(f"{line_of(record)}\n" for record in records)
                file.flush()
                if self._synced:
                    os.fsync(file.fileno())
        except OSError as error:
            if not self._has_failed:
                logger.warning("%s lacks lines from here on: %s", self.path, error)
            self._has_failed = True
            if size is not None:
                with suppress(OSError):  # half a line would spoil the next one
                    os.truncate(self.path, size)


def _step(line: bytes) -> float:
    """Return the step of a line; infinity if the line is invalid."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def line_of(record: MetricsLine) -> str:
    """Return a record as a line of JSON; NaN and infinities become null, other objects text."""
    return json.dumps(finite(dict(record)), allow_nan=False, default=str)


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None, and keys by text, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def read(path: Path, kinds: Mapping[str, type] = {}) -> list[Record]:
    """Read the records of a file of JSON lines, if it exists, and skip lines that are none;
    ValueError if it is not such a file.
    """
    lines = read_file(path, MOST_LINES).splitlines() if os.path.lexists(path) else []
    records = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            record = json.loads(line, parse_int=_whole)
            if _is_record(record, kinds):
                records.append(record)
    if skipped := len(lines) - len(records):
        logger.warning("%s: %d lines are left out: not records", quote(str(path)), skipped)
    return records


def _whole(digits: str) -> float:
    """Return a number of at most 18 digits as it is, and a longer one as Python rounds it."""
    if len(digits) <= 18:
        return int(digits)
    return float(digits)


def _is_record(line: Any, kinds: Mapping[str, type]) -> bool:
    """Return whether a line has its step, and what it says is of these kinds."""
    if not isinstance(line, dict):
        return False
    step = line.get("step")
    if type(step) is not int or step < 0:
        return False
    for name, kind in kinds.items():
        value = line.get(name)
        if value is None:
            continue
        if type(value) is not kind or not all(isinstance(text, str) for text in _inside(value)):
            return False
    return _is_shallow(line)


def _has(line: MetricsLine, names: Sequence[str]) -> bool:
    return all(line.get(name) is not None for name in names)


def _inside(value: Any) -> Sequence[Any]:
    """Return what is in a list or an object."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _is_shallow(value: Any, most: int = 60) -> bool:
    """Return whether lists and objects are within one another at most so often."""
    return most > 0 and all(_is_shallow(inner, most - 1) for inner in _inside(value))


@cache
def version(package: str) -> str:
    """Return the version of a package, or "unknown"."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "unknown"


def versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages, by name."""
    numbers = {"python": platform.python_version()}
    for package in ("rlhf-pg", *PACKAGES, *ALSO):
        number = version(package)
        if number != "unknown":
            numbers[package] = number
    return numbers
