"""Faults planted in one of two runs while it trains: `diff` names step and cause of each."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from rlhf_pg import GRPOTrainer
from rlhf_pg.replay.difference import diff_runs
from rlhf_pg.report.run_files import RunFiles
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers.callbacks import Callback
from tests.trainers.conftest import digits

STEPS, EACH = 8, 17  # faults of each kind: 102 in all
DATA = arithmetic().train_dataset.select(range(40)).to_dict()
CONFIG: dict[str, Any] = {
    "max_completion_length": 6,
    "prompts_per_step": 4,
    "num_generations": 4,
    "learning_rate": 1e-3,
    "max_steps": STEPS,
    "log_completions_steps": 2,
    "save_steps": 4,
    "rollout_drafts": "off",  # so that what the sampler computed is compared bit by bit
}
# Keys, other values, and the first step whose numbers these change; 0 where none changes.
KEYS: list[tuple[str, Any, int]] = [
    ("learning_rate", 2e-3, 1),
    ("temperature", 0.9, 1),
    ("beta", 0.1, 1),
    ("scale_rewards", "none", 1),
    ("aggregation", "sequence_mean", 1),
    ("num_iterations", 2, 1),
    ("num_mini_batches", 2, 1),
    ("max_grad_norm", 0.01, 1),
    ("weight_decay", 0.1, 1),
    ("adam_beta1", 0.5, 1),
    ("lr_scheduler_type", "cosine", 2),
    ("entropy_coef", 0.01, 1),
    ("seed", 7, 1),
    ("missing_eos_penalty", 0.5, 1),
    ("max_completion_length", 5, 1),
    ("epsilon", 0.3, 0),
    ("max_skipped_steps", 9, 0),
]

Fault = tuple[dict[str, Any], int, set[str]]  # what is planted, the step, the causes that fit


def train(directory: Path, **planted: Any) -> RunFiles:
    """Train a run, with what is planted in it."""
    torch.manual_seed(0)
    model, tokenizer = arithmetic().new_model()
    if (spoil := planted.get("spoil")) is not None:
        spoil(model)
    callbacks = [planted["callback"]] if "callback" in planted else []
    GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=planted.get("reward", digits),
        args=GRPOConfig_of(planted.get("config", {}), directory),
        train_dataset=Dataset.from_dict(planted.get("data", DATA)),
        callbacks=callbacks,
    ).train()
    return RunFiles(directory)


def GRPOConfig_of(changes: dict[str, Any], directory: Path) -> Any:
    return GRPOTrainer.config_type(**CONFIG | changes, output_dir=str(directory))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    return train(tmp_path_factory.mktemp("runs") / "base")


def flipped(model: torch.nn.Module, chance: random.Random) -> str:
    """Flip a bit of the fraction of a weight; return the tensor's name."""
    name, parameter = chance.choice(list(model.named_parameters()))
    words = parameter.data.view(-1).view(torch.int32)
    words[chance.randrange(len(words))] ^= 1 << chance.randrange(23)
    return name


class Flip(Callback):
    """A callback that flips a bit before a step."""

    def __init__(self, step: int, chance: random.Random) -> None:
        self.step, self.chance = step, chance

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.state.step + 1 == self.step:
            flipped(trainer.model, self.chance)


def weight(chance: random.Random, base: RunFiles) -> Fault:
    step = chance.randrange(STEPS)
    if step == 0:
        return {"spoil": lambda model: flipped(model, chance)}, 0, {"weight"}
    return {"callback": Flip(step, chance)}, step, {"weight"}


def drawn(base: RunFiles) -> dict[int, int]:
    """The first step in which each row of the data was drawn."""
    first: dict[int, int] = {}
    for step, trace in base.traces.items():
        for row in trace.rows:
            first.setdefault(row, step)
    return first


def prompt(chance: random.Random, base: RunFiles) -> Fault:
    row, step = chance.choice(list(drawn(base).items()))
    prompts = list(DATA["prompt"])
    place = chance.randrange(len(prompts[row]))
    other = chance.choice([c for c in "0123456789" if c != prompts[row][place]])
    prompts[row] = prompts[row][:place] + other + prompts[row][place + 1 :]
    return {"data": DATA | {"prompt": prompts}}, step, {"prompt text"}


