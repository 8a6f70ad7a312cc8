"""What is said of learning curves, and of tokens that repeat, is so on curves made by hand."""

import io
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.benchmarks.learning import watch
from tests.benchmarks.learning.job import Job, ensure, lines, train
from tests.benchmarks.learning.subject import SUBJECTS, load
from tests.benchmarks.learning.summary import (
    Point,
    Run,
    Spread,
    grouped,
    middle,
    save_picture,
    table,
    to_score,
)
from tests.benchmarks.learning.tune import Settings
from tests.benchmarks.learning.watch import Repeats, Watch

SLOW = [Point(0, 0.0, 0.1), Point(10, 4.0, 0.5), Point(20, 9.0, 0.8), Point(30, 15.0, 0.7)]
FAST = [Point(0, 0.0, 0.2), Point(10, 2.0, 0.8), Point(20, 5.0, 0.9), Point(30, 7.0, 0.95)]
RUNS = [Run("sums", "grpo", "trl", SLOW), Run("sums", "grpo", "ours", FAST)]


def test_score_is_reached_at_first_evaluation_at_or_above_it() -> None:
    assert to_score(SLOW, 0.8) == Point(20, 9.0, 0.8)
    assert to_score(SLOW, 0.1) == SLOW[0]
    assert to_score(SLOW, 0.81)[:2] == (math.inf, math.inf)


def test_seed_that_never_reaches_score_counts_as_infinitely_slow() -> None:
    seconds = [to_score(curve, 0.8).seconds for curve in (SLOW, FAST, SLOW[:2])]
    assert Spread.of(seconds) == (9.0, 2.0, math.inf)
    assert Spread.of([3.0, 1.0]) == (2.0, 1.0, 3.0)


def test_table_has_median_and_range_of_each_side() -> None:
    more = Run("sums", "grpo", "trl", [Point(0, 0.0, 0.3), Point(10, 6.0, 0.85)])
    rows = table([*RUNS, more], {"sums": 0.8}).splitlines()
    assert rows[2:] == [
        "| sums, grpo, ours | 1 | 0.80 | 10 (10 to 10) | 2 (2 to 2) | 0.950 (0.950 to 0.950) |",
        "| sums, grpo, trl | 2 | 0.80 | 15 (10 to 20) | 8 (6 to 9) | 0.775 (0.700 to 0.850) |",
    ]


def test_middle_of_curves_is_taken_evaluation_by_evaluation() -> None:
    curves = [FAST, SLOW, [Point(s, 10.0 + s, 0.9) for s in (0, 10, 20, 30)]]
    assert middle(curves)[1] == Point(10, 4.0, 0.8)
    assert grouped(RUNS)["sums", "grpo", "trl"] == [SLOW]


