"""Asking a server over HTTP, a bounded number of times."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

from rlhf_pg.rollout.engine import RolloutError

T = TypeVar("T")

ATTEMPTS = 3
PAUSE = 1.0  # seconds before the second attempt; longer before each further one


class Refused(RolloutError):
    """The server understood, and will not: asking again is no use."""


class Server:
    """A server that answers in JSON, or with nothing.

    Args:
        url: without a path.
        timeout: seconds for one answer.
        remedy: what to do when it fails, for the error.
    """

    def __init__(self, url: str, timeout: float, remedy: str) -> None:
        self.url, self.timeout, self.remedy = url.rstrip("/"), timeout, remedy

    def get(self, path: str) -> Any:
        """See `ask`."""
        return self.ask(path, None, lambda answer: answer)

    def post(self, path: str, body: Any) -> Any:
        """See `ask`."""
        return self.ask(path, body, lambda answer: answer)

    def ask(self, path: str, body: Any, read: Callable[[Any], T]) -> T:
        """What `read` makes of the answer; what fails, is late or cannot be read is asked again.

        Args:
            body: to be posted as JSON; None gets instead.
            read: raises ValueError, TypeError or LookupError at an answer that is not whole.

        Raises:
            Refused: the server answered with a status from 400 to 499.
            RolloutError: `ATTEMPTS` have failed.
        """
        what = ""
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE * attempt)
            try:
                return read(self._once(path, body))
            except urllib.error.HTTPError as error:
                what = f"status {error.code}: {_said(error)}"
                if error.code < 500:
                    raise Refused(f"{self.url}{path} refuses with {what}") from error
            except TimeoutError:
                what = f"no answer within {self.timeout:g} s"
            except (OSError, http.client.HTTPException) as error:
                late = isinstance(getattr(error, "reason", None), TimeoutError)
                what = f"no answer within {self.timeout:g} s" if late else f"no answer ({error})"
            except (ValueError, TypeError, LookupError) as error:
                what = f"an answer that is not whole ({error!r})"
        raise RolloutError(
            f"the server at {self.url} gave {what}, to {path}, in {ATTEMPTS} attempts: "
            f"{self.remedy}"
        )

    def _once(self, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=self.timeout) as answer:
            text: bytes = answer.read()
        # vLLM says "Success: ..." to some requests, in plain text.
        return json.loads(text) if text[:1] in (b"{", b"[") else None


def _said(error: urllib.error.HTTPError) -> str:
    """The message of an error of vLLM's, or what stands in its place."""
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, TypeError, LookupError):
        return text[:200].strip() or error.reason
