"""Small files that anybody may have written: read whole, or refused (ValueError)."""

from pathlib import Path
from typing import Any

import yaml

from rlhf_pg.boundary.quoted import quote

MOST_TEXT = 2**20  # bytes of a recipe
MOST_LINES = 2**32  # bytes of a file of JSON lines
LARGEST_VALUE = 10 * MOST_TEXT  # characters and entries of a recipe, its aliases repeated


class _UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses a key given twice; plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep) for key, _ in node.value if key.tag != merge]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.YAMLError(f"key {twice[0]!r} is given twice")
        return dict(super().construct_mapping(node, deep))


def read_file(path: Path, most: int = MOST_TEXT) -> bytes:
    """Read a file; ValueError if it is none, or has more than `most` bytes."""
    reason = f"it has more than {most:,} bytes"
    try:
        if path.exists() and not path.is_file():
            reason = "it is not a file"
        elif path.stat().st_size <= most:
            return path.read_bytes()
    except OSError as error:
        reason = str(error.strerror)
    raise ValueError(f"{quote(str(path))}: cannot be read: {reason}")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the keys of a YAML file, perhaps none."""
    name = quote(str(path))
    text = read_file(path)
    try:
        keys = yaml.load(text.decode(), Loader=_UniqueKeys) or {}
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: cannot be read: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an impossible date, for example
        raise ValueError(f"{name}: not valid YAML: {error}") from error
    if not isinstance(keys, dict):
        raise ValueError(f"{name}: expected `key: value` lines, got {type(keys).__name__}")
    left = [keys]
    size = 0
    while left and size <= LARGEST_VALUE:  # aliases of aliases are small only until one prints them
        value: Any = left.pop()
        size += len(value) if isinstance(value, str) else 1
        left += [*value, *value.values()] if isinstance(value, dict) else ()
        left += value if isinstance(value, list) else ()
    if left:
        raise ValueError(f"{name}: its aliases stand for too many values")
    return keys
