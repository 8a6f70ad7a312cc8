"""What a run leaves in its directory, and where it goes when another run begins there."""

import os
from pathlib import Path

# What tells that there was a run is the last.
RUN_FILES = (
    *("config.yaml", "completions.jsonl", "checkpoints", "best", "final", "reward.png"),
    *("tensorboard", "wandb", "run-id", "skipped", "metrics.json", "metrics.jsonl"),
)


def check_regular(directory: Path) -> None:
    """Refuse what has the name of a run's file and is a pipe or a device: reading it might never
    end.

    Raises:
        ValueError: there is one.
    """
    for path in (directory / name for name in RUN_FILES):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is no regular file: move it away, and resume again")


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
