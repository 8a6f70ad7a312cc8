"""Text of others, made harmless."""

import pytest

from rlhf_pg.boundary.quoted import LONGEST, quote, show, tell, visible


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("plain, and Grüße 日本", "plain, and Grüße 日本"),
        ("\x1b]0;title\x07 red\x1b[31m", r"\x1b]0;title\x07 red\x1b[31m"),
        ("one\nWARNING forged\r", r"one\nWARNING forged\r"),
        ("\x9b31m \u202e \ud800", r"\x9b31m \u202e \ud800"),
        ("at https://me:hunter2@host/a", "at https://***@host/a"),
        ("at 'https://host/a?key=S3CRET&b=1': 401", "at 'https://host/a?***': 401"),
        ("is it? https://host/a (yes?)", "is it? https://host/a (yes?)"),
    ],
)
def test_quoted_escapes_control_characters_and_hides_secrets(text, said):
    assert quote(text) == said


def test_long_quoted_text_is_truncated_with_note():
    assert quote("a" * LONGEST) == "a" * LONGEST
    assert quote("ab" * LONGEST) == "ab" * (LONGEST // 2) + f" ... ({2 * LONGEST} characters)"
    secret = "https://host/?" + "s" * 3 * LONGEST + " end"
    assert quote(secret) == f"https://host/?*** end ... ({len(secret)} characters)"
    assert len(show([0] * 10**6)) < LONGEST + 50


def test_visible_keeps_newlines():
    assert visible("key: a\x1b\n  \u202e^\n") == "key: a\\x1b\n  \\u202e^\n"


def test_exception_and_repr_are_quoted():
    assert tell(ValueError("a\x1b")) == r"ValueError: a\x1b"
    assert show("a\x1b") == r"'a\x1b'"
