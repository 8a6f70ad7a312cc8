"""Answers compared as text, as numbers, and by patterns."""

import threading
from decimal import Decimal

import pytest

from rlhf_pg.rewards.verifiers import make_verifier
from rlhf_pg.rewards.verifiers.answers import number_in


def score(name, completion, truth, **options):
    (said,) = make_verifier(name, options)([], [completion], None, answer=[truth])
    return said


@pytest.mark.parametrize(
    ("completion", "truth", "options", "expected"),
    [
        (" Paris\n", "Paris", {}, 1),
        ("New\n York", "New York", {}, 1),
        ("paris", "Paris", {}, 0),
        ("STRASSE", "straße", {"ignore_case": True}, 1),
        ("e\u0301t\u00e9", "\u00e9te\u0301", {}, 1),
        ("<think>Lyon?</think>\n\nParis", "Paris", {}, 1),
        ("<think>a</think>Paris<think>or Lyon", "Paris", {}, 1),
        ("<think><answer>Lyon</answer></think>Paris", "Paris", {}, 1),
        ("<answer>Lyon</answer><answer>Paris</answer>", "Paris", {}, 1),
        ("<answer>Paris", "Paris", {}, 1),
        ("Paris", "Paris", {"opened": True}, 0),  # it is still thinking
        ("42", 42, {}, 1),
        ("Lyon", ["Paris", "Lyon"], {}, 1),
    ],
)
def test_exact(completion, truth, options, expected) -> None:
    assert score("exact", completion, truth, **options) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", 42),
        ("#### 42\nLet me check 43", 42),
        ("5 apples ####", 5),
        (r"\boxed{42}, after 7 steps", 42),
        (r"$42, and \boxed{x}", 42),
        ("1,234,567.89", "1234567.89"),
        (r"1\,234", 1234),
        ("1234,567", 567),
        ("\u22125", -5),
        ("3-5", 5),
        ("Answer \u2013 18", "18"),
        ("so \\boxed{\\frac{1}{2}}", "0.5"),
        ("-$42.50", "-42.5"),
        (".5", "0.5"),
        ("-3 / 4", "-0.75"),
        ("1/0", None),
        ("1e-3", "0.001"),
        ("H2O", None),
        ("12345678901234567890123", "12345678901234567890123"),
        ("\u0664\u0662", None),  # no digits that Decimal and a reader would take for the same
    ],
)
def test_number_in_text(text, number) -> None:
    assert number_in(text) == (None if number is None else Decimal(str(number)))


@pytest.mark.parametrize(
    ("completion", "truth", "options", "expected"),
    [
        ("It is 42", "six times seven\n#### 42", {}, 1),
        ("42.0", 42, {}, 1),
        ("0.3333333", "1/3", {}, 1),
        ("0.333", "1/3", {"abs_tol": 0.001}, 1),
        ("12345678901234567890123", "12345678901234567890124", {}, 0),
        ("1e9999", "1e-9999", {}, 0),
        ("5", 0.1 + 4.9, {}, 1),
    ],
)
def test_numeric(completion, truth, options, expected) -> None:
    assert score("numeric", completion, truth, **options) == expected


@pytest.mark.parametrize(
    "text", ["111," * 50_000, "9" * 200_000, "#### " * 40_000, r"\boxed{" * 20_000]
)
def test_number_in_endless_text_is_looked_for_in_one_pass(text) -> None:
    number_in(text)  # for minutes, if a pattern went over the text again from every place in it


@pytest.mark.parametrize(
    ("completion", "options", "expected"),
    [
        ("so: yes.", {"pattern": "yes|no"}, 1),
        ("Yes", {"pattern": "yes", "ignore_case": True}, 1),
        ("yes.", {"pattern": "yes", "whole": True}, 0),
    ],
)
def test_regex(completion, options, expected) -> None:
    assert score("regex", completion, None, **options) == expected


def test_catastrophic_pattern_ends_in_any_thread(caplog) -> None:
    made = make_verifier("regex", {"pattern": "(a|aa)+$"})
    said: list = []
    thread = threading.Thread(
        target=lambda: said.append(made([], ["a" * 100 + "b", "aaa"], None)), daemon=True
    )
    thread.start()
    thread.join(20)
    assert said == [[0.0, 1.0]]
    assert "takes more than 1 s on a text of 101 characters" in caplog.text
