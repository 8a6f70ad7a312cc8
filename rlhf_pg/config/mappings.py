"""Keys that are a mapping: plain in YAML and Python, JSON or one-line YAML on a command line."""

from typing import Annotated, Any

import tyro
import yaml


def _read(words: list[str]) -> dict[str, Any]:
    try:
        value = yaml.safe_load(words[0])
    except yaml.YAMLError:
        value = None
    if value is None and words[0].strip().lower() in ("null", "none", ""):
        return {}
    if not isinstance(value, dict):
        raise ValueError(f'expected a mapping such as \'{{"key": "value"}}\', got {words[0]!r}')
    return value


_JSON = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=_read,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [yaml.safe_dump(value, default_flow_style=True).strip()],
)

Mapping = Annotated[dict[str, Any], _JSON]
"""Type of a key whose value is a mapping; a flag gives it as JSON (or YAML in one line)."""
