"""Tools: what the policy writes is read, checked and answered, whatever it is."""

import asyncio
import threading

import pytest

from rlhf_pg.episodes import Toolbox, ToolEnvironment
from tests.episodes.scripted import letters

TOKENIZER = letters()

# What a tokenizer may come with: how `parse_response` of transformers is to read its answers.
TEMPLATE = {
    "start_anchor": "<assistant>",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {},
        "tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True},
    },
}


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: another.
    """
    return a + b


async def shout(text: str) -> str:
    """Make a text loud.

    Args:
        text: what to say.
    """
    await asyncio.sleep(0)
    return text.upper()


def broken(text: str) -> str:
    """Fail.

    Args:
        text: why.
    """
    raise OSError(text)


def environment(*tools, timeout=30.0, tokenizer=TOKENIZER):
    playing = ToolEnvironment(Toolbox.of(tools or (add, shout, broken), tokenizer, timeout))
    assert playing.reset({"prompt": [{"role": "user", "content": "q"}]})[0]["content"] == "q"
    return playing


def called(text):
    return f"<tool_call>{text}</tool_call>"


def answers(playing, completion):
    messages, reward, done = playing.step(completion)
    assert reward is None
    assert done == (not messages)
    return [message["content"] for message in messages]


def test_turn_with_calls_is_answered_others_end_episode():
    playing = environment()
    said = "so " + called('{"name": "add", "arguments": {"a": 2, "b": 3}}')
    said += called(' {"name": "shout", "arguments": {"text": "no"}}\n')
    messages, reward, done = playing.step(said)
    assert messages == [
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "shout", "content": "NO"},
    ]
    assert (reward, done) == (None, False)
    assert playing.step("it is 5").done
    assert (playing.calls, playing.failures) == (2, 0)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("{", "the call is not JSON"),
        ("[" * 10000, "the call is not JSON"),
        ("7", 'a call needs a "name" and "arguments"'),
        ('{"name": "add", "arguments": [1]}', 'a call needs a "name"'),
        ('{"name": "exec", "arguments": {}}', "there is no tool 'exec', only add, shout, broken"),
        ('{"name": "add", "arguments": {"a": 1, "c": 2}}', "argument 'c'"),
        ('{"name": "add", "arguments": {"a": "x"}}', "TypeError"),
        ('{"name": "broken", "arguments": {"text": "gone"}}', "OSError: gone"),
    ],
)
def test_bad_call_is_answered_with_error(call, told):
    playing = environment()
    [answer] = answers(playing, called(call))
    assert answer.startswith("Error: ")
    assert told in answer
    assert (playing.calls, playing.failures) == (1, 1)
    assert answers(playing, called('{"name": "add", "arguments": {"a": 1}}')) == ["2"]


@pytest.mark.fault(55, "the policy is told that the tool took too long")
def test_slow_tool_gives_error_without_affecting_others():
    go = threading.Event()

    def wait() -> str:
        """Wait."""
        go.wait(30)
        return "late"

    playing = environment(wait, add, timeout=0.2)
    both = called('{"name": "wait"}') + called('{"name": "add", "arguments": {"a": 1}}')
    assert answers(playing, both) == ["Error: TimeoutError: no answer within 0.2 s", "2"]
    assert playing.failures == 1
    go.set()


def test_odd_results_are_readable_and_do_not_end_episode():
    def table(kind: int) -> dict:
        """Numbers.

        Args:
            kind: which.
        """
        return [{"a": ["größer", None]}, {(1, 2): 3}, "\ud800"][kind]

    playing = environment(table)
    said = [called(f'{{"name": "table", "arguments": {{"kind": {kind}}}}}') for kind in range(3)]
    right, wrong, half = answers(playing, "".join(said))
    assert right == '{"a": ["größer", null]}'
    assert wrong.startswith("Error: TypeError: keys must be str")
    assert half == "?"
    assert playing.failures == 1


def test_arguments_may_have_any_name():
    def run(function: str, timeout: int) -> str:
        """Run.

        Args:
            function: which.
            timeout: seconds.
        """
        return f"{function} {timeout}"

    call = '{"name": "run", "arguments": {"function": "f", "timeout": 1}}'
    assert answers(environment(run), called(call)) == ["f 1"]


def test_unterminated_calls_are_ignored():
    good = called('{"name": "add", "arguments": {"a": 1}}')
    assert answers(environment(), good + "<tool_call>" * 3) == ["2"]
    assert answers(environment(), "<tool_call>" * 3) == []


def test_tokenizer_with_response_template_parses_calls():
    """In its own form."""
    tokenizer = letters()
    tokenizer.response_template = TEMPLATE
    playing = environment(add, tokenizer=tokenizer)
    assert answers(playing, '<call>{"name": "add", "arguments": {"a": 4}}</call>') == ["5"]
    assert answers(playing, "so it is 5") == []


def test_tools_of_one_name_raise():
    with pytest.raises(ValueError, match="two have the same name, among add"):
        Toolbox.of([add, add], TOKENIZER, 1.0)
