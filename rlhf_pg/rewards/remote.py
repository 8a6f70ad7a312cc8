"""A reward that is computed by a server: completions go there as JSON, scores come back."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import httpx2
from pydantic import Field

from rlhf_pg.boundary.http import Client
from rlhf_pg.boundary.quoted import quoted, shown
from rlhf_pg.rewards.functions import OF_TRL

Whole = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class HttpReward:
    """A server that scores completions.

    It is posted `{"prompts": [...], "completions": [...], "completion_ids": [...]}` with every
    other column of the dataset under its name, all lists of equal length, and answers
    `{"scores": [...]}`, `{"rewards": [...]}` or a bare list: one entry per completion, a number,
    null where the reward does not apply, or a list with an entry per token.

    Raises:
        ValueError: an address that cannot be used, or a variable that is not set.
    """

    def __init__(
        self,
        url: str,  # with its path
        *,
        batch_size: Whole = 64,  # completions in one request; requests run side by side
        concurrency: Whole = 8,  # requests at the same time, by this process
        timeout: Seconds = 60.0,  # for one answer
        retries: Annotated[int, Field(ge=0)] = 5,  # see `rlhf_pg.boundary.http.Client`
        api_key_env: str | None = None,  # the variable with a key, sent as Authorization: Bearer
    ) -> None:
        check_address(url)
        parts, self.batch_size = httpx2.URL(url), batch_size
        self.client = Client(url, timeout, retries, concurrency, key_in(api_key_env))
        port = "" if parts.port is None else f":{parts.port}"
        self.__name__ = f"{parts.host}{port}{parts.path}".rstrip("/")

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[Any]:
        """Return one entry per completion.

        Raises:
            ValueError: a column that is not JSON, or a server that does not answer with one entry
                per completion.
        """
        table = {"prompts": prompts, "completions": completions, **columns}
        rows = range(0, len(completions), self.batch_size)
        bodies = [
            {
                name: list(column[i : i + self.batch_size])
                for name, column in table.items()
                if name not in OF_TRL
            }
            for i in rows
        ]
        batches = await asyncio.gather(*map(self._scores, bodies))
        return [score for batch in batches for score in batch]

    async def _scores(self, body: Mapping[str, Any]) -> list[Any]:
        count = len(body["completions"])

        def read(said: Any) -> list[Any]:
            if isinstance(said, dict):
                said = said.get("scores", said.get("rewards"))
            if not isinstance(said, list) or len(said) != count:
                raise ValueError(f"it is not a list of {count} scores, got {shown(said)}")
            return said

        return await self.client.ask("", body, read)


def check_address(url: str) -> None:
    """Refuse an address that cannot be asked, or that holds what would be saved with the config.

    Raises:
        ValueError: it is not http(s), or has a user, a password, a query or a fragment.
    """
    parts = httpx2.URL(url)
    is_http = parts.scheme in ("http", "https") and parts.host
    if not is_http or parts.userinfo or parts.query or parts.fragment:
        raise ValueError(
            f"an address is http://host:port/path, got {quoted(url)}; a user, a password or a "
            "query would be saved with the config: name an environment variable with the key in "
            "api_key_env"
        )


def key_in(variable: str | None) -> str:
    """Return the key in an environment variable; empty if none is named.

    Raises:
        ValueError: it is not set, or the key itself was given in place of a name.
    """
    if variable is None:
        return ""
    if not variable.isidentifier():
        raise ValueError("api_key_env: name the environment variable that holds the key")
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"api_key_env: there is no environment variable {variable}: put the key there"
        )
    return key
