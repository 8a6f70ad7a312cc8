"""A file of JSON lines that a crash or a full disk does not spoil."""

import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_pg.checkpoint.atomic import sync

logger = logging.getLogger(__name__)


class JsonLines:
    """A file with one JSON object per line; each line has its step.

    Opened again, it keeps the lines up to a step, which a resumed run does not repeat. Lines that
    cannot be read, after a crash or a fault of the disk, are removed too. If that cannot be done
    (OSError), what was there stays. Unless `synced`, the system decides when lines go to the disk.
    """

    def __init__(self, path: Path, keep_through_step: int, synced: bool = True) -> None:
        lines = path.read_bytes().splitlines() if path.exists() and keep_through_step else []
        steps = [_step(line) for line in lines]
        if math.inf in steps[:-1]:
            logger.warning("%s has lines that cannot be read: they are left out", path)
        kept = [line for line, n in zip(lines, steps, strict=True) if n <= keep_through_step]
        whole = path.with_name(f"partial-{path.name}")
        whole.write_bytes(b"".join(line + b"\n" for line in kept))
        sync(whole)
        whole.replace(path)
        sync(path.parent)
        self.path, self._synced = path, synced
        self._has_failed = False

    def write(self, *records: Mapping[str, Any]) -> None:
        """Append a line for each record; if the disk is full, they are missing: one warning."""
        size = None
        try:
            with self.path.open("a") as file:
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
                with suppress(OSError):  # half of the line would spoil the next
                    os.truncate(self.path, size)


def _step(line: bytes) -> float:
    """Return the step of a line; infinity if it is not one of ours."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def line_of(record: Mapping[str, Any]) -> str:
    """Return a record as a line of JSON; NaN and infinities become null, foreign values text."""
    return json.dumps(finite(dict(record)), allow_nan=False, default=str)


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None at any depth, and keys by text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def read(path: Path) -> list[dict[str, Any]]:
    """Read all lines of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
