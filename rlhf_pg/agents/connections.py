"""Connections of agents to the endpoint: their number and their time are limited."""

import asyncio
import resource
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 4096
FILES = 4  # open files of the process, for each connection
REQUEST_SECONDS = 30.0  # in which a whole request has to arrive
KEEP_ALIVE = 15  # seconds for which an idle connection is kept
ENDED_SECONDS = 1.0  # and one of an episode that has ended, whose program may be asking again


class Connection(H11Protocol):
    """A connection, which may be replaced by a new one while it waits for a request.

    Those without the key of a running episode, which anybody can open, are replaced first.
    """

    agent: Any = None  # whose key it has had

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {"connection": self}
        self._wait()
        connections: list[Any] = [x for x in self.connections if not x.transport.is_closing()]
        if len(connections) > most_connections():
            replaced = min(
                (x for x in connections if x.waits and x is not self),
                key=lambda x: (x.agent is not None, x.since),
                default=self,
            )
            replaced.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.agent is not None:
            self.agent.connections.discard(self)

    @property
    def waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _wait(self) -> None:
        self.since = self.loop.time()
        self.loop.call_later(REQUEST_SECONDS, self._give_up, self.since)

    def _give_up(self, since: float) -> None:
        if self.waits and self.since == since:
            self.transport.abort()

    def end_soon(self) -> None:
        """Close the connection after the answer that is sent."""
        self.loop.call_later(ENDED_SECONDS, self._end)

    def _end(self) -> None:
        if not self.transport.is_closing():
            self.shutdown()


def most_connections() -> int:
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES)


def raise_file_limit() -> None:
    """Allow this process as many open files as it may have: each connection is one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # macOS says that there is no limit, and has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
