"""The tables and pictures of results-tables.md, of docs/results/*.json (benchmarks/real.py).

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


def files(pattern: str) -> list[dict[str, Any]]:
    """The results whose file has a name of this pattern."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def runs() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The runs that are there, by task and method; those with other settings are left out."""
    tasks: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for run in files("*.json"):
        if not run["name"] and run["task"] not in ("learned", "shown"):
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


def of_cpu(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs whose seconds can be compared: those of a GPU shared it with others."""
    return [run for run in group if not run["machine"].startswith("NVIDIA")]


def median(values: list[float], digits: int) -> str:
    """The median as text, "-" of nothing."""
    return f"{np.median(values):.{digits}f}" if values else "-"


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
            minutes = [run["held_out"][-1]["seconds"] / 60 for run in of_cpu(group)]
            peaks = [run["peak_bytes"] / 1e9 for run in of_cpu(group)]
            between = f" ({low:.2f} to {high:.2f})" if len(group) > 2 else ""
            rows.append(
                f"| {task} | {method} | {len(group)} | {all_scores[0].mean():.2f} "
                f"| **{mean:.2f}**{between} "
                f"| {all_scores[-1].min():.2f} .. {all_scores[-1].max():.2f} "
                f"| {median(minutes, 1)} | {median(peaks, 1)} |"
            )
    return "\n".join(rows)


def race(goal: float = 0.5) -> str:
    """A row for each method on two tasks: what it takes to a held-out score."""
    rows = ["| Task | Method | Seeds | Completions | CPU seconds | Peak GB |", "|---" * 6 + "|"]
    both = [(task, *pair) for task in ("happy", "letters") for pair in runs()[task].items()]
    for task, method, every in both:
        group = of_cpu(every)
        there = [next((p for p in run["held_out"] if p["score"] >= goal), None) for run in group]
        points = [point for point in there if point is not None]
        cells = ["not reached"] * 2
        if len(points) > len(group) / 2:
            cells = [median([p[unit] for p in points], 0) for unit in ("samples", "seconds")]
        peak = median([run["peak_bytes"] / 1e9 for run in group], 1)
        rows.append(f"| {task} | {method} | {len(group)} | {' | '.join(cells)} | {peak} |")
    return "\n".join(rows)


# Tasks that rewards alone learn too, the student's loss, and its runs.
STUDENTS = (
    ("arithmetic", "teacher and rewards", "arithmetic-grpo-rewarded-*"),
    ("arithmetic", "teacher alone", "arithmetic-grpo-taught-*"),
    ("happy", "teacher alone", "shown-grpo-*"),
)


def students() -> str:
    """A row for each student: the steps in which it comes to its teacher's score, to within the
    error of that, and those in which rewards alone do.
    """
    rows = ["| Task | Teacher | Seeds | Steps of the student | Steps of GRPO |", "|---" * 5 + "|"]
    for task, how, pattern in STUDENTS:
        taught, alone = files(f"{pattern}.json"), files(f"{task}-grpo-?.json")
        if not (taught and alone):
            continue
        teachers = {run["seed"]: run.get("teacher", alone[0]["held_out"][-1]) for run in taught}
        named = dict.fromkeys(f"{one['score']:.2f}" for one in teachers.values())
        cells = [f"{task}, {how} | {', '.join(named)} | {len(taught)}"]
        for group in (taught, alone):
            steps = []
            for run in (one for one in group if one["seed"] in teachers):
                goal = teachers[run["seed"]]["score"] - teachers[run["seed"]]["stderr"]
                each = run["recipe"]["prompts_per_step"] * run["recipe"]["num_generations"]
                there = (p["samples"] // each for p in run["held_out"] if p["score"] >= goal)
                steps.append(str(next(there, f"over {run['recipe']['max_steps']}")))
            cells.append(", ".join(steps))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def draw_students(plt: Any) -> None:
    """Draw the held-out scores of students and of rewards alone, by step."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axis, task in zip(axes, ("arithmetic", "happy"), strict=True):
        runs_of = {how: pattern for of, how, pattern in STUDENTS if of == task}
        runs_of["rewards alone"] = f"{task}-grpo-?"
        for color, (label, pattern) in zip(COLORS, runs_of.items(), strict=False):
            for i, run in enumerate(files(f"{pattern}.json")):
                each = run["recipe"]["prompts_per_step"] * run["recipe"]["num_generations"]
                points = [(p["samples"] / each, p["score"]) for p in run["held_out"]]
                name = None if i else label
                axis.plot(*zip(*points, strict=True), color=color, alpha=0.7, label=name)
        axis.set_title(task, loc="left")
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    axes[0].set_ylabel("held-out score")
    figure.savefig(RESULTS / "students.svg", metadata={"Date": None})
    plt.close(figure)


def draw_rates(plt: Any) -> None:
    """Draw reward, entropy and KL of each step, for each adapter at its learning rates."""
    kinds = {"rank-1": "LoRA, rank 1", "rank-16": "LoRA, rank 16", "full": "all weights"}
    figure, axes = plt.subplots(3, 3, figsize=(10, 7), sharey="row", layout="constrained")
    for (kind, title), column in zip(kinds.items(), axes.T, strict=True):
        column[0].set_title(title, loc="left")
        of_kind = files(f"letters-grpo-*{kind}-rate-*.json")
        of_kind.sort(key=lambda run: run["settings"]["learning_rate"])
        for color, run in zip(COLORS, of_kind, strict=False):
            for metric, axis in zip(("reward", "entropy", "kl"), column, strict=True):
                label = f"{run['settings']['learning_rate']:g}"
                axis.plot([step[metric] for step in run["steps"]], color=color, label=label)
                axis.grid(alpha=0.3)
        column[1].legend(fontsize=7, loc="upper left", frameon=False)
        column[2].set_xlabel("step")
    for metric, axis in zip(
        ("reward", "entropy, nats per token", "KL, nats per token"), axes[:, 0], strict=True
    ):
        axis.set_ylabel(metric)
    axes[2, 0].set_yscale("symlog", linthresh=1)
    figure.savefig(RESULTS / "rates.svg", metadata={"Date": None})
    plt.close(figure)


def draw_learned(plt: Any) -> None:
    """Draw a learned reward and the one that chose its pairs, by the KL to the start."""
    figure, axis = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for run in files("learned-ppo-*.json"):
        kl = [step["kl"] for step in run["steps"]]
        for color, metric, label in zip(
            COLORS, ("reward", "rewards/happiness/mean"), ("learned", "gold"), strict=False
        ):
            axis.plot(kl, [step[metric] for step in run["steps"]], ".", color=color, label=label)
    axis.set_xlabel("KL to the start, nats per token")
    axis.set_ylabel("reward")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(RESULTS / "learned.svg", metadata={"Date": None})
    plt.close(figure)


def draw() -> None:
    """Draw the held-out score of each task, by samples and by seconds, and the two other pages."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "results"  # the same file for the same numbers
    from matplotlib import pyplot as plt

    if files("shown-*.json"):
        draw_students(plt)
    if files("*-rate-*.json"):
        draw_rates(plt)
    if files("learned-*.json"):
        draw_learned(plt)
    for task, methods in runs().items():
        figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
        for color, (method, group) in zip(COLORS, methods.items(), strict=False):
            mean, low, high = interval(scores(group))
            for axis, unit in zip(axes, ("samples", "seconds"), strict=True):
                timed = group if unit == "samples" else of_cpu(group)
                if not timed:
                    continue
                x = np.mean([[point[unit] for point in run["held_out"]] for run in timed], axis=0)
                axis.plot(x, mean, color=color, label=f"{method}, {len(group)} seeds")
                axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
                axis.set_xlabel("completions" if unit == "samples" else "seconds of CPU")
                axis.grid(alpha=0.3)
        axes[0].set_ylabel("held-out reward")
        axes[0].set_title(task, loc="left")
        axes[0].legend(loc="lower right", fontsize=8, frameon=False)
        figure.savefig(RESULTS / f"{task}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw()
