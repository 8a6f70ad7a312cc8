"""JSON that a schema allows."""

import socket

import pytest
from referencing.exceptions import Unresolvable

from rlhf_pg.rewards.verifiers import answers, make_verifier

POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "name": {"type": "string", "pattern": "^[a-z]+$"}},
    "required": ["x"],
    "additionalProperties": False,
}


def score(completion, schema):
    (said,) = make_verifier("json_schema", {"schema": schema})([], [completion])
    return said


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('{"x": 1}', 1),
        ('```json\n{"x": 1}\n```', 1),
        ('Here:\n```\n{"x": 1}\n```\nDone.', 1),
        ('```json\n{}\n```\nNo:\n```json\n{"x": 1}\n```', 1),
        ('Here: {"x": 1}', 0),
        ('{"x": NaN}', 0),
        ("", 0),
        ("[" * 200_000, 0),
        ('{"x": ' + "9" * 50_000 + "}", 0),
    ],
)
def test_completion_against_schema(completion, expected) -> None:
    assert score(completion, POINT) == expected


@pytest.mark.parametrize(
    ("schema", "completion", "expected"),
    [
        ({"patternProperties": {"^a": {"type": "integer"}}}, '{"a1": "x"}', 0),
        ({"pattern": "a"}, "5", 1),
        ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}, '"3"', 0),
        ({"$ref": "#"}, "3", 0),  # refers to itself for ever
    ],
)
def test_schemas(schema, completion, expected) -> None:
    assert score(completion, schema) == expected


def test_pattern_that_backtracks_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(answers, "SECONDS", 0.1)
    assert score('"' + "a" * 60 + '!"', {"pattern": "^(a|a)*$"}) == 0


def test_nothing_is_fetched(monkeypatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *host, **_: asked.append(host) or [])
    with pytest.raises(Unresolvable, match=r"example\.com"):
        score("3", {"$ref": "http://example.com/schema.json"})
    assert not asked
