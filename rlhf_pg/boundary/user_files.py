"""The finder of users' Python files, which knows each by name in any process.

It imports only the standard library, so that a process without the package can load this file by
its path.
"""

import hashlib
import importlib.util
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

PREFIX = "rlhf_pg_user_"

_local = threading.local()


class UserFiles:
    """The finder of users' modules, first in `sys.meta_path`.

    While a user's file is imported, the files beside it come before what is installed, as they do
    for a script; but not before Python's own modules.
    """

    def __init__(self) -> None:
        self.files: dict[str, str] = {}  # module name -> path; of a namespace, its directory

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a user's module; None leaves it to the other finders."""
        if path is not None or name in sys.stdlib_module_names:
            return None
        if not name.startswith(PREFIX) and (found := _sibling(name, _searched())) is not None:
            self.files[name] = found
        return _spec(name, self.files[name]) if name in self.files else None


class _LastUserFiles:
    """The last finder in `sys.meta_path`: files beside users' files, for imports in functions."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of what nothing else has found, if it stands beside a user's file."""
        if path is not None:
            return None
        known = [str(Path(file).parent) for file in finder.files.values()]
        found = _sibling(name, [*_searched(), *reversed(known)], namespaces=True)
        if found is None:
            return None
        finder.files[name] = found
        return _spec(name, found)


class _Loader(SourceFileLoader):
    """A loader of a user's file, which may import the files beside it."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the file; what is beside a package is beside its directory."""
        own = Path(self.path).parent
        directory = own.parent if self.is_package(module.__name__) else own
        _forget_namesakes(directory)
        with searching(directory):
            super().exec_module(module)


finder, _last = UserFiles(), _LastUserFiles()


def install(files: Mapping[str, str]) -> None:
    """Make users' modules of another process known in this one, to be imported when asked for.

    Args:
        files: what `loaded` returned there.
    """
    finder.files |= files
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)
        sys.meta_path.append(_last)


def loaded() -> dict[str, str]:
    """Return the file of each user's module that was imported here, by the module's name."""
    return {name: file for name, file in finder.files.items() if name in sys.modules}


def module_name(file: Path) -> str:
    """Return the name that a file has as a module: the same for the same absolute path."""
    stem = "".join(c if c.isalnum() else "_" for c in file.stem)
    return f"{PREFIX}{stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"


def _sibling(name: str, places: Iterable[str], namespaces: bool = False) -> str | None:
    """Return the Python file of a module in the first of some directories that has it.

    Args:
        namespaces: a directory without `__init__.py` counts too.
    """
    for place in places:
        found = PathFinder.find_spec(name, [place])
        if found is None:
            continue
        if found.origin is not None and found.origin.endswith(".py"):
            return found.origin
        if found.origin is None and namespaces:
            return str(Path(place) / name)
    return None


def _spec(name: str, file: str) -> ModuleSpec | None:
    if file.endswith(".py"):
        return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, file))
    return PathFinder.find_spec(name, [str(Path(file).parent)])


def _forget_namesakes(directory: Path) -> None:
    """Let a file that is imported have its own `helpers`, not those beside an earlier file."""
    for name, file in list(finder.files.items()):
        own = None if name.startswith(PREFIX) else _sibling(name, [str(directory)])
        if own not in (None, file):
            del finder.files[name]
            for known in [key for key in sys.modules if f"{key}.".startswith(f"{name}.")]:
                del sys.modules[known]


def _searched() -> list[str]:
    """Return the directories to look in, on this thread, the one asked for last first."""
    found: list[str] = getattr(_local, "directories", [])
    return found


@contextmanager
def searching(*places: Path) -> Iterator[None]:
    """Look for modules in these directories too, on this thread."""
    before = _searched()
    _local.directories = [*map(str, places), *before]
    try:
        yield
    finally:
        _local.directories = before
