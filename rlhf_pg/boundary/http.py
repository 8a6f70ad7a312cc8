"""JSON asked of a server over HTTP, with bounded attempts, time and concurrency."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import httpx2

from rlhf_pg.boundary.quoted import quoted, told

T = TypeVar("T")

PAUSE = 1.0  # seconds before the second attempt, twice as long before each further one
LONGEST_PAUSE = 60.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")
TEMPORARY = (408, 429)  # statuses below 500 after which it is asked again: too late, too many


class Unanswered(ValueError):
    """An error of a server that could not be asked: all attempts have failed."""


class Refused(Unanswered):
    """An error that another attempt would not mend: the server understood and refused."""


class Client:
    """A client that asks one server for JSON.

    A connection that fails, a late answer, one that cannot be read and the statuses 408, 429 and
    5xx lead to another attempt after 1 s, then 2, 4 and so on. Redirects are not followed.
    """

    def __init__(
        self,
        url: str,  # paths are appended to it
        timeout: float,  # seconds for one whole answer
        retries: int,  # attempts after the first
        concurrency: int,  # requests of this process at a time
        key: str = "",  # sent as `Authorization: Bearer`
    ) -> None:
        self.url, self.timeout, self.retries, self._key = url, timeout, retries, key
        self._free = asyncio.Semaphore(concurrency)
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
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
        method, failure = "GET" if body is None else "POST", ""
        request = self._client.build_request(method, self.url + path, json=body)
        async with self._free:
            for attempt in range(self.retries + 1):
                if attempt:
                    await asyncio.sleep(min(PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE))
                try:
                    async with asyncio.timeout(self.timeout):
                        answer = await self._client.send(request)
                    if answer.status_code < 300:
                        # vLLM answers some requests in plain text, "Success: ...".
                        is_json = answer.text.lstrip()[:1] in ("{", "[")
                        return read(answer.json() if is_json else None)
                except TimeoutError:
                    failure = f"no answer within {self.timeout:g} s"
                except httpx2.HTTPError as error:
                    failure = f"no answer ({told(error)})"
                except (ValueError, TypeError, LookupError, RecursionError) as error:
                    failure = f"an answer that cannot be used ({told(error)})"
                else:
                    status = answer.status_code
                    said = answer.text if status >= 400 else "redirects are not followed"
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
