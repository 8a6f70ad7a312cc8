"""The environment of a multi-turn episode, which answers every turn and may reward it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from rlhf_pg.boundary.quoted import show
from rlhf_pg.boundary.user_code import finite

Messages: TypeAlias = str | Sequence[Mapping[str, Any]]


class Observation(NamedTuple):
    """An environment's answer to a turn; a plain tuple of the three fields will do."""

    # The text before the next turn if the prompt is text. If it is chat, messages, or text for a
    # single user message. Ignored when `done`.
    messages: Messages = ""
    reward: float | None = None  # of this turn
    done: bool = False  # the episode is over


class Environment(Protocol):
    """The environment of one episode; both methods may be `async`.

    If a method raises, returns something else or takes longer than `environment_timeout`, the
    episode ends, its error is recorded, and it is left out of losses and reward statistics.
    """

    def reset(self, example: dict[str, Any]) -> Messages | Awaitable[Messages]:
        """Begin the episode of a dataset row, and return its prompt: the row's or another.

        If the row has a chat, returned text is a user message after the row's system prompt.
        """

    def step(self, completion: str) -> Observation | Awaitable[Observation]:
        """Answer a turn, which is text without special tokens.

        A turn that a token limit cut off may be rewarded; the episode then ends.
        """


EnvironmentFactory: TypeAlias = Callable[[], Environment]


class SettlingEnvironment:
    """The base class of environments that are notified when their episode ends."""

    def settle(self) -> float | Awaitable[float | None] | None:
        """Return the reward of the whole episode, or None; not called if the episode failed.

        It replaces the last turn's own reward.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Abort work still under way; called after every episode, even a failed one."""


def check_prompt(prompt: Any, of_row: Messages) -> Messages:
    """Return the result of `reset` as a prompt of the same kind as the row's, `of_row`; ValueError
    if it is neither text nor chat messages.
    """
    if isinstance(prompt, str):
        if isinstance(of_row, str):
            return prompt
        system = [dict(m) for m in of_row[:1] if m.get("role") in ("system", "developer")]
        return [*system, {"role": "user", "content": prompt}]
    if not _is_chat(prompt) or not prompt:
        raise ValueError(f"reset must return a string or a list of messages, got {show(prompt)}")
    return [dict(message) for message in prompt]


def check_observation(answer: Any, prompt: Messages) -> Observation:
    """Return the result of `step` as an `Observation`; ValueError if it does not have three
    entries, the messages do not fit the prompt, or the reward is not a finite number.
    """
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise ValueError(
            f"step must return Observation(messages, reward, done), got {show(answer)}"
        )
    messages, reward, done = answer
    if isinstance(prompt, str):
        fits = isinstance(messages, str)
        kind = "a string, as the prompt is"
    else:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        fits = _is_chat(messages)
        kind = "messages or a string"
    if not (done or fits):
        raise ValueError(f"step must answer with {kind}, got {show(messages)}")
    return Observation(messages, check_reward(reward, "a turn"), bool(done))


def check_reward(reward: Any, what: str) -> float | None:
    """Return the reward of a turn or an episode, or None; ValueError if it is not a number."""
    number = finite(reward)
    if number is None and reward is not None:
        raise ValueError(
            f"the reward of {what} must be a finite number or None, got {show(reward)}"
        )
    return number


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list | tuple) and all(
        isinstance(message, Mapping) and "role" in message for message in messages
    )
