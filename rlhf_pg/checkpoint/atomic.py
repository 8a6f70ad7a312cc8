"""Directories that are whole or absent, whatever interrupts the process that writes them.

A directory is written beside its place as `partial-{name}`, gets a `manifest.json` with size and
SHA-256 of every file, and only then its name. Everything is synced to disk before that, since a
machine may lose power at any moment. A directory that it replaces is moved to `aside-{name}` for
the moment of the renaming, and removed after it.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_pg.boundary.quoted import quoted, shown, told
from rlhf_pg.failpoints import failpoint

MANIFEST = "manifest.json"
FORMAT = 1
LONGEST = 1 << 26  # bytes of a manifest, which has about a hundred for each file
PARTIAL, ASIDE = "partial-", "aside-"
# Errors of a manifest that is not JSON, or not ours.
UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),
)


def partial_of(path: Path) -> Path:
    """Return the path where a directory is written or removed; it is never read."""
    return path.with_name(PARTIAL + path.name)


def begin(path: Path) -> Path:
    """Make an empty directory to write in, without what an earlier attempt has left."""
    failpoint("save-begin")
    recover(path)
    partial = partial_of(path)
    _delete(partial)
    partial.mkdir(parents=True)
    for directory in path.parents[1:3]:  # the parent may be new, and its own too
        sync_directory(directory)
    return partial


def seal(partial: Path, facts: Mapping[str, Any]) -> None:
    """Sync every file to disk, then write the manifest.

    Args:
        facts: more entries of the manifest, in JSON types.
    """
    failpoint("save-manifest")
    files = sorted(file for file in partial.rglob("*") if file.is_file())
    named = {file.relative_to(partial).as_posix(): _entry(file) for file in files}
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, **facts, "files": named}, indent=2))
    sync_file(manifest)
    for directory in [partial, *(d for d in partial.rglob("*") if d.is_dir())]:
        sync_directory(directory)


def publish(path: Path) -> None:
    """Give the sealed directory its name in place of an old one; one of the two is always there."""
    failpoint("save-rename")
    aside = _aside_of(path)
    if os.path.lexists(path):
        path.rename(aside)
        failpoint("save-aside")
    partial_of(path).rename(path)
    sync_directory(path.parent)
    failpoint("save-renamed")
    with suppress(OSError):
        _delete(aside)


def abandon(path: Path) -> None:
    """Remove what was begun and put back what it was to replace, as far as the disk allows."""
    shutil.rmtree(partial_of(path), ignore_errors=True)
    try:
        recover(path)
    except OSError:
        return  # `recover` runs again when a run begins, and when it saves


def recover(path: Path) -> None:
    """Put back what was moved aside, unless its replacement has arrived."""
    aside = _aside_of(path)
    if not os.path.lexists(aside):
        return
    if os.path.lexists(path):
        _delete(aside)
    else:
        aside.rename(path)
        sync_directory(path.parent)


def recover_all(directory: Path) -> None:
    """Call `recover` for everything that was moved aside in a directory."""
    for aside in list(directory.glob(f"{ASIDE}*")):
        recover(aside.with_name(aside.name.removeprefix(ASIDE)))


def remove(path: Path) -> None:
    """Remove a directory, its name first, so that half of it is never taken for the whole."""
    failpoint("prune")
    doomed = partial_of(path)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    sync_directory(path.parent)
    failpoint("pruning")
    shutil.rmtree(doomed)


def remove_leftovers(directory: Path) -> None:
    """Remove what interrupted saves and removals have left."""
    for partial in directory.glob(f"{PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)


def _delete(path: Path) -> None:
    """Remove whatever has this name; for a link, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def verified(path: Path, contents: bool = True) -> str | None:
    """Return why a directory is not the whole one that was sealed; None if it is.

    Args:
        contents: compare the SHA-256 of every file too, not only its size.
    """
    try:
        manifest = json.loads(_manifest(path))
        files = {str(name): (int(e["size"]), e["sha256"]) for name, e in manifest["files"].items()}
        form = manifest["format"]
    except (FileNotFoundError, NotADirectoryError):
        return f"it has no {MANIFEST}"
    except UNREADABLE as error:
        return f"its {MANIFEST} cannot be read ({told(error)})"
    if form != FORMAT:
        return f"its {MANIFEST} has format {shown(form)}, and this version reads {FORMAT}"
    reasons = (_difference(path, name, *entry, contents) for name, entry in files.items())
    return next((reason for reason in reasons if reason is not None), None)


def facts(path: Path) -> dict[str, Any]:
    """Return the `facts` that `seal` wrote, contents unchecked; {} if the directory is broken."""
    if verified(path, contents=False) is not None:
        return {}
    known: dict[str, Any] = json.loads(_manifest(path))
    return known


def seal_of(path: Path) -> bytes:
    """Return the SHA-256 of the manifest, which identifies a directory; zeros if unreadable."""
    try:
        return hashlib.sha256(_manifest(path)).digest()
    except OSError:
        return bytes(32)


def _manifest(path: Path) -> bytes:
    """Read the bytes of a directory's manifest.

    Raises:
        OSError: there is none, or it is a link, a pipe, a device or beyond `LONGEST`: reading it
            might never end.
    """
    # A pipe without a writer would make open() wait for one.
    descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no regular file")
        if found.st_size > LONGEST:
            raise OSError(f"it has {found.st_size} bytes, which no manifest has")
        return file.read(LONGEST)


def _difference(path: Path, name: str, size: int, sha256: str, contents: bool) -> str | None:
    """Return how a file differs from its entry in the manifest; None if it does not."""
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        return f"its {MANIFEST} names {shown(name)}, which is not inside it"
    shown_name, file = quoted(name), path
    try:
        for part in parts:
            file = file / part
            if file.is_symlink():
                return f"{shown_name} is a link"
        if not file.is_file():
            return f"{shown_name} is missing"
        if file.stat().st_size != size:
            return f"{shown_name} has {file.stat().st_size} bytes, and had {size}"
        if contents and _sha256(file) != sha256:
            return f"{shown_name} has changed: its SHA-256 is another"
    except OSError as error:
        return f"{shown_name} cannot be read: {told(error)}"
    return None


def sync_file(file: Path) -> None:
    """Return when a file is on the disk."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Return when the names in a directory are on the disk, if the file system can tell."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def _entry(file: Path) -> dict[str, Any]:
    sync_file(file)
    return {"size": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _aside_of(path: Path) -> Path:
    return path.with_name(ASIDE + path.name)
