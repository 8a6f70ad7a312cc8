"""File names in a config: they are looked up beside the recipe, then in the working directory."""

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from rlhf_pg.boundary import user_modules
from rlhf_pg.config.fields import registry

PATH_KEYS = (
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


def absolute(name: str, recipe_dir: Path | None) -> str:
    """Return the absolute path of a file or folder, or the name if there is none."""
    for folder in (recipe_dir or "", ""):
        path = os.path.join(folder, os.path.expanduser(name))
        if name and os.path.exists(path):
            return os.path.abspath(path)
    return name


def locate_keys(config: Any, recipe_dir: Path | None) -> dict[str, Any]:
    """Return the keys that name models, datasets and functions, absolute where they are files."""
    keys: dict[str, Any] = {}
    for key, value in vars(config).items():
        of_model = key.endswith("model_name_or_path") and value != "policy"
        if value and (of_model or key in ("ptx_dataset_name", "chat_template")):
            keys[key] = absolute(value, recipe_dir)
        elif value and key in PATH_KEYS:
            keys[key] = os.path.expandvars(os.path.expanduser(value))
        elif key in ("dataset_name", "eval_dataset_name"):
            keys[key] = [absolute(name, recipe_dir) for name in value]
        elif value and key in FUNCTIONS and (key == "environment_factory" or names_function(value)):
            keys[key] = locate_reward(value, recipe_dir)
        elif key in ("reward_funcs", "tools"):
            keys[key] = [locate_reward(name, recipe_dir) for name in value]
        elif key in CALLS and ":" in value:
            keys[key] = locate_function(key, value, recipe_dir)
        elif key == "reward_options":
            keys[key] = {}
            for name, options in value.items():
                keys[key][locate_reward(name, recipe_dir)] = locate_options(
                    name, options, recipe_dir
                )
    return keys


def locate_function(key: str, name: str, recipe_dir: Path | None) -> str:
    """Return the name of an estimator or loss of the user's, which is loaded; ValueError if it does
    not take the arguments of one.
    """
    functions = registry(key)
    if name not in functions:  # else it was given in Python
        if name.startswith("python:"):
            raise ValueError(f"{key} {name} was given in Python: give the function again")
        name = locate_reward(name, recipe_dir)
        functions[name] = user_modules.load(name)
    call = CALLS[key]
    try:
        inspect.signature(functions[name]).bind_partial(*call.split(", "))
    except TypeError:
        raise ValueError(f"{key} {name} must take ({call}, *, ...)") from None
    return name


def locate_options(name: str, options: dict[str, Any], recipe_dir: Path | None) -> dict[str, Any]:
    """Return the options of a reward, with absolute file names of a judge."""
    located = dict(options)
    if not name.startswith("judge:") and "." in name:  # a user's function
        return located
    for key in located.keys() & {"rubric", "cache"}:  # the cache may be new
        value = located[key]
        if isinstance(value, str) and (key == "cache" or is_file_name(value)):
            path = os.path.expanduser(absolute(value.strip(), recipe_dir))
            located[key] = os.path.abspath(path)
    return located


def locate_reward(name: str, recipe_dir: Path | None) -> str:
    """Return the name of a reward with its file, model or module made absolute, if it exists; a
    module as DIRECTORY/package.module:function.
    """
    if name.startswith("model:"):
        return f"model:{absolute(name.removeprefix('model:'), recipe_dir)}"
    module = name.rpartition(":" if ":" in name else ".")[0]
    if module.endswith(".py"):
        return absolute(module, recipe_dir) + name.removeprefix(module)
    if module and module.split(".")[0] not in {
        "judge",
        "python",
        *sys.stdlib_module_names,
    }:
        stem = module.replace(".", "/")
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if (path := absolute(file, recipe_dir)) != file:
                return path.removesuffix(file) + name
    return name


def names_function(text: str) -> bool:
    """Return whether a text is FILE.py:NAME, and not a template."""
    return re.fullmatch(r"[^\s{}]+\.py:\w+", text) is not None


def is_file_name(rubric: str) -> bool:
    """Return whether a judge's rubric is the name of a file with the rubric."""
    return "\n" not in rubric.strip() and rubric.strip().endswith((".md", ".txt"))
