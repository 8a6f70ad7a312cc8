"""Import users' Python files and modules by name.

A file becomes a module with a unique name, `rlhf_pg_user_<stem>_<hash of its path>`, so that two
files called `my_rewards.py` do not collide. Its directory is appended to `sys.path`, for imports of
files beside it.

Code is named before it runs (`admit`). A config that a command finds in a directory, which nobody
has read, brings no code along (`distrust`).
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_pg.boundary.launcher import is_first_process
from rlhf_pg.boundary.quoted import frames, quote, visible
from rlhf_pg.boundary.terminal import say
from rlhf_pg.config.foreign_keys import nearest

PREFIX = "rlhf_pg_user_"
FACTORY = "function or class"
INSTALLED = tuple(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib"))

_named: set[str] = set()  # code that this command has named
_found: list[tuple[Path, Collection[str]]] = []  # configs that are not trusted


def distrust(config: Path, given: Collection[str]) -> None:
    """Refuse the code of a config that was found, unless the user has `given` its name."""
    _found.append((config, given))


def forget() -> None:
    """Forget what was named and distrusted: a command has ended."""
    _named.clear()
    _found.clear()


def admit(name: str, paths: Sequence[Path] | None = None, refused: Sequence[Path] = ()) -> None:
    """Name code before it runs, once; ValueError if it comes with a config that is not trusted.

    Args:
        paths: its files or folders; None for what the config itself contains.
        refused: directories besides the config's that a config which was found must not use.
    """
    for config, given in _found:
        own = [directory.resolve() for directory in (config.parent, *refused)]
        names = None if paths is None else [path.resolve() for path in paths]
        if name not in given and (
            names is None or any(file.is_relative_to(folder) for file in names for folder in own)
        ):
            raise ValueError(
                f"{quote(str(config))} would run {quote(name)}: this config was found, and not "
                "named as a recipe. Read it, and if you trust it, add --trust_run"
            )
    if name not in _named and is_first_process():
        say(f"runs {quote(name)}")
    _named.add(name)


def paths_of(module: str) -> list[Path]:
    """Return the folders or the file of a module's package, which is not imported."""
    spec = importlib.util.find_spec(module.partition(".")[0] or "-")
    if spec is None:
        return []
    if spec.submodule_search_locations or spec.has_location:
        return [Path(name) for name in spec.submodule_search_locations or [spec.origin or ""]]
    return [Path(os.__file__)]  # it is built in


def load(name: str, what: str = "function") -> Any:
    """Import a function (or class): `file.py:name`, `package.module:name`, `package.module.name`.

    `what` is "function", "class", or `FACTORY` for either. A module is installed, in the working
    directory, or in the directory before its name (`directory/package.module:name`). ValueError if
    there is no such file or module, its import fails (the message has its traceback), or it has no
    function of that name.
    """
    source, _, attribute = name.rpartition(":" if ":" in name else ".")
    if name.endswith(".py") or not source:
        raise ValueError(
            f"{quote(name)} names no {what}: write file.py:NAME or package.module:NAME"
        )
    directory, _, dotted = source.rpartition("/")
    file = find_file(source, name) if source.endswith(".py") else None
    where = file or Path(directory).absolute()
    if file is None:
        _search(where)
    # A function of an installed package may be any, with arguments of the config.
    refused = () if dotted.startswith("rlhf_pg.") else INSTALLED
    admit(name, paths_of(dotted) if file is None else [file], refused)
    try:
        module = importlib.import_module(dotted) if file is None else import_file(file)
    except (Exception, SystemExit) as error:
        said = visible("".join(traceback.format_exception_only(error)).rstrip())
        problem = f"{quote(name)} cannot be imported from {quote(str(where))}"
        raise ValueError(f"{problem}:{frames(error)}\n{said}") from error
    loaded = getattr(module, attribute, None)
    fits = what == FACTORY or inspect.isclass(loaded) == (what == "class")
    if not fits or not callable(loaded):
        of_kind = inspect.isclass if what == "class" else inspect.isfunction
        public = [key for key, _ in inspect.getmembers(module, of_kind) if not key.startswith("_")]
        raise ValueError(
            f"{quote(name)}: it has no {what} {quote(attribute)}"
            f"{nearest(attribute, public)}; there are: {', '.join(public) or 'none'}"
        )
    return loaded


def find_file(path: str, name: str) -> Path:
    """Return the absolute path of a file; ValueError, beginning with `name`, if there is none."""
    file = Path(os.path.abspath(Path(path).expanduser()))
    if not file.is_file():
        or_at_recipe = "" if Path(path).is_absolute() else ", nor one beside the recipe"
        raise ValueError(f"{quote(name)}: there is no file {quote(str(file))}{or_at_recipe}")
    return file


def import_file(file: Path) -> ModuleType:
    """Import a Python file once, under a name that is the same in every process."""
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
    name = PREFIX + re.sub(r"\W", "_", file.stem) + f"_{digest}"
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


def loaded_files() -> dict[str, str]:
    """Return the file of each module from `import_file`, by the module's name."""
    here = list(sys.modules.items())  # a copy, since other threads may import
    return {name: str(module.__file__) for name, module in here if name.startswith(PREFIX)}


def _search(directory: Path) -> None:
    """Search a directory for modules, after all others."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
    importlib.invalidate_caches()
