"""The logged steps of a run: which of them a page has room for, and what each needs there."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlhf_pg.report.run_files import RunFiles, tokens_file
from rlhf_pg.report.token_steps import TokenStep, cut, packed, reward_weights

MOST_COMPLETIONS = 10_000
MOST_TOKENS = 3_000_000
# No step takes more than this part, so that there is something to compare it with.
PART = 4


@dataclass(frozen=True)
class LoggedSteps:
    """The logged steps of a run, whose tokens are read one step at a time.

    Attributes:
        records: the completions of each step; empty where only tokens are kept.
        weights: of the sources of reward, by name.
    """

    files: RunFiles
    records: Mapping[int, list[dict[str, Any]]]
    weights: Mapping[str, float]

    @classmethod
    def of(cls, files: RunFiles) -> "LoggedSteps":
        """Read the completions of a run."""
        records: dict[int, list[dict[str, Any]]] = {step: [] for step in files.logged_steps()}
        for record in files.completions:
            records.setdefault(record["step"], []).append(record)
        weights = reward_weights(files.config, files.completions)
        return cls(files, dict(sorted(records.items())), weights)

    def step(self, number: int) -> TokenStep:
        """Read a step, as much of it as a page takes; without tokens it has texts."""
        whole = TokenStep(
            step=number,
            records=self.records[number],
            tokens=self.files.tokens(number),
            weights=self.weights,
        )
        return cut(whole, MOST_COMPLETIONS // PART, MOST_TOKENS // PART)

    def packed(self, number: int) -> bytes:
        """Return a step as a page has it."""
        return packed(self.step(number))

    def state(self, number: int) -> tuple[Any, ...]:
        """Return what stays the same as long as `packed` does."""
        try:
            stat = tokens_file(self.files.directory, number).stat()
        except OSError:
            return (len(self.records[number]),)
        return len(self.records[number]), stat.st_mtime_ns, stat.st_size

    def summary(self, number: int) -> dict[str, Any]:
        """Return what a page needs of a step before it is opened."""
        bare = TokenStep(step=number, records=self.records[number], weights=self.weights)
        completions, tokens = self.size(number)
        return bare.summary() | {"completions": completions, "tokens": tokens}

    def size(self, number: int) -> tuple[int, int]:
        """Return how many completions and tokens a step has, without reading its tokens."""
        lengths = _lengths(tokens_file(self.files.directory, number))
        return (len(self.records[number]), 0) if lengths is None else lengths

    def chosen(self) -> tuple[list[int], str]:
        """Return the steps that a page has room for, and what to say of the others.

        The first, the best and the worst are in it, and then the latest.
        """
        room, tokens_left = MOST_COMPLETIONS, MOST_TOKENS
        chosen: list[int] = []
        for number in dict.fromkeys([*self._marked(), *reversed(list(self.records))]):
            completions, tokens = self.size(number)
            room -= min(completions, MOST_COMPLETIONS // PART)
            tokens_left -= min(tokens, MOST_TOKENS // PART)
            if room < 0 or tokens_left < 0:
                break
            chosen.append(number)
        said = ""
        if len(chosen) < len(self.records):
            said = (
                f"{len(chosen):,} of {len(self.records):,} logged steps are in this page: the "
                f"first, the best, the worst and the latest, up to {MOST_COMPLETIONS:,} "
                f"completions and {MOST_TOKENS:,} tokens."
            )
        return sorted(chosen), said

    def _marked(self) -> Iterator[int]:
        """Yield the first step, and those with the best and the worst completion."""
        yield from list(self.records)[:1]
        sizes = [self.summary(number) for number in self.records]
        scored = [size for size in sizes if size["best"] is not None]
        if scored:
            yield max(scored, key=lambda size: float(size["best"][0]))["step"]
            yield min(scored, key=lambda size: float(size["worst"][0]))["step"]


def _lengths(path: Path) -> tuple[int, int] | None:
    """Return how many completions and tokens a file has; None if it cannot be read."""
    try:
        with safe_open(path, "numpy") as file:
            lengths = file.get_tensor("lengths")
    except (OSError, SafetensorError):
        return None
    return len(lengths), int(lengths.sum())