def test_picture_shows_each_task(tmp_path: Path) -> None:
    more = [run._replace(task="other") for run in RUNS]
    save_picture([*RUNS, *more], {"sums": 0.8, "other": 0.5}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


# ----------------------------------------------------------------------------------- what is seen


def test_token_repeats_with_all_that_stands_before_it_up_to_seven() -> None:
    repeats = Repeats()
    long = list(range(10, 22))
    assert repeats.share([("a", long), ("a", long)]) == 0  # of one step: neither is the earlier
    assert repeats.share([("b", long)]) == 0
    assert repeats.share([("a", long)]) == 1
    assert repeats.share([("a", [10, 11, 99, 13])]) == 2 / 4
    # Behind another beginning, the eighth token on is known again.
    assert repeats.share([("a", [99, *long])]) == 5 / 13


def test_clock_stands_still_while_run_is_evaluated(monkeypatch) -> None:
    clock, evaluations = [0.0], itertools.count(0.0, 100.0)
    monkeypatch.setattr(watch.time, "perf_counter", lambda: clock[0])

    def score() -> float:
        clock[0] += next(evaluations)
        return 0.5

    file = io.StringIO()
    seen = Watch(lambda completion_ids, **_: [1.0] * len(completion_ids), score, 2, file)
    seen.begin()
    for _ in range(4):
        assert seen.reward(prompts=["a", "b"], completion_ids=[[1, 2], [3]]) == [1.0, 1.0]
        clock[0] += 3.0
        seen.after_step(entropy=0.25)
    written = [json.loads(line) for line in file.getvalue().splitlines()]
    points = [line for line in written if "score" in line]
    assert points == [
        {"samples": samples, "seconds": seconds, "score": 0.5}
        for samples, seconds in ((0, 0.0), (4, 6.0), (8, 12.0))
    ]
    steps = [line for line in written if "step" in line]
    assert steps[1] == {
        "step": 2,
        "samples": 4,
        "step_seconds": 3.0,
        "tokens": 3,
        "repeated": 1.0,
        "entropy": 0.25,
    }
    assert Run.of([{"task": "t", "method": "m", "side": "s"}, *written]).curve[-1] == (8, 12.0, 0.5)


@pytest.mark.parametrize("method", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_both_sides_are_given_the_same_prompts(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for part in SUBJECTS["arithmetic"].task.new_model():
        part.save_pretrained(tmp_path / "start")
    heard: dict[str, list[str]] = {"ours": [], "trl": []}
    for side, prompts in heard.items():

        def reward(prompts, completions, seen=prompts, **columns) -> list[float]:
            seen += prompts
            return [float(len(said)) for said in completions]

        model, tokenizer = load(str(tmp_path / "start"))
        job = replace(JOB, task="arithmetic", method=method, side=side, seed=3, samples=1024)
        file = io.StringIO()
        seen = Watch(reward, lambda: 0.5, 1, file)
        train(replace(job, learning_rate=1e-4), model, tokenizer, seen, str(tmp_path / side))
        written = [json.loads(line) for line in file.getvalue().splitlines()]
        assert [line["samples"] for line in written] == [0, 512, 512, 1024, 1024]
        assert all(0 < line["entropy"] < 4 for line in written if "step" in line)
    assert heard["ours"] == heard["trl"]
    assert len(set(heard["ours"])) == 1024 // 8


# ----------------------------------------------------------------------------------- the settings


JOB = Job(
    task="counting",
    method="grpo",
    side="trl",
    seed=0,
    model="m",
    samples=30,
    every=1,
    temperature=1.0,
    learning_rate=0.2,
    batch=128,
)


def made(job: Job, directory: Path) -> Path:
    """A run that is best at a rate of 0.2, and fastest with 64 completions at a time."""
    path = directory / f"{job.name}.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    fewest = {0.1: 20, 0.2: 10, 0.4: 10}[round(job.learning_rate, 3)]
    last = {0.1: 0.95, 0.2: 0.9, 0.4: 0.8}[round(job.learning_rate, 3)]
    written = [
        {"task": job.task, "method": job.method, "side": job.side},
        {"step": 1, "step_seconds": 100.0 / job.batch},
        {"step": 2, "step_seconds": {32: 2.0, 64: 1.0, 128: 3.0}[job.batch]},
        Point(fewest, 1.0, 0.8)._asdict(),
        Point(30, 2.0, last)._asdict(),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in written))
    return path


def test_fastest_batch_and_soonest_rate_are_chosen_once(tmp_path, monkeypatch) -> None:
    job = replace(JOB, seed=3)
    monkeypatch.setattr("tests.benchmarks.learning.tune.ensure", made)
    settings = Settings(tmp_path)
    settings.choose(job, [32, 64, 128], 0.8)
    assert Settings(tmp_path).chosen == {"counting-grpo-trl": {"learning_rate": 0.2, "batch": 64}}
    assert Settings(tmp_path).applied(job).batch == 64
    assert Settings(tmp_path).applied(job).seed == 3
    monkeypatch.setattr("tests.benchmarks.learning.tune.ensure", pytest.fail)
    Settings(tmp_path).choose(job, [32], 0.8)


def test_finished_run_is_kept_and_one_with_other_settings_refused(tmp_path: Path) -> None:
    path = tmp_path / "counting-grpo-trl-0.jsonl"
    path.write_text(json.dumps(vars(JOB)) + "\n")
    assert ensure(JOB, tmp_path) == path
    assert lines(path) == [vars(JOB)]
    with pytest.raises(RuntimeError, match="other settings: remove it"):
        ensure(replace(JOB, samples=60), tmp_path)