def reward(chance: random.Random, base: RunFiles) -> Fault:
    wrong, row = chance.randrange(1, STEPS + 1), chance.randrange(16)

    def spoiled(completions: list[str], step: int, **columns: Any) -> list[float]:
        scores = digits(completions, **columns)
        if step + 1 == wrong:
            scores[row] += 0.25
        return scores

    spoiled.__name__ = "digits"
    return {"reward": spoiled}, wrong, {"reward"}


def order(chance: random.Random, base: RunFiles) -> Fault:
    known, rows = drawn(base), list(range(len(DATA["prompt"])))
    a, b = 0, 0
    while DATA["prompt"][a] == DATA["prompt"][b]:
        a, b = chance.choice(sorted(known)), chance.choice(rows)
    rows[a], rows[b] = b, a
    data = {name: [column[i] for i in rows] for name, column in DATA.items()}
    return {"data": data}, min(known[a], known.get(b, STEPS)), {"data order"}


def config(chance: random.Random, base: RunFiles) -> Fault:
    key, value, step = KEYS[chance.randrange(len(KEYS))]
    return {"config": {key: value}}, step, {"config"}


class Rounded(Callback):
    """A callback that has a library round otherwise from a step on."""

    def __init__(self, step: int, patch: pytest.MonkeyPatch) -> None:
        self.step, self.patch = step, patch

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.state.step + 1 == self.step:
            self.patch.setattr(torch.nn.functional, "silu", _otherwise(torch.nn.functional.silu))


def _otherwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rounds(x: Tensor, *others: Any, **options: Any) -> Tensor:
        return function(x, *others, **options) * (1 + 2**-22)

    return rounds


def rounding(chance: random.Random, base: RunFiles) -> Fault:
    step = chance.randrange(1, STEPS + 1)
    fits = {"log-probability", "sampled id"}
    return {"callback": Rounded(step, pytest.MonkeyPatch())}, step, fits


FAULTS = {f.__name__: f for f in (weight, prompt, reward, order, config, rounding)}


def check(kind: str, seed: int, base: RunFiles, directory: Path) -> None:
    """Plant a fault, train, and compare with the run without it."""
    planted, step, causes = FAULTS[kind](random.Random(1000 * seed + len(kind)), base)
    if kind == "config":
        key, value, step = KEYS[seed]
        planted = {"config": {key: value}}
    try:
        other = train(directory, **planted)
    finally:
        if kind == "rounding":
            planted["callback"].patch.undo()
    found = diff_runs(base.directory, other.directory).difference
    assert found is not None
    assert (found.step, found.cause in causes) == (step, True), (found.cause, found.because)


@pytest.mark.parametrize("kind", FAULTS)
def test_planted_fault_is_named(kind: str, base: RunFiles, tmp_path: Path) -> None:
    check(kind, 0, base, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(EACH))
@pytest.mark.parametrize("kind", FAULTS)
def test_every_planted_fault_is_named(kind: str, seed: int, base: RunFiles, tmp_path: Path) -> None:
    check(kind, seed, base, tmp_path / "run")


def test_rows_that_no_step_draws_are_told_from_their_order(base: RunFiles, tmp_path: Path) -> None:
    known = drawn(base)
    a, b = [row for row in range(len(DATA["prompt"])) if row not in known][:2]
    prompts = list(DATA["prompt"])
    prompts[a], prompts[b] = prompts[b], prompts[a]
    answers = list(DATA["answer"])
    answers[a], answers[b] = answers[b], answers[a]
    moved = train(tmp_path / "moved", data={"prompt": prompts, "answer": answers})
    edited = train(tmp_path / "edited", data=DATA | {"prompt": prompts})
    found = [diff_runs(base.directory, run.directory).difference for run in (moved, edited)]
    assert [(one.step, one.cause) for one in found if one] == [
        (0, "data order"),
        (0, "prompt text"),
    ]


def test_nothing_differs_between_equal_runs(base: RunFiles, tmp_path: Path) -> None:
    other = train(tmp_path / "elsewhere")
    compared = diff_runs(base.directory, other.directory)
    assert compared.difference is None
    assert compared.steps == STEPS
