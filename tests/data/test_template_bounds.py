"""A chat template that never ends, or fills the memory, is one error, and the next one works."""

import threading

import pytest

from rlhf_pg.data import template_bounds
from rlhf_pg.data.rendering import render
from tests.agents.test_history import bytes_tokenizer

CHAT = [{"role": "user", "content": "hi"}]
FOR_EVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set n = namespace(x='x') %}{% for _ in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (FOR_EVER, "it was ended"),
        (DOUBLED, "it was ended"),
        ("{{ 9 ** 9 ** 9 }}", "too large"),
        ("{{ 'x' * 10 ** 11 }}", "too large"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_template_is_ended(monkeypatch, template: str, said: str) -> None:
    monkeypatch.setattr(template_bounds, "SECONDS", 0.2)
    monkeypatch.setattr(template_bounds, "MEMORY", 2**26)
    with pytest.raises(ValueError, match=f"a chat does not fit the chat template: .*{said}"):
        render(bytes_tokenizer(template, "<end>"), CHAT, "a chat")
    assert (
        render(bytes_tokenizer("{{ '-' * 3 }}{{ 2 * 3.5 }}", "<end>"), CHAT, "a chat") == "---7.0"
    )


def test_template_of_another_thread_is_ended(monkeypatch) -> None:
    monkeypatch.setattr(template_bounds, "SECONDS", 0.2)
    failed = []

    def work() -> None:
        with pytest.raises(ValueError, match="it was ended"):
            render(bytes_tokenizer(FOR_EVER, "<end>"), CHAT, "a chat")
        failed.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == [True]
