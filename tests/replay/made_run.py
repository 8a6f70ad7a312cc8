"""A run directory made by hand, with every file that a run leaves, to plant faults in."""

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file, save_file

from rlhf_pg.checkpoint import atomic
from rlhf_pg.report.run_files import RunFiles, Start, StepTokens, Trace, tokens_file

STEPS, PROMPTS, SAMPLES, LENGTH = 8, 3, 4, 5
LOGGED = (2, 4, 6, 8)
TENSORS = {"embed.weight": (6, 4), "head.weight": (4, 6), "norm.bias": (4,)}
CONFIG: dict[str, Any] = {
    "algorithm": "grpo",
    "model_name_or_path": None,
    "dataset_name": ["/data/one/questions.jsonl"],
    "dataset_fingerprint": "f00d",
    "reward_funcs": ["/code/one/rewards.py:accuracy"],
    "output_dir": "runs/one",
    "seed": 42,
    "dtype": "float32",
    "disable_dropout": True,
    "shuffle_dataset": True,
    "prompts_per_step": PROMPTS,
    "num_generations": SAMPLES,
    "temperature": 1.0,
    "micro_batch_tokens": 1024,
    "gradient_checkpointing": False,
    "learning_rate": 0.001,
    "lr_scheduler_type": "constant",
    "max_steps": STEPS,
    "epsilon": 0.2,
    "log_completions_steps": 2,
    "num_completions_to_print": 2,
    "save_steps": 4,
}
VERSIONS = {"python": "3.11.9", "torch": "2.12.0", "transformers": "5.1.0", "rlhf-pg": "0.1.0"}


