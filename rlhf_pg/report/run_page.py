"""`report.html` of a run: its curves with known troubles, its tokens and its environment."""

import fnmatch
import logging
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pg.boundary.quoted import visible
from rlhf_pg.report.html import table, write_document
from rlhf_pg.report.run_files import RunFiles
from rlhf_pg.report.token_steps import COLUMNS, LoggedSteps
from rlhf_pg.report.troubles import troubles

logger = logging.getLogger(__name__)

REPORT = "report.html"
MOST_POINTS = 4_000  # points of a curve; with more, neighbouring steps are averaged
# A line for each chart: its title, patterns of keys, and a description. A metric goes to the first
# chart with its key; each of the rest has a chart under "Other".
CATALOGUE = """
# Reward
Reward by source | reward rewards/*/mean rewards/greedy | Weighted total, and raw mean by source.
Spread of scores | reward_std rewards/*/std | Standard deviation within groups, and by source.
Groups with one score for all | frac_reward_zero_std | Nothing is learnt from these groups.
Failed rewards | rewards/*/failed | Share of calls of a reward function that failed.
# Policy
KL to the reference | kl | Distance from the initial model, in nats per token.
Distance from the teacher | teacher/divergence | Nats per token; 0 for a token without a teacher.
KL of a completion | kl/completion | Summed over the tokens of a completion, in nats.
KL of the update | approx_kl approx_kl/after | How far one step moves; above 0.1 is large.
Entropy | entropy | In nats per token; at 0 the policy always says the same.
Clipping | clip_ratio/* | Share of tokens whose ratio was clipped, and which then do not count.
Gradient norm | grad_norm | Before clipping. Single peaks are normal, a steady rise is not.
Loss | loss policy_loss train_loss | Its level says little: look at the reward.
Ratio | ratio | Mean probability under the new policy by that under the old one: near 1.
Sampler and policy apart | agreement/* sampling/sampling_logp_difference/* | In nats per token.
Ratio of policy and sampler | sampling/importance_sampling_ratio/* | Near 1.
Samples that count | sampling/effective_sample_size sampling/clipped_share | By their weights.
Age of samples | sampling/staleness | Steps between the policy and the weights that sampled.
Learning rate | learning_rate value_learning_rate | The rates that the optimizer used.
Coefficients | beta entropy_coef old_kl_coef learning_rate_scale | Controllers may move them.
# Lengths
Length of completions | completions/mean_length completions/m??_length | Tokens of a completion.
Truncated | completions/clipped_ratio | Share that was cut off at max_completion_length.
Turns and tools | episodes/* tools/* | Turns, calls of tools, and how many of them failed.
# Value
Value loss | value_loss | Squared error of the critic.
Explained variance | explained_variance | 1 is all, below 0 is worse than a constant.
Clipped values | value_clip_ratio | Share of values that were clipped.
# Time and memory
Time by stage | step_time time/* | Seconds of a step, and of its stages.
Speed | perf/tokens_per_second | Tokens of prompts and completions, over the whole step.
Memory | memory/* | Memory of the accelerator, in GB.
Updates | num_updates skipped_updates | Updates of the step, and those that were not finite.
# Evaluation
Held-out reward | eval_reward eval_*_reward | On held-out prompts, sampled and greedy.
Held-out scores by source | eval_*rewards/*/mean | Mean raw scores on held-out prompts.
Several attempts | eval_*pass@* eval_*majority@* | Share solved by one of k, and by the majority.
Held-out length | eval_*completions/mean_length | Mean tokens of a completion.
"""
NO_CURVES = {"step", "num_tokens"}  # they are the axes
# With one update per step these are constant whatever happens, and then left out.
OF_SEVERAL_UPDATES = ("approx_kl", "ratio", "ratio_overflow", "clip_ratio/*")


