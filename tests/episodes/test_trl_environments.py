"""Environments as TRL has them: called, and paid."""

import time

import pytest

from rlhf_pg.episodes import EnvironmentSource, EpisodeRunner, Observation, source_of
from rlhf_pg.episodes.adapters import TrlEnvironments
from rlhf_pg.rollout import SamplingParams
from rlhf_pg.tasks.multi_turn import CHARACTERS
from rlhf_pg.tasks.tiny import tool_tokenizer
from tests.episodes.scripted import sayer
from tests.rows import episodes_of

TOKENIZER = tool_tokenizer(CHARACTERS, [])
EOS = TOKENIZER.eos_token_id
CHAT = [{"role": "user", "content": "q"}]
# Shows the names of the tools, and what they answer.
TOKENIZER.chat_template = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ '(' + m.content + ')' if m.role != 'assistant' else m.content }}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


class Counter:
    """As the documentation of TRL writes them: tools with a state, and a reward of its own."""

    def reset(self, **row):
        self.row, self.count = row, 0
        return f", from {row['start']}" if row.get("start") else None

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: by how much.

        Returns:
            The new value.
        """
        self._refuse(step)
        self.count += step
        return self.count

    async def double(self) -> int:
        """Double the counter."""
        self.count *= 2
        return self.count

    def get_reward(self) -> float:
        return float(self.count)

    def _refuse(self, step):
        if step < 0:
            raise ValueError("no way back")

    @property
    def fragile(self):
        raise RuntimeError("nobody should look")


class Door:
    """Without a reward; its tool has the name of our method."""

    def reset(self, start=None):
        self.open = False

    def step(self, key: str) -> str:
        """Turn a key.

        Args:
            key: which one.
        """
        self.open = key == "b"
        return "open" if self.open else "shut"


class Ours:
    def reset(self, example):
        return example["prompt"]

    def step(self, completion):
        return Observation(done=True)


def call(name, **arguments):
    inner = ", ".join(f'"{k}": {v}' for k, v in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{inner}}}}}</tool_call>'


def runner_of(factory, tools=(), timeout=30.0, **options):
    found = TrlEnvironments(factory).runner_options(TOKENIZER, timeout, tools)
    return EpisodeRunner(tokenizer=TOKENIZER, stop_token_ids=[EOS], **found, **options)


def play(runner, *turns, rows=({},), n=1, max_tokens=400):
    examples = [{"prompt": CHAT} | row for row in rows]
    tokens = [TOKENIZER("(q)>")["input_ids"]] * len(rows)
    params = SamplingParams(max_tokens=max_tokens)
    engine = sayer(TOKENIZER, *(turn + TOKENIZER.eos_token for turn in turns))
    return episodes_of(runner, engine, examples, tokens, range(len(rows)), n, params)


def test_methods_are_tools_with_a_state_and_reset_extends_prompt() -> None:
    runner = runner_of(Counter)
    turns = (call("increment", step=3) + call("increment", step=-1), call("double"), "done")
    (episode,) = play(runner, *turns, rows=[{"start": 5, "answer": "a"}])
    assert episode.error is None
    assert TOKENIZER.decode(episode.prompt_ids) == "[double][increment](q, from 5)>"
    said = [m["content"] for m in episode.messages if m["role"] == "tool"]
    assert said == ["3", "Error: ValueError: no way back", "6"]
    assert [reward for reward in episode.rewards if reward == reward] == [6.0]
    assert episode.rewards[-1] == 6.0  # at the last turn's last token
    assert (episode.turns, episode.environment.calls, episode.environment.failures) == (3, 3, 1)
    instance = episode.environment.trl_instance
    assert type(instance) is Counter
    assert instance.row == {"prompt": CHAT, "start": 5, "answer": "a"}


def test_prompt_without_observation_is_that_of_dataset() -> None:
    (episode,) = play(runner_of(Counter), "done")
    assert episode.prompt == CHAT
    assert TOKENIZER.decode(episode.prompt_ids) == "(q)>"  # as it was tokenized with the dataset


@pytest.mark.parametrize("limit", [{"max_turns": 1}, {"max_tokens": 80}])
def test_episode_that_was_cut_off_is_still_paid(limit) -> None:
    options = {k: v for k, v in limit.items() if k == "max_turns"}
    sizes = {k: v for k, v in limit.items() if k == "max_tokens"}
    turns = (call("increment", step=3), "x" * 80)
    (episode,) = play(runner_of(Counter, **options), *turns, **sizes)
    assert episode.truncated
    assert [reward for reward in episode.rewards if reward == reward] == [3.0]


def test_row_chooses_environment_and_its_tools() -> None:
    factories = {"count": Counter, "door": Door}
    runner = runner_of(factories)
    rows = [{"environment": "count", "start": 1}, {"environment": "door", "start": 2}]
    assert [[tool["function"]["name"] for tool in runner.tools(row)] for row in rows] == [
        ["double", "increment"],
        ["step"],
    ]
    assert TrlEnvironments(factories).pays
    count, door = play(runner, call("step", key='"b"'), "done", rows=rows)
    assert door.environment.trl_instance.open
    assert door.messages[1]["content"] == "open"
    assert "there is no tool 'step', only double, increment" in count.messages[1]["content"]
    assert "environment" not in count.environment.trl_instance.row
    assert all(reward != reward for reward in door.rewards)
    with pytest.raises(ValueError, match=r"column 'environment' .*'house', .* count, door"):
        runner.tools({"environment": "house"})


def test_tools_of_run_stand_beside_methods() -> None:
    def add(a: int) -> int:
        """Add one.

        Args:
            a: to what.
        """
        return a + 1

    runner = runner_of(Door, tools=[add])
    (episode,) = play(runner, call("add", a=1) + call("step", key='"b"'), "done")
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == ["2", "open"]
    with pytest.raises(ValueError, match="give tools or environment_factory, not both"):
        source_of(Ours).runner_options(TOKENIZER, 1.0, [add])


@pytest.mark.parametrize(
    ("reset", "error"),
    [
        (lambda self, **row: 3, "ValueError: reset must return a string or None, got 3"),
        (lambda self, **row: time.sleep(9), "TimeoutError: no answer within 0.2 s"),
        (lambda self, **row: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_failed_reset_ends_its_episode(reset, error) -> None:
    faulty = type("Faulty", (Counter,), {"reset": reset})
    (episode,) = play(runner_of(faulty, timeout=0.2), "done")
    assert episode.error == error
    assert not episode.tokens


def test_plain_factory_makes_ours_and_other_things_are_refused() -> None:
    for factory in (Ours, lambda: Ours()):
        assert type(source_of(factory)) is EnvironmentSource
    assert type(source_of(TrlEnvironments(Counter))) is TrlEnvironments
    for wrong in ("guess", {"a": Door}, Counter):
        with pytest.raises(ValueError, match="TrlEnvironments"):
            source_of(wrong)

    class Mute(Door):
        def move(self, where: str) -> str:
            return where

    with pytest.raises(ValueError, match=r"no usable schema: .*move"):
        TrlEnvironments(Mute).runner_options(TOKENIZER, 1.0, [])