class MadeRun:
    """Writer of a run, the numbers of which are drawn from one seed.

    Args:
        name: of its directory, which no comparison may see.
        pace: seconds of a step, likewise.
        config: keys to change.
        start: attributes of the first `Start` to change.
        noise: relative size of rounding in all numbers.
        steps: how many it took.
    """

    def __init__(
        self,
        directory: Path,
        *,
        pace: float = 1.0,
        config: dict[str, Any] | None = None,
        start: dict[str, Any] | None = None,
        noise: float = 0.0,
        steps: int = STEPS,
    ) -> None:
        self.directory, self.pace, self.noise, self.steps = directory, pace, noise, steps
        self.drawn, self.jitter = random.Random(1), random.Random(2)
        self.weights = {
            name: np.random.default_rng(3).normal(size=shape).astype(np.float32)
            for name, shape in TENSORS.items()
        }
        directory.mkdir(parents=True)
        kept = CONFIG | {"output_dir": str(directory)} | (config or {})
        (directory / "config.yaml").write_text(yaml.safe_dump(kept, sort_keys=False))
        begun = Start(
            step=0,
            versions=VERSIONS,
            processes=1,
            backend="DDP",
            device="cpu",
            rewards={"accuracy": "abc123", "model": None},
            weights=self.fingerprints(updated=False),
        )
        self.write("trace.jsonl", asdict(replace(begun, **(start or {}))))
        for step in range(1, steps + 1):
            self.step(step)

    def write(self, file: str, record: dict[str, Any]) -> None:
        with (self.directory / file).open("a") as lines:
            lines.write(json.dumps(record) + "\n")

    def fingerprints(self, updated: bool = True) -> dict[str, str]:
        return {
            # Rounding changes some bit of every tensor that was updated.
            name: f"{zlib.crc32(x.tobytes()):08x}{'n' if self.noise and updated else ''}"
            for name, x in self.weights.items()
        }

    def number(self) -> float:
        return self.rounded(self.drawn.uniform(-2, 2))

    def rounded(self, x: float) -> float:
        return x * (1 + self.noise * self.jitter.uniform(-1, 1))

    def step(self, step: int) -> None:
        count = PROMPTS * SAMPLES
        for name in self.weights:
            self.weights[name] = (self.weights[name] * np.float32(1.01)).astype(np.float32)
        trace = Trace(
            step=step,
            prompt_index=[(step - 1) * PROMPTS + k for k in range(PROMPTS)],
            rows=[(step * 7 + k) % 50 for k in range(PROMPTS)],
            prompts=[f"{zlib.crc32(b'%d' % ((step * 7 + i // 4) % 50)):08x}" for i in range(count)],
            ids=[f"{self.drawn.getrandbits(32):08x}" for _ in range(count)],
            logprobs=[self.number() for _ in range(count)],
            rewards={
                "accuracy": [float(self.drawn.random() < 0.5) for _ in range(count)],
                "model": [self.number() for _ in range(count)],
            },
            advantages=[self.number() for _ in range(count)],
            values=[self.number() for _ in range(count)],
            weights=list(self.fingerprints().values()),
        )
        self.write("trace.jsonl", asdict(trace))
        self.write("metrics.jsonl", self.metrics(step, trace))
        if step in LOGGED:
            self.texts(trace)
        if step % 4 == 0:
            self.save(f"checkpoints/step-{step:08d}", step, model_alone=False)
        if step == self.steps:
            self.save("final", step, model_alone=True)

    def metrics(self, step: int, trace: Trace) -> dict[str, Any]:
        return {
            "step": step,
            "loss": self.number(),
            "grad_norm": self.number(),
            "learning_rate": 0.001,
            "reward": self.rounded(sum(x or 0 for x in trace.rewards["accuracy"]) / len(trace.ids)),
            "kl": None,
            "num_tokens": step * 100,
            "step_time": self.pace,
            "time/rollout": self.pace / 2,
            "perf/tokens_per_second": 100 / self.pace,
            "my_own": self.number(),
        }

    def texts(self, trace: Trace) -> None:
        count = len(trace.ids)
        for i in range(count):
            k, sample = divmod(i, SAMPLES)
            self.write(
                "completions.jsonl",
                {
                    "step": trace.step,
                    "prompt_index": trace.prompt_index[k],
                    "sample": sample,
                    "prompt": f"What is {trace.rows[k]} plus one?",
                    "completion": f"answer {trace.ids[i]}",
                    "rewards/accuracy": trace.rewards["accuracy"][i],
                    "advantage": trace.advantages[i],
                },
            )
        ids = np.array([self.drawn.randrange(500) for _ in range(count * LENGTH)], np.int32)
        columns = ("advantage", "reward", "value", "log_ratio", "entropy", "sampler_logprob")
        tokens = StepTokens(
            prompt_index=np.repeat(np.array(trace.prompt_index), SAMPLES),
            sample=np.tile(np.arange(SAMPLES, dtype=np.int32), PROMPTS),
            lengths=np.full(count, LENGTH, np.int32),
            ids=ids,
            action=np.ones(len(ids), np.bool_),
            texts=[f"t{number} " for number in ids],
            numbers={name: np.array([self.number() for _ in ids]) for name in columns},
        )
        tokens.save(tokens_file(self.directory, trace.step))

    def save(self, name: str, step: int, model_alone: bool) -> None:
        path = self.directory / name
        partial = atomic.begin(path)
        noisy = {
            key: (x * np.float32(self.rounded(1.0))).astype(np.float32)
            for key, x in self.weights.items()
        }
        save_file(noisy, partial / "model.safetensors")
        (partial / "config.json").write_text(json.dumps({"hidden_size": 4}))
        (partial / "README.md").write_text(f"# {self.directory.name}\n")
        if not model_alone:
            moments = {f"{key}.exp_avg": x for key, x in noisy.items()}
            save_file(moments, partial / "optimizer.safetensors")
            state = {"counters": {"step": step, "num_tokens": step * 100}, "config": {}}
            state["config"] = {"output_dir": str(self.directory)}
            (partial / "state.json").write_text(json.dumps(state))
            save_file({"python": np.array([hash(self.pace)])}, partial / "rng-rank0.safetensors")
        atomic.seal(partial, {"step": step})
        atomic.publish(path)


def edit_lines(
    directory: Path, file: str, change: Callable[[dict[str, Any]], None], where: Callable[..., bool]
) -> None:
    """Change the first line of a file of JSON lines for which a condition holds."""
    lines = [json.loads(line) for line in (directory / file).read_text().splitlines()]
    change(next(line for line in lines if where(line)))
    (directory / file).write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_trace(directory: Path, step: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the trace of a step."""
    edit_lines(directory, "trace.jsonl", change, lambda x: x["step"] == step and "ids" in x)


def edit_config(directory: Path, key: str, value: Any) -> None:
    """Change a key of the config."""
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {key: value}))


def edit_tokens(directory: Path, step: int, change: Callable[[StepTokens], None]) -> None:
    """Change the kept tokens of a step."""
    tokens = RunFiles(directory).tokens(step)
    assert tokens is not None
    writable = replace(
        tokens,
        ids=tokens.ids.copy(),
        numbers={name: x.copy() for name, x in tokens.numbers.items()},
    )
    change(writable)
    writable.save(tokens_file(directory, step))


def flip_bit(file: Path, name: str, element: int, bit: int) -> None:
    """Change one bit of a float32 tensor in a safetensors file."""
    tensors = load_file(file)
    changed = tensors[name].copy()
    changed.view(np.uint32).reshape(-1)[element] ^= np.uint32(1 << bit)
    save_file(tensors | {name: changed}, file)
