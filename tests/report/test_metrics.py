"""Means that add up, the lines that are kept, and what a run shows of itself."""

import math
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_pg.checkpoint.run_dir import RUN_FILES, set_aside
from rlhf_pg.report.journal import Journal
from rlhf_pg.report.metrics import KEYS, Meter, length_metrics, reward_metrics
from rlhf_pg.report.run_files import JsonLines, StepRecord, read


def means(meter):
    return meter.means(meter.sums())


def test_only_unmasked_slots_count():
    meter = Meter()
    x = torch.tensor([[1.0, math.nan, 2.0], [math.inf, 6.0, 100.0]])
    meter.add_masked("x", x, torch.tensor([[True, False, True], [False, True, False]]))
    meter.add_masked("x", torch.full((1, 5), 1.0), torch.ones(1, 5, dtype=torch.bool))
    assert means(meter) == {"x": 14 / 8}  # by token: neither by row nor by call


def test_extremes_cover_unmasked_slots_of_all_ranks():
    meter, other = Meter(), Meter()
    x = torch.tensor([[1.0, math.nan, -2.0], [math.inf, 6.0, 100.0]])
    mask = torch.tensor([[True, False, True], [False, True, False]])
    for name in ("x/min", "x/max", "x/mean", "none/max"):
        meter.add_masked(name, x, mask & (name != "none/max"))
        other.add_masked(name, torch.full((1, 2), 5.0), torch.tensor([[True, False]]))
    theirs = torch.tensor([[-math.inf, 7.0, 3.0]], dtype=torch.float64)  # none/max, x/max, x/min
    alone = meter.extremes(lambda own: own)
    assert math.isnan(alone.pop("none/max"))
    assert alone == {"x/min": -2.0, "x/max": 6.0}
    meter.absorb(other)
    everyone = meter.extremes(lambda own: torch.cat([own, theirs]))
    assert everyone == {"none/max": 5.0, "x/min": -3.0, "x/max": 7.0}
    assert means(meter) == {"x/mean": (1 - 2 + 6 + 5) / 4}


def test_sums_of_ranks_and_micro_batches_add_up():
    def meter_of(*totals):
        meter = Meter()
        for total, count in totals:
            meter.add("b", torch.tensor(total), count)
            meter.add("a", torch.tensor(2 * total), 1)
        return meter

    pieces = [(1.0, 1), (0.0, 9), (4.0, 2)]
    whole, first, second = meter_of(*pieces), meter_of(*pieces[:1]), meter_of(*pieces[1:])
    assert whole.sums().equal(first.sums() + second.sums())
    assert first.means(first.sums() + second.sums()) == means(whole) == {"a": 10 / 3, "b": 5 / 12}


def test_rewards_by_hand():
    scores = torch.tensor([[1, 4], [3, math.nan], [2, 2], [2, 2]], dtype=torch.float64)
    # Where b does not apply, its mean in the group (4) stands in: totals 9, 11, 6, 6.
    weights = torch.tensor([1.0, 2.0])
    metrics = reward_metrics(scores, scores * weights, ["a", "b"], torch.tensor([5, 5, 8, 8]))
    assert metrics == {
        "reward": pytest.approx(2 + 2 * 8 / 3),
        "rewards/a/mean": 2.0,
        "rewards/a/std": pytest.approx((2 / 3) ** 0.5),  # 1 + 1 over 4 - 1
        "rewards/b/mean": pytest.approx(8 / 3),
        "rewards/b/std": pytest.approx(math.sqrt(4 / 3)),  # of 4, 2, 2: 24/9 over 3 - 1
        "reward_std": pytest.approx(math.sqrt(2) / 2),
        "frac_reward_zero_std": 0.5,
    }


def test_reward_uses_trained_scores_and_sources_use_raw():
    raw = torch.tensor([[10.0, 0], [30, 0]])
    trained = torch.tensor([[1.0, -1], [2, 0]])
    metrics = reward_metrics(raw, trained, ["a", "b"], torch.tensor([4, 4]))
    assert metrics["reward"] == 1.5 - 0.5
    assert metrics["rewards/a/mean"] == 20
    assert metrics["reward_std"] == pytest.approx(math.sqrt(2))  # of 0 and 2


def test_length_metrics_by_hand():
    # tokens of the completion, of the prompt, whether it was truncated
    metrics = length_metrics(torch.tensor([[1, 10, 0], [4, 20, 1], [4, 5, 1]]))
    assert metrics == {
        "completions/mean_length": 3,
        "completions/min_length": 1,
        "completions/max_length": 4,
        "completions/clipped_ratio": pytest.approx(2 / 3),
    }


def write_steps(path, steps):
    lines = JsonLines(path, keep_through_step=0)
    for step in steps:
        lines.write({"step": step, "loss": step / 3})
    return path


def test_non_finite_numbers_become_null(tmp_path):
    row = {"scores": [math.nan, (math.inf, 1.0)], ("a", 1): -math.inf}
    JsonLines(tmp_path / "m.jsonl", 0).write({"step": 1, "kl": -math.inf, "row": row})
    row = '{"scores": [null, [null, 1.0]], "(\'a\', 1)": null}'
    assert (tmp_path / "m.jsonl").read_text() == f'{{"step": 1, "kl": null, "row": {row}}}\n'


