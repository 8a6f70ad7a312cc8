"""JSON asked of a server over HTTP, with bounded attempts, time, size and concurrency."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import httpx2

from rlhf_pg.boundary.quoted import quoted, told

T = TypeVar("T")

MOST = 1 << 26  # bytes of an answer
PAUSE = 1.0  # seconds before the second attempt, twice as long before each further one
LONGEST_PAUSE = 60.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")
TEMPORARY = (408, 429)  # statuses below 500 after which it is asked again: too late, too many


class Unanswered(ValueError):
    """An error of a server that could not be asked: all attempts have failed."""


class Refused(Unanswered):
    """An error after which asking again is no use: the server understood and refused."""


class Client:
    """A client that asks one server for JSON.

    A connection that fails, a late answer, one that cannot be read and the statuses 408, 429 and
    5xx lead to another attempt after 1 s, then 2, 4 and so on. Redirects are not followed.

    Paths are appended to `url`. There are `retries` attempts after the first. The `timeout` in
    seconds is for one whole answer, and `concurrency` bounds the requests at a time of this
    process. A `key` is sent as `Authorization: Bearer`.
    """

    def __init__(
        self, url: str, timeout: float, retries: int, concurrency: int, key: str = ""
    ) -> None:
        self.url, self.timeout, self.retries, self._key = url, timeout, retries, key
        self._free = asyncio.Semaphore(concurrency)
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        self._client = httpx2.AsyncClient(
            headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=None,  # our own bounds the whole answer
            # A kept connection may be closed just when it is used.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=httpx2.URL(url).host not in LOOPBACK,  # its proxies
        )

    async def ask(self, path: str, body: Any, read: Callable[[Any], T]) -> T:
        """Return what `read` makes of the answer to a POST of a body as JSON, or to a GET.

        `read` raises ValueError, TypeError or LookupError if an answer is malformed. Refused if the
        status is from 300 to 499, but for `TEMPORARY`; Unanswered if all attempts have failed.
        """
        content, failure = None if body is None else json.dumps(body, allow_nan=False), ""
        async with self._free:
            for attempt in range(self.retries + 1):
                if attempt:
                    await asyncio.sleep(min(PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE))
                try:
                    async with asyncio.timeout(self.timeout):
                        status, text = await self._once(path, content)
                    if status < 300:
                        # vLLM answers some requests in plain text, "Success: ...".
                        is_json = text.lstrip()[:1] in (b"{", b"[")
                        return read(json.loads(text, parse_constant=_refuse) if is_json else None)
                except TimeoutError:
                    failure = f"no answer within {self.timeout:g} s"
                except httpx2.HTTPError as error:
                    failure = f"no answer ({told(_origin(error))})"
                except (ValueError, TypeError, LookupError, RecursionError) as error:
                    failure = f"an answer that cannot be used ({told(error)})"
                else:
                    said = "redirects are not followed" if status < 400 else _message(text)
                    said = said.replace(self._key, "***") if self._key else said
                    failure = f"status {status}: {quoted(said)}"
                    if status < 500 and status not in TEMPORARY:
                        raise Refused(
                            f"the server at {self.url} refuses {path or '/'} with {failure}"
                        )
        raise Unanswered(
            f"the server at {self.url} gave {failure}, to {path or '/'}, in {self.retries + 1} "
            f"attempt{'s' if self.retries else ''}"
        )

    async def _once(self, path: str, content: str | None) -> tuple[int, bytes]:
        method, parts, size = "GET" if content is None else "POST", [], 0
        async with self._client.stream(method, self.url + path, content=content) as answer:
            async for part in answer.aiter_raw():
                parts.append(part)
                size += len(part)
                if size > MOST:
                    raise ValueError(f"it has more than {MOST} bytes")
        return answer.status_code, b"".join(parts)


def _message(text: bytes) -> str:
    """Return the message of an error as OpenAI's and vLLM's servers give it, or the text itself."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, TypeError, LookupError):
        return text.decode(errors="replace").strip() or "nothing said"


def _origin(error: BaseException) -> BaseException:
    """Return the system error that libraries have wrapped."""
    while (cause := error.__cause__ or error.__context__) is not None and str(cause):
        error = cause
    return error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
