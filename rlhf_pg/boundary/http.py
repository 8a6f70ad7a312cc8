"""JSON requests over HTTP, with bounded attempts, time, size and concurrency."""

import asyncio
import json
import zlib
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, TypeVar

import httpx2

from rlhf_pg.boundary.quoted import quote, tell

T = TypeVar("T")

PAUSE = 1.0  # seconds before the second attempt, doubled before each further one
LONGEST_PAUSE = 60.0
MOST_BYTES = 2**27  # of an answer, decompressed
LOOPBACK = ("localhost", "127.0.0.1", "::1")
TEMPORARY = (408, 429)  # statuses below 500 that are retried: timeout, too many requests


# What a body and its reader may raise; OverflowError is of an infinite number.
UNUSABLE = (ValueError, TypeError, LookupError, RecursionError, OverflowError, zlib.error)


class Unanswered(ValueError):
    """All attempts of a request have failed."""


class Failed(Unanswered):
    """The server said, in the last attempt, that it failed (status 500 and above)."""


class Refused(Unanswered):
    """The server refused the request; a retry would not help."""


class Client:
    """A client for JSON from one server.

    A failed connection, a late or unreadable answer and the statuses 408, 429 and 5xx lead to
    another attempt after 1 s, then 2, 4 and so on, or after the header Retry-After. Redirects are
    not followed.
    """

    def __init__(
        self,
        url: str,  # paths are appended to it
        timeout: float,  # seconds for one whole answer
        retries: int,  # attempts after the first
        concurrency: int,  # concurrent requests of this process
        key: str = "",  # sent as `Authorization: Bearer`
    ) -> None:
        self.url = url
        self.timeout = timeout
        self.retries = retries
        self._key = key
        self._free = asyncio.Semaphore(concurrency)
        self._client = httpx2.AsyncClient(
            headers={"Accept-Encoding": "gzip"}
            | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=None,  # `self.timeout` bounds the whole answer
            # The server may close a kept connection just when it is used.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=httpx2.URL(url).host not in LOOPBACK,  # proxies
        )

    async def ask(self, path: str, body: Any, read: Callable[[Any], T]) -> T:
        """POST a body as JSON, or GET without one, and return the answer parsed by `read`.

        `read` raises ValueError, TypeError or LookupError if an answer is malformed. Refused if the
        status is 300 to 499, except `TEMPORARY`; Failed or Unanswered if all attempts have failed.
        """
        method = "GET" if body is None else "POST"
        failure = ""
        pause = PAUSE
        who = f"the server at {self.url}"
        where = path or "/"
        request = self._client.build_request(method, self.url + path, json=body)
        async with self._free:
            for attempt in range(self.retries + 1):
                status = 0
                if attempt:
                    await asyncio.sleep(min(pause, LONGEST_PAUSE))
                    pause *= 2
                try:
                    async with asyncio.timeout(self.timeout):
                        sent = self._client.send(request, stream=True)
                        async with aclosing(await sent) as answer:
                            body = await read_body(answer)
                    if answer.status_code < 300:
                        # vLLM answers some requests in plain text, "Success: ...".
                        is_json = body.lstrip()[:1] in (b"{", b"[")
                        return read(json.loads(body) if is_json else None)
                except TimeoutError:
                    failure = f"no answer within {self.timeout:g} s"
                except httpx2.HTTPError as error:
                    failure = f"no answer ({tell(error)})"
                except UNUSABLE as error:
                    failure = f"an answer that cannot be used ({tell(error)})"
                else:
                    status = answer.status_code
                    wait = answer.headers.get("retry-after", "")
                    pause = max(pause, float(wait if wait.isdecimal() else 0))
                    message = "redirects are not followed"
                    if status >= 400:
                        message = body.decode(errors="replace")
                    if self._key:
                        message = message.replace(self._key, "***")
                    failure = f"status {status}: {quote(message)}"
                    if status < 500 and status not in TEMPORARY:
                        raise Refused(f"{who} refuses {where} with {failure}")
        attempts = f"{self.retries + 1} attempt{'s' if self.retries else ''}"
        kind = Failed if status >= 500 else Unanswered
        raise kind(f"{who} gave {failure}, to {where}, in {attempts}")


async def read_body(answer: httpx2.Response) -> bytes:
    """Return the decompressed body of an answer; ValueError beyond `MOST_BYTES`.

    httpx would decompress all that it gets at once, and what is packed several times as often.
    """
    coding = answer.headers.get("content-encoding", "identity").lower()
    if coding not in ("identity", "gzip"):
        raise ValueError(f"its Content-Encoding is {quote(coding)}, not gzip")
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS + 16)  # with the header of gzip
    body = bytearray()
    async for chunk in answer.aiter_raw():
        room = MOST_BYTES + 1 - len(body)
        body += unpacker.decompress(chunk, room) if coding == "gzip" else chunk
        if len(body) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return bytes(body)
