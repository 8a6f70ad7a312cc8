"""The keys of the configs, read from their source: `--help` needs no torch, which takes seconds.

A group is a class of the config. Its keys have the default, the type and the docstring of the last
class that declares them.
"""

import ast
import os
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

PACKAGE = Path(__file__).parents[1]
COMMON = "PolicyGradientConfig"  # the keys that all algorithms have


@dataclass(frozen=True)
class Key:
    """A key as `--help` shows it."""

    name: str
    kind: str
    default: Any
    text: str
    options: tuple[str, ...] = ()  # names that it takes


class Group(NamedTuple):
    """The keys that one class of a config adds, with the first sentence of its docstring."""

    title: str
    text: str
    keys: list[Key]


Chosen: TypeAlias = Callable[[Group, Key], bool]


def groups(config: str) -> list[Group]:
    """Return the keys of a config class in groups, from the most general class to its own.

    Args:
        config: name of the class, such as GRPOConfig.
    """
    lineage = _stand_in(config).__mro__[-2::-1]  # without object, the most general first
    latest: dict[str, Key] = {}
    home: dict[str, str] = {}
    for owner in (one.__name__ for one in lineage):
        for key in _own_keys(owner):
            latest[key.name] = key
            home.setdefault(key.name, owner)
    found = []
    for owner in dict.fromkeys(home.values()):
        text = " ".join((ast.get_docstring(_classes()[owner].node) or "").split("\n\n")[0].split())
        own = [key for key in latest.values() if home[key.name] == owner]
        found.append(Group(owner.removesuffix("Config").lower(), text, own))
    return found


def algorithms() -> dict[str, str]:
    """Return the name of the config class of every algorithm, by what recipes call it."""
    defaults = {
        name: next((key.default for key in _own_keys(name) if key.name == "algorithm"), None)
        for name in _classes()
    }
    return {
        default: name for name, default in defaults.items() if default and default.isidentifier()
    }


def shown(config: str, values: Mapping[str, Any], chosen: Chosen = lambda *_: True) -> str:
    """Return the keys of a config as text for a terminal.

    Args:
        values: of a recipe, shown in place of the defaults.
        chosen: which keys are shown; all by default.
    """
    blocks = []
    for group in groups(config):
        own = [key for key in group.keys if chosen(group, key)]
        if own:
            head = textwrap.wrap(f"{group.title}: {group.text}", width())
            blocks.append(
                "\n".join([*head, *(line for key in own for line in _lines(key, values))])
            )
    return "\n\n".join(blocks)


def width() -> int:
    """Return the columns that help is written in."""
    return min(100, shutil.get_terminal_size().columns)


def _lines(key: Key, values: Mapping[str, Any]) -> list[str]:
    value = _plain(values.get(key.name, key.default))
    text = key.text + (f" One of: {', '.join(key.options)}." if key.options else "")
    inner = "      "
    return [
        f"  --{key.name} {key.kind}  (default: {value})",
        *textwrap.wrap(text, width(), initial_indent=inner, subsequent_indent=inner),
    ]


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---------------------------------------------------------------------------------- reading source


class _Class(NamedTuple):
    module: str
    node: ast.ClassDef


@cache
def _tree(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _classes() -> dict[str, _Class]:
    """Return the classes of all files in config/, by name."""
    names = sorted(name for name in os.listdir(PACKAGE / "config") if name.endswith(".py"))
    modules = [f"rlhf_pg.config.{name.removesuffix('.py')}" for name in names if name[0] != "_"]
    return {
        node.name: _Class(module, node)
        for module in modules
        for node in _tree(module).body
        if isinstance(node, ast.ClassDef)
    }


@cache
def _stand_in(name: str) -> type:
    """Return an empty class with the name and the bases of a config class, for Python's own MRO."""
    bases = [base.id for base in _classes()[name].node.bases if isinstance(base, ast.Name)]
    return type(name, tuple(_stand_in(base) for base in bases if base in _classes()), {})


def _own_keys(name: str) -> Iterator[Key]:
    """Yield the keys that a class itself declares; the string below one is its text."""
    module, node = _classes()[name]
    if not any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        return
    after = [*node.body[1:], None]
    for statement, below in zip(node.body, after, strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = ""
        match below:
            case ast.Expr(value=ast.Constant(value=str(said))):
                text = " ".join(said.split())
        default, options = _default(module, statement.value)
        kind = _kind(module, statement.annotation)
        yield Key(statement.target.id, kind, default, text, options)


def _default(module: str, node: ast.expr | None) -> tuple[Any, tuple[str, ...]]:
    """Return a field's default, and the names that it takes if it is a `choice`."""
    match node:
        case ast.Call(func=ast.Name(id="choice"), args=[default, ast.Name(id=registry)]):
            return ast.literal_eval(default), tuple(_items(_resolved(module, registry)))
        case ast.Call(func=ast.Name(id="number"), args=[default, *_]):
            return ast.literal_eval(default), ()
        case ast.Call(func=ast.Name(id="field"), keywords=[ast.keyword(arg="default_factory")]):
            return {}, ()
        case None:
            return None, ()
    return ast.literal_eval(node), ()


def _kind(module: str, node: ast.expr) -> str:
    """Spell a type as a flag has it: `float|None`, `{a,b}`, `str ...`."""
    match node:
        case ast.BinOp(left=left, right=right):
            return f"{_kind(module, left)}|{_kind(module, right)}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            options = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return "{" + ",".join(str(ast.literal_eval(option)) for option in options) + "}"
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[inner, *_])):
            return f"{_kind(module, inner)} ..."
        case ast.Name(id="Mapping"):
            return "JSON"
        case ast.Name(id="bool"):
            return "{true,false}"
        case ast.Name(id=name) if name[0].isupper():
            return _kind(module, _resolved(module, name))
    return ast.unparse(node)


def _resolved(module: str, name: str) -> ast.expr:
    """Return the expression that a name stands for, followed through imports of the package."""
    for node in _tree(module).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return value
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value):
                if found == name:
                    return value
            case ast.ImportFrom(module=str(source), names=names):
                if any((alias.asname or alias.name) == name for alias in names):
                    return _resolved(source, name)
    raise LookupError(f"{module} does not define {name}")


def _items(node: ast.expr) -> list[Any]:
    if isinstance(node, ast.Starred):
        return _items(node.value)
    if isinstance(node, ast.Dict):
        return [ast.literal_eval(key) for key in node.keys if key is not None]
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        parts = [_items(one) if isinstance(one, ast.Starred) else [one] for one in node.elts]
        return [ast.literal_eval(x) if isinstance(x, ast.expr) else x for xs in parts for x in xs]
    return [ast.literal_eval(node)]
