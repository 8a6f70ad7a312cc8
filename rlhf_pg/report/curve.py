"""The reward over the steps of a run, in the terminal and as a picture.

Needs the extra `report` (plotext and matplotlib), imported when a curve is asked for.
"""

from pathlib import Path
from typing import Any

from rlhf_pg.report.json_lines import read

SMOOTHING = 0.9


def show_curve(directory: Path) -> None:
    """Print the reward curve of a run directory."""
    import plotext

    steps, rewards = _reward(directory)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(76, 16)
    plotext.plot(steps, _smoothed(rewards), marker="braille")
    plotext.title("reward (smoothed)")
    plotext.xlabel("step")
    print(plotext.uncolorize(plotext.build()))


def save_curve(directory: Path) -> Path:
    """Draw the reward curve of a run directory, with the evaluations, as `reward.png` in it."""
    from matplotlib.figure import Figure

    steps, rewards = _reward(directory)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rewards, alpha=0.25, color="tab:blue")
    axes.plot(steps, _smoothed(rewards), color="tab:blue", label="training")
    evaluated = [line for line in read(directory / "metrics.jsonl") if "eval_reward" in line]
    if evaluated:
        held_out = [line["eval_reward"] for line in evaluated]
        axes.plot(
            [line["step"] for line in evaluated],
            held_out,
            "o-",
            color="tab:orange",
            label="held out",
        )
    axes.set(xlabel="step", ylabel="reward", title=str(directory))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path = directory / "reward.png"
    figure.savefig(path, dpi=120)
    return path


def _reward(directory: Path) -> tuple[list[int], list[float]]:
    lines: list[dict[str, Any]] = read(directory / "metrics.jsonl")
    return [line["step"] for line in lines], [line["reward"] for line in lines]


def _smoothed(values: list[float]) -> list[float]:
    """Return the exponential moving average, which starts at the first value."""
    smooth: list[float] = []
    for value in values:
        last = smooth[-1] if smooth else value
        smooth.append(SMOOTHING * last + (1 - SMOOTHING) * value)
    return smooth
