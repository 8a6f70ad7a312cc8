"""`bisect`: the first step at which a condition holds, its neighbours and its batch."""

from pathlib import Path

import pytest

from rlhf_pg.cli import main
from rlhf_pg.replay.batch import batch_of
from rlhf_pg.replay.condition import first_step, parse
from rlhf_pg.report.run_files import RunFiles
from tests.replay.made_run import MadeRun, edit_lines

LINES = [
    {"step": 1, "reward": 0.5, "kl": None, "a/b@2-c": 1},
    {"step": 2, "reward": 0.1, "kl": 0.3, "a/b@2-c": 2},
    {"step": 3, "reward": 0.05, "kl": 2.0, "eval_reward": None},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = MadeRun(tmp_path_factory.mktemp("runs") / "one").directory
    for step in range(1, 9):
        reward = 0.1 if step in (4, 5) else 0.5
        change = lambda line, x=reward: line.update(reward=x)  # noqa: E731
        edit_lines(directory, "metrics.jsonl", change, lambda line, n=step: line["step"] == n)
    return directory


@pytest.mark.parametrize(
    ("text", "step"),
    [
        *(("reward < 0.2", 2), ("reward<0.1", 3), ("reward <= 0.1", 2), ("reward > 0.4", 1)),
        *(("reward >= 0.6", None), ("reward == 0.1", 2), ("reward != 0.5", 2)),
        *(("kl == nan", 1), ("kl == null", 1), ("kl != nan", 2), ("kl < 1", 2)),
        *(("eval_reward == null", 3), ("a/b@2-c >= 2", 2), ("kl > -1e3", 2)),
        *(("reward < 0.2 and kl > 1", 3), ("reward < 0.01 or kl > 1", 3)),
        *(("kl > 1 or reward > 0.4 and kl == null", 1), ("reward > 1 or kl > 9", None)),
    ],
)
def test_first_step_that_holds(text: str, step: int | None) -> None:
    found = first_step(parse(text), LINES)
    assert (None if found is None else LINES[found[0]]["step"]) == step


@pytest.mark.parametrize(
    "text",
    [
        *("", "reward", "reward <", "reward < high", "0.2 > ", "reward < 0.2 and", "(reward < 1)"),
        *("reward = 1", "reward < null", "__import__('os').system('x')", "reward < 1 < 2"),
    ],
)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write it like|no comparison|neither more nor less"):
        parse(text)


def test_unknown_metric_is_refused_with_nearest(run: Path, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bisect", str(run), "--bad", "rewrd < 0.2"])
    assert left.value.code == 2
    assert "did you mean 'reward'?" in capsys.readouterr().err


def test_step_is_shown_with_neighbours_and_batch(run: Path, capsys) -> None:
    main(["bisect", str(run), "--bad", "reward < 0.2"])
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "step 4: reward 0.1 < 0.2"
    assert lines[1:6] == [
        "  step 2  reward 0.5",
        "  step 3  reward 0.5",
        "> step 4  reward 0.1",
        "  step 5  reward 0.1",
        "  step 6  reward 0.5",
    ]
    assert "its batch, 12 completions:" in out
    assert "prompt 9, sample 0 (row 28 of the data): accuracy" in out
    assert "'What is 28 plus one?' -> 'answer " in out
    assert "rlhf-pg replay" not in out


def test_batch_of_step_that_is_not_logged_is_of_trace(run: Path, capsys) -> None:
    main(["bisect", str(run), "--bad", "num_tokens >= 300"])
    out = capsys.readouterr().out
    assert "prompt 6, sample 1 (row 21 of the data): accuracy" in out
    assert out.splitlines()[-1] == f"to see its tokens: rlhf-pg replay {run} --step 3"


def test_batch_is_from_step_made_again(run: Path) -> None:
    files = RunFiles(run)
    entries = batch_of(files, 3, remake=lambda directory, step: files.tokens(2))
    tokens = files.tokens(2)
    assert tokens is not None
    # What is made again here is another step, so its rows come after those of the trace.
    assert [entry.completion for entry in entries[:12]] == [None] * 12
    assert entries[12].completion == "".join(tokens.texts[:5])


def test_no_step_is_status_1(run: Path, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bisect", str(run), "--bad", "reward > 5"])
    assert left.value.code == 1
    assert capsys.readouterr().out == "no step of 8 has reward > 5\n"


@pytest.mark.parametrize("flags", [[], ["{run}"], ["nowhere", "--bad", "reward < 1"]])
def test_wrong_usage_is_status_2(run: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bisect", *(flag.format(run=run) for flag in flags)])
    assert left.value.code == 2
