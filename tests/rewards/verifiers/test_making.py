"""Making ready-made rewards: names, options, what is missing, and what all of them share."""

import inspect
import pickle
import re
from pathlib import Path

import pytest

from rlhf_pg.rewards import verifiers
from rlhf_pg.rewards.verifiers import VERIFIERS, make_verifier
from rlhf_pg.rewards.verifiers.texts import text_of

# Options that each of them can be made with.
ENOUGH = {
    "regex": {"pattern": "a"},
    "json_schema": {"schema": {"type": "object"}},
    "length": {"longest": 5},
}


def test_reward_has_its_name_and_survives_pickling() -> None:
    for name in VERIFIERS.keys() - {"code"}:  # which needs bubblewrap
        made = make_verifier(name, ENOUGH.get(name, {}))
        again = pickle.loads(pickle.dumps(made))
        assert (again.__name__, again) == (name, made)


def test_row_without_truth_applies_to_no_one() -> None:
    assert make_verifier("exact", {})([], ["a", "a"], None, answer=[None, "a"]) == [None, 1.0]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("maths", {}, ["no reward 'maths'", "did you mean 'math'", "repetition"]),
        ("exact", {"colum": "a"}, ["reward exact: ", "'colum'", "'column'"]),
        ("regex", {"pattern": "(a"}, ["reward regex: ", "'(a'", "not a regular expression"]),
        ("numeric", {"abs_tol": "much"}, ["reward numeric: abs_tol", "'much'"]),
        ("length", {}, ["reward length: ", "shortest", "longest"]),
        ("length", {"shortest": 5, "longest": 4}, ["shortest (5)", "longest (4)"]),
        ("format", {"tags": ["a", "a"]}, ["reward format: tags", "different"]),
        ("json_schema", {"schema": {"type": "objekt"}}, ["not a JSON schema", "objekt"]),
    ],
)
def test_wrong_option_is_one_error(name, options, words) -> None:
    with pytest.raises(ValueError, match="reward") as caught:
        make_verifier(name, options)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("math", "math_verify", "math"), ("json_schema", "jsonschema", "json")],
)
def test_missing_package_says_what_to_install(monkeypatch, name, module, extra) -> None:
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == module else found(name)
    )
    with pytest.raises(ValueError, match=f"reward {name}: .*") as caught:
        make_verifier(name, ENOUGH.get(name, {}))
    assert f'pip install "rlhf-pg[{extra}]"' in str(caught.value)


def test_truth_is_in_the_column_of_the_option() -> None:
    assert make_verifier("numeric", {"column": "solution"})([], ["1"], None, solution=["1"]) == [1]


def test_rewards_take_one_text() -> None:
    assert make_verifier("numeric")("It is 4.", answer="4") == [1.0]


def test_unreadable_truth_does_not_apply_and_is_said(caplog) -> None:
    scores = make_verifier("numeric", {})([], ["1", "1"], None, answer=["one\nor two", "1"])
    assert scores == [None, 1.0]
    (record,) = caplog.records
    assert "'answer' holds 'one\\nor two': there is no number in it" in record.getMessage()


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        (
            [
                {"role": "assistant", "content": "first"},
                {"role": "tool", "content": "tool"},
                {"role": "assistant", "content": "last"},
                {"role": "user", "content": "user"},
            ],
            "last",
        ),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "x"}]}], "a"),
    ],
)
def test_text_of_completion(completion, text) -> None:
    assert text_of(completion) == text


def test_docs_name_every_option() -> None:
    text = (Path(verifiers.__file__).parents[3] / "docs" / "rewards.md").read_text()
    of_all = (inspect.signature(made).parameters.values() for made in VERIFIERS.values())
    options = {p.name for own in of_all for p in own if p.kind is p.KEYWORD_ONLY}
    assert [name for name in options if not re.search(rf"`{name}\b|`.*, {name}`", text)] == []
