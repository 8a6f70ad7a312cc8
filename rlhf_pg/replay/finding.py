"""Single places in which two runs differ, and the order in which they come about."""

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_pg.boundary.quoted import shown

# What a step computes, in the order in which it does. A later stage cannot have changed an earlier
# one of the same step.
STAGES = (
    *("data order", "prompt text", "sampled id", "log-probability", "value", "reward"),
    *("advantage", "gradient", "weight", "metric", "length"),
)
CONFIG, VERSION = "config", "library version"
LONGEST_TEXT = 80  # characters of a text that is shown
LAST = 1 << 62  # place of what has no row


@dataclass(frozen=True, kw_only=True)
class Row:
    """A completion, by what names it in every file of a run."""

    prompt_index: int | None
    sample: int | None
    dataset_row: int | None = None

    def __str__(self) -> str:
        said = f"prompt {self.prompt_index}"
        if self.sample is not None:
            said += f", sample {self.sample}"
        return said if self.dataset_row is None else f"{said} (row {self.dataset_row} of the data)"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One place in which two runs differ.

    Attributes:
        step: 0 is before the first.
        stage: one of `STAGES`.
        file: where it is written, relative to the run.
        what: the quantity, metric, tensor or key.
        a, b: what each run has there.
        row: which completion; None for what belongs to the whole step.
        place: number of the row within the step.
        token: number of the token within the completion.
        note: more about it, in words.
        before: it was so before the step computed anything.
    """

    step: int
    stage: str
    file: str
    what: str
    a: Any
    b: Any
    row: Row | None = None
    place: int = LAST
    token: int | None = None
    note: str = ""
    before: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """The key by which the first of several findings is told."""
        return self.step, -1 if self.before else STAGES.index(self.stage), self.place

    def __str__(self) -> str:
        where = f" of {self.row}" if self.row else ""
        token = f", token {self.token}" if self.token is not None else ""
        values = ": {} and {}".format(*map(value, around(self.a, self.b)))
        note = f" ({self.note})" if self.note else ""
        return f"{shown_name(self.what)}{where}{token}{values}{note}, in {shown_name(self.file)}"

    def as_json(self) -> dict[str, Any]:
        """Return the finding in JSON types."""
        record = asdict(self)
        record.pop("place")
        return record


def around(a: Any, b: Any) -> tuple[Any, Any]:
    """Return two long texts cut to where they differ first; anything else as it is."""
    if not (isinstance(a, str) and isinstance(b, str)) or max(len(a), len(b)) <= LONGEST_TEXT:
        return a, b
    pairs = enumerate(itertools.zip_longest(a, b))
    at = next((i for i, (x, y) in pairs if x != y), 0)
    start = max(0, at - LONGEST_TEXT // 4)
    return a[start : start + LONGEST_TEXT], b[start : start + LONGEST_TEXT]


def value(x: Any) -> str:
    """Return a value as it is shown: numbers in full, text quoted, nothing as a dash."""
    if x is None:
        return "nothing"
    if isinstance(x, float):
        return repr(x) if math.isfinite(x) else str(x)
    return shown(x)


def shown_name(name: str) -> str:
    """Return a name from a file, escaped, without quotation marks."""
    return shown(name)[1:-1]
