"""File names in a config: they are looked up beside the recipe, then in the working directory."""

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from rlhf_pg.boundary import user_modules
from rlhf_pg.config.fields import registry

PLACES = (
    "output_dir",
    "resume_from_checkpoint",
    "vllm_sync_directory",
)  # may be new
# The arguments of functions that the keys name.
CALLS = {
    "advantage_estimator": "inputs",
    "policy_loss": "logprobs, old_logprobs, advantages, mask",
}
FUNCTIONS = (
    "trainer",
    "privileged_prompt",
    "agent_program",
    "environment_factory",
)


def absolute(name: str, beside: Path | None) -> str:
    """Return the absolute path of a file or folder, or the name if there is none."""
    for folder in (beside or "", ""):
        path = os.path.join(folder, os.path.expanduser(name))
        if name and os.path.exists(path):
            return os.path.abspath(path)
    return name


def locate_keys(config: Any, beside: Path | None) -> dict[str, Any]:
    """Return the keys that name models, datasets and functions, absolute where they are files."""
    keys: dict[str, Any] = {}
    for key, value in vars(config).items():
        of_model = key.endswith("model_name_or_path") and value != "policy"
        if value and (of_model or key in ("ptx_dataset_name", "chat_template")):
            keys[key] = absolute(value, beside)
        elif value and key in PLACES:
            keys[key] = os.path.expandvars(os.path.expanduser(value))
        elif key in ("dataset_name", "eval_dataset_name"):
            keys[key] = [absolute(name, beside) for name in value]
        elif value and key in FUNCTIONS and (key == "environment_factory" or names_function(value)):
            keys[key] = locate_reward(value, beside)
        elif key in ("reward_funcs", "tools"):
            keys[key] = [locate_reward(name, beside) for name in value]
        elif key in CALLS and ":" in value:
            keys[key] = locate_function(key, value, beside)
        elif key == "reward_options":
            keys[key] = {}
            for name, options in value.items():
                keys[key][locate_reward(name, beside)] = locate_options(name, options, beside)
    return keys


def locate_function(key: str, name: str, beside: Path | None) -> str:
    """Return the name of an estimator or loss of the user's, which is loaded; ValueError if it does
    not take the arguments of one.
    """
    functions = registry(key)
    if name not in functions:  # else it was given in Python
        if name.startswith("python:"):
            raise ValueError(f"{key} {name} was given in Python: give the function again")
        name = locate_reward(name, beside)
        functions[name] = user_modules.load(name)
    call = CALLS[key]
    try:
        inspect.signature(functions[name]).bind_partial(*call.split(", "))
    except TypeError:
        raise ValueError(f"{key} {name} must take ({call}, *, ...)") from None
    return name


def locate_options(name: str, options: dict[str, Any], beside: Path | None) -> dict[str, Any]:
    """Return the options of a reward, with absolute file names of a judge."""
    located = dict(options)
    if not name.startswith("judge:") and "." in name:  # a user's function
        return located
    for key in located.keys() & {"rubric", "cache"}:  # the cache may be new
        value = located[key]
        if isinstance(value, str) and (key == "cache" or is_file_name(value)):
            path = os.path.expanduser(absolute(value.strip(), beside))
            located[key] = os.path.abspath(path)
    return located


def locate_reward(name: str, beside: Path | None) -> str:
    """Return the name of a reward with its file, model or module made absolute, if it exists; a
    module as DIRECTORY/package.module:function.
    """
    if name.startswith("model:"):
        return f"model:{absolute(name.removeprefix('model:'), beside)}"
    place = name.rpartition(":" if ":" in name else ".")[0]
    if place.endswith(".py"):
        return absolute(place, beside) + name.removeprefix(place)
    if place and place.split(".")[0] not in {
        "judge",
        "python",
        *sys.stdlib_module_names,
    }:
        stem = place.replace(".", "/")
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if (path := absolute(file, beside)) != file:
                return path.removesuffix(file) + name
    return name


def names_function(text: str) -> bool:
    """Return whether a text is FILE.py:NAME, and not a template."""
    return re.fullmatch(r"[^\s{}]+\.py:\w+", text) is not None


def is_file_name(rubric: str) -> bool:
    """Return whether a judge's rubric is the name of a file with the rubric."""
    return "\n" not in rubric.strip() and rubric.strip().endswith((".md", ".txt"))
