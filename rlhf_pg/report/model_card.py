"""The model card of a run, `final/README.md`. Names and texts in it are untrusted: they are
escaped, and paths of this machine and addresses of servers are left out.
"""

import html
import json
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from rlhf_pg.boundary.input_files import read_file
from rlhf_pg.boundary.quoted import quote, visible
from rlhf_pg.config.run import effect_of
from rlhf_pg.report.run_files import PACKAGES, RunFiles, version

MOST_ROWS = 12  # in the table of metrics
COLUMNS = ("reward", "eval_reward", "kl", "entropy", "completions/mean_length")
ADDRESS = re.compile(r"(?:(openenv:)|\w+://)\S*")  # a server's address
LONGEST_RUBRIC = 80  # characters
# Files that may name the base model, with its key: in a model's directory, or in its run's.
NAMES_BASE = {"README.md": "base_model", "adapter_config.json": "base_model_name_or_path"}
NAMES_BASE |= {"config.json": "_name_or_path", "../config.yaml": "model_name_or_path"}
SUPERVISED = {"sft": "supervised fine-tuning", "reward_model": "the Bradley-Terry loss"}
PAPERS = {
    "GRPO": "Shao et al. 2024, DeepSeekMath, arXiv:2402.03300",
    "RLOO": "Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740",
    "Reinforce": "Williams 1992, Simple Statistical Gradient-Following Algorithms, ML 8:229-256",
    "reward_model": "Bradley & Terry 1952, Rank Analysis of Incomplete Block Designs, Biometrika",
    "PPO": "Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347",
}


def model_card(
    config: Mapping[str, Any],
    fingerprint: str | None,
    directory: Path,
    is_adapter: bool = False,
) -> str:
    """Return the model card in Markdown, from a config with its algorithm, the fingerprint of the
    training data, and the run's `metrics.jsonl`; whether the model is an adapter is for the Hub.
    """
    algorithm = str(config["algorithm"])
    model = config.get("model_name_or_path")
    shown = json.loads(json.dumps(_redact(dict(config)), default=str))
    settings = {key: value for key, value in shown.items() if value not in (None, [], {}, "")}
    text = visible(yaml.safe_dump(settings, sort_keys=False).rstrip())
    data = settings.get("dataset_name") or [settings.get("task")]
    tags = ["rlhf_pg", algorithm.lower().replace("_", "-")]
    columns: Sequence[str] = ()
    rewards = None
    if "reward_funcs" in config:
        tags.insert(1, "reinforcement-learning")
        columns = COLUMNS
        named = [settings.get("reward_model_name_or_path"), *settings.get("reward_funcs", ())]
        rewards = [name for name in named if name]
    datasets = [name for name in config.get("dataset_name") or () if _is_hub_id(name)]
    fence = "```"
    while fence in text:
        fence += "`"
    header = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        base_model=_base_model(model) if model else None,
        datasets=datasets or None,
        tags=tags,
    )
    card = ModelCard.from_template(
        header,
        template_path=str(Path(__file__).with_suffix(".md")),
        literal=literal,
        directory=directory.name,
        algorithm=SUPERVISED.get(algorithm, algorithm),
        model=settings.get("model_name_or_path"),
        data=list(filter(None, data)),
        fingerprint=fingerprint,
        rewards=rewards,
        curve=_curve(directory, columns),
        settings=text,
        fence=fence,
        versions=", ".join(f"{name} {version(name)}" for name in ("rlhf-pg", *PACKAGES)),
        paper=PAPERS.get(algorithm),
    )
    return str(card)


def literal(text: Any) -> str:
    """Return one line of text, escaped for Markdown and HTML."""
    return re.sub(r"([\\`*_{}\[\]()#+!|~$-])", r"\\\1", html.escape(quote(str(text)), quote=False))


def _base_model(name: str) -> str | None:
    """Return the Hub id of a model, or the one that the card or a config of its directory names."""
    names = [name]
    for file, key in NAMES_BASE.items():
        with suppress(Exception):  # anybody's file, which need not be there
            header = next(yaml.safe_load_all(read_file(Path(name) / file)))
            names += header[key] if isinstance(header[key], list) else [header[key]]
    return next(filter(_is_hub_id, names), None)


def _is_hub_id(name: Any) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", str(name))) and not os.path.exists(name)


def _redact(value: Any) -> Any:
    """Return a value without local directories and addresses of servers."""
    if isinstance(value, str):
        return _redact_text(value)
    if isinstance(value, list | tuple):
        return [_redact(item) for item in value]
    if not isinstance(value, dict):
        return value
    redacted = {}
    for key, item in value.items():
        if key == "rubric":
            item = textwrap.shorten(str(item), LONGEST_RUBRIC, placeholder=" ...")
        if effect_of(key) != "output" and key != "base_url":
            redacted[_redact(key)] = _redact(item)
    return redacted


def _redact_text(text: str) -> str:
    if address := ADDRESS.fullmatch(text):
        return f"{address[1] or ''}a server"
    name_or_path = text.removeprefix("model:")
    if not os.path.isabs(name_or_path.partition(":")[0]):
        return text
    return text.removesuffix(name_or_path) + Path(name_or_path).name


def _curve(directory: Path, columns: Sequence[str]) -> list[list[str]]:
    """Return the rows of a table of a few steps, including the last; without columns it has the
    loss and the metrics of evaluations.
    """
    lines = RunFiles(directory).metrics
    every = -(-len(lines) // MOST_ROWS)
    kept = []
    evaluated = dict[str, None]()  # names, in order
    for number, line in enumerate(lines, 1):
        held_out = dict.fromkeys(key for key in line if key.startswith("eval_"))
        evaluated |= held_out
        if number % every == 0 or number == len(lines) or held_out:
            kept.append(line)
    kept = kept[-2 * MOST_ROWS :]
    if not kept:
        return []
    columns = columns or ("loss", *evaluated)
    columns = [name for name in columns if any(line.get(name) is not None for line in kept)]
    rows = [["step", *columns]]
    rows.append(["---" for _ in rows[0]])
    for line in kept:
        row = [str(line["step"])]
        for name in columns:
            value = line.get(name)
            row.append("" if value is None else f"{value:.4g}")
        rows.append(row)
    return rows
