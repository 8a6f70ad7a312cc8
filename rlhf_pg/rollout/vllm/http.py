"""Asking a server over HTTP: a bounded number of times, for a bounded time, for so many bytes."""

import asyncio
import ipaddress
import json
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2

from rlhf_pg.boundary.quoted import quoted, told
from rlhf_pg.boundary.user_code import result_of
from rlhf_pg.rollout.engine import RolloutError

T = TypeVar("T")

ATTEMPTS = 3
PAUSE = 1.0  # seconds before the second attempt; longer before each further one
CONNECTIONS = 256  # requests that a server is given at once
MOST = 1 << 20  # bytes of an answer
TOO_BUSY = (408, 429)  # statuses below 500 that may pass: too late, too many requests


class Refused(RolloutError):
    """The server understood, and will not: asking again is no use."""


class _Failed(Exception):
    """It has failed, which may pass."""


class Server:
    """A server that answers in JSON, or with nothing.

    What it is asked runs on an event loop of its own, since the time of a whole answer, from the
    look-up of its name to the last byte, can be bounded only there. It is believed no more than a
    stranger: redirects are not followed, and compressed bodies not asked for.

    Args:
        url: without a path.
        timeout: seconds for one answer.
        remedy: what to do when it fails, for the error.
    """

    def __init__(self, url: str, timeout: float, remedy: str) -> None:
        self.url, self.timeout, self.remedy = url.rstrip("/"), timeout, remedy
        self._free = asyncio.Semaphore(CONNECTIONS)
        self._client = httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity"},
            timeout=None,  # ours is that of the whole
            # A connection that is kept may be closed just when it is used.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=not _is_loopback(httpx2.URL(url).host),  # its proxies
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), daemon=True).start()
        ending = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        ending.atexit = False

    def ask(self, path: str, body: Any, read: Callable[[Any], T], most: int = MOST) -> T:
        """The result of `begin`; an interrupt breaks it off, and the server hears of it."""
        return result_of(self.begin(path, body, read, most))

    def begin(
        self, path: str, body: Any, read: Callable[[Any], T], most: int = MOST
    ) -> "Future[T]":
        """What `read` makes of the answer; what fails, is late or cannot be read is asked again.

        Args:
            body: to be posted as JSON; None gets instead.
            read: raises ValueError, TypeError or LookupError at an answer that is not whole.
            most: bytes that an answer may have.

        Raises:
            Refused: by the future: the server answered with a status from 300 to 499, but for
                `TOO_BUSY`.
            RolloutError: by the future: `ATTEMPTS` have failed.
        """
        return asyncio.run_coroutine_threadsafe(self._asked(path, body, read, most), self._loop)

    async def _asked(self, path: str, body: Any, read: Callable[[Any], T], most: int) -> T:
        what = ""
        async with self._free:
            for attempt in range(ATTEMPTS):
                await asyncio.sleep(PAUSE * attempt)
                try:
                    return read(await self._once(path, body, most))
                except _Failed as error:
                    what = str(error)
                except TimeoutError:
                    what = f"no answer within {self.timeout:g} s"
                except httpx2.HTTPError as error:
                    what = f"no answer ({told(_origin(error))})"
                except (ValueError, TypeError, LookupError, RecursionError) as error:
                    what = f"an answer that is not whole ({told(error)})"
        raise RolloutError(
            f"the server at {self.url} gave {what}, to {path}, in {ATTEMPTS} attempts: "
            f"{self.remedy}"
        )

    async def _once(self, path: str, body: Any, most: int) -> Any:
        method, url = "GET" if body is None else "POST", self.url + path
        async with (
            asyncio.timeout(self.timeout),
            self._client.stream(method, url, json=body) as answer,
        ):
            text, status = await _body(answer, most), answer.status_code
        if status < 300:
            # vLLM says "Success: ..." to some requests, in plain text.
            return json.loads(text) if text[:1] in (b"{", b"[") else None
        said = f"status {status}: {quoted(_said(text) or answer.reason_phrase)}"
        if status < 400:
            said = f"status {status}: it sends us elsewhere, where we do not go"
        if status >= 500 or status in TOO_BUSY:
            raise _Failed(said)
        raise Refused(f"the server at {self.url} refuses {path} with {said}")


async def _body(answer: httpx2.Response, most: int) -> bytes:
    parts, size = [], 0
    async for part in answer.aiter_raw():
        parts.append(part)
        size += len(part)
        if size > most:
            raise ValueError(f"it has more than {most} bytes")
    return b"".join(parts)


def _said(text: bytes) -> str:
    """The message of an error of vLLM's, or what stands in its place."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return text.decode(errors="replace").strip()


def _origin(error: BaseException) -> BaseException:
    """Of an error that libraries have passed on: which system call failed, and how."""
    while (cause := error.__cause__ or error.__context__) is not None and str(cause):
        error = cause
    return error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
