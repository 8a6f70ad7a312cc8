"""The model card of a run, `final/README.md`. Names and texts in it are untrusted: they are
escaped, and paths of this machine and addresses of servers are left out.
"""

import html
import json
import os
import re
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from rlhf_pg.boundary.input_files import read_file
from rlhf_pg.boundary.quoted import quote, visible
from rlhf_pg.checkpoint.compatibility import PLACES
from rlhf_pg.report.run_files import PACKAGES, RunFiles, version

MOST_ROWS = 12  # rows in the table of the reward
COLUMNS = ("reward", "eval_reward", "kl", "entropy", "completions/mean_length")
ADDRESS = re.compile(r"(?:(openenv:)|\w+://)\S*")  # a server's address
LONGEST_RUBRIC = 80  # characters
# Files that may name the base model, with its key: in a model's directory, or in its run's.
NAMES_BASE = {"README.md": "base_model", "adapter_config.json": "base_model_name_or_path"}
NAMES_BASE |= {"config.json": "_name_or_path", "../config.yaml": "model_name_or_path"}
PAPERS = {
    "GRPO": "Shao et al. 2024, DeepSeekMath, arXiv:2402.03300",
    "RLOO": "Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740",
    "Reinforce": "Williams 1992, Simple Statistical Gradient-Following Algorithms, ML 8:229-256",
    "PPO": "Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347",
}


def model_card(config: Mapping[str, Any], fingerprint: str | None, directory: Path) -> str:
    """Return the model card in Markdown, from a config with its algorithm, the fingerprint of the
    training data, and the run's `metrics.jsonl`.
    """
    algorithm = str(config["algorithm"])
    base = config.get("model_name_or_path")
    start = f", from {literal(_redact(base))}" if base else ""
    names = config.get("dataset_name") or [config.get("task")]
    data = ", ".join(literal(_redact(name)) for name in names if name)
    known = f" (fingerprint `{fingerprint}`)" if fingerprint else ""
    rewards = [config.get("reward_model_name_or_path"), *(config.get("reward_funcs") or ())]
    scored = ", ".join(literal(_redact(name)) for name in rewards if name)
    # The header for the Hub, with names that can be Hub ids.
    header = ModelCardData(
        library_name="peft" if config.get("use_peft") else "transformers",
        base_model=_base_model(base) if base else None,
        datasets=list(filter(_is_hub_id, config.get("dataset_name") or ())) or None,
        tags=["rlhf_pg", "reinforcement-learning", algorithm.lower()],
    )
    plain = json.loads(json.dumps(_redact(dict(config)), default=str))
    settings = {key: value for key, value in plain.items() if value not in (None, [], {}, "")}
    text = visible(yaml.safe_dump(settings, sort_keys=False).rstrip())
    # A fence that is longer than any in the text.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    parts = [
        f"---\n{header.to_yaml()}\n---\n",
        f"# {literal(directory.name)}",
        f"Trained by {literal(algorithm)} with `rlhf_pg`{start}.",
        "## Data and rewards",
        f"- Data: {data or 'given in Python'}{known}\n"
        f"- Rewards: {scored or 'of the task, or given in Python'}",
        "## How it went",
        _curve(directory),
        "## Config",
        "Keys that are not listed are at their defaults or empty.",
        f"{fence}yaml\n{text}\n{fence}",
        "## Versions",
        ", ".join(f"{name} {version(name)}" for name in ("rlhf-pg", *PACKAGES)),
        *[f"Method: {paper}." for name, paper in PAPERS.items() if name == algorithm],
    ]
    return "\n\n".join(parts) + "\n"


def literal(text: Any) -> str:
    """Return one line of text, escaped for Markdown and HTML."""
    return re.sub(r"([\\`*_{}\[\]()#+!|~$-])", r"\\\1", html.escape(quote(str(text)), quote=False))


def _base_model(name: str) -> str | None:
    """Return the Hub id of a model, or the one that the card or a config of its directory names."""
    named = [name]
    for file, key in NAMES_BASE.items():
        with suppress(Exception):  # anybody's file, which need not be there
            found = next(yaml.safe_load_all(read_file(Path(name) / file)))[key]
            named += found if isinstance(found, list) else [found]
    return next(filter(_is_hub_id, named), None)


def _is_hub_id(name: Any) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", str(name))) and not os.path.exists(name)


def _redact(value: Any) -> Any:
    """Return a value without local directories and addresses of servers."""
    if isinstance(value, str) and (address := ADDRESS.fullmatch(value)):
        return f"{address[1] or ''}a server"
    if isinstance(value, str):
        kind, place = ("model:", value[6:]) if value.startswith("model:") else ("", value)
        if os.path.isabs(place.partition(":")[0]):
            return kind + Path(place).name
        return value
    if isinstance(value, list | tuple):
        return [_redact(item) for item in value]
    if isinstance(value, dict):
        return {
            _redact(key): textwrap.shorten(str(_redact(item)), LONGEST_RUBRIC, placeholder=" ...")
            if key == "rubric"
            else _redact(item)
            for key, item in value.items()
            if key not in PLACES and key != "base_url"
        }
    return value


def _curve(directory: Path) -> str:
    """Return a table of a few steps, including the last."""
    lines = RunFiles(directory).metrics
    if not lines:
        return "No step was taken."
    every = -(-len(lines) // MOST_ROWS)
    kept = [line for i, line in enumerate(lines, 1) if i % every == 0 or i == len(lines)]
    kept = [line for line in lines if "eval_reward" in line or line in kept][-2 * MOST_ROWS :]
    columns = [name for name in COLUMNS if any(line.get(name) is not None for line in kept)]
    rows = [["step", *columns], ["---"] * (1 + len(columns))]
    for line in kept:
        numbers = [line.get(name) for name in columns]
        rows.append([str(line["step"]), *("" if x is None else f"{x:.4g}" for x in numbers)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
