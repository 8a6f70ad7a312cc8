"""The environment of an episode of several turns, which answers every turn and may reward it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.boundary.user_code import finite
from rlhf_pg.data.prompts import Schemas as Schemas

Messages: TypeAlias = str | Sequence[Mapping[str, Any]]


class Observation(NamedTuple):
    """An environment's answer to a turn; a plain tuple of the three fields will do."""

    # What precedes the next turn: text if the prompt is text, messages if it is chat, where text
    # stands for one message of the user. Ignored when `done`.
    messages: Messages = ""
    reward: float | None = None  # of this turn
    done: bool = False  # the episode is over


class Environment(Protocol):
    """The surroundings of one episode; both methods may be `async`.

    An episode ends with a recorded error if a method raises, returns something else or takes longer
    than `environment_timeout`. Such an episode enters no loss and no statistic of rewards.
    """

    def reset(self, example: dict[str, Any]) -> Messages | Awaitable[Messages]:
        """Begin the episode of a dataset row, whose `prompt` is among its columns.

        Returns:
            The prompt, as text or chat messages: that of the row or another. Where the row has a
            chat, text stands for a message of the user, behind the row's system prompt.
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


class SettlingEnvironment:
    """The base class of environments that are told when their episode is over, however it ended."""

    def settle(self) -> float | Awaitable[float | None] | None:
        """Return the reward of the whole episode, or None; not called if the episode failed.

        It is paid at the last turn, in place of what that turn was paid so far.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give up what is still under way; called after every episode, failed ones included."""


class EnvironmentSource:
    """What makes a run's environments, and knows what they offer; this one has a plain factory."""

    pays = True  # whether "environment" is a source of reward

    def __init__(self, factory: EnvironmentFactory) -> None:
        self.factory = factory

    def runner_options(
        self,
        tokenizer: PreTrainedTokenizerBase,
        timeout: float,
        tools: Sequence[Callable[..., Any]],
    ) -> dict[str, Any]:
        """Return the fields of an `EpisodeRunner` that depend on the environments.

        Args:
            timeout: seconds for a call of an environment.
            tools: further functions that the policy may call; a ValueError where there can be none.
        """
        if tools:
            raise ValueError(
                "give tools or environment_factory, not both: an environment can call what it likes"
            )
        return {"environment_factory": self.factory, "timeout": timeout}

    def prompted(self, dataset: Dataset | None, rows: int) -> Dataset | None:
        """Return the dataset with a column `prompt`, if environments bring the prompts themselves;
        `rows` rows stand for a dataset that is missing.
        """
        return dataset


def source_of(factory: Any) -> EnvironmentSource:
    """Return the source of a run's environments.

    Raises:
        ValueError: it can make none.
    """
    if isinstance(factory, EnvironmentSource):
        return factory
    if not callable(factory) or (isinstance(factory, type) and not hasattr(factory, "step")):
        raise ValueError(
            "environment_factory must make environments with reset(example) and step(completion), "
            f"got {shown(factory)}; those of TRL's kind go into "
            "rlhf_pg.rollout.multi_turn.adapters.TrlEnvironments"
        )
    return EnvironmentSource(factory)


def checked_prompt(prompt: Any, given: Messages) -> Messages:
    """Check what `reset` returned, and return it as a prompt.

    Args:
        given: the prompt of the dataset's row.

    Raises:
        ValueError: it is neither text nor chat messages.
    """
    if isinstance(prompt, str) and not isinstance(given, str):
        system = [dict(m) for m in given[:1] if m.get("role") in ("system", "developer")]
        return [*system, {"role": "user", "content": prompt}]
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
    if isinstance(messages, str) and not isinstance(prompt, str):
        messages = [{"role": "user", "content": messages}]
    fits = isinstance(messages, str) if isinstance(prompt, str) else _is_chat(messages)
    if not done and not fits:
        kind = "a string, as the prompt is" if isinstance(prompt, str) else "messages or a string"
        raise ValueError(f"step must answer with {kind}, got {shown(messages)}")
    return Observation(messages, checked_reward(reward, "a turn"), bool(done))


def checked_reward(reward: Any, what: str) -> float | None:
    """Check the reward of a turn or an episode, and return it as a float or None.

    Raises:
        ValueError: it is neither a finite number nor None.
    """
    if reward is None:
        return None
    if (number := finite(reward)) is None:
        raise ValueError(
            f"the reward of {what} must be a finite number or None, got {shown(reward)}"
        )
    return number


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list | tuple) and all(
        isinstance(message, Mapping) and "role" in message for message in messages
    )
