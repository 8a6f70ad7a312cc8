"""Files that a run writes. No link is followed to another file, and no reader sees half a file."""

import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

PARTIAL = "partial-"  # begins the names of what is not complete


def write_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file under a new name beside its place, sync it, and let it replace the earlier one.

    After an OSError the earlier file is unchanged.
    """
    _check_name(path)
    # A name that nobody can guess: two writers of one page do not write into one file.
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(8)}-{path.name}")
    try:
        with open(partial, "xb", opener=open_own) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def open_own(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=open_own)`; OSError if it is a link or not a file."""
    _check_name(Path(path))
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def is_replaceable(path: Path) -> bool:
    """Return whether a name is free, or a file's own."""
    return not os.path.lexists(path) or (path.is_file() and not path.is_symlink())


def _check_name(path: Path) -> None:
    if not is_replaceable(path):
        reason = "a link, a directory or a device has this name and is not written to: move it away"
        raise FileExistsError(errno.EEXIST, reason, str(path))


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:  # some file systems and users cannot sync directories
        if not path.is_dir() or error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP):
            raise
