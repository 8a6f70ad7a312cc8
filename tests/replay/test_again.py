"""A step that is made again is the step that was made, to the last bit."""

import hashlib
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer
from rlhf_pg.replay.again import Made, Replay, save
from rlhf_pg.report.run_files import RunFiles, StepTokens
from rlhf_pg.rollout import Observation
from rlhf_pg.tasks import arithmetic, calculator, guess
from tests.trainers.conftest import PROMPTS, digits
from tests.untimed import without_times

EVERY = {"max_steps": 6, "save_steps": 3, "log_completions_steps": 1}
TWICE = {"num_mini_batches": 2, "num_iterations": 2}
DRAWN = random.Random(7)  # a source of numbers that no seed of a run reaches


async def judged(completions: list[str], log_extra, log_metric, **_: Any) -> list[float | None]:
    """A judge that never says the same twice, and of whom nothing else is known."""
    log_extra("why", [f"because {DRAWN.random()}" for _ in completions])
    log_metric("mood", DRAWN.random())
    return [DRAWN.random() if DRAWN.random() < 0.8 else 0.0 for _ in completions]


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


def even(completions: list[Any], **_: Any) -> list[float]:
    """A reward of chats."""
    return [sum(c in "02468" for c in str(said)) / 9 for said in completions]


def of_task(task: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model, tokenizer = task.new_model()
    data = task.train_dataset.select(range(16))
    return {
        "model": model,
        "processing_class": tokenizer,
        "train_dataset": data,
        "reward_funcs": [even] if task.tools else [],
        "tools": task.tools,
        "environment_factory": task.environment_factory,
    }


RUNS: dict[str, tuple[type, Callable[[], dict[str, Any]]]] = {
    "grpo": (GRPOTrainer, lambda: {"eval_steps": 2, "eval_dataset": PROMPTS.select(range(4))}),
    "grpo-lora": (GRPOTrainer, lambda: TWICE | {"use_peft": True, "lora_r": 4, "beta": 0.1}),
    "ppo": (PPOTrainer, lambda: TWICE | {"normalize_values": True, "kl_controller": "adaptive"}),
    "dynamic": (
        GRPOTrainer,
        lambda: {"dynamic_sampling_rounds": 2},
    ),
    "greedy": (ReinforceTrainer, lambda: {"advantage_estimator": "returns_minus_greedy"}),
    "dropout": (GRPOTrainer, lambda: {"disable_dropout": False}),
    "judge": (GRPOTrainer, lambda: {"reward_funcs": [judged]}),
    "dice": (
        GRPOTrainer,
        lambda: {"reward_funcs": [], "environment_factory": Dice, "max_completion_length": 16},
    ),
    "guess": (PPOTrainer, lambda: of_task(guess()) | {"max_completion_length": 24}),
    "tools": (GRPOTrainer, lambda: of_task(calculator()) | {"max_completion_length": 32}),
}


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
    again = make(kind, **common, **more())
    return again, RunFiles(Path(first.args.output_dir))


@pytest.mark.parametrize("name", RUNS)
def test_steps_are_as_they_were(make, tmp_path, name: str) -> None:
    """From the beginning, where no checkpoint is, and from the checkpoint of step 3."""
    again, run = trained(make, name)
    before, made_by_then = contents(run.directory), Dice.made
    replay = Replay(again)
    made = [replay.make(step) for step in (2, 5, 6)]
    assert [one.differs for one in made] == [[], [], []]
    assert contents(run.directory) == before
    assert Dice.made - made_by_then <= 1  # to look at
    save(made, tmp_path / "saved")
    kept = (run.directory / "completions.jsonl").read_text().splitlines()
    wanted = [line for line in kept if json.loads(line)["step"] in (2, 5, 6)]
    assert (tmp_path / "saved" / "completions.jsonl").read_text().splitlines() == wanted
    saved = RunFiles(tmp_path / "saved")
    lines = [without_times(line) for line in run.metrics if line["step"] in (2, 5, 6)]
    assert [without_times(line) for line in saved.metrics] == lines
    for step in () if again.episode_runner else (2, 5, 6):  # there sampled by chance together
        tokens = (run.directory / "tokens" / f"step-{step:08d}.safetensors").read_bytes()
        assert (
            tmp_path / "saved" / "tokens" / f"step-{step:08d}.safetensors"
        ).read_bytes() == tokens


def test_checkpoint_leads_to_the_same_step_as_the_beginning(make) -> None:
    again, run = trained(make, "grpo")
    begun = {key: value.clone() for key, value in again.model.state_dict().items()}
    restored = []
    restore = again.checkpointer.restore
    again.checkpointer.restore = lambda path, rank: (
        restored.append(path.name) or restore(path, rank)
    )
    from_checkpoint = Replay(again).make(5)
    assert restored == ["step-00000003"]
    (run.directory / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    (run.directory / "best" / "manifest.json").unlink()
    other = make(GRPOTrainer, **EVERY, **RUNS["grpo"][1]())
    other.model.load_state_dict(begun)
    from_beginning = Replay(other).make(5)
    assert from_beginning.differs == []
    assert from_beginning.record.trace == from_checkpoint.record.trace


def test_nobody_is_asked_again(make) -> None:
    again, run = trained(make, "judge")
    state = DRAWN.getstate()
    made = Replay(again).make(4)
    assert DRAWN.getstate() == state
    assert made.metrics["mood"] == run.metrics[3]["mood"]
    assert made.record.completions[0]["why"].startswith("because 0.")


def test_answers_that_were_not_kept_are_not_asked_for(make) -> None:
    again, run = trained(make, "judge")
    (run.directory / "outside.jsonl").unlink()
    with pytest.raises(ValueError, match=r"outside.jsonl has nothing of step 4, in which judged"):
        Replay(again).make(4)


def test_run_without_anybody_to_ask_keeps_no_answers(make) -> None:
    _, run = trained(make, "grpo", max_steps=1)
    assert not (run.directory / "outside.jsonl").exists()


def test_other_weights_are_refused_by_name(make) -> None:
    again, _ = trained(make, "grpo", max_steps=1)
    again.model.lm_head.weight.data.view(-1)[17] += 1e-7
    with pytest.raises(
        ValueError, match=r"began from other weights: model.embed_tokens.weight was"
    ):
        Replay(again)


def test_what_cannot_be_made_is_refused(make, tmp_path) -> None:
    again, _ = trained(make, "grpo", save_steps=0, save_best=False)
    replay = Replay(again)
    with pytest.raises(ValueError, match="the run took steps 1 to 6: step 7 is none of them"):
        replay.make(7)
    replay.make(3)
    with pytest.raises(ValueError, match="there is no checkpoint before step 2 to go back to"):
        replay.make(2)
    empty = make(output_dir=str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="holds no run: it has no line in metrics"):
        Replay(empty)


def test_other_reward_is_told_from_the_record(make) -> None:
    """The ids are as before, the rewards and what follows from them are not."""
    _, run = trained(make, "grpo", max_steps=2)
    options = EVERY | {"max_steps": 2} | RUNS["grpo"][1]()
    other = make(GRPOTrainer, **options, reward_funcs=lambda completions, **_: [0.5] * 16)
    made: Made = Replay(other, run).make(1)
    assert made.differs == ["rewards", "advantages", "weights", "loss", "grad_norm"]


def test_tokens_agree_with_the_metrics_of_their_step(make) -> None:
    """Means over the tokens, computed from the file, are what metrics.jsonl says."""
    _, run = trained(make, "ppo")
    tokens = run.tokens(4)
    assert isinstance(tokens, StepTokens)
    line, numbers = run.metrics[3], tokens.numbers
    assert tokens.lengths.sum() == len(tokens.ids) == len(tokens.texts)
    assert numbers["kl"].astype(float).mean() == pytest.approx(line["kl"], abs=2e-3)
    assert tokens.lengths.mean() == line["completions/mean_length"]
    assert numbers["advantage"].astype(float).mean() == pytest.approx(0, abs=2e-3)  # whitened
    assert numbers["advantage"].astype(float).std() == pytest.approx(1, abs=2e-3)
    # Score less KL, summed over a completion: beta is 0.05 at first, and moves.
    assert numbers["reward"].astype(float).sum() / 16 < line["reward"] + 1
    trace = run.traces[4]
    sampled = numbers["sampler_logprob"].astype(float)
    ends = tokens.lengths.cumsum()
    sums = [sampled[end - n : end].sum() for end, n in zip(ends, tokens.lengths, strict=True)]
    assert sums == pytest.approx(trace.logprobs, abs=1e-4)


def test_tokens_of_one_update_have_ratio_1_and_the_entropy_of_the_step(make) -> None:
    _, run = trained(make, "grpo", max_steps=1)
    tokens = run.tokens(1)
    assert tokens is not None
    assert abs(tokens.numbers["log_ratio"].astype(float)).max() < 1e-5
    mean = tokens.numbers["entropy"].astype(float).mean()
    assert mean == pytest.approx(run.metrics[0]["entropy"], rel=1e-3)
    said = [json.loads(line) for line in (run.directory / "completions.jsonl").open()]
    assert [(one["prompt_index"], one["sample"]) for one in said] == [
        (prompt, sample) for prompt in range(4) for sample in range(4)
    ]
    tokenizer = arithmetic().new_model()[1]
    start = 0
    for one, length in zip(said, tokens.lengths, strict=True):
        ids = tokens.ids[start : start + length].tolist()
        assert one["completion"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(tokens.texts[start : start + length]) == tokenizer.decode(ids)
        start += length


def test_tokens_of_later_steps_go_when_a_run_is_resumed(make) -> None:
    first = make(GRPOTrainer, **EVERY)
    first.train()
    run = RunFiles(Path(first.args.output_dir))
    assert run.logged_steps() == [1, 2, 3, 4, 5, 6]
    shutil.rmtree(run.directory / "checkpoints" / "step-00000006")
    resumed = make(GRPOTrainer, **EVERY | {"max_steps": 4, "log_completions_steps": 4})
    resumed.train(resume_from_checkpoint="latest")
    assert run.logged_steps() == [1, 2, 3, 4]
    run = RunFiles(run.directory)
    assert [start.step for start in run.starts] == [0, 3]
    assert list(run.traces) == [1, 2, 3, 4]


async def in_numpy(completions: list[str], **_: Any) -> list[Any]:
    return [np.float32(score) for score in digits(completions)]


async def in_tensors(completions: list[str], **_: Any) -> list[Any]:
    return [torch.tensor(score, device="cpu") for score in digits(completions)]


async def at_steps(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    return [[*[None] * (len(ids) - 1), np.float32(len(ids))] for ids in completion_ids]


async def without_number(completions: list[str], log_metric, **_: Any) -> list[Any]:
    log_metric("mood", math.nan)
    return [score if score > 0.2 else math.nan for score in digits(completions)]


@pytest.mark.parametrize("judge", [in_numpy, in_tensors, at_steps])
def test_scores_of_any_kind_of_number_are_kept(make, judge: Any) -> None:
    options = EVERY | {"max_steps": 2, "reward_funcs": [judge]}
    make(**options).train()
    assert Replay(make(**options)).make(2).differs == []


@pytest.mark.parametrize("how", ["drop", "value"])
def test_what_was_no_score_is_none_again(make, how: str) -> None:
    options = EVERY | {"max_steps": 2, "reward_funcs": [without_number], "on_reward_error": how}
    make(**options).train()
    replay = Replay(make(**options))
    made = replay.make(2)
    assert made.differs == []
    assert made.metrics["rewards/without_number/mean"] == pytest.approx(
        replay.run.metrics[1]["rewards/without_number/mean"]
    )


def test_environment_is_not_asked_by_the_evaluation_of_a_step(make) -> None:
    more = RUNS["dice"][1]() | {"eval_steps": 1, "eval_dataset": PROMPTS.select(range(4))}
    options = EVERY | {"max_steps": 2} | more
    make(**options).train()
    made = Dice.made
    assert Replay(make(**options)).make(2).differs == []
    assert Dice.made - made <= 1  # to look at


def test_run_that_went_on_from_another_directory(make, tmp_path) -> None:
    """Its own first step follows the checkpoint that it names; others are not in it."""
    make(**EVERY | {"max_steps": 3}).train()
    named = {"resume_from_checkpoint": str(tmp_path / "run" / "checkpoints" / "step-00000003")}
    options = EVERY | {"max_steps": 5, "save_steps": 0, "output_dir": str(tmp_path / "other")}
    make(**options | named).train()
    assert Replay(make(**options | named)).make(5).differs == []
    with pytest.raises(ValueError, match="took steps 4 to 5: step 3 is none of them"):
        Replay(make(**options | named)).make(3)
    with pytest.raises(ValueError, match="went on from a checkpoint of step 3 that is not there"):
        Replay(make(**options)).make(4)
