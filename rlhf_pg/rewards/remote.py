"""A reward that is computed by a server: completions go there as JSON, scores come back."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2

from rlhf_pg.boundary.quoted import quoted, told
from rlhf_pg.boundary.user_code import finite
from rlhf_pg.rewards.endpoint import asker, only_columns, side_by_side, whole

KEYS = ("scores", "rewards")


class HttpReward:
    """A server that scores completions.

    It is posted `{"prompts": [...], "completions": [...], "completion_ids": [...]}` with every
    other column of the dataset under its name, all lists of equal length, and answers
    `{"scores": [...]}`, `{"rewards": [...]}` or a bare list: one entry per completion, a number,
    null where the reward does not apply, or a list with an entry per token.

    Args:
        url: the address, with its path.
        batch_size: completions in one request; requests run side by side.
        concurrency: requests at the same time, by this process.
        timeout: seconds for one answer.
        retries: further attempts where a connection fails, an answer is late, or its status is
            408, 429 or 5xx.
        api_key_env: the environment variable with a key, sent as `Authorization: Bearer`.
        options: see `rlhf_pg.boundary.http.Asker`.

    Raises:
        ValueError: an option that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        batch_size: int = 64,
        concurrency: int = 8,
        timeout: float = 60.0,
        retries: int = 5,
        api_key_env: str | None = None,
        **options: Any,
    ) -> None:
        who = quoted(str(url))
        self.batch_size = whole(who, "batch_size", batch_size, least=1)
        self.asker = asker(who, url, api_key_env, timeout, retries, concurrency, **options)
        parts = httpx2.URL(url)
        port = "" if parts.port is None else f":{parts.port}"
        self.__name__ = f"{parts.host}{port}{parts.path}".rstrip("/")

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[Any]:
        """Return one score per completion.

        Raises:
            ValueError: a column that is not JSON, a server that does not answer, or an answer that
                is not one score per completion.
        """
        table = _json({"prompts": prompts, "completions": completions, **only_columns(columns)})
        starts = range(0, len(completions), self.batch_size)
        batches = await side_by_side([self._scores(table, start) for start in starts])
        return [score for batch in batches for score in batch]

    async def _scores(self, table: Mapping[str, list[Any]], start: int) -> list[Any]:
        rows = slice(start, start + self.batch_size)
        body = {name: column[rows] for name, column in table.items()}
        answer = await self.asker.ask(body)
        scores = _listed(answer)
        if scores is None:
            raise ValueError(
                f"{quoted(self.asker.url)} must answer with a list of scores, or with one under "
                f'"scores" or "rewards", and said {self.asker.shown(answer)}'
            )
        count = len(body["completions"])
        if len(scores) != count:
            raise ValueError(
                f"{quoted(self.asker.url)} gave {len(scores)} scores for {count} completions "
                f"(from number {start} on): {self.asker.shown(scores)}"
            )
        for row, score in enumerate(scores, start):
            if not all(map(_is_score, score if isinstance(score, list) else [score])):
                raise ValueError(
                    f"{quoted(self.asker.url)} gave {self.asker.shown(score)} for completion "
                    f"{row}: a score is a finite number, or null where the reward does not apply"
                )
        return scores


def _json(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return columns as lists, each of which JSON can hold."""
    for name, column in columns.items():
        try:
            json.dumps(list(column), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"the column {quoted(name)} cannot be sent to a server as JSON ({told(error)}): "
                "remove it from the dataset, or make text or numbers of it"
            ) from None
    return {name: list(column) for name, column in columns.items()}


def _listed(answer: Any) -> list[Any] | None:
    if isinstance(answer, dict):
        answer = next((answer[key] for key in KEYS if key in answer), None)
    return answer if isinstance(answer, list) else None


def _is_score(score: Any) -> bool:
    return score is None or (isinstance(score, int | float) and finite(score) is not None)
