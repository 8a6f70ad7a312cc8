"""Differences of weights: by their fingerprints in the trace, and in checkpoints and final/."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_pg.checkpoint.atomic import LONGEST, MANIFEST, UNREADABLE
from rlhf_pg.replay.finding import Finding
from rlhf_pg.replay.rounding import Rounding
from rlhf_pg.replay.tensors import tensor_differences
from rlhf_pg.report.run_files import TRACE, RunFiles

WEIGHT = "weight"
# Files of a checkpoint that do not say what was computed. Random states are used by dropout alone.
NOT_COMPARED = ("README.md",)
RANDOM = "rng-rank"
STATE = "state.json"
OF_STATE = ("counters", "running", "scheduler", "learning_rates")
# Entries of configs of models that say where a model came from and what wrote it.
ORIGINS = ("_name_or_path", "transformers_version", "name_or_path", "base_model_name_or_path")


def weights_after(run: RunFiles, step: int) -> dict[str, str]:
    """Return the fingerprints of the tensors after a step; empty if they are not recorded."""
    if step > 0 and step in run.traces:
        names = next((s.weights for s in reversed(run.starts) if s.step < step), {})
        return dict(zip(names, run.traces[step].weights, strict=False))
    return weights_begun(run, step)


def weights_begun(run: RunFiles, step: int) -> dict[str, str]:
    """Return the fingerprints with which a run began, or went on, after a step."""
    begun = (s.weights for s in reversed(run.starts) if s.step == step)
    return dict(next(begun, {}))


def fingerprint_findings(step: int, a: RunFiles, b: RunFiles) -> Iterator[Finding]:
    """Yield the tensors that differ after a step, and those with which one run went on from it."""
    after = weights_after(a, step), weights_after(b, step)
    traced = [run.traces[step].weights for run in (a, b) if step in run.traces]
    if len(traced) == 2 and len(traced[0]) != len(traced[1]):
        yield _found(step, TRACE, "number of tensors", len(traced[0]), len(traced[1]))
    yield from _unequal(step, *after, "")
    if step == 0:
        return
    yield from _altered(step, a, b)
    for run, name, known in ((a, "A", after[0]), (b, "B", after[1])):
        begun = weights_begun(run, step)
        begun = {tensor: begun[tensor] for tensor in known if tensor in begun}
        if begun and begun != known:
            note = f"{name} went on with other weights than its step {step} ended with"
            pair = (begun, known) if run is a else (known, begun)
            yield from _unequal(step, *pair, note)


def _altered(step: int, a: RunFiles, b: RunFiles) -> Iterator[Finding]:
    """Yield the tensors that something else than an update has changed since the step before."""
    altered = [dict(run.traces[step].altered) for run in (a, b) if step in run.traces]
    if len(altered) < 2:
        return
    for name in {**altered[0], **altered[1]}:
        x, y = (table.get(name) for table in altered)
        if x != y:
            found = _found(step, TRACE, name, x, y, "no longer as the step before had left it")
            yield replace(found, before=True)


def _unequal(step: int, a: Mapping[str, str], b: Mapping[str, str], note: str) -> Iterator[Finding]:
    if not a or not b or a == b:
        return
    for name in {**a, **b}:
        x, y = a.get(name), b.get(name)
        if x != y:
            yield Finding(step=step, stage=WEIGHT, file=TRACE, what=name, a=x, b=y, note=note)


@dataclass(frozen=True)
class Saved:
    """A sealed directory of a run: a checkpoint, or final/."""

    run: Path
    name: str  # relative to the run

    @property
    def path(self) -> Path:
        return self.run / self.name

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest; empty if it cannot be read."""
        try:
            with (self.path / MANIFEST).open("rb") as file:
                known = json.loads(file.read(LONGEST))
            known["files"] = {str(k): str(v["sha256"]) for k, v in known["files"].items()}
        except UNREADABLE:
            return {}
        return dict(known)

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 by name of file, as the manifest has them, without files that say nothing."""
        named: dict[str, str] = self.manifest.get("files", {})
        return {name: sha for name, sha in named.items() if _counts(name)}

    def digest(self, name: str) -> str | None:
        """Return the SHA-256 of a file as it is now; None if it is not there."""
        try:
            with (self.path / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return None


def _counts(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last not in NOT_COMPARED and ".." not in name.split("/") and not name.startswith("/")


def saved_at(run: RunFiles, last_step: int) -> dict[str, int]:
    """Return the sealed directories of a run by name, with the step after which each was saved."""
    found = {}
    for path in sorted((run.directory / "checkpoints").glob("step-" + "[0-9]" * 8)):
        found[f"checkpoints/{path.name}"] = int(path.name.removeprefix("step-"))
    if (run.directory / "final").is_dir():
        step = Saved(run.directory, "final").manifest.get("step", last_step)
        found["final"] = step if isinstance(step, int) else last_step
    return found


def saved_findings(
    step: int, a: Saved | None, b: Saved | None, rounding: Rounding, dropout: bool
) -> Iterator[Finding]:
    """Yield what differs between two directories that were saved after the same step.

    A directory that only one run has is held against its own manifest alone.
    """
    there = [saved for saved in (a, b) if saved is not None]
    broken = [saved for saved in there if not saved.manifest]
    for saved in broken:
        which = "A's" if saved is a else "B's"
        yield _found(step, saved.name, MANIFEST, None, None, f"{which} cannot be read")
    if broken:
        return
    for name in {key: None for saved in there for key in saved.files}:
        if name.rpartition("/")[2].startswith(RANDOM) and not dropout:
            continue
        yield from _file_findings(step, name, a, b, rounding)


def _file_findings(
    step: int, name: str, a: Saved | None, b: Saved | None, rounding: Rounding
) -> Iterator[Finding]:
    place = "/".join([*{saved.name for saved in (a, b) if saved is not None}, name])
    now = [None if saved is None else saved.digest(name) for saved in (a, b)]
    sealed = [None if saved is None else saved.files.get(name) for saved in (a, b)]
    if None not in (a, b) and now[0] == now[1] and sealed[0] == sealed[1]:
        return
    changed = {
        letter: _changed(saved, name, digest)
        for letter, saved, digest in (("A", a, now[0]), ("B", b, now[1]))
        if saved is not None
    }
    said = "; ".join(f"{letter}'s {why}" for letter, why in changed.items() if why)
    if a is None or b is None:
        if said:
            yield _found(step, place, name, now[0], now[1], said)
        return
    if None in now:
        yield _found(step, place, name, now[0] is not None, now[1] is not None, said)
        return
    exact = Rounding() if said else rounding
    yield from _contents(step, place, a.path / name, b.path / name, exact, said)


def _changed(saved: Saved, name: str, digest: str | None) -> str:
    """Say how a file is not what the manifest has sealed; "" if it is, or was never there."""
    sealed = saved.files.get(name)
    if sealed is None or sealed == digest:
        return ""
    if digest is None:
        return "file is missing, and its manifest has it"
    return "file was changed after it was saved: its SHA-256 is not that of its manifest"


def _contents(
    step: int, place: str, a: Path, b: Path, rounding: Rounding, said: str
) -> Iterator[Finding]:
    """Yield what differs within two files, of which at least a byte does."""
    found: list[Finding] = []
    if a.suffix == ".safetensors":
        try:
            for one in tensor_differences(a, b, rounding):
                note = "; ".join(filter(None, [one.note, said]))
                found.append(_found(step, place, one.name, one.a, one.b, note))
        except ValueError as error:
            found.append(_found(step, place, place, None, None, f"{said}; {error}"))
    elif a.suffix == ".json":
        found += _json_findings(step, place, a, b, rounding, said)
    else:
        found.append(_found(step, place, place, None, None, said or "the files differ"))
    if not found and said:  # in bytes that hold nothing
        found.append(_found(step, place, place, None, None, said))
    yield from found


def _json_findings(
    step: int, place: str, a: Path, b: Path, rounding: Rounding, said: str
) -> Iterator[Finding]:
    try:
        first, second = (json.loads(path.read_bytes()) for path in (a, b))
        tables = [_told(a.name, x) for x in (first, second)]
    except (ValueError, AttributeError, RecursionError) as error:
        yield _found(step, place, place, None, None, f"{said}; cannot be read: {error}")
        return
    for key in {**tables[0], **tables[1]}:
        x, y = tables[0].get(key), tables[1].get(key)
        if not rounding.same(x, y):
            yield _found(step, place, key, x, y, said)


def _told(file: str, known: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a JSON file that count, nested ones by their path."""
    kept = {k: x for k, x in known.items() if file != STATE or k in OF_STATE}
    return {key: _unordered(x) for key, x in _flat(kept) if key.rpartition(".")[2] not in ORIGINS}


def _unordered(x: Any) -> Any:
    """Return a list of names sorted: peft writes a set in any order."""
    names = isinstance(x, list) and all(isinstance(item, str) for item in x)
    return sorted(x) if names else x


def _flat(known: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, x in known.items():
        if isinstance(x, dict) and x:
            yield from _flat(x, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", x


def _found(step: int, file: str, what: str, a: Any, b: Any, note: str = "") -> Finding:
    return Finding(step=step, stage=WEIGHT, file=file, what=what, a=a, b=b, note=note)
