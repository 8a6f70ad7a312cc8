"""What a run leaves in its directory, and where it goes when another run begins there."""

import os
from pathlib import Path

# What tells that there was a run is the last.
RUN_FILES = (
    *("config.yaml", "completions.jsonl", "checkpoints", "best", "final", "reward.png"),
    *("tensorboard", "wandb", "run-id", "skipped", "metrics.json", "metrics.jsonl"),
)


def set_aside(directory: Path) -> Path | None:
    """Move what has the name of a run's file, whoever wrote it, to `earlier-N/` beside it: nothing
    is lost.

    Returns:
        Where it is now; None if there was none.
    """
    there = [name for name in RUN_FILES if os.path.lexists(directory / name)]
    if not there:
        return None
    numbers = [path.name.removeprefix("earlier-") for path in directory.glob("earlier-*")]
    last = max((int(number) for number in numbers if number.isdecimal()), default=0)
    place = directory / f"earlier-{last + 1}"
    place.mkdir()
    for name in there:
        (directory / name).rename(place / name)
    return place
