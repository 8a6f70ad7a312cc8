"""The address, key and limits of rewards that ask a server, checked before anything is asked."""

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import httpx2

from rlhf_pg.boundary.http import Asker
from rlhf_pg.boundary.quoted import quoted, shown
from rlhf_pg.boundary.user_code import finite

T = TypeVar("T")

# What a trainer gives to whatever takes `**columns`, and no server.
OFFERED = ("trainer_state", "log_extra", "log_metric", "environments")


def asker(
    who: str,
    url: str,
    api_key_env: str | None,
    timeout: float,
    retries: int,
    concurrency: int,
    **options: Any,
) -> Asker:
    """Make the client of a reward, without asking anything yet.

    Args:
        who: the reward, for errors.
        api_key_env: the environment variable that holds the key; None for none.
        timeout, retries, concurrency, options: see `Asker`.

    Raises:
        ValueError: an option that cannot be used, or a variable that is not set.
    """
    seconds = number(who, "timeout", timeout)
    if seconds <= 0:
        raise ValueError(f"{who}: timeout must be above 0 seconds, got {shown(timeout)}")
    key = "" if api_key_env is None else key_of(who, api_key_env)
    attempts = whole(who, "retries", retries, least=0)
    at_once = whole(who, "concurrency", concurrency, least=1)
    return Asker(checked_url(who, url), seconds, attempts, at_once, key, **options)


def checked_url(who: str, url: Any) -> str:
    """Return an address to which something may be posted.

    Raises:
        ValueError: it is none, or holds what would be saved with the config: a user, a password or
            a query.
    """
    try:
        parts = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError, ValueError):
        parts = httpx2.URL("")
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ValueError(
            f"{who}: the address must be http://host:port/path (or https), got {shown(url)}"
        )
    if parts.userinfo or parts.query or parts.fragment:
        raise ValueError(
            f"{who}: the address {quoted(str(url))} holds a user, a password, a query or a "
            "fragment, which would be saved with the config: name an environment variable with "
            "the key in api_key_env"
        )
    return str(url)


def key_of(who: str, variable: Any) -> str:
    """Return the key in an environment variable.

    Raises:
        ValueError: it is not set, or holds what no header can.
    """
    if not isinstance(variable, str) or not variable.isidentifier():
        raise ValueError(
            f"{who}: api_key_env must be the name of an environment variable, not the key itself"
        )
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"{who}: the environment variable {variable} is not set: put the key there"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(f"{who}: the key in {variable} holds a character that no key has")
    return key


def number(who: str, option: str, value: Any) -> float:
    """Return an option that is a finite number, or the text of one, as YAML takes 1e-6.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = None if isinstance(value, bool) else finite(float(value))
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None:
        raise ValueError(f"{who}: {option} must be a number, got {shown(value)}")
    return found


def whole(who: str, option: str, value: Any, least: int) -> int:
    """Return an option that is a whole number, at least so large.

    Raises:
        ValueError: it is something else.
    """
    found = number(who, option, value)
    if found != int(found) or found < least:
        raise ValueError(
            f"{who}: {option} must be a whole number, at least {least}, got {shown(value)}"
        )
    return int(found)


async def side_by_side(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of calls that run at the same time.

    Raises:
        Exception: the one of the first call that failed; the others are cancelled.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def only_columns(given: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return the columns of the dataset among the arguments of a reward."""
    return {name: column for name, column in given.items() if name not in OFFERED}


def as_text(value: Any) -> str:
    """Return a prompt, a completion or a column as text; a chat turn by turn, with its roles."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(m, dict) for m in value):
        return "\n\n".join(f"[{m.get('role', '?')}]\n{_content(m)}" for m in value)
    return shown_whole(value)


def shown_whole(value: Any) -> str:
    """Return any value as text, whole."""
    try:
        return str(value)
    except Exception as error:
        raise ValueError(f"a {type(value).__name__} cannot be shown as text") from error


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(
            str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content
        )
    calls = message.get("tool_calls")
    return "\n".join([*([str(content)] if content else []), *map(str, calls or [])])
