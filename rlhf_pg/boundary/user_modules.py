"""Python files and modules of users, imported by name.

A file becomes a module with a name of its own, `rlhf_pg_user_<stem>_<hash of its path>`, so that
two files called `my_rewards.py` do not meet. Its directory goes to the end of `sys.path`, for the
files beside it.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_pg.boundary.quoted import quoted, shown, visible
from rlhf_pg.config.foreign_keys import nearest

PREFIX = "rlhf_pg_user_"
MOST_NAMES = 20  # of a module that an error lists
MOST_LINES = 40  # of a traceback in an error


def load(name: str) -> Any:
    """Import what a name means: `file.py:name`, `package.module:name` or `package.module.name`.

    Args:
        name: a file, by its path; or an installed module, or one of the working directory or, with
            a directory in front (`directory/package.module:name`), of that one.

    Returns:
        The object of that name.

    Raises:
        ValueError: there is no such file or module, its import fails (the message has its own
            traceback), it has no such name, or what has the name cannot be called.
    """
    place, attribute = split(name)
    file = find_file(place, name) if place.endswith(".py") else None
    directory, _, dotted = place.rpartition("/")
    try:
        if file is not None:
            module = import_file(file)
        else:
            _search(Path(directory).absolute())
            module = importlib.import_module(dotted)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if file is not None or not f"{dotted}.".startswith(f"{missing}."):
            raise _import_error(name, error) from None
        raise ValueError(
            f"{quoted(name)}: there is no module {quoted(str(missing))}, neither installed nor in "
            f"{quoted(str(Path(directory).absolute()))} or beside the recipe"
        ) from None
    return _callable(name, module, attribute)


def split(name: str) -> tuple[str, str]:
    """Return the file or module of a name, and the name in it.

    Raises:
        ValueError: it is a URL, or lacks one of the two.
    """
    if "://" in name:
        raise ValueError(f"{quoted(name)} is a URL, from which no code is imported: name a file")
    place, _, attribute = name.rpartition(":" if ":" in name else ".")
    parts = place.rpartition("/")[2].split(".")
    is_module = place.endswith(".py") or all(part.isidentifier() for part in parts)
    if name.endswith(".py") or not is_module or not attribute.isidentifier():
        raise ValueError(
            f"{quoted(name)} names no function: write file.py:NAME or package.module:NAME"
        )
    return place, attribute


def find_file(path: str, name: str) -> Path:
    """Return the absolute path of a file; a relative one is in the working directory.

    Args:
        name: what the file is wanted for, in the error.

    Raises:
        ValueError: there is none.
    """
    file = Path(os.path.abspath(Path(path).expanduser()))
    if not file.is_file():
        or_beside = "" if Path(path).is_absolute() else ", nor one beside the recipe"
        raise ValueError(f"{quoted(name)}: there is no file {quoted(str(file))}{or_beside}")
    return file


def import_file(file: Path) -> ModuleType:
    """Import a Python file, once, under a name that is the same in every process."""
    stem = "".join(c if c.isalnum() else "_" for c in file.stem)
    name = f"{PREFIX}{stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    _search(file.parent)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def loaded() -> dict[str, str]:
    """Return the file of each module that `import_file` has made, by the module's name."""
    return {
        name: str(module.__file__)
        for name, module in list(sys.modules.items())
        if name.startswith(PREFIX)
    }


def _search(directory: Path) -> None:
    """Find modules in a directory, after all that is installed."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
    importlib.invalidate_caches()


def _import_error(name: str, error: BaseException) -> ValueError:
    """Return an error with the traceback of an import, without the frames that are ours."""
    trace = traceback.TracebackException.from_exception(error)
    ours = (__file__, importlib.__file__)
    trace.stack[:] = [
        frame
        for frame in trace.stack
        if frame.filename not in ours and not frame.filename.startswith("<frozen importlib")
    ]
    lines = visible("".join(trace.format()).rstrip()).split("\n")
    lines = lines if len(lines) <= MOST_LINES else ["...", *lines[-MOST_LINES:]]
    return ValueError("\n".join([f"{quoted(name)} cannot be imported:", *lines]))


def _callable(name: str, module: ModuleType, attribute: str) -> Any:
    found = getattr(module, attribute, None)
    if found is None:
        names = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and callable(value) and not inspect.isclass(value)
        ]
        raise ValueError(
            f"{quoted(name)}: it has no function {quoted(attribute)}{nearest(attribute, names)}; "
            f"functions in it: {', '.join(map(quoted, names[:MOST_NAMES])) or 'none'}"
        )
    if inspect.isclass(found):
        raise ValueError(
            f"{quoted(name)} is a class: name a function, or an object that the module makes of it"
        )
    if not callable(found):
        raise ValueError(f"{quoted(name)} is {shown(found)}, which cannot be called")
    return found
