"""Requests to a server over HTTP, with bounded attempts, time and size."""

import asyncio
import json
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2

from rlhf_pg.boundary.http import body_of, is_loopback, origin
from rlhf_pg.boundary.quoted import quoted, told
from rlhf_pg.boundary.user_code import result_of
from rlhf_pg.rollout.engine import RolloutError

T = TypeVar("T")

ATTEMPTS = 3
PAUSE = 1.0  # seconds before the second attempt; longer before each further one
CONNECTIONS = 256  # concurrent requests to a server
MOST = 1 << 20  # bytes of an answer
TOO_BUSY = (408, 429)  # temporary statuses below 500: too late, too many requests


class Refused(RolloutError):
    """An error after which asking again is no use: the server understood and refused."""


class _Failed(Exception):
    """A failure of the server that may be temporary."""


class Server:
    """A server that answers in JSON, or with nothing.

    Requests run on a separate event loop, since only there can the time of a whole answer, from the
    name lookup to the last byte, be bounded. The server is not trusted: redirects are not followed,
    and compressed bodies are not asked for.

    Args:
        url: without a path.
        timeout: seconds for one answer.
        remedy: what the user should do when it fails, for the error message.
    """

    def __init__(self, url: str, timeout: float, remedy: str) -> None:
        self.url, self.timeout, self.remedy = url.rstrip("/"), timeout, remedy
        self._free = asyncio.Semaphore(CONNECTIONS)
        self._client = httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity"},
            timeout=None,  # our own bounds the whole answer
            # A kept connection may be closed just when it is used.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=not is_loopback(httpx2.URL(url).host),  # its proxies
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), daemon=True).start()
        ending = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        ending.atexit = False

    def ask(self, path: str, body: Any, read: Callable[[Any], T], most: int = MOST) -> T:
        """Return the result of `begin`; an interrupt cancels the request, which the server sees."""
        return result_of(self.begin(path, body, read, most))

    def begin(
        self, path: str, body: Any, read: Callable[[Any], T], most: int = MOST
    ) -> "Future[T]":
        """Send a request, and return a future of what `read` makes of the answer.

        A request that fails, is late or cannot be read is repeated.

        Args:
            body: posted as JSON; None makes it a GET.
            read: raises ValueError, TypeError or LookupError if an answer is malformed.
            most: bytes that an answer may have.

        Raises:
            Refused: from the future: the server answered with a status from 300 to 499, except for
                `TOO_BUSY`.
            RolloutError: from the future: `ATTEMPTS` attempts have failed.
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
                    what = f"no answer ({told(origin(error))})"
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
            text, status = await body_of(answer, most), answer.status_code
        if status < 300:
            # vLLM answers some requests in plain text, "Success: ...".
            return json.loads(text) if text[:1] in (b"{", b"[") else None
        said = f"status {status}: {quoted(_said(text) or answer.reason_phrase)}"
        if status < 400:
            said = f"status {status}: it sends us elsewhere, and redirects are not followed"
        if status >= 500 or status in TOO_BUSY:
            raise _Failed(said)
        raise Refused(f"the server at {self.url} refuses {path} with {said}")


def _said(text: bytes) -> str:
    """Return the message of one of vLLM's errors, or the text itself."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return text.decode(errors="replace").strip()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
