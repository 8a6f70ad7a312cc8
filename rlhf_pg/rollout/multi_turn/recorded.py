"""An environment that answers as another one did, for a step that is made again."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_pg.rollout.multi_turn.environment import Observation, SettlingEnvironment
from rlhf_pg.rollout.multi_turn.tools import ToolEnvironment


class RecordedError(Exception):
    """The error that ended an episode when it was first played.

    Attributes:
        text: what the episode said of it.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class RecordedEnvironment(SettlingEnvironment):
    """An environment that gives the recorded answers, one after another, whatever it is told.

    Attributes:
        tools: how many tools were called, and how many of these calls failed.
    """

    def __init__(self, answers: Sequence[Mapping[str, Any]], tools: Sequence[int] = (0, 0)) -> None:
        self._answers, self.tools = iter(answers), (tools[0], tools[1])

    def reset(self, example: dict[str, Any]) -> Any:
        """Return the prompt as it was."""
        return self._next().get("prompt", example["prompt"])

    def step(self, completion: str) -> Observation:
        """Return the observation as it was."""
        said = self._next()
        return Observation(said.get("messages", ""), said.get("reward"), bool(said.get("done")))

    def settle(self) -> float | None:
        """Return the reward of the episode, if the other environment gave one."""
        reward: float | None = self._next().get("settled")
        return reward

    def _next(self) -> Mapping[str, Any]:
        said = next(self._answers, {})
        if "error" in said:
            raise RecordedError(said["error"])
        return said


def tool_counts(environment: Any) -> tuple[int, int]:
    """Return how many tools were called in an episode, and how many of these calls failed."""
    if type(environment) is RecordedEnvironment:
        return environment.tools
    if not issubclass(type(environment), ToolEnvironment):  # a user's object may be anything
        return 0, 0
    return environment.calls, environment.failures
