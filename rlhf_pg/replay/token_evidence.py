"""Differences of a step, token by token, as tokens/ has them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_pg.replay.finding import LAST, Finding, Row
from rlhf_pg.replay.rounding import Rounding, least_size
from rlhf_pg.report.run_files import TOKENS, StepTokens

# Where a token's number is computed; others are metrics.
STAGE_OF_NUMBER = {
    "sampler_logprob": "log-probability",
    "kl": "log-probability",
    "value": "value",
    "reward": "reward",
    "advantage": "advantage",
    "log_ratio": "gradient",
    "entropy": "gradient",
}

OF_SAMPLER = ("sampler_logprob", "log_ratio")  # what is made of numbers of the sampler
DIFFERENCES = ("log_ratio", "kl")  # of two log-probabilities, which nearly cancel out


def token_findings(
    step: int, a: StepTokens, b: StepTokens, rounding: Rounding
) -> Iterator[Finding]:
    """Yield the first token of each quantity that differs, for the rows that both runs have."""
    file = f"{TOKENS}/step-{step:08d}.safetensors"
    found = _Tokens(step, file, a, b)
    for name in ("prompt_index", "sample"):
        yield from found.rows(name, "data order")
    yield from found.rows("lengths", "sampled id")
    for name in ("ids", "action"):
        yield from found.tokens(name, "sampled id", getattr(a, name), getattr(b, name), Rounding())
    yield from found.texts()
    for name in {**a.numbers, **b.numbers}:
        stage = STAGE_OF_NUMBER.get(name, "metric")
        x, y = a.numbers.get(name), b.numbers.get(name)
        if x is None or y is None:
            yield found.whole(stage, name, x is not None, y is not None)
            continue
        within = rounding.of_sampler() if name in OF_SAMPLER else rounding
        yield from found.tokens(name, stage, x, y, within, _size(name, a))


class _Tokens:
    """The tokens of a step of two runs, with what names their places."""

    def __init__(self, step: int, file: str, a: StepTokens, b: StepTokens) -> None:
        self.step, self.file, self.a, self.b = step, file, a, b
        self.ends = np.cumsum(a.lengths.astype(np.int64))

    def whole(self, stage: str, what: str, x: Any, y: Any) -> Finding:
        return Finding(step=self.step, stage=stage, file=self.file, what=what, a=x, b=y)

    def rows(self, name: str, stage: str) -> Iterator[Finding]:
        x, y = getattr(self.a, name), getattr(self.b, name)
        if len(x) != len(y):
            yield self.whole(stage, f"number of {name}", len(x), len(y))
        count = min(len(x), len(y))
        for i in np.flatnonzero(x[:count] != y[:count])[:1].tolist():
            found = self.whole(stage, name, int(x[i]), int(y[i]))
            yield replace(found, row=self._row(i), place=i)

    def tokens(
        self,
        name: str,
        stage: str,
        x: NDArray[Any],
        y: NDArray[Any],
        rounding: Rounding,
        size: float = 0.0,
    ) -> Iterator[Finding]:
        count = min(len(x), len(y))
        if len(x) != len(y):
            yield self.whole(stage, f"number of {name}", len(x), len(y))
        apart = np.flatnonzero(_apart(x[:count], y[:count], rounding, size))
        if len(apart):
            yield self._at(int(apart[0]), stage, name, x, y, len(apart))

    def texts(self) -> Iterator[Finding]:
        pairs = enumerate(zip(self.a.texts, self.b.texts, strict=False))
        i = next((i for i, (x, y) in pairs if x != y), None)
        if i is not None:
            row, place, token = self._place(i)
            found = self.whole("sampled id", "text", self.a.texts[i], self.b.texts[i])
            yield replace(found, row=row, place=place, token=token)

    def _at(
        self, i: int, stage: str, name: str, x: NDArray[Any], y: NDArray[Any], count: int
    ) -> Finding:
        row, place, token = self._place(i)
        note = f"id {_text(self.a, i)}"
        if name == "ids":
            note = f"{_text(self.a, i)} and {_text(self.b, i)}{self._chances(i)}"
        if count > 1:
            note += f"; and {count - 1} other tokens"
        found = self.whole(stage, name, _plain(x[i]), _plain(y[i]))
        return replace(found, row=row, place=place, token=token, note=note)

    def _chances(self, i: int) -> str:
        """Say how likely both tokens were, where the files tell."""
        known = [run.numbers.get("sampler_logprob") for run in (self.a, self.b)]
        numbers = [float(column[i]) for column in known if column is not None and i < len(column)]
        if len(numbers) < 2:
            return ""
        return f", log-probabilities {numbers[0]:.4g} and {numbers[1]:.4g}"

    def _place(self, i: int) -> tuple[Row | None, int, int | None]:
        """Return row, place of the row, and number within it, of a token of the step."""
        place = int(np.searchsorted(self.ends, i, side="right"))
        if place >= len(self.ends):
            return None, LAST, None
        start = int(self.ends[place]) - int(self.a.lengths[place])
        return self._row(place), place, i - start

    def _row(self, place: int) -> Row | None:
        if place >= min(len(self.a.prompt_index), len(self.a.sample)):
            return None
        index, sample = int(self.a.prompt_index[place]), int(self.a.sample[place])
        return Row(prompt_index=index, sample=sample)


def _size(name: str, tokens: StepTokens) -> float:
    """Return the size of the numbers that a column is the difference of, if it is one."""
    numbers = tokens.numbers.get("sampler_logprob")
    of_parts = 0.0 if name not in DIFFERENCES or numbers is None else _largest(numbers)
    return max(of_parts, least_size(name))


def _largest(numbers: NDArray[Any]) -> float:
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))


def _apart(x: NDArray[Any], y: NDArray[Any], rounding: Rounding, size: float) -> NDArray[np.bool_]:
    """Return where two columns differ; NaN is a number like any other."""
    if x.dtype.kind != "f" or y.dtype.kind != "f":
        return np.asarray(x != y)
    x, y = x.astype(np.float64), y.astype(np.float64)
    differ: NDArray[np.bool_] = (x != y) & ~(np.isnan(x) & np.isnan(y))
    if rounding.is_exact or not differ.any():
        return differ
    largest = max(_largest(x), _largest(y), size)
    # The file has most numbers in float16, which rounds by itself.
    allowed = (rounding.rtol + 2.0**-10) * largest + rounding.floor
    differ &= ~(np.abs(x - y) <= allowed)  # NaN is not near anything
    return differ


def _plain(x: Any) -> Any:
    return x.item() if isinstance(x, np.generic) else x


def _text(tokens: StepTokens, i: int) -> str:
    text = repr(tokens.texts[i]) if i < len(tokens.texts) else "?"
    return f"{int(tokens.ids[i])} {text}" if i < len(tokens.ids) else text
