"""Directories that are complete or absent, even if the writing process is interrupted.

A directory is written beside its place as `partial-{name}`. Its `state.json`, written last, has the
size and the SHA-256 of every other file, and the SHA-256 of itself. Everything is synced to disk
before the directory gets its name, since a machine may lose power at any moment. `recover`
completes an interrupted replacement.
"""

import hashlib
import json
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_pg.boundary.output_files import PARTIAL, sync, write_file
from rlhf_pg.boundary.quoted import quote, tell
from rlhf_pg.failpoints import failpoint
from rlhf_pg.runtime import Runtime

STATE = "state.json"
SEAL = "sha256"  # the key in it
# Exceptions that reading a state of any content and shape may raise.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass
class Save:
    """The save of a directory by several processes, any of which may fail."""

    runtime: Runtime
    path: Path

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one step of the save in a block; if it fails on any process, remove the partial
        directory, and raise OSError on all. Collective.
        """
        try:
            with self.runtime.raise_together(OSError):
                try:
                    yield
                except Exception as error:  # safetensors and tokenizers have their own classes
                    raise OSError(
                        f"{self.path} could not be saved ({tell(error)}). Earlier checkpoints are "
                        "intact: make sure that every process can write there and the disk has "
                        "room, then resume with --resume_from_checkpoint latest"
                    ) from error
        except OSError:
            if self.runtime.is_main:
                with suppress(OSError):  # `begin` tries again
                    recover(self.path)
            raise

    def main(self, call: Callable[[], Any]) -> None:
        """Run a step on the main process; collective."""
        with self.step():
            if self.runtime.is_main:
                call()


def partial_of(path: Path) -> Path:
    """Return the path under which a directory is written or removed."""
    return path.with_name(PARTIAL + path.name)


def begin(path: Path) -> None:
    """Make the empty directory `partial_of(path)`."""
    failpoint("save-begin")
    recover(path)
    partial_of(path).mkdir(parents=True)


def publish(path: Path, facts: Mapping[str, Any]) -> None:
    """Write `state.json` with `facts` in JSON types, and give the directory its name."""
    failpoint("save-state")
    partial = partial_of(path)
    files = [file for file in sorted(partial.rglob("*")) if file.is_file()]
    for file in files:  # safetensors writes 0600; let the umask decide, as for the directory
        with suppress(OSError):  # another user's file, or a file system without modes
            file.chmod(partial.stat().st_mode & 0o666)
    entries = {
        file.relative_to(partial).as_posix(): {"size": file.stat().st_size, "sha256": _sha256(file)}
        for file in files
    }
    write_file(partial / STATE, [seal({**facts, "files": entries})])
    for written in [*partial.rglob("*"), partial]:
        sync(written)
    failpoint("save-rename")
    _replace(path)
    for directory in path.parents[:3]:  # the parent and its parent may be new
        sync(directory)
    failpoint("save-renamed")


def _replace(path: Path) -> None:
    """Give `partial_of(path)` its name, and remove the directory that had it."""
    replaced = path.with_name(f"{PARTIAL}replaced-{path.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        (path / STATE).unlink(missing_ok=True)  # from here on `recover` completes the replacement
        path.rename(replaced)  # a rename works even while it is read
    failpoint("save-replace")
    partial_of(path).rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a directory; renamed first, so that half of it is never taken as complete."""
    failpoint("prune")
    if path.is_symlink():
        path.unlink()
        return
    partial = partial_of(path)
    shutil.rmtree(partial, ignore_errors=True)
    path.rename(partial)
    (partial / STATE).unlink(missing_ok=True)  # or `recover` would complete it
    failpoint("pruning")
    shutil.rmtree(partial)


def recover(path: Path) -> None:
    """Remove partial directories, but complete a replacement whose old directory is gone."""
    partial = partial_of(path)
    if find_damage(partial) is None and find_damage(path) is not None:
        _replace(path)
    shutil.rmtree(partial, ignore_errors=True)


def find_damage(path: Path, contents: bool = True) -> str | None:
    """Describe how a directory differs from its published state (sizes, `contents`); else None."""
    try:
        entries = _read(path)["files"]
        files = {file.relative_to(path).as_posix(): file for file in path.rglob("*")}
        for file in files.values():
            _check_kind(file, stat.S_IFREG, stat.S_IFDIR)
        for name, entry in entries.items():
            if name not in files:
                return f"{quote(name)} is missing"
            size = files[name].stat().st_size
            if size != entry["size"]:
                return f"{quote(name)} has {size} bytes, and had {entry['size']}"
            if contents and _sha256(files[name]) != entry["sha256"]:
                return f"{quote(name)} has changed: its SHA-256 differs"
    except UNREADABLE as error:
        return tell(error)
    return None


def state(path: Path) -> dict[str, Any]:
    """Return the facts of a published directory, contents unchecked; {} if there is none."""
    with suppress(*UNREADABLE):
        return _read(path)
    return {}


def seal(facts: Mapping[str, Any]) -> bytes:
    """Return the content of `state.json`: facts, and the SHA-256 of their JSON."""
    return json.dumps({**facts, SEAL: _digest(facts)}, indent=2).encode()


def _read(path: Path) -> dict[str, Any]:
    """Return the sealed facts; raise one of `UNREADABLE` if they are missing or have changed."""
    _check_kind(path / STATE, stat.S_IFREG)
    facts = json.loads((path / STATE).read_bytes())
    if not isinstance(facts, dict) or facts.pop(SEAL, None) != _digest(facts):
        raise ValueError(f"{STATE} has changed: its SHA-256 differs")
    return facts


def _check_kind(file: Path, *kinds: int) -> None:
    if stat.S_IFMT(file.lstat().st_mode) not in kinds:  # whoever reads a pipe waits for ever
        raise ValueError(f"{quote(file.name)} is a link, or not a file")


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
