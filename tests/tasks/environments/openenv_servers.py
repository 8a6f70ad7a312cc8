"""Environment servers as users of OpenEnv write them: a number to be guessed, and a till."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Hint(Observation):
    hint: str = ""


class Range(Hint):
    low: int = 0
    high: int = 9


class HigherLower(Environment):
    """Its number is the seed's last digit."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.number = (seed or 0) % 10
        return Hint(hint="0 to 9?")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        guess = int(action.message)
        if guess == self.number:
            return Hint(hint="yes", reward=1.0, done=True)
        return Hint(hint="higher" if guess < self.number else "lower", reward=-0.25)

    @property
    def state(self) -> State:
        return self._state


class Patient(HigherLower):
    """Asks again for what is no number."""

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        return super().step(action) if action.message.isdecimal() else Hint(hint="?", reward=-0.5)


class Till(MCPEnvironment):
    """Pays what has been added to it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("till")

        @server.tool()
        def add(amount: int) -> str:
            """Add an amount."""
            if amount < 0:
                raise ValueError("no refunds")
            self.sum += amount
            return f"sum {self.sum}"

        super().__init__(server)
        self.sum = 0
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_: Any
    ) -> Observation:
        self.sum = 0
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise NotImplementedError

    async def step_async(self, action: Action, timeout_s: float | None = None, **_: Any) -> Any:
        before = self.sum
        said = await super().step_async(action, timeout_s=timeout_s)
        said.reward, said.done = float(self.sum - before), self.sum > 9
        return said

    @property
    def state(self) -> State:
        return self._state


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an app on a free port of loopback; yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    socket = server.config.bind_socket()
    thread = Thread(target=server.run, args=([socket],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


def higher_lower(sessions: int = 32, wide: bool = False, patient: bool = False) -> Any:
    environment, observation = Patient if patient else HigherLower, Range if wide else Hint
    return create_app(environment, Guess, observation, max_concurrent_envs=sessions)


def till() -> Any:
    return create_app(Till, CallToolAction, CallToolObservation, max_concurrent_envs=32)
