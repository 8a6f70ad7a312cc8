"""TRL's own trainers, never trained: the tests call their loss and their advantages directly."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

MAX_LENGTH = 8
PROMPT = "1+1="


class Given:
    """In front of a trainer of TRL: what is `given`, in place of the forward pass."""

    given: Tensor | None = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        if self.given is None:
            return super()._get_per_token_logps_and_entropies(*args, **options)
        return self.given, torch.zeros_like(self.given), None


class Engine:
    """In front of a trainer of TRL: an engine whose log-probabilities are `sampled`, (B,T)."""

    sampled: Tensor | None = None

    def _generate(self, *args: Any) -> tuple[Any, ...]:
        output = list(super()._generate(*args))
        if self.sampled is not None:
            _, completions, *_ = output
            rows = zip(self.sampled.tolist(), completions, strict=True)
            output[4] = [row[: len(ids)] for row, ids in rows]
            self.use_vllm = True  # from here on, TRL corrects for the engine
        return tuple(output)


def scores(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.fixture(scope="session")
def trainers() -> dict[str, tuple[type, type]]:
    """Trainer and config by name; without TRL, the test is skipped."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    trl = pytest.importorskip("trl", minversion="1.16")
    found = {
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
    }
    return {
        name: (type("GivenTrainer", (Given, Engine, trainer), {}), config)
        for name, (trainer, config) in found.items()
    }


@pytest.fixture
def make(trainers: dict, tmp_path: Path, model_path: str) -> Callable[..., Any]:
    """make("grpo", loss_type=..., ...): a trainer of TRL in eval mode."""

    def build(kind: str = "grpo", reward_funcs: Any = scores, **options: Any) -> Any:
        trainer_type, config_type = trainers[kind]
        defaults = {
            "output_dir": str(tmp_path),
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": MAX_LENGTH,
        }
        trainer = trainer_type(
            model=model_path,
            reward_funcs=reward_funcs,
            args=config_type(**(defaults | options)),
            train_dataset=Dataset.from_dict({"prompt": [PROMPT]}),
        )
        trainer.model.eval()
        return trainer

    return build