def test_control_characters_do_not_break_lines(tmp_path):
    record = {"step": 1, "completion": "a\nb\r\x0c\x85\u2028\x1b[2J\ud800"}
    JsonLines(tmp_path / "c.jsonl", 0).write(record)
    JsonLines(tmp_path / "c.jsonl", 1)
    assert read(tmp_path / "c.jsonl") == [record]


@pytest.mark.parametrize(
    ("resumed_at", "kept"), [(0, []), (2, [1, 1, 2]), (3, [1, 1, 2, 3]), (9, [1, 1, 2, 3])]
)
def test_resumed_run_repeats_no_line(tmp_path, resumed_at, kept):
    path = write_steps(tmp_path / "m.jsonl", [1, 1, 2, 3])
    lines = JsonLines(path, keep_through_step=resumed_at)
    assert [line["step"] for line in read(path)] == kept
    lines.write({"step": resumed_at + 1})
    assert [line["step"] for line in read(path)] == [*kept, resumed_at + 1]


RECORD = {"prompt": "1+1=", "completion": "2", "rewards/exact": 1.0}


def metrics_of(step, **numbers):
    return dict.fromkeys(KEYS) | {"step": step, "step_time": 0.25} | numbers


def record(journal, step, *completions):
    shown = range(len(completions))
    journal.record(StepRecord(trace={"step": step}, completions=completions, shown=shown))


def run(journal, steps, **numbers):
    with journal.progress(steps):
        for step in range(1, steps + 1):
            journal.step(metrics_of(step, **numbers))


def test_main_process_keeps_every_step_and_sample(tmp_path, capsys):
    journal = Journal(tmp_path / "new" / "run", 0, is_main=True)
    run(journal, 3, reward=0.5, kl=math.nan)
    record(journal, 3, RECORD, RECORD | {"rewards/exact": math.nan})
    kept = read(tmp_path / "new" / "run" / "metrics.jsonl")
    assert kept == [metrics_of(step, reward=0.5, kl=None) for step in (1, 2, 3)]
    assert read(tmp_path / "new" / "run" / "completions.jsonl") == [
        {"step": 3, **RECORD},
        {"step": 3, **RECORD, "rewards/exact": None},
    ]


def test_other_ranks_neither_write_nor_print(tmp_path, capsys):
    journal = Journal(tmp_path / "run", 0, is_main=False)
    journal.say("hello")
    run(journal, 3, reward=0.5)
    record(journal, 1, RECORD)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_line_has_every_reward_and_only_what_is_computed(tmp_path, capsys):
    several = {"reward": 0.5, "rewards/a/mean": 0.25, "rewards/b/mean": math.nan}
    run(Journal(tmp_path, 0, is_main=True, shown=("reward", "kl")), 1, **several)
    assert capsys.readouterr().out == "step 1/1  reward 0.500 (a 0.250, b -)  0.25 s/step\n"


def test_trouble_is_printed_once(tmp_path, capsys):
    for after_step in (0, 3):
        journal = Journal(tmp_path, after_step, is_main=True)
        for step in range(after_step + 1, after_step + 4):
            journal.step(metrics_of(step, **{"approx_kl/after": 0.5}))
    assert capsys.readouterr().out.count("approx_kl/after") == 1


@pytest.mark.parametrize("moves", range(len(RUN_FILES) + 1))
def test_interrupted_set_aside_keeps_earlier_run_whole(tmp_path, monkeypatch, moves):
    for name in RUN_FILES:
        (tmp_path / name).write_text("earlier")
    rename, left = Path.rename, iter(range(moves))

    def interrupted(path, target):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(Path, "rename", interrupted)
        set_aside(tmp_path)
    set_aside(tmp_path)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("earlier-")]
    assert sorted(path.name for path in tmp_path.glob("*/*")) == sorted(RUN_FILES)


@pytest.mark.parametrize(
    "hostile",
    ["\x1b[2Jcleared", "one\r\ntwo", "\u202eright to left"],
)
@pytest.mark.parametrize("key", ["prompt", "completion"])
def test_control_characters_are_shown_escaped(tmp_path, capsys, key, hostile):
    record(Journal(tmp_path, 0, is_main=True), 1, RECORD | {key: hostile})
    out = capsys.readouterr().out
    assert repr(hostile) in out
    assert out.replace("\n", "").isprintable()
    assert out.count("\n") == 1
    assert read(tmp_path / "completions.jsonl")[0][key] == hostile  # kept as it was


def test_record_that_cannot_be_kept_is_one_warning(tmp_path, monkeypatch, caplog) -> None:
    journal = Journal(tmp_path, 0, is_main=True)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    tokens = SimpleNamespace(save=full)
    for step in (1, 2):
        journal.record(StepRecord(trace={"step": step, "sources": []}, tokens=tokens))
    assert caplog.text.count("No space left on device") == 1
    assert [line["step"] for line in read(tmp_path / "trace.jsonl")] == [1, 2]
