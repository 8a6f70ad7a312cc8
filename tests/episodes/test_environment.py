"""What an environment may return, and the two embedded ones by hand."""

import math

import pytest

from rlhf_pg.episodes import Observation
from rlhf_pg.episodes.environment import check_observation, check_prompt
from rlhf_pg.tasks.multi_turn import Guess, calculate, found, last_word

CHAT = [{"role": "user", "content": "q"}]


def test_text_in_place_of_chat_is_said_by_user_behind_system_prompt():
    system = {"role": "system", "content": "s"}
    assert check_prompt("new", CHAT) == [{"role": "user", "content": "new"}]
    assert check_prompt("new", [system, *CHAT])[0] == system
    assert check_prompt("new", [system, *CHAT])[1:] == [{"role": "user", "content": "new"}]


@pytest.mark.parametrize("prompt", [None, [], [{"content": "q"}]])
def test_invalid_prompt_raises(prompt):
    with pytest.raises(ValueError, match="reset must return a string or a list of messages"):
        check_prompt(prompt, "q")


@pytest.mark.parametrize(
    ("answer", "prompt", "expected"),
    [
        (("up", 1, False), "q", ("up", 1.0, False)),
        (Observation(CHAT), CHAT, (CHAT, None, False)),
        (("q", None, False), CHAT, (CHAT, None, False)),  # said by the user
        ((CHAT, None, True), "q", (CHAT, None, True)),  # nobody reads it
        ((None, 0, True), CHAT, (None, 0.0, True)),
    ],
)
def test_valid_observations_are_normalized(answer, prompt, expected):
    assert check_observation(answer, prompt) == expected


@pytest.mark.parametrize(
    ("answer", "prompt", "message"),
    [
        (None, "q", "step must return Observation"),
        ((CHAT, 1.0, False), "q", "must answer with a string"),
        ((7, 1.0, False), CHAT, "must answer with messages or a string"),
        (("up", math.inf, False), "q", "finite number or None, got inf"),
    ],
)
def test_invalid_observation_raises(answer, prompt, message):
    with pytest.raises(ValueError, match=message):
        check_observation(answer, prompt)


def test_guess_environment_by_hand():
    environment = Guess()
    assert environment.reset({"prompt": "1-9:", "answer": "6"}) == "1-9:"
    assert environment.step("5") == (">", pytest.approx(math.log(9 / 4) / math.log(9)), False)
    assert environment.step("12") == ("<", 0.0, False)
    assert environment.step("3") == (">", 0.0, False)
    for nonsense in ("", "5>6", "six", "006", "٦"):
        assert environment.step(nonsense) == ("?", 0.0, False)
    assert environment.step("6")[1:] == (pytest.approx(math.log(4) / math.log(9)), True)


def test_only_last_guess_counts():
    assert found([], ["3", "5<3", "3>5", "", "3?3"], answer=["3"] * 5) == [1, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("7", "7"), ("37*48-5", "1771"), ("2-3*4", "-10"), ("1-2-3", "-4"), ("2*3*4+5*6", "54")],
)
def test_calculate_by_hand(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "1+", "-1", "2**9", "1/2", "__import__", "1 + 1", "٣+1", "9*" * 20 + "9"]
)
def test_invalid_expression_raises(expression):
    with pytest.raises(ValueError, match="not an expression"):
        calculate(expression)


def test_only_last_message_counts():
    said = [[{"content": "4"}], [{"content": "4"}, {"content": "5"}]]
    assert last_word([], said, answer=["4", "4"]) == [1.0, 0.0]
