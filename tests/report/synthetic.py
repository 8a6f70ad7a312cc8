"""Runs as they would have been: the files of one, made up, for pages to show."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlhf_pg.report.run_files import StepTokens, tokens_file

WORDS = [" the", " answer", " is", " so", " 4", " 7", " +", ",", ".", " then", "\n", "é", "ü"]
COLUMNS = ("advantage", "reward", "log_ratio", "kl", "value", "sampler_logprob")
CONFIG = {
    "algorithm": "ppo",
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "max_steps": 1000,
    "learning_rate": 1e-6,
    "beta": 0.05,
    "output_dir": "runs/synthetic",
    "reward_funcs": ["accuracy", "format"],
}
VERSIONS = {"python": "3.12.3", "torch": "2.13.0", "transformers": "5.16.0", "rlhf-pg": "0.1.0"}


def make_run(
    directory: Path,
    steps: int = 40,
    every: int = 10,
    prompts: int = 3,
    n: int = 4,
    lengths: tuple[int, int] = (5, 30),
    config: dict[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write the files of a run that learnt, with trouble at its end."""
    noise = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(CONFIG | (config or {}), sort_keys=False))
    lines = [metrics(step, steps, noise) for step in range(1, steps + 1)]
    write_lines(directory / "metrics.jsonl", lines)
    start = {"step": 0, "versions": VERSIONS, "processes": 8, "backend": "DDP", "device": "H100"}
    write_lines(directory / "trace.jsonl", [start | {"rewards": {}, "weights": {}}])
    records: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        records += logged_step(directory, step, prompts, n, lengths, noise)
    write_lines(directory / "completions.jsonl", records)
    return directory


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def metrics(step: int, steps: int, noise: np.random.Generator) -> dict[str, Any]:
    """The line of a step."""
    done, jitter = step / steps, noise.normal(size=4)
    accuracy = 0.2 + 0.7 * done + 0.03 * jitter[0]
    length = 120 + 6 * jitter[1]
    line = {
        "step": step,
        "loss": 0.02 * jitter[2],
        "grad_norm": abs(0.8 + 0.3 * jitter[3]),
        "learning_rate": 1e-6 * (1 - done),
        "reward": accuracy + 0.2,
        "reward_std": 0.4,
        "rewards/accuracy/mean": accuracy,
        "rewards/accuracy/std": 0.45,
        "rewards/format/mean": 1.0,
        "rewards/format/std": 0.0,
        "kl": 0.02 + 0.08 * done,
        "entropy": 1.1 - done,
        "completions/mean_length": length,
        "completions/max_length": length * 2.2,
        "completions/clipped_ratio": 0.02,
        "frac_reward_zero_std": 0.3 + 0.5 * done,
        "num_tokens": step * 150_000,
        "step_time": 9.6 + length / 150,
        "time/rollout": 3.1 + length / 150,
        "time/update": 5.2,
        "value_loss": 0.35 - 0.3 * done,
        "explained_variance": 0.7 * done,
        "approx_kl": None,
        "my/number": done**2,
    }
    if step % max(1, steps // 10) == 0:
        line |= {"eval_reward": accuracy - 0.05, "eval_greedy_reward": accuracy + 0.02}
    return {key: float(x) if isinstance(x, np.floating) else x for key, x in line.items()}


def tokens_of(
    places: list[tuple[int, int]],
    lengths: Any,
    ids: Any,
    texts: list[str],
    numbers: dict[str, Any],
    action: Any = None,
) -> StepTokens:
    """The record of completions without scores, by their prompts and samples."""
    count = len(places)
    return StepTokens(
        prompt_index=np.array([p for p, _ in places]),
        sample=np.array([s for _, s in places], np.int32),
        row=np.zeros(count, np.int64),
        rank=np.zeros(count, np.int32),
        truncated=np.zeros(count, np.bool_),
        prompt_lengths=np.zeros(count, np.int32),
        prompt_ids=np.zeros(0, np.int32),
        lengths=np.asarray(lengths, np.int32),
        ids=np.asarray(ids, np.int32),
        action=np.ones(len(texts), np.bool_) if action is None else action,
        score_at=np.zeros(0, np.int64),
        scores=np.zeros((0, 1)),
        numbers={name: np.asarray(column) for name, column in numbers.items()},
        texts=texts,
    )


def logged_step(
    directory: Path,
    step: int,
    prompts: int,
    n: int,
    lengths: tuple[int, int],
    noise: np.random.Generator,
) -> list[dict[str, Any]]:
    """Write the tokens of a step, and return the lines of its completions."""
    count = prompts * n
    sizes = noise.integers(lengths[0], lengths[1] + 1, count)
    total = int(sizes.sum())
    ids = noise.integers(0, len(WORDS), total)
    right = noise.random(count) < 0.2 + 0.6 * min(1.0, step / 500)
    advantage = np.repeat(np.where(right, 0.8, -0.9), sizes)
    kl = noise.normal(0.03, 0.12, total)
    reward = -0.05 * kl
    reward[np.cumsum(sizes) - 1] += right
    numbers = (
        *(advantage + noise.normal(0, 0.15, total), reward, noise.normal(0, 0.04, total), kl),
        *(noise.normal(0.5, 0.2, total), -noise.gamma(0.5, 0.4, total)),
    )
    texts = [WORDS[i] for i in ids]
    places = [(step * prompts + i // n, i % n) for i in range(count)]
    tokens = tokens_of(
        places,
        sizes,
        ids + 100,
        texts,
        dict(zip(COLUMNS, numbers, strict=True)),
        noise.random(total) > 0.02,
    )
    tokens.save(tokens_file(directory, step))
    ends = np.cumsum(sizes)
    return [
        {
            "step": step,
            "prompt_index": p,
            "sample": s,
            "prompt": [
                {"role": "system", "content": "Reason step by step, then answer in a box."},
                {"role": "user", "content": f"What is {p} + {p % 7}? Explain every step."},
            ],
            "completion": "".join(texts[ends[i] - sizes[i] : ends[i]]),
            "rewards/accuracy": float(right[i]),
            "rewards/format": float(noise.random() < 0.8),
            "advantage": float(0.8 if right[i] else -0.9),
            "truncated": bool(sizes[i] == lengths[1]),
            "answer": str(p + p % 7),
        }
        for i, (p, s) in enumerate(places)
    ]
