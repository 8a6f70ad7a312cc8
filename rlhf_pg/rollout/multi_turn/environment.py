"""The environment of an episode of several turns, which answers every turn and may reward it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.boundary.user_code import finite

Messages: TypeAlias = str | Sequence[Mapping[str, Any]]


class Observation(NamedTuple):
    """An environment's answer to a turn; a plain tuple of the three fields will do.

    Attributes:
        messages: what precedes the next turn: text if the prompt is text, chat messages if it is
            chat. Ignored when `done`.
        reward: of this turn; None for no reward.
        done: whether the episode is over.
    """

    messages: Messages = ""
    reward: float | None = None
    done: bool = False


class Environment(Protocol):
    """The surroundings of one episode; both methods may be `async`.

    An episode ends with a recorded error if a method raises, returns something else or takes longer
    than `environment_timeout`. Such an episode enters no loss and no statistic of rewards.
    """

    def reset(self, example: dict[str, Any]) -> Messages | Awaitable[Messages]:
        """Begin the episode of a dataset row, whose `prompt` is among its columns.

        Returns:
            The prompt, as text or chat messages: that of the row or another.
        """
        ...

    def step(self, completion: str) -> Observation | Awaitable[Observation]:
        """Answer a turn.

        Args:
            completion: its text, without special tokens. This may be a turn that was cut off by a
                limit on tokens: it may be rewarded, and nothing follows it.
        """
        ...


EnvironmentFactory: TypeAlias = Callable[[], Environment]


def checked_prompt(prompt: Any) -> Messages:
    """Check what `reset` returned, and return it as a prompt.

    Raises:
        ValueError: it is neither text nor chat messages.
    """
    if isinstance(prompt, str):
        return prompt
    if _is_chat(prompt) and prompt:
        return [dict(message) for message in prompt]
    raise ValueError(f"reset must return a string or a list of messages, got {shown(prompt)}")


def checked_observation(answer: Any, prompt: Messages) -> Observation:
    """Check what `step` returned, and return it as an `Observation`.

    Raises:
        ValueError: there are not three entries, the messages are of another kind than the prompt,
            or the reward is not a finite number.
    """
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise ValueError(
            f"step must return Observation(messages, reward, done), got {shown(answer)}"
        )
    messages, reward, done = answer
    done = _over(done)
    fits = isinstance(messages, str) if isinstance(prompt, str) else _is_chat(messages)
    if not done and not fits:
        kind = "a string" if isinstance(prompt, str) else "a list of messages"
        raise ValueError(f"step must answer with {kind}, as the prompt is, got {shown(messages)}")
    if reward is not None and (reward := finite(reward)) is None:
        raise ValueError(
            f"the reward of a turn must be a finite number or None, got {shown(answer[1])}"
        )
    return Observation(messages, reward, done)


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list | tuple) and all(
        isinstance(message, Mapping) and "role" in message for message in messages
    )


def _over(done: Any) -> bool:
    try:
        return bool(done)
    except Exception as error:  # such as an array of several
        raise ValueError(f"done must be true or false, got {shown(done)}") from error
