"""A step that is made again is the step that was made, to the last bit."""

import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer
from rlhf_pg.data.batch import Batch
from rlhf_pg.episodes import Observation
from rlhf_pg.replay.replay import Replay
from rlhf_pg.report.run_files import RunFiles, tokens_file
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers.sampler import Sampler
from tests.trainers.conftest import digits, of_task

EVERY = {"max_steps": 4, "save_steps": 2, "log_completions_steps": 2}
TWICE = {"num_mini_batches": 2, "num_iterations": 2}
DRAWN = random.Random(7)  # a source of numbers that no seed of a run reaches


async def judged(completions: list[str], **_: Any) -> list[float]:
    """A judge that never says the same twice."""
    return [DRAWN.random() for _ in completions]


def of_steps(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    """A reward of every token but the last, which fails now and then."""
    return [
        [float("nan") if DRAWN.random() < 0.02 else float(token % 7) for token in ids]
        for ids in completion_ids
    ]


class Dice:
    """An environment with randomness of its own, which now and then fails."""

    made = 0

    def __init__(self) -> None:
        Dice.made += 1
        self.turns = 0

    def reset(self, example: dict[str, Any]) -> str:
        return f"{DRAWN.randrange(10)}+{DRAWN.randrange(10)}="

    def step(self, completion: str) -> Observation:
        self.turns += 1
        if DRAWN.random() < 0.1:
            raise RuntimeError("the dice fell from the table")
        return Observation(str(DRAWN.randrange(100)), DRAWN.random(), done=self.turns == 2)


RUNS: dict[str, tuple[type, Callable[[], dict[str, Any]]]] = {
    "grpo": (GRPOTrainer, dict),
    "lora": (
        GRPOTrainer,
        lambda: (
            TWICE
            | {"use_peft": True, "lora_r": 4, "lora_dropout": 0.1, "disable_dropout": False}
            | {"beta": 0.1, "dynamic_sampling_rounds": 2}
        ),
    ),
    "states": (GRPOTrainer, lambda: of_task("qwen3_5_text")),
    "ppo": (PPOTrainer, lambda: TWICE | {"normalize_values": True, "kl_controller": "adaptive"}),
    "greedy": (
        ReinforceTrainer,
        lambda: {"advantage_estimator": "returns_minus_greedy", "reward_funcs": [judged, digits]},
    ),
    "steps": (PPOTrainer, lambda: {"reward_funcs": of_steps, "on_reward_error": "drop"}),
    "dice": (
        GRPOTrainer,
        lambda: {"reward_funcs": [], "environment_factory": Dice, "max_completion_length": 16},
    ),
}
ASKS = ("greedy", "steps", "dice")  # of these sampling again would ask somebody


def contents(directory: Path) -> dict[str, str]:
    """A hash of every file below a directory."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def trained(make, name: str, **options: Any) -> tuple[Any, RunFiles]:
    """Train a run; return a new trainer with its config, and its files."""
    kind, more = RUNS[name]
    common = EVERY | options
    first = make(kind, **common, **more())
    first.train()
    return make(kind, **common, **more()), RunFiles(Path(first.args.output_dir))


@pytest.mark.parametrize("name", ["lora", "states", "ppo", "greedy", "steps", "dice"])
def test_steps_are_as_they_were(make, name: str) -> None:
    """From the beginning, where no checkpoint is, and from the checkpoint of step 2, for a step
    before the one that was made last too; and so are the ids that are sampled again.
    """
    again, run = trained(make, name)
    before, made_by_then, state = contents(run.directory), Dice.made, DRAWN.getstate()
    replay = Replay(again)
    made = [replay.make(step) for step in (2, 4, 3)]
    assert [one.differs for one in made] == [[], [], []]
    assert contents(run.directory) == before
    assert (Dice.made, DRAWN.getstate()) == (made_by_then, state)  # nobody was asked
    assert 4 in run.weights  # compared with a checkpoint's
    for one in made:
        line = run.metrics[one.step - 1]
        assert one.metrics["loss"] == line["loss"]
        assert one.metrics["reward"] == line["reward"]
    if name not in ASKS:
        assert replay.make(3, resample=True).differs == []


def test_trees_are_as_they_were(make, monkeypatch) -> None:
    """The second token of each completion follows the prompt, as the first one does."""
    sample = Sampler.sample

    def branching(*inputs: Any, **options: Any) -> Batch:
        batch = sample(*inputs, **options)
        offsets = torch.ones_like(batch.completion_ids)
        offsets[:, 1:2] = 2
        lines = torch.ones_like(offsets).cumsum(1) % 2  # two endpoints take turns
        return batch.with_columns(parent_offsets=offsets, branches=lines)

    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "sample", branching)
        first = make(GRPOTrainer, **EVERY)
        first.agreement.refuses = False
        first.train()
    assert Replay(make(GRPOTrainer, **EVERY)).make(2).differs == []


def test_other_reward_is_found_by_sampling_again(make) -> None:
    """The ids are as before, the scores and what follows from them are not."""
    trained(make, "grpo", max_steps=2)
    options = EVERY | {"max_steps": 2}
    half = lambda completions, **_: [0.5] * len(completions)  # noqa: E731
    other = make(GRPOTrainer, **options, reward_funcs=half)
    made = Replay(other).make(2, resample=True)
    stages = [place.stage for place in made.differs]
    assert stages == ["scores", "advantages", "gradient", "weights"]


@pytest.mark.parametrize(("name", "asked"), [("greedy", "judged"), ("dice", "environment")])
def test_what_would_be_asked_is_named(make, name: str, asked: str) -> None:
    again, _ = trained(make, name, max_steps=1)
    with pytest.raises(ValueError, match=asked):
        Replay(again).make(1, resample=True)


def test_step_that_earlier_weights_sampled_is_not_sampled_again(make) -> None:
    again, _ = trained(make, "grpo", max_steps=1)
    vars(again)["ahead"] = object()
    with pytest.raises(ValueError, match="rollout_ahead"):
        Replay(again).make(1, resample=True)


def test_edited_record_shows(make) -> None:
    again, run = trained(make, "grpo")
    file = tokens_file(run.directory, 3)
    record = run.tokens(3)
    record.scores[3] += 0.25
    record.save(file)
    stages = [place.stage for place in Replay(again).make(3).differs]
    assert stages == ["advantages", "gradient"]
    file.unlink()
    with pytest.raises(ValueError, match="step 3"):
        Replay(make(GRPOTrainer, **EVERY)).make(3)


def test_other_weights_are_refused_by_name(make) -> None:
    again, _ = trained(make, "grpo", max_steps=1)
    again.model.lm_head.weight.data.view(-1)[17] += 1e-7
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight"):
        Replay(again)


def test_resampled_step_without_a_record_is_refused(make) -> None:
    """There is nothing to compare it with."""
    again, run = trained(make, "lora")
    tokens_file(run.directory, 3).unlink()
    with pytest.raises(ValueError, match="step 3 cannot be compared"):
        Replay(again).make(3, resample=True)


def test_what_cannot_be_made_is_refused(make, tmp_path) -> None:
    again, _ = trained(make, "grpo", save_steps=0, save_best=False, max_steps=2)
    replay = Replay(again)
    with pytest.raises(ValueError, match="steps 1 to 2: step 3"):
        replay.make(3)
    replay.make(2)
    with pytest.raises(ValueError, match="no checkpoint before step 1"):
        replay.make(1)
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        Replay(make(output_dir=str(tmp_path / "empty")))


def test_record_agrees_with_what_readers_see(make) -> None:
    """Small micro-batches, in another order than the rows, leave every number at its own token."""
    _, run = trained(make, "ppo", micro_batch_tokens=24)
    tokens, tokenizer = run.tokens(4), arithmetic().new_model()[1]
    assert tokens is not None
    assert tokens.texts is not None
    line, numbers = run.metrics[3], tokens.numbers
    said = [one for one in run.completions if one["step"] == 4]
    assert tokens.prompt_index.tolist() == [one["prompt_index"] for one in said]
    assert tokens.prompt_index.tolist() == sorted(tokens.prompt_index.tolist())
    for i, (one, start) in enumerate(zip(said, tokens.starts, strict=True)):
        own = slice(start, start + tokens.lengths[i])
        ids = tokens.ids[own].tolist()
        assert one["completion"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(tokens.texts[own]) == tokenizer.decode(ids)
        assert tokenizer.decode(tokens.prompts()[i]) == one["prompt"]
        assert one["advantage"] == pytest.approx(numbers["advantage"][own].mean(), rel=1e-4)
        (score,) = tokens.scores[(tokens.score_at >= own.start) & (tokens.score_at < own.stop)]
        assert score[0] == pytest.approx(one["rewards/digits"]) == digits([one["completion"]])[0]
    assert numbers["kl"].astype(float).mean() == pytest.approx(line["kl"], abs=2e-3)
    assert abs(numbers["log_ratio"].astype(float)).max() < 1e-5
    assert tokens.lengths.mean() == line["completions/mean_length"]
    assert numbers["value"].astype(float).std() > 0
    unlogged = run.tokens(3)
    assert unlogged.texts is None
    assert set(unlogged.numbers) == {"advantage", "sampler_logprob"}


def test_any_bit_of_a_weight_changes_its_fingerprint(make) -> None:
    trainer = make()
    before = trainer.recorder.fingerprints(trained=True)
    weight = trainer.model.model.norm.weight
    bits = weight.data.view(torch.int32)
    bits[3] ^= 1
    changed = trainer.recorder.fingerprints(trained=True)
    assert [name for name in before if before[name] != changed[name]] == ["model.norm.weight"]
    bits[3] ^= 1
    weight.data[:2] = torch.tensor([2.0, 1.0])
    exchanged = trainer.recorder.fingerprints(trained=True)
    weight.data[:2] = torch.tensor([1.0, 2.0])
    assert trainer.recorder.fingerprints(trained=True) != exchanged


def test_records_of_later_steps_go_when_a_run_is_resumed(make) -> None:
    _, run = trained(make, "grpo")
    shutil.rmtree(run.directory / "checkpoints" / "step-00000004")
    before = contents(run.directory)
    assert Replay(make(GRPOTrainer, **EVERY)).make(4).differs == []  # from step 2, over step 3
    assert contents(run.directory) == before
    make(GRPOTrainer, **EVERY | {"max_steps": 3, "resume_from_checkpoint": "latest"}).train()
    run = RunFiles(run.directory)
    assert run.config["resume_from_checkpoint"] is None  # config.yaml starts a new run
    assert [run.tokens(step) is not None for step in range(1, 5)] == [True] * 3 + [False]
    assert [start.step for start in run.starts] == [0, 2]
    assert list(run.traces) == [1, 2, 3]
    assert Replay(make(GRPOTrainer, **EVERY | {"max_steps": 3})).make(3).differs == []


def test_run_that_went_on_from_another_directory(make, tmp_path) -> None:
    """Its own first step follows the checkpoint that it names; others are not in it."""
    make(**EVERY | {"max_steps": 2}).train()
    named = {"resume_from_checkpoint": str(tmp_path / "run" / "checkpoints" / "step-00000002")}
    options = EVERY | {"max_steps": 4, "save_steps": 0, "output_dir": str(tmp_path / "other")}
    make(**options | named).train()
    assert named.items() <= RunFiles(tmp_path / "other").config.items()
    assert Replay(make(**options | named)).make(4).differs == []
    with pytest.raises(ValueError, match="steps 3 to 4: step 2"):
        Replay(make(**options | named)).make(2)
    with pytest.raises(ValueError, match="checkpoint of step 2 that is missing"):
        Replay(make(**options)).make(3)


def test_float64_is_kept_whole(make) -> None:
    again, run = trained(make, "grpo", dtype="float64", max_steps=2)
    assert run.tokens(2).numbers["sampler_logprob"].dtype == np.float64
    assert Replay(again).make(2).differs == []
