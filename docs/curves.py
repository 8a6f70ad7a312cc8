"""The tables and pictures of results.md, of docs/results/*.json (tests/benchmarks/real.py).

`make docs` writes the tables; `python docs/curves.py` draws the pictures, with matplotlib.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
NAMES = {"grpo": "GRPO", "rloo": "RLOO", "reinforce_pp": "REINFORCE++", "ppo": "PPO"}


def runs() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The runs that are there, by task and method; those with other settings are left out."""
    tasks: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(RESULTS.glob("*.json")):
        run = json.loads(path.read_text())
        if not run["name"]:
            *trl, algorithm = run["algorithm"].split()
            method = " ".join([*trl, NAMES[algorithm], f"({run['weights']})"])
            tasks[run["task"]][method].append(run)
    return tasks


def iqm(values: Any) -> Any:
    """The interquartile mean of the last axis (Agarwal et al. 2021): of the middle half."""
    cut = values.shape[-1] // 4
    return np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(-1)


def interval(values: Any) -> Any:
    """The interquartile mean over seeds (points, seeds), and its 95 % bootstrap interval."""
    seeds = values.shape[-1]
    drawn = values[..., np.random.default_rng(0).integers(seeds, size=(5000, seeds))]
    return iqm(values), *np.percentile(iqm(drawn), [2.5, 97.5], axis=-1)


def scores(group: list[dict[str, Any]]) -> Any:
    """Held-out scores (points, seeds)."""
    return np.array([[point["score"] for point in run["held_out"]] for run in group]).T


def table() -> str:
    """A row for each task and method: interquartile means, from three seeds with an interval."""
    rows = [
        "| Task | Method | Seeds | Before | After | Lowest .. highest | CPU minutes | Peak GB |"
    ]
    rows.append("|---" * 8 + "|")
    for task, methods in runs().items():
        for method, group in methods.items():
            all_scores = scores(group)
            mean, low, high = interval(all_scores[-1])
            minutes = np.median([run["held_out"][-1]["seconds"] for run in group]) / 60
            peak = np.median([run["peak_bytes"] for run in group]) / 1e9
            between = f" ({low:.2f} to {high:.2f})" if len(group) > 2 else ""
            rows.append(
                f"| {task} | {method} | {len(group)} | {all_scores[0].mean():.2f} "
                f"| **{mean:.2f}**{between} "
                f"| {all_scores[-1].min():.2f} .. {all_scores[-1].max():.2f} "
                f"| {minutes:.1f} | {peak:.1f} |"
            )
    return "\n".join(rows)


def draw() -> None:
    """Draw the held-out score of each task, by samples and by seconds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "results"  # the same file for the same numbers
    from matplotlib import pyplot as plt

    for task, methods in runs().items():
        figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
        for color, (method, group) in zip(COLORS, methods.items(), strict=False):
            mean, low, high = interval(scores(group))
            for axis, unit in zip(axes, ("samples", "seconds"), strict=True):
                x = np.mean([[point[unit] for point in run["held_out"]] for run in group], axis=0)
                axis.plot(x, mean, color=color, label=f"{method}, {len(group)} seeds")
                axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
                axis.set_xlabel("completions" if unit == "samples" else "seconds of CPU")
                axis.grid(alpha=0.3)
        axes[0].set_ylabel("held-out reward")
        axes[0].set_title(task, loc="left")
        axes[1].legend(loc="lower right", fontsize=8, frameon=False)
        figure.savefig(RESULTS / f"{task}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw()
