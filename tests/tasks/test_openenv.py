"""Servers of the real OpenEnv on loopback, played by a trainer through the real client."""

import math
import socket
import time
from pathlib import Path

import pytest

from rlhf_pg.boundary.user_code import begin
from rlhf_pg.episodes.adapters import load_task
from tests.tasks.test_verifiers import play, totals

pytestmark = pytest.mark.tasks
__all__ = ["play"]


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent / "environments")
    import openenv_servers

    return openenv_servers


def observation_key_of(task):
    """The field of an observation that the policy reads."""
    return task.environment_factory.factory().observation_key


def test_rows_are_seeds_and_held_out_rows_are_others(servers) -> None:
    with servers.served(servers.higher_lower()) as url:
        options = {"episodes": 4, "eval_episodes": 2}
        tasks = [load_task(f"openenv:{url}", options, seed=seed) for seed in (0, 1, 1)]
    rows = [[*task.train_dataset["seed"], *task.eval_dataset["seed"]] for task in tasks]
    assert rows[1] == rows[2]
    assert len({*rows[0], *rows[1]}) == 12


def test_server_answers_turns_and_pays_each(servers, play) -> None:
    with servers.served(servers.higher_lower()) as url:
        task = load_task(f"openenv:{url}", {"episodes": 10})
        trainer = play(task, ("7", "1", "3"), ("x",), ("3",))
        samples = trainer.sampler.sample(trainer.train_prompts, [3], [0], 3, 1.0)
    assert samples.prompts[0] == [{"role": "user", "content": "0 to 9?"}]
    said = [message["content"] for message in samples.completions[0]]
    assert said == ["7", "lower", "1", "higher", "3"]
    rewards = [reward for reward in samples.episodes[0].rewards if not math.isnan(reward)]
    assert rewards == [-0.25, -0.25, 1.0]
    assert totals(trainer, samples)[::2] == [0.5, 1.0]
    assert "invalid literal" in samples.episodes[1].error


def test_first_observation_stands_behind_prompt(servers) -> None:
    with servers.served(servers.higher_lower()) as url:
        task = load_task(f"openenv:{url}", {"prompt": "Guess."})
        options = task.environment_factory.runner_options(None, 10.0, ())
        environment = options["environment_factory"]()
        prompt = begin(lambda: environment.reset(dict(task.train_dataset[0]))).result()
        begin(lambda: environment.settle()).result()
    assert prompt == [{"role": "user", "content": "Guess.\n\n0 to 9?"}]


def test_sessions_are_given_back(servers, play) -> None:
    """The server has room for one batch."""
    with servers.served(servers.higher_lower(sessions=2)) as url:
        trainer = play(load_task(f"openenv:{url}"), ("x",), ("3", "3"), max_turns=1)
        for _ in range(3):
            samples = trainer.sampler.sample(trainer.train_prompts, [3], [0], 2, 1.0)
            assert samples.episodes[1].error is None
            time.sleep(0.2)  # that of a failed episode ends behind the batch


def test_tools_of_server_are_offered_and_called(servers, play) -> None:
    calls = [
        f'<tool_call>{{"name": "{name}", "arguments": {{"amount": {amount}}}}}</tool_call>'
        for name, amount in (("add", 2), ("add", 8), ("add", -1), ("sell", 1))
    ]
    with servers.served(servers.till()) as url:
        task = load_task(f"openenv:{url}", {"prompt": "Count."})
        says = ((calls[0], calls[1]), (calls[2] + calls[3] + "<tool_call>{</tool_call>", "end"))
        trainer = play(task, *says)
        prompt = trainer.processing_class.decode(trainer.train_prompts.tokens[0])
        samples = trainer.sampler.roll_out(range(1))
    assert prompt == "<tools>add<user>Count.<assistant>"
    assert [episode.error for episode in samples.episodes] == [None, None]
    assert samples.completions[0][1] == {"role": "tool", "name": "add", "content": "sum 2"}
    told = [m["content"] for m in samples.completions[1] if m["role"] == "tool"]
    assert all(text.startswith("Error: ") for text in told)
    assert len(told) == 3
    assert totals(trainer, samples) == [10.0, 0.0]


def test_fields_are_chosen_by_name_or_shown_as_json(servers, play) -> None:
    with servers.served(servers.higher_lower()) as url:
        task = load_task(f"openenv:{url}", {"observation_key": "hint", "action_key": "message"})
        assert observation_key_of(task) == "hint"
        with pytest.raises(ValueError, match=r"set action_key .*message"):
            load_task(f"openenv:{url}", {"action_key": "text"})
    with servers.served(servers.higher_lower(wide=True)) as url:
        assert observation_key_of(load_task(f"openenv:{url}")) == "hint"


def test_policy_trains_against_server(servers, play) -> None:
    with servers.served(servers.higher_lower(patient=True)) as url:
        trainer = play(load_task(f"openenv:{url}"), max_completion_length=8, num_generations=4)
        trainer.train()
        assert trainer.state.step == 1


def test_what_is_wrong_is_said_before_the_run(servers) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"the environment server {url}.*ConnectError"):
            load_task(f"openenv:{url}")
    with pytest.raises(ValueError, match="'rows'"):
        load_task("openenv:http://127.0.0.1:1", {"rows": 3})