def write_report(directory: Path, out: Path | None = None, running: bool = False) -> Path:
    """Write the report of a run, which reloads itself if it is `running`; return its path."""
    path = directory / REPORT if out is None else out
    files = RunFiles(directory)
    lines = files.metrics
    curve = curve_data(files)
    keys = {key for line in lines for key in line}
    absent = {key for key in keys if all(line.get(key) is None for line in lines)}
    tables = []
    if files.starts:
        rows = [[str(x.step), str(x.processes), x.backend, x.device] for x in files.starts]
        head = ["after step", "processes", "backend", "device"]
        tables.append(table("Beginnings", head, rows))
        rows = [[name, version] for name, version in files.starts[-1].versions.items()]
        tables.append(table("Versions", ["package", "version"], rows))
    if files.config:
        rows = [[str(key), plain(value)] for key, value in files.config.items()]
        tables.append(table("Config", ["key", "value"], rows))
    logged = LoggedSteps(files)
    steps, left_out = logged.chosen()
    data = {
        "kind": "run",
        "title": curve["name"],
        "subtitle": [visible(part) for part in _subtitle(files) if part],
        "runs": [curve],
        "charts": charts_of(curve["metrics"]),
        "absent": sorted(map(visible, absent)),
        "warnings": [asdict(trouble) for trouble in troubles(lines)],
        "tables": tables,
        "steps": [logged.summary(step) for step in steps],
        "columns": COLUMNS,
        "left_out": left_out,
        "running": running,
    }
    write_document(path, curve["name"], data, ((step, logged.pack(step)) for step in steps))
    return path


def _subtitle(files: RunFiles) -> list[str]:
    """Return short descriptions of a run: algorithm, model, steps, versions."""
    config = files.config
    lines = files.metrics
    model = Path(str(config.get("model_name_or_path") or ""))
    if model.name == "final":  # an earlier run's
        model = model.parent
    last = lines[-1]["step"] if lines else 0
    planned = config.get("max_steps")
    of = f" of {planned}" if isinstance(planned, int) and planned > last else ""
    parts = [str(config.get("algorithm") or "").upper(), model.name, f"{last}{of} steps"]
    if files.starts:
        start = files.starts[-1]
        parts.append(f"{start.processes} x {start.device} ({start.backend})")
        shown = ("torch", "transformers", "rlhf-pg")
        parts += [f"{name} {start.versions[name]}" for name in shown if name in start.versions]
    return parts


def charts_of(keys: Iterable[str]) -> list[dict[str, Any]]:
    """Return the charts of these metrics, in order, as dicts of `group`, `title`, `what` and
    `keys`; each metric is in one of them.
    """
    left = [key for key in keys if key not in NO_CURVES]
    charts = []
    group = ""
    for line in CATALOGUE.strip().splitlines():
        if line.startswith("# "):
            group = line.removeprefix("# ")
            continue
        title, patterns, what = line.split(" | ")
        matched = []
        for pattern in patterns.split():
            matched += fnmatch.filter(left, pattern)
            left = [key for key in left if key not in matched]
        if matched:
            charts.append({"group": group, "title": title, "what": what, "keys": matched})
    what = "A number that the run logged."
    other = [{"group": "Other", "title": k, "what": what, "keys": [k]} for k in sorted(left)]
    return [*charts, *other]


def curve_data(files: RunFiles) -> dict[str, Any]:
    """Return the metrics of a run in columns, over steps, tokens and seconds."""
    lines = files.metrics
    keys = list(dict.fromkeys(key for line in lines for key in line))
    columns = {
        key: np.array([np.nan if (x := line.get(key)) is None else float(x) for line in lines])
        for key in keys
    }
    known = {key: column for key, column in columns.items() if not np.isnan(column).all()}
    x = {"step": known.get("step", np.zeros(0))}
    x["time"] = np.nancumsum(known.get("step_time", np.zeros(len(lines))))
    if "num_tokens" in known:  # a counter: if missing, unchanged
        x["tokens"] = np.maximum.accumulate(np.nan_to_num(known["num_tokens"]))
    width = -(-len(lines) // MOST_POINTS) or 1
    ends = np.minimum(np.arange(width, len(lines) + width, width), len(lines)) - 1
    curves = {}
    of_several = {key for name in OF_SEVERAL_UPDATES for key in fnmatch.filter(known, name)}
    still = {key for key in of_several if np.nanmin(known[key]) == np.nanmax(known[key])}
    for key in known.keys() - NO_CURVES - still:
        parts = np.append(known[key], [np.nan] * (-len(lines) % width)).reshape(-1, width)
        means = np.ma.masked_invalid(parts).mean(1).filled(np.nan)
        curves[key] = [None if np.isnan(mean) else float(f"{mean:.6g}") for mean in means]
    return {
        "name": visible(files.directory.absolute().name),
        "x": {name: column[ends].tolist() for name, column in x.items()},
        "metrics": {visible(key): curves[key] for key in keys if key in curves},
        "mean_of": width,
    }


def plain(value: Any) -> str:
    """Return a value of a config as YAML, on one line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
