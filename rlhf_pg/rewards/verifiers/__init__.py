"""Ready-made rewards by name: answers that can be checked, the shape of a text, programs.

Each is a function that scores one completion. It may take the arguments `text` (the whole
completion), `answer` (see `texts.answer_of`), `truth` (the entry of the dataset's column `column`,
which may be a list of right answers), `ids` (its tokens) and `opened` (see `Verifier`). Its
keyword-only arguments are its options.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlhf_pg.boundary.quoted import quote, show
from rlhf_pg.config.fields import check_options
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.rewards.verifiers import answers, programs, texts

VERIFIERS: dict[str, Callable[..., float]] = {
    function.__name__: function
    for function in (
        answers.math,
        answers.exact,
        answers.numeric,
        answers.regex,
        answers.json_schema,
        answers.format,
        answers.length,
        answers.repetition,
        programs.code,
    )
}
WAITING = ("math", "code")  # these wait for another process; threads only slow the others down
FORMS = "file.py:NAME, module:NAME, model:PATH_OR_HUB_ID (no options), judge:NAME, http://ADDRESS"


@dataclass(frozen=True)
class Verifier:
    """A ready-made reward with its options."""

    name: str
    options: Mapping[str, Any]
    # Whether the prompt ends with `<think>` (as in some chat templates) or another tag: then a
    # completion that was truncated before `</think>` has no answer.
    opened: bool = False

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the dataset that the reward needs."""
        if "column" in self.options:
            return (self.options["column"],)
        return ()

    def __call__(
        self,
        prompts: Any,
        completions: Any = None,
        completion_ids: Any = (),
        **columns: Any,
    ) -> list[float | None]:
        """Return one score per completion: None where the truth is None, and with a warning where
        it is unreadable. It may be called on one text alone: `reward("x = 4", answer="4")`.
        """
        column: Any = self.options.get("column")
        completions = prompts if completions is None else completions
        if isinstance(completions, str):
            completions = [completions]
            columns = {key: [value] for key, value in columns.items()}

        def apply(completion: Any, ids: Sequence[int], truth: Any) -> float | None:
            try:
                if truth is None:
                    return None
                return self.score(texts.text_of(completion), ids, truth)
            except texts.Unreadable as error:
                where = f"where the column {column!r} holds {show(truth)}"
                texts.warn_once(f"reward {self.name} does not apply {where}: {error}")
                return None

        blank: Any = [""] * len(completions)
        rows = (completions, completion_ids or blank, columns[column] if column else blank)
        # Mathematics and programs run in their own processes, which should keep all cores busy.
        if self.name not in WAITING:
            return list(map(apply, *rows))
        with ThreadPoolExecutor(texts.cores_of_process()) as threads:
            return list(threads.map(apply, *rows))

    def score(self, text: str, ids: Sequence[int] = (), truth: Any = "") -> float:
        """Score one completion; raise `Unreadable` if the truth cannot be used."""
        offered = {
            "text": text,
            "answer": texts.answer_of(f"<think>{text}" if self.opened else text),
            "ids": ids,
            "truth": truth,
            "opened": self.opened,
        }
        function = VERIFIERS[self.name]
        names = inspect.signature(function).parameters.keys() & offered
        return function(**{name: offered[name] for name in names}, **self.options)


def make_verifier(name: str, options: Mapping[str, Any] | None = None) -> Verifier:
    """Make a ready-made reward, a key of `VERIFIERS`, with its keyword arguments and `opened`.

    ValueError if the name or an option is unknown, an option is missing or out of range, or the
    package or the program that the reward needs is not installed.
    """
    if name not in VERIFIERS:
        raise ValueError(
            f"there is no reward {show(name)}{nearest(name, VERIFIERS)}; write {FORMS}, or one of "
            f"{', '.join(VERIFIERS)}"
        )
    options = dict(options or {})
    opened = bool(options.pop("opened", False))
    try:
        made = Verifier(name, check_options(VERIFIERS[name], options), opened)
        with suppress(texts.Unreadable):  # scoring a blank finds options that do not fit together
            made.score("")
    except ValueError as error:
        raise ValueError(f"reward {name}: {quote(str(error))}") from error
    return made


def accuracy_reward(completions: Any, solution: Any, **_: Any) -> list[float | None]:
    """Score like the reward `math` with the column `solution`; named and called as in TRL."""
    return make_verifier("math", {"column": "solution"})([], completions, solution=solution)


def think_format_reward(completions: Any, **_: Any) -> list[float | None]:
    """Return 1 for completions that begin with thinking in tags; named and called as in TRL."""
    pattern = "(?s)<think>(?!.*<think>).*?</think>.*"
    return make_verifier("regex", {"pattern": pattern, "whole": True})([], completions)
