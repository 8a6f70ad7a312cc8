"""Python files and modules of users: found by name, imported, and known by name in a new process.

A file becomes a module with a name of its own, `rlhf_pg_user_<stem>_<hash of its path>`, so that
two files called `my_rewards.py` do not meet. A finder in `sys.meta_path` knows where these modules
are. While one is imported, it also finds the files beside it, so that `sys.path` stays as it is.
"""

import importlib
import importlib.util
import inspect
import os
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from rlhf_pg.boundary import user_files
from rlhf_pg.boundary.quoted import quoted, shown, visible
from rlhf_pg.boundary.user_code import foreign
from rlhf_pg.boundary.user_files import PREFIX as PREFIX
from rlhf_pg.boundary.user_files import finder, searching
from rlhf_pg.boundary.user_files import install as install
from rlhf_pg.boundary.user_files import loaded as loaded
from rlhf_pg.boundary.user_files import module_name as module_name
from rlhf_pg.config.foreign_keys import nearest

MOST_NAMES = 20  # of a module that an error lists
MOST_LINES = 40  # of a traceback in an error
OURS = (__file__, user_files.__file__, importlib.__file__)  # frames that an error leaves out


def load(name: str) -> Any:
    """Import what a name means: `file.py:name`, `package.module:name` or `package.module.name`.

    Args:
        name: a file, by its path; or a module of the working directory or, with a directory in
            front (`directory/package.module:name`), of that one, or else an installed one.

    Returns:
        The object of that name.

    Raises:
        ValueError: there is no such file or module, its import fails (the message has its own
            traceback), it has no such name, or what has the name cannot be called.
    """
    place, attribute = split(name)
    if place.endswith(".py"):
        module = _import_file(name, find_file(place, name))
    else:
        directory, _, dotted = place.rpartition("/")
        module = _import_dotted(name, dotted, Path(directory).absolute())
    return _callable(name, module, attribute)


def split(name: str) -> tuple[str, str]:
    """Return the file or module of a name, and the name in it.

    Raises:
        ValueError: it is a URL, or lacks one of the two.
    """
    if "://" in name:
        raise ValueError(f"{quoted(name)} is a URL, from which no code is imported: name a file")
    if name.endswith(".py"):
        raise ValueError(f"{quoted(name)} names no function: write {quoted(name)}:NAME")
    place, _, attribute = name.rpartition(":" if ":" in name else ".")
    parts = place.rpartition("/")[2].split(".")
    is_module = place.endswith(".py") or all(part.isidentifier() for part in parts)
    if not is_module or not attribute.isidentifier():
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


# ------------------------------------------------------------------------------------- importing


def _import_file(name: str, file: Path) -> ModuleType:
    own = module_name(file)
    known = own in finder.files
    install({own: str(file)})
    try:
        return _imported(name, own)
    except BaseException:
        if not known:
            del finder.files[own]
        raise


def _import_dotted(name: str, module: str, directory: Path) -> ModuleType:
    install({})
    try:
        with searching(directory):
            return _imported(name, module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{quoted(name)}: there is no module {quoted(str(error.name))}, neither installed nor "
            f"in {quoted(str(directory))} or beside the recipe"
        ) from None


def _imported(name: str, module: str) -> ModuleType:
    """Import a module.

    Args:
        name: what the user has written, for the error.
        module: its dotted name.

    Raises:
        ModuleNotFoundError: the module itself is not there.
        ValueError: it fails; the message has the traceback from its own file on.
    """
    importlib.invalidate_caches()
    with foreign(f"the import of {quoted(name)}"):
        try:
            return importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
                raise
            raise ValueError(
                f"{quoted(name)} cannot be imported:\n{_own_traceback(error)}"
            ) from None


def _own_traceback(error: BaseException) -> str:
    """Return an error as Python prints it, without the frames that are ours or of the import."""
    told = traceback.TracebackException(type(error), error, _own_frames(error.__traceback__))
    lines = visible("".join(told.format()).rstrip()).split("\n")
    return "\n".join(lines if len(lines) <= MOST_LINES else ["...", *lines[-MOST_LINES:]])


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    own, kept = [], None
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if path not in OURS and not path.startswith("<frozen importlib"):
            own.append(trace)
        trace = trace.tb_next
    for at in reversed(own):
        kept = TracebackType(kept, at.tb_frame, at.tb_lasti, at.tb_lineno)
    return kept


def _callable(name: str, module: ModuleType, attribute: str) -> Any:
    try:
        found = getattr(module, attribute)
    except AttributeError:
        raise ValueError(f"{quoted(name)}: {_no_such(module, attribute)}") from None
    if inspect.isclass(found):
        raise ValueError(
            f"{quoted(name)} is a class: name a function, or an object that the module makes of it"
        )
    if not callable(found):
        raise ValueError(f"{quoted(name)} is {shown(found)}, which cannot be called")
    return found


def _no_such(module: ModuleType, attribute: str) -> str:
    """Return that a module has no such name, the nearest one, and those there are."""
    names = [key for key, value in vars(module).items() if _is_function(key, value)]
    there = ", ".join(map(quoted, names[:MOST_NAMES])) or "none"
    return (
        f"it has no function {quoted(attribute)}{nearest(attribute, names)}; functions in it: "
        f"{there}"
    )


def _is_function(name: str, value: Any) -> bool:
    return not name.startswith("_") and callable(value) and not inspect.isclass(value)
