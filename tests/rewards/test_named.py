"""Rewards by name: what each form means, what is said of it, and every wrong name."""

import pickle

import pytest
from transformers import TrainerState

from rlhf_pg.rewards.named import describe, make_rewards
from rlhf_pg.rewards.servers import HttpReward, Judge
from rlhf_pg.rewards.verifiers import Verifier
from tests.boundary.test_user_modules import forget, write  # noqa: F401
from tests.rewards.calling import Rewards

REWARDS = """
def accuracy(completions, answer, **_):
    return [float(text == right) for text, right in zip(completions, answer)]

def brevity(completions, limit=10, **_):
    return [float(len(text) <= limit) for text in completions]

async def later(completions, bonus, **_):
    return [bonus for _ in completions]

class Kept:
    def __call__(self, completions, **_):
        return [0.5 for _ in completions]

kept = Kept()
"""
JUDGED = {"rubric": "Is it kind?", "model": "m", "base_url": "http://127.0.0.1:9/v1"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, mine=REWARDS))
    return tmp_path


def test_every_form_in_one_list(here, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    names = ["mine.py:accuracy", "json.dumps", "exact", "http://127.0.0.1:9/score", "judge:kind"]
    names += ["model:runs/judge", "model:org/reward-model"]
    made = make_rewards(names, {"kind": JUDGED})
    assert [type(reward) for reward in made[2:5]] == [Verifier, HttpReward, Judge]
    assert made[5:] == ["runs/judge", "org/reward-model"]
    assert Rewards(made[:5]).names == ["accuracy", "dumps", "exact", "127.0.0.1:9/score", "kind"]
    says = describe(names, made)
    assert says[0] == f"reward mine.py:accuracy: runs code imported from {here}/mine.py"
    assert says[1].endswith("json/__init__.py")
    assert says[2:] == [
        "reward exact: ready-made",
        "reward http://127.0.0.1:9/score: sends completions to http://127.0.0.1:9/score",
        "reward judge:kind: sends completions to m at http://127.0.0.1:9/v1",
        "reward model:runs/judge: loads the reward model runs/judge",
        "reward model:org/reward-model: loads the reward model org/reward-model",
    ]


def test_options_of_function_are_given_to_it_at_every_call(here):
    options = {"mine.py:brevity": {"limit": 1}, "mine.py:later": {"bonus": 3.0}}
    made = make_rewards([*options, "mine.py:accuracy", "mine.py:kept"], options)
    for functions in (made, pickle.loads(pickle.dumps(made))):
        rewards = Rewards(functions)
        said = rewards(["p"] * 2, ["a", "bb"], [[4]] * 2, {"answer": ["a", "x"]})
        assert said[:, 0].tolist() == [[1.0, 3.0, 1.0, 0.5], [0.0, 3.0, 0.0, 0.5]]
        assert rewards.names == ["brevity", "later", "accuracy", "kept"]
        assert rewards.sources[1].kind == "async"
    assert describe(list(options), made[:2])[0].endswith(f"imported from {here}/mine.py")


def test_option_stays_where_a_column_or_an_argument_has_its_name(here):
    write(
        here,
        counted="""
def any_column(completions, limit=10, **_):
    return [float(limit) for _ in completions]

def of_run(completions, step, log_metric=None, **_):
    assert log_metric is None
    return [float(step) for _ in completions]
""",
    )
    options = {
        "counted.py:any_column": {"limit": 1},
        "counted.py:of_run": {"step": 7, "log_metric": None},
    }
    made = make_rewards(list(options), options)
    said = Rewards(made)(
        ["p"] * 2, ["a", "bb"], [[4]] * 2, {"limit": [5, 6]}, state=TrainerState(global_step=3)
    )
    assert said[:, 0].tolist() == [[1.0, 7.0], [1.0, 7.0]]


@pytest.mark.parametrize("key", ["kind", "judge:kind"])
def test_options_reach_judge_and_server_as_recipe_or_flags_write_them(monkeypatch, key):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    options = {
        key: {**JUDGED, "api_key_env": "JUDGE_KEY", "scale": "0-5", "timeout": "1e1", "retries": 2},
        "http://127.0.0.1:9": {"concurrency": 2, "retries": 0},
    }
    names = ["judge:kind", "http://127.0.0.1:9"]
    made = make_rewards(names, options)
    judge, server = made
    assert (judge.client.timeout, judge.low, judge.high) == (10.0, 0.0, 5.0)
    assert judge.client.retries == 2
    assert server.client.retries == 0
    assert describe(names, made)[0].endswith(", with the key in JUDGE_KEY")
    assert "sk-secret" not in str(describe(names, made))


@pytest.mark.parametrize(
    ("names", "options", "reason"),
    [
        (["exat"], {}, "there is no reward 'exat'; did you mean 'exact'"),
        (["exact"], {"regex": {}}, "has regex, which reward_funcs does not name; it names exact"),
        (["exact"], {"exact": 3}, "reward_options of exact must be .*, got 3"),
        (["judge:j"], {}, "judge:j: rubric is .*\nmodel is "),
        (["judge:j"], {"j": {**JUDGED, "timeot": 1}}, "'timeot'; did you mean 'timeout'"),
        (["http://h/s"], {"http://h/s": {"retries": -1}}, "retries must be"),
        (["model:"], {}, "write model:PATH_OR_HUB_ID, without options"),
        (["mine.py:brevity"], {"mine.py:brevity": {"limt": 1}}, "did you mean 'limit'"),
        (["mine.py"], {}, "names no function"),
    ],
)
def test_wrong_name_or_option_is_one_error(here, names, options, reason):
    with pytest.raises(ValueError, match=reason):
        make_rewards(names, options)
