"""The names of files in a config, which are looked for beside the recipe and then here."""

import os
import sys
from pathlib import Path
from typing import Any

NO_FILES = ("judge", "http", "https", "python")  # before a colon


def found(name: str, beside: Path | None) -> str | None:
    """Return the absolute path of a file or folder, looked for beside the recipe and then here."""
    for directory in (beside or Path.cwd(), Path.cwd()) if name else ():
        path = os.path.join(directory, os.path.expanduser(name))
        if os.path.exists(path):
            return os.path.abspath(path)
    return None


def located_keys(config: Any, beside: Path | None) -> dict[str, Any]:
    """Return the keys that name models, datasets and rewards, absolute where they are files."""
    keys: dict[str, Any] = {}
    for key, value in vars(config).items():
        if key.endswith("model_name_or_path") and value:
            keys[key] = found(value, beside) or value
        elif key in ("dataset_name", "eval_dataset_name"):
            keys[key] = [found(name, beside) or name for name in value]
    if hasattr(config, "reward_funcs"):
        rewards = {name: located(name, beside) for name in config.reward_funcs}
        keys["reward_funcs"] = list(rewards.values())
        keys["reward_options"] = {
            rewards.get(name, name): _with_files(options, beside)
            for name, options in config.reward_options.items()
        }
    return keys


def located(name: str, beside: Path | None) -> str:
    """Return the name of a reward with its file, model or module made absolute, if it is there.

    A module gets its directory in front: DIRECTORY/package.module:function.
    """
    kind, _, model = name.partition(":")
    if kind == "model":
        return f"model:{found(model, beside) or model}"
    place = name.rpartition(":" if ":" in name else ".")[0]
    if not place or kind in NO_FILES or place.partition(".")[0] in sys.stdlib_module_names:
        return name
    if place.endswith(".py"):
        return (found(place, beside) or place) + name.removeprefix(place)
    stem = place.replace(".", "/")
    for file in (f"{stem}.py", f"{stem}/__init__.py"):
        if path := found(file, beside):
            return path.removesuffix(file) + name
    return name


def is_file_name(rubric: Any) -> bool:
    """Return whether a judge's rubric is the name of a file that holds it."""
    text = rubric.strip() if isinstance(rubric, str) else ""
    return "\n" not in text and text.endswith((".md", ".txt"))


def _with_files(options: Any, beside: Path | None) -> Any:
    """Make a judge's files absolute: its rubric, if it is one, and its cache, which may be new."""
    if not isinstance(options, dict):
        return options
    files = {}
    rubric, cache = options.get("rubric", ""), options.get("cache")
    if is_file_name(rubric) and (path := found(rubric.strip(), beside)):
        files["rubric"] = path
    if isinstance(cache, str):
        files["cache"] = found(cache, beside) or os.path.abspath(os.path.expanduser(cache))
    return options | files
