"""Runs of every kind, two steps each, which end in the same numbers on the CPU and on a GPU.

`python -m tests.device.runs FILE NAME ...` makes them on this machine's own device, and
writes a JSON line each.
"""

import argparse
import contextlib
import io
import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForSequenceClassification

from rlhf_pg import (
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    ReinforceConfig,
    ReinforceTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from rlhf_pg.report.run_files import read
from rlhf_pg.runtime.ddp import full
from rlhf_pg.tasks import TASKS
from tests.tiny import tiny_model

TRAINERS: dict[str, tuple[Any, Any]] = {
    "grpo": (GRPOConfig, GRPOTrainer),
    "ppo": (PPOConfig, PPOTrainer),
    "rloo": (RLOOConfig, RLOOTrainer),
    "reinforce": (ReinforceConfig, ReinforceTrainer),
}
COMMON: dict[str, Any] = {
    "dtype": "float32",  # as on a CPU
    "max_steps": 2,
    "save_steps": 0,
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 16,
    "num_iterations": 1,
    "log_completions_steps": 1,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-6,  # or rounding alone would move a weight as far as a gradient
    "micro_batch_tokens": 160,
}
METRICS = ("reward", "loss", "grad_norm", "entropy", "kl", "value_loss", "num_tokens")


@dataclass(frozen=True)
class Run:
    """An algorithm, keys of its config, and what else a trainer is given."""

    algorithm: str = "grpo"
    options: dict[str, Any] = field(default_factory=dict)
    task: str = "arithmetic"
    arch: dict[str, Any] | None = None  # of `tiny_model`; None: the task's own model
    reward_model: bool = False
    resumes: bool = False  # after the first step

    @property
    def dtype(self) -> str:
        return str(self.options.get("dtype", "float32"))


BF16, LORA, AUTO = {"dtype": "bfloat16"}, {"use_peft": True}, {"micro_batch_tokens": "auto"}
WINDOW = {"arch": "mistral", "vocab_size": 64, "sliding_window": 6, "hidden_size": 64}
ROUNDS = {"num_iterations": 2, "num_mini_batches": 2}

RUNS: dict[str, Run] = {
    "grpo": Run(options={"beta": 0.05, "eval_steps": 1, "weight_decay": 0.1, **ROUNDS}),
    "grpo, auto": Run(
        options={
            **AUTO,
            "beta": 0.1,
            "sync_ref_model": True,
            "entropy_coef": 0.01,
            "dynamic_sampling_rounds": 2,
            "stop": ("12",),
        }
    ),
    "grpo, reward model": Run(reward_model=True),
    "ppo, offload, LoRA": Run(
        "ppo",
        {
            **BF16,
            **LORA,
            **AUTO,
            "gradient_checkpointing": "offload",
            "advantage_estimator": "n_step",
            "n_steps": 2,
        },
    ),
    "grpo, penalties": Run(
        options={
            "rollout_cache_tokens": 120,
            "overlong_buffer": 4,
            "missing_eos_penalty": 1.0,
            "mask_truncated_completions": True,
            "normalize_rewards": True,
        }
    ),
    "grpo, environment": Run(task="guess"),
    "grpo, padded": Run(arch=WINDOW),
    "rloo, resumed": Run("rloo", {"save_steps": 1}, resumes=True),
    "reinforce": Run("reinforce", {"advantage_estimator": "returns_minus_moving_average"}),
    "ppo": Run(
        "ppo",
        {
            **AUTO,
            **ROUNDS,
            "normalize_values": True,
            "bootstrap_truncated": True,
            "value_pretraining_steps": 1,
            "value_init": "random",
        },
    ),
}


def score(completions: list[Any], **_: Any) -> list[float]:
    """A number that every character of the text changes."""
    return [float(sum(map(ord, str(text))) % 7) for text in completions]


def prepared(run: Run, directory: Path) -> tuple[Path, list[Any]]:
    """The model of a run, saved in the directory, and its sources of reward."""
    own = directory / os.environ.get("RANK", "0")  # a process waits for no other
    model_path, rewards_path = own / "model", own / "rewards"
    if not own.exists():
        torch.manual_seed(0)
        model, tokenizer = TASKS[run.task]().new_model()
        if run.arch is not None:
            model, ends = tiny_model(**run.arch), tokenizer.eos_token_id
            model.config.eos_token_id = model.generation_config.eos_token_id = ends
        save(model_path, model, tokenizer)
        save(rewards_path, sequence_classifier(tokenizer), tokenizer)
    return model_path, [score, *([str(rewards_path)] if run.reward_model else [])]


def trainer(run: Run, directory: Path, steps: int | None = None) -> Any:
    """The trainer of a run."""
    config_type, trainer_type = TRAINERS[run.algorithm]
    task = TASKS[run.task]()
    model, rewards = prepared(run, directory)
    options = {**COMMON, **run.options} | ({} if steps is None else {"max_steps": steps})
    paths = {"model_name_or_path": str(model), "output_dir": str(directory / "out")}
    return trainer_type(
        reward_funcs=rewards,
        args=config_type(**paths, **options),
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset.select(range(4)) if "eval_steps" in options else None,
        tools=task.tools,
        environment_factory=task.environment_factory,
    )


def save(path: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def sequence_classifier(tokenizer: Any) -> PreTrainedModel:
    """A reward model with random weights."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_labels": 1}
    torch.manual_seed(1)
    return Qwen3ForSequenceClassification(
        Qwen3Config(
            vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **shape, **heads
        )
    )


def numbers(name: str, directory: Path) -> dict[str, Any]:
    """Metrics of every step, completions, weights at the end, and where they were.

    Args:
        directory: one that all processes of the run share.
    """
    run = RUNS[name]
    with contextlib.redirect_stdout(io.StringIO()):
        if run.resumes:
            trainer(run, directory, steps=1).train()
        trained = trainer(run, directory)
        trained.train("latest" if run.resumes else None)
        out = directory / "out"
        lines = read(out / "metrics.jsonl")
        samples = [line["completion"] for line in read(out / "completions.jsonl")]
    trainable = (full(p) for p in trained.learner.module.parameters() if p.requires_grad)
    weights = [p.detach().double().abs().sum().item() for p in trainable]
    return {
        "device": str(trained.model.device),
        "metrics": {key: [line.get(key) for line in lines] for key in METRICS},
        "eval": [value for line in lines for key, value in line.items() if "eval_rew" in key],
        "samples": samples,
        "weights": weights,
    }


def quiet() -> None:
    """No progress bars, and no warnings of libraries."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="+")
    args = parser.parse_args()
    quiet()
    places = {name: args.file.parent / f"run-{i}" for i, name in enumerate(args.names)}
    for name, place in places.items():  # while every process still saves what it is told to
        prepared(RUNS[name], place)
    for name, place in places.items():
        made = {"name": name, **numbers(name, place)}
        if os.environ.get("RANK", "0") == "0":
            with args.file.open("a") as file:
                file.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
