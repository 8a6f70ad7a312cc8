"""The table of clipping.md, of docs/results/table1.jsonl (benchmarks/table1.py).

`make docs` writes the table; `python docs/table1.py` draws the picture, with matplotlib.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
LAST = 100  # completions, as in the paper

Runs = dict[str, dict[str, dict[int, dict[str, Any]]]]  # by task, setting and seed


def runs() -> Runs:
    by_task: Runs = defaultdict(lambda: defaultdict(dict))
    for line in (RESULTS / "table1.jsonl").read_text().splitlines():
        run = json.loads(line)
        by_task[run["task"]][run["setting"]][run["seed"]] = run
    return by_task


def score(run: dict[str, Any]) -> float:
    """The mean reward of the last steps that have 100 completions."""
    steps = -(-LAST // run["completions"])
    return float(np.mean(run["reward"][-steps:]))


def normalised(settings: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Scores (seeds) by setting: 0 for the policy before training, 1 for the best setting."""
    first = [run["reward"][0] for by_seed in settings.values() for run in by_seed.values()]
    before = np.mean(first)
    means = {}
    for name, by_seed in settings.items():
        means[name] = np.array([score(by_seed[seed]) for seed in sorted(by_seed)]) - before
    best = max(scores.mean() for scores in means.values())
    return {name: scores / best for name, scores in means.items()}


def interval(scores: Any) -> tuple[float, float, float]:
    """The mean over tasks and seeds, (tasks, seeds), and its 95 % bootstrap interval over seeds."""
    generator = np.random.default_rng(0)
    tasks, seeds = scores.shape
    drawn = generator.integers(seeds, size=(5000, tasks, seeds))
    means = np.take_along_axis(scores[None], drawn, axis=2).mean((1, 2))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(scores.mean()), float(low), float(high)


def divergence(by_seed: dict[int, dict[str, Any]]) -> float:
    """KL(policy before a step || after it), nats per token: the mean over steps and seeds."""
    return float(np.mean([np.mean(run["kl"]) for run in by_seed.values()]))


def table() -> str:
    """A row for each setting: its mean over tasks, and each task's."""
    by_task = {task: normalised(settings) for task, settings in runs().items()}
    rows = [
        f"| | {' | '.join(by_task)} | mean (95 % interval) |",
        "|---" * (len(by_task) + 2) + "|",
    ]
    for name in next(iter(by_task.values())):
        scores = np.stack([settings[name] for settings in by_task.values()])
        mean, low, high = interval(scores)
        cells = [f"{task.mean():.2f}" for task in scores]
        rows.append(f"| {name} | {' | '.join(cells)} | **{mean:.2f}** ({low:.2f} to {high:.2f}) |")
    return "\n".join(rows)


# A colour for each kind of setting; from the loosest of its settings to the tightest.
KINDS = {
    "#000000": ("no clipping or penalty",),
    "#0072b2": ("clip 0.3", "clip 0.2", "clip 0.1"),
    "#d55e00": ("adaptive KL 0.03", "adaptive KL 0.01", "adaptive KL 0.003"),
    "#009e73": ("fixed KL 0.3", "fixed KL 1.0", "fixed KL 3.0"),
}
LINES = ("-", "--", ":")


def draw() -> None:
    """Draw the rewards of each task, mean over seeds, and under it the KL of the steps."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "table1"
    from matplotlib import pyplot as plt

    tasks = runs()
    width = 2.6 * len(tasks)
    figure, axes = plt.subplots(2, len(tasks), figsize=(width, 5), layout="constrained")
    for (task, settings), (above, below) in zip(tasks.items(), axes.T, strict=True):
        above.set_title(task, loc="left")
        below.set_yscale("log")
        below.set_xlabel("step")
        for color, names in KINDS.items():
            for name, line in zip(names, LINES, strict=False):
                by_seed = settings[name].values()
                for axis, key in ((above, "reward"), (below, "kl")):
                    curve = smooth(np.mean([run[key] for run in by_seed], axis=0))
                    axis.plot(curve, line, color=color, label=name, linewidth=1)
                    axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("reward, mean of five steps")
    axes[1, 0].set_ylabel("KL of a step, nats per token")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(RESULTS / "table1.svg", metadata={"Date": None})
    plt.close(figure)


def smooth(values: Any, size: int = 5) -> Any:
    return np.convolve(values, np.ones(size) / size, mode="valid")


if __name__ == "__main__":
    draw()
