"""The shape of a completion: tags, length, repetition."""

import pytest

from rlhf_pg.rewards.verifiers import make_verifier


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("<think>a</think><answer>b</answer>", {}, 1),
        ("\n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n", {}, 1),
        ("<answer>b</answer><think>a</think>", {}, 0),
        ("<think>a</think>and<answer>b</answer>", {}, 0),
        ("so <think>a</think><answer>b</answer>", {}, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", {}, 0),
        ("<think>a<answer>b</answer></think><answer>c</answer>", {}, 0),
        ("<think>a</think><answer>b</think></answer>", {}, 0),
        ("", {}, 0),
        ("<think>" * 50_000, {}, 0),
        ("a</think><answer>b</answer>", {"opened": True}, 1),
        ("<think>a</think><answer>b</answer>", {"opened": True}, 0),
        ("<plan>a</plan> <code>b</code>", {"tags": ["plan", "code"]}, 1),
    ],
)
def test_format(text, options, expected) -> None:
    assert make_verifier("format", options)([], [text]) == [expected]


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        # Of 0, 2, 4, 6, 8 and 12 tokens.
        ({"shortest": 4, "longest": 4, "slack": 4}, [0, 0.5, 1, 0.5, 0, 0]),
        ({"longest": 4, "slack": 8}, [1, 1, 1, 0.75, 0.5, 0]),
        ({"shortest": 4}, [0, 0, 1, 1, 1, 1]),
        ({"shortest": 4, "longest": 6, "slack": 4}, [0, 0.5, 1, 1, 0.5, 0]),
        ({"longest": 0, "slack": 12}, [1, 10 / 12, 8 / 12, 0.5, 4 / 12, 0]),
    ],
)
def test_length_in_tokens(options, scores) -> None:
    ids = [[5] * count for count in (0, 2, 4, 6, 8, 12)]
    assert make_verifier("length", options)([], [""] * 6, ids) == pytest.approx(scores)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("a b c d e f", {}, 0),
        ("a b c a b c", {}, -0.25),  # abc bca cab abc
        ("A b C a B c", {}, -0.25),
        ("a a a a", {"ngram_size": 1}, -0.75),
        ("a a a a", {"ngram_size": 1, "max_penalty": -0.2}, -0.15),
        ("", {}, 0),
        ("no " * 100_000, {}, 1 / 99_998 - 1),
    ],
)
def test_repetition(text, options, expected) -> None:
    assert make_verifier("repetition", options)([], [text]) == pytest.approx([expected])
