r"""Answers compared as mathematics, by the real math-verify, in processes of their own."""

import threading

import pytest

from rlhf_pg.boundary.pool import NotStarted, Pool
from rlhf_pg.rewards.verifiers import answers, make_verifier
from tests.rewards import misbehaving as faults


@pytest.fixture(autouse=True, scope="module")
def one_process():
    """Each takes seconds to import math-verify."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "cores_of_process", lambda: 1)
        answers.workers.cache_clear()
        yield
    answers.workers.cache_clear()


def boxed(text: str) -> str:
    return rf"\boxed{{{text}}}"


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        (boxed("42"), 42, 1),
        (boxed(r"\frac{1}{2}"), "1/2", 1),
        (boxed(r"\frac12"), boxed(r"\dfrac{1}{2}"), 1),
        (boxed("\u22123"), "-3", 1),
        (boxed(boxed(r"\frac{1}{2}")), "1/2", 1),
        (boxed("(2, 1)"), "(1,2)", 0),
        # Several boxes are a set: to list all candidates is no answer.
        (" or ".join(map(boxed, "123")), "3", 0),
        (boxed("8") + ". The final answer is $7$", "8", 1),
        ("So we get $x = 42$", "42", 1),
        ("5 + 5 = 10\n#### 42", "42", 1),
        ("To determine the answer, we multiply 20 * 12 = 240.\n#### 42", "42", 1),
        ("The final answer is 42.\n#### 41", "42", 0),
        ("The final answer is 42.\n####", "42", 1),
        (boxed("42"), "6 times 7\n#### 42", 1),
        (boxed("3"), ["2", "3"], 1),
        ("<think>" + boxed("42"), "42", 0),
        (r"\boxed{42", "42", 0),
        ("", "42", 0),
        (boxed("42"), None, None),
        (boxed("42"), "  ", None),  # it cannot be parsed
    ],
)
def test_math(answer, truth, expected) -> None:
    (score,) = make_verifier("math", {})([], [answer], None, answer=[truth])
    assert score == expected


@pytest.mark.parametrize(
    ("answer", "expected"), [(boxed("42"), 1), ("The answer is 42.", 0), ("$42$", 0)]
)
def test_only_boxes_count_if_wanted(answer, expected) -> None:
    assert make_verifier("math", {"boxed": True})([], [answer], None, answer=["42"]) == [expected]


def test_end_of_a_very_long_completion_is_seen() -> None:
    text = "so $x$ is 16 and 3 apples " * 40_000
    scores = make_verifier("math", {})([], [text + boxed("42"), text], None, answer=["42"] * 2)
    assert scores == [1, 0]


def test_process_that_cannot_start_is_an_error_not_a_wrong_answer(monkeypatch) -> None:
    monkeypatch.setattr(answers, "workers", lambda: Pool(1, ready=faults.breaks))
    with pytest.raises(NotStarted, match="ZeroDivisionError"):
        make_verifier("math", {})([], [boxed("1")], None, answer=["1"])


def test_numbers_are_no_code() -> None:
    assert answers.compare(["1"], "__import__('os').getpid()", False) == 0


def test_workers_are_made_before_threads_ask_for_them(monkeypatch) -> None:
    made: list[None] = []
    monkeypatch.setattr(answers, "workers", lambda: made.append(None))
    make_verifier("math")
    assert made == [None]


def test_endless_computation_ends_in_any_thread() -> None:
    """Powers of powers, in C and out of reach of exceptions; the others keep their scores."""
    made = make_verifier("math", {"timeout": 1.0})
    said: list = []
    texts = [boxed("7"), boxed("9^{9^{9^{9}}}")]
    thread = threading.Thread(
        target=lambda: said.append(made([], texts, None, answer=["7"] * 2)), daemon=True
    )
    thread.start()
    thread.join(60)
    assert said == [[1, 0]]
