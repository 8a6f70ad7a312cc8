"""Print a table, and draw a picture, of docs/results/table1.jsonl (benchmarks/table1.py)."""

import json
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
LAST = 5  # steps
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262}  # 97.5 % quantile by the number of seeds

# A colour for each kind of setting; from the loosest of its settings to the tightest.
KINDS = {
    "#000000": ("no clipping or penalty",),
    "#0072b2": ("clip 0.3", "clip 0.2", "clip 0.1"),
    "#d55e00": ("adaptive KL 0.03", "adaptive KL 0.01", "adaptive KL 0.003"),
    "#009e73": ("fixed KL 0.3", "fixed KL 1.0", "fixed KL 3.0"),
}
LINES = ("-", "--", ":")

Runs = dict[str, dict[str, dict[int, dict[str, Any]]]]  # by task, setting and seed


def runs() -> Runs:
    by_task: Runs = defaultdict(lambda: defaultdict(dict))
    for line in (RESULTS / "table1.jsonl").read_text().splitlines():
        run = json.loads(line)
        by_task[run["task"]][run["setting"]][run["seed"]] = run
    return by_task


def score(run: dict[str, Any]) -> float:
    """The mean reward of the last steps: of 160 to 1,280 completions, in the paper 100."""
    return float(np.mean(run["reward"][-LAST:]))


def normalised(settings: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Scores (seeds) by setting: 0 for the policy before training, 1 for the best setting."""
    first = [run["reward"][0] for by_seed in settings.values() for run in by_seed.values()]
    before = np.mean(first)
    scores = {}
    for name, by_seed in settings.items():
        scores[name] = np.array([score(by_seed[seed]) for seed in sorted(by_seed)]) - before
    best = max(of_setting.mean() for of_setting in scores.values())
    return {name: of_setting / best for name, of_setting in scores.items()}


def with_interval(values: Any) -> str:
    """The mean over seeds, and half of its 95 % interval by Student's t."""
    half = STUDENT[len(values)] * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():.2f} ± {half:.2f}"


def table() -> str:
    """A row for each setting: its mean over tasks, by how much it is better than clip 0.2 with the
    same seeds, runs that end below their start, and each task's mean.
    """
    by_task = {task: normalised(settings) for task, settings in runs().items()}
    heads = ["mean of tasks", "over clip 0.2", "runs that got worse", *by_task]
    rows = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    clipped = np.mean([scores["clip 0.2"] for scores in by_task.values()], axis=0)
    for name in chain.from_iterable(KINDS.values()):
        scores = np.stack([of_task[name] for of_task in by_task.values()])  # (tasks, seeds)
        of_seeds = scores.mean(0)
        better = "-" if name == "clip 0.2" else with_interval(of_seeds - clipped)
        cells = [f"**{with_interval(of_seeds)}**", better, f"{(scores < 0).sum()}"]
        cells += [f"{of_task.mean():.2f}" for of_task in scores]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


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
                    steps = min(len(run[key]) for run in by_seed)
                    curve = smooth(np.mean([run[key][:steps] for run in by_seed], axis=0))
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
    print(table())
    draw()
