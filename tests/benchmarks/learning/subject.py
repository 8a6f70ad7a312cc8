"""What both sides are given: a task, the weights to start from, batch sizes, and the judge."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlhf_pg.config import SFTConfig
from rlhf_pg.data.prompts import PromptSampler
from rlhf_pg.models.modes import evaluating
from rlhf_pg.rollout import NativeEngine, SamplingParams
from rlhf_pg.supervised import train_sft
from rlhf_pg.tasks import TASKS, Task, load_task
from rlhf_pg.tasks.tiny import character_tokenizer, tiny_decoder
from rlhf_pg.tasks.warm_start import ensure_model

HELD_OUT = 256


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A task, and what a run on it is like.

    Attributes:
        new: tokens of the longest completion.
        samples: the budget of a run.
        score: share of held-out problems to get right.
        learning_rate: where nothing has been tuned.
        options: of a third-party task.
    """

    name: str
    prompts: int
    n: int
    new: int
    samples: int
    score: float
    learning_rate: float = 4e-4
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def task(self) -> Task:
        return load_task(self.name, self.options, seed=0)

    @cached_property
    def held_out(self) -> Dataset:
        """The same problems for everyone."""
        data = self.task.eval_dataset
        assert data is not None
        return data.shuffle(seed=0).select(range(min(HELD_OUT, len(data))))

    def in_order(self, seed: int, samples: int) -> Dataset:
        """The prompts of a whole run, in the order in which this library draws them."""
        data = self.task.train_dataset
        return data.select(PromptSampler(len(data), seed).rows(range(samples // self.n)))

    def start(self, directory: Path) -> str:
        """The path of the warm-started model, which is made once."""
        if self.name in TASKS:
            return ensure_model(self.name, None)
        path = directory / self.name.replace(":", "_")
        if not (path / "final" / "model.safetensors").exists():
            self._warm_start(path)
        return str(path / "final")

    def _warm_start(self, path: Path) -> None:
        data = self.task.train_dataset
        characters = set("".join([*data["prompt"], *data["answer"]]))
        tokenizer = character_tokenizer("".join(sorted(characters)))
        torch.manual_seed(0)
        train_sft(
            SFTConfig(
                output_dir=str(path),
                max_steps=300,
                batch_size=64,
                learning_rate=2e-3,
                label_smoothing=0.2,
                save_steps=0,
            ),
            model=tiny_decoder(tokenizer, max_positions=192),
            processing_class=tokenizer,
            train_dataset=data.select_columns(["prompt", "answer"]),
        )


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject(name="arithmetic", prompts=64, n=8, new=6, samples=153_600, score=0.9),
        Subject(
            name="counting",
            prompts=16,
            n=8,
            new=192,
            samples=12_800,
            score=0.9,
            learning_rate=3e-4,
        ),
        Subject(
            name="reasoning_gym:spell_backward",
            prompts=32,
            n=8,
            new=12,
            samples=51_200,
            score=0.7,
            options={"size": 3000, "eval_size": 300, "min_word_len": 3, "max_word_len": 5},
        ),
    )
}


def load(path: str) -> tuple[PreTrainedModel, Any]:
    """The policy to start from, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(path)


@torch.no_grad()
def held_out_score(
    subject: Subject, model: PreTrainedModel, tokenizer: Any, temperature: float
) -> float:
    """The mean reward of a completion of each held-out problem, with the same noise every time."""
    columns = subject.held_out[:]
    prompts = [tokenizer(prompt)["input_ids"] for prompt in columns["prompt"]]
    params = SamplingParams(temperature=temperature, max_tokens=subject.new)
    with evaluating(model):
        engine = NativeEngine(model, [tokenizer.eos_token_id], tokenizer.pad_token_id)
        said = [one.tokens for one in engine.generate(prompts, 1, params, seed=0)]
    texts = tokenizer.batch_decode(said, skip_special_tokens=True)
    assert subject.task.reward is not None
    scores = subject.task.reward(completions=texts, completion_ids=said, **_plural(columns))
    return sum(scores) / len(scores)


def _plural(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns as a reward function gets them."""
    return {"prompts" if name == "prompt" else name: column for name, column in columns.items()}
