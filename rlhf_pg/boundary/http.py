"""JSON asked of a server over HTTP, with bounded attempts, time, size and concurrency."""

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import httpx2

from rlhf_pg.boundary.quoted import quoted, shown, told

MOST = 1 << 26  # bytes of an answer
FIRST_PAUSE = 1.0  # seconds before the second attempt; twice as long before each further one
LONGEST_OWN_PAUSE = 60.0  # seconds, where the server asks for none
LONGEST_PAUSE = 300.0  # seconds, where the server asks for more
TEMPORARY = (408, 429)  # statuses below 500 after which it is asked again: too late, too many


class Unanswered(ValueError):
    """An error of a server that could not be asked, or that refused."""


class Garbled(Unanswered):
    """An answer that came, and is not JSON."""


class _Failed(Exception):
    """A failure that may be temporary, with the seconds to wait if the server says so."""


class Asker:
    """A client that posts JSON to one address and reads JSON.

    A connection that fails, a late answer and the statuses 408, 429 and 5xx lead to another
    attempt. Redirects are not followed. The server is not trusted: errors quote what it says,
    without the key.

    Args:
        url: the address, with its path.
        timeout: seconds for one whole answer, from the name lookup to the last byte.
        retries: further attempts after the first.
        concurrency: requests at the same time, by this process.
        key: sent as `Authorization: Bearer`; empty for none.
        most: bytes that an answer may have.
        pause: what waits between attempts, given seconds.
    """

    def __init__(
        self,
        url: str,
        timeout: float,
        retries: int,
        concurrency: int,
        key: str = "",
        most: int = MOST,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.url, self.timeout, self.retries = url, timeout, retries
        self.concurrency, self.most, self.pause = concurrency, most, pause
        self._key = key
        self._kept: tuple[Any, httpx2.AsyncClient, asyncio.Semaphore] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave connections behind: another process makes its own."""
        return self.__dict__ | {"_kept": None}

    async def ask(self, body: Any) -> Any:
        """Post a JSON value, and return the JSON value that is answered.

        Raises:
            Garbled: the answer is not JSON, or too long.
            Unanswered: the server refuses, sends us elsewhere, or all attempts have failed.
        """
        client, free = self._mine()
        async with free:
            for attempt in range(self.retries + 1):
                pause = min(FIRST_PAUSE * 2**attempt, LONGEST_OWN_PAUSE)
                try:
                    async with asyncio.timeout(self.timeout):
                        return await self._once(client, body)
                except _Failed as failure:
                    what, asked = failure.args
                    pause = pause if asked is None else asked
                except TimeoutError:
                    what = f"no answer within {self.timeout:g} s"
                except httpx2.HTTPError as error:
                    what = f"no answer ({told(origin(error))})"
                if attempt < self.retries:
                    if pause > LONGEST_PAUSE:
                        raise self._error(f"asks us to come back in {pause:g} s, which is too long")
                    await self.pause(pause)
        times = "1 attempt" if self.retries == 0 else f"{self.retries + 1} attempts"
        raise self._error(f"gave {what}, in {times}")

    def shown(self, answer: Any) -> str:
        """Return a value that the server has answered, for an error, without the key."""
        return shown(answer, self._key)

    def _mine(self) -> tuple[httpx2.AsyncClient, asyncio.Semaphore]:
        """Return the client of the running event loop, to which connections are bound."""
        loop = asyncio.get_running_loop()
        if self._kept is None or self._kept[0] is not loop:
            headers = {"Accept-Encoding": "identity"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            client = httpx2.AsyncClient(
                headers=headers,
                timeout=None,  # our own bounds the whole answer
                limits=httpx2.Limits(max_connections=None),
                trust_env=not is_loopback(httpx2.URL(self.url).host),  # its proxies
            )
            self._kept = loop, client, asyncio.Semaphore(self.concurrency)
        return self._kept[1], self._kept[2]

    async def _once(self, client: httpx2.AsyncClient, body: Any) -> Any:
        async with client.stream("POST", self.url, json=body) as answer:
            try:
                said = await body_of(answer, self.most)
            except ValueError as error:
                raise self._error(f"gave an answer too long: {error}", Garbled) from None
        status, text = answer.status_code, said.decode(errors="replace").strip()
        if status < 300:
            try:
                return json.loads(said, parse_constant=_refuse_constant)
            except (ValueError, RecursionError):
                what = f"gave what is not JSON: {self._quoted(text) or 'nothing'}"
                raise self._error(what, Garbled) from None
        if status < 400:
            where = quoted(answer.headers.get("Location", ""))
            raise self._error(f"sends us elsewhere (status {status}, to {where})")
        what = f"status {status}: {self._quoted(text) or quoted(answer.reason_phrase)}"
        if status >= 500 or status in TEMPORARY:
            after = answer.headers.get("Retry-After", "")  # a date is ignored
            raise _Failed(what, float(after) if after.isascii() and after.isdigit() else None)
        raise self._error(f"refuses with {what}")

    def _error(self, what: str, kind: type[Unanswered] = Unanswered) -> Unanswered:
        return kind(self._hidden(f"{quoted(self.url)} {what}"))

    def _quoted(self, said: str) -> str:
        """Return the start of what the server said, without the key, which it may repeat."""
        return quoted(self._hidden(said))

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


async def body_of(answer: httpx2.Response, most: int) -> bytes:
    """Return the bytes of an answer.

    Raises:
        ValueError: it has more than `most`; the rest is not read.
    """
    parts, size = [], 0
    async for part in answer.aiter_raw():
        parts.append(part)
        size += len(part)
        if size > most:
            raise ValueError(f"it has more than {most} bytes")
    return b"".join(parts)


def origin(error: BaseException) -> BaseException:
    """Return the system error that libraries have wrapped."""
    while (cause := error.__cause__ or error.__context__) is not None and str(cause):
        error = cause
    return error


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine by its name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
