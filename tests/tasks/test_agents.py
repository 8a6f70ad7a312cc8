"""Agents of other libraries by the recipes of their examples: smolagents, textarena, verifiers."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from rlhf_pg.boundary import user_modules
from tests.examples.test_agents import outcomes, trainer_of as trainer_of

pytestmark = pytest.mark.tasks

ANSWER = '<tool_call>{"name": "final_answer", "arguments": {"answer": "%d"}}</tool_call>'
MULTIPLY = '<tool_call>{"name": "multiply", "arguments": {"a": %d, "b": %d}}</tool_call>'


def test_agent_calls_tool_of_mcp_server(trainer_of) -> None:
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
    says = [(call, "It is 425"), ("424",)]
    trainer = trainer_of("mcp_tools.py", {"prompt": "What is 17 * 25?", "answer": "425"}, says)
    trainer.train()
    expected = [([float(i == 0)], "".join(said), 0) for i, said in enumerate(says)]
    assert outcomes(trainer, trainer.played) == expected


def test_agent_of_smolagents_calls_its_tool(trainer_of) -> None:
    says = [(MULTIPLY % (17, 25), ANSWER % 425), (ANSWER % 42,), ("No.", ANSWER % 425)]
    trainer = trainer_of("smol.py", {"prompt": "What is 17 * 25?", "answer": "425"}, says)
    episodes = trainer.sampler.roll_out(range(1)).episodes
    paid = [(paid, said) for paid, said, _ in outcomes(trainer, episodes)]
    assert paid == [([1], "".join(says[0])), ([0], says[1][0]), ([1], "".join(says[2]))]
    shown, played = map(
        trainer.processing_class.decode, (episodes[0].prompt_ids, episodes[0].tokens)
    )
    assert shown.startswith("multiplyfinal_answer<system>")
    assert shown.endswith("New task:\nWhat is 17 * 25?<assistant>")
    assert "Observation:\n425<assistant>" in played


# What is said in turn, what is paid in the order of the players, what they said, forks of the row.
GAMES = [
    (("[0]", "[3]", "[1]", "[4]", "[2]"), [0, 0, 1, 0, -1], "[0][1][2][3][4]", 1),
    (("[0]", "[3]", "[1]", "[4]", "[8]", "[5]"), [0, 0, -1, 0, 0, 1], "[0][1][8][3][4][5]", 1),
    (("[0]", "[0]", "none"), [1, 0, -1], "[0][0]none", 1),
    (("one", "two"), [0, -1], "onetwo", 0),  # the second player has no turn
]


def test_players_are_paid_for_their_own_turns(trainer_of) -> None:
    says, *expected = zip(*GAMES, strict=True)
    trainer = trainer_of("self_play.py", {"prompt": "TicTacToe-v0-raw"}, says)
    episodes = trainer.sampler.roll_out(range(1)).episodes
    assert outcomes(trainer, episodes) == [*zip(*expected, strict=True)]


@pytest.mark.parametrize(
    ("name", "most", "says", "rewards"),
    [
        ("higher_lower", 2048, [("7", "3", "5"), ("5",), ("9",) * 4], [1 / 3, 1, 0]),
        ("higher_lower", 16, [("7",), ("5",)], [0, 1]),  # no tokens are left for a second guess
        ("with_tools", 2048, [(MULTIPLY % (6, 7), "42"), ("41",)], [1.25, 0]),
    ],
)
def test_environment_of_verifiers_pays(
    trainer_of, tmp_path, monkeypatch, name, most, says, rewards
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "environments")
    monkeypatch.setenv("ENVIRONMENT", name)
    for module in user_modules.loaded_files():  # with another environment
        monkeypatch.delitem(sys.modules, module)
    rows = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["verifiers_env.py", str(rows)])
    runpy.run_path("examples/agents/verifiers_env.py", run_name="__main__")
    row = json.loads(rows.read_text())
    trainer = trainer_of("verifiers_env.py", row, says, max_completion_length=most)
    trainer.train()
    expected = [([r], "".join(said), 0) for r, said in zip(rewards, says, strict=True)]
    assert outcomes(trainer, trainer.played) == expected
    assert trainer.played[0].truncated == (most == 16)
