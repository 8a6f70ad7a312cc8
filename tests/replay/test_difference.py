"""`diff`: what counts as a difference, what as rounding, and which cause is named for it."""

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from rlhf_pg.cli import main
from rlhf_pg.replay.difference import Difference, diff_runs
from rlhf_pg.replay.evidence import STAGE_OF_FIELD, STAGE_OF_METRIC, metric_findings, stage_of
from rlhf_pg.replay.finding import STAGES
from rlhf_pg.replay.rounding import Rounding
from rlhf_pg.replay.suspects import ACTS_AT, ASIDE, placeless
from rlhf_pg.report.metrics import KEYS
from rlhf_pg.report.run_files import TRACES_KEPT, RunFiles, StepTokens, Trace, tokens_file
from tests.replay.made_run import (
    CONFIG,
    STEPS,
    VERSIONS,
    MadeRun,
    edit_config,
    edit_lines,
    edit_tokens,
    edit_trace,
)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MadeRun(tmp_path_factory.mktemp("runs") / "one").directory


@pytest.fixture
def copy(one: Path, tmp_path: Path) -> Path:
    """The same run once more, to change."""
    shutil.copytree(one, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    """made(noise=..., config=...): a run like the others, but for what is said."""
    return lambda **options: MadeRun(tmp_path / "made", **options).directory


def first(one: Path, other: Path, **options: Any) -> Difference:
    difference = diff_runs(one, other, **options).difference
    assert difference is not None
    return difference


def is_equal(one: Path, other: Path) -> bool:
    return diff_runs(one, other).difference is None


def make_episodes(*runs: Path) -> None:
    """Have runs say that their completions were episodes."""
    for run in runs:
        edit_lines(
            *(run, "metrics.jsonl", lambda line: line.update({"episodes/turns": 2.0})),
            lambda line: line["step"] == 1,
        )


# ---------------------------------------------------------------------------------- no difference


def test_keys_of_places_and_logging_do_not_count(one: Path, copy: Path) -> None:
    edit_config(copy, "output_dir", "elsewhere")
    edit_config(copy, "dataset_name", ["/mnt/two/questions.jsonl"])
    edit_config(copy, "reward_funcs", ["/home/me/rewards.py:accuracy"])
    edit_config(copy, "save_steps", 2)
    assert is_equal(one, copy)


def test_reward_function_is_known_by_its_source_and_not_its_file(one: Path, copy: Path) -> None:
    edit_config(copy, "reward_funcs", ["python:accuracy"])
    assert is_equal(one, copy)
    change = lambda line: line["rewards"].clear()  # noqa: E731
    edit_lines(copy, "trace.jsonl", change, lambda line: "versions" in line)
    assert first(one, copy).cause == "config"


def test_model_by_another_name_is_equal_if_weights_are(one: Path, copy: Path) -> None:
    edit_config(copy, "model_name_or_path", "/mnt/two/model")
    assert is_equal(one, copy)
    change = lambda line: line["weights"].clear()  # noqa: E731
    edit_lines(copy, "trace.jsonl", change, lambda line: "versions" in line)
    assert first(one, copy).cause == "config"


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("/a/b/c.jsonl", "c.jsonl"),
        ("openai/gsm8k", "openai/gsm8k"),
        ("model:/a/b/reward", "model:reward"),
        ("/a/my_rewards.py:accuracy", "my_rewards.py:accuracy"),
        ("http://127.0.0.1:9000/score", "/score"),
        ({"/a/r.py:f": {"base_url": "http://x", "k": 1}}, {"r.py:f": {"k": 1}}),
    ],
)
def test_placeless_leaves_last_part_of_path(name: Any, left: Any) -> None:
    assert placeless(name) == left


def test_random_states_count_with_dropout_alone(one: Path, made, tmp_path: Path) -> None:
    other = made(pace=9.0)
    assert is_equal(one, other)
    dropout = {"disable_dropout": False}
    pair = [MadeRun(tmp_path / f"d{i}", pace=i, config=dropout).directory for i in (1, 2)]
    assert first(*pair).found[0].file.endswith("rng-rank0.safetensors")


def test_null_and_missing_metric_differ(one: Path, copy: Path) -> None:
    edit_lines(copy, "metrics.jsonl", lambda line: line.pop("kl"), lambda line: line["step"] == 3)
    difference = first(one, copy)
    assert (difference.step, difference.found[0].what) == (3, "kl")
    assert difference.found[0].note == "only A has it"


def test_missing_wall_time_does_not_differ(one: Path, copy: Path) -> None:
    change = lambda line: line.pop("time/rollout")  # noqa: E731
    edit_lines(copy, "metrics.jsonl", change, lambda line: line["step"] == 3)
    assert is_equal(one, copy)


# ---------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize(
    "options",
    [
        {"start": {"processes": 2}},
        {"start": {"backend": "FSDP2"}},
        {"start": {"device": "NVIDIA H100"}},
        {"config": {"micro_batch_tokens": 64}},
        {"config": {"gradient_checkpointing": True}},
    ],
)
def test_other_layout_is_compared_within_rounding(one: Path, made, options: Any, capsys) -> None:
    other = made(noise=1e-6, **options)
    main(["diff", str(one), str(other)])
    out = capsys.readouterr().out
    assert out.startswith(f"no difference in {STEPS} steps\n")
    assert "compared within rounding (0.001 of the largest number" in out


def test_same_layout_is_compared_bit_by_bit(one: Path, made) -> None:
    difference = first(one, made(noise=1e-12))
    assert (difference.step, difference.cause) == (1, "log-probability")
    assert "as another rounding of a library or device would be" in difference.because[0]


@pytest.mark.parametrize(("apart", "equal"), [(1e-7, True), (1e-3, False)])
def test_log_probabilities_of_episodes_are_compared_within_rounding(
    one: Path, copy: Path, tmp_path: Path, apart: float, equal: bool
) -> None:
    episodes = shutil.copytree(one, tmp_path / "episodes")
    make_episodes(episodes, copy)
    edit_trace(copy, 3, lambda x: x["logprobs"].__setitem__(1, x["logprobs"][1] * (1 + apart)))

    def nudge(tokens: StepTokens) -> None:
        for name in ("sampler_logprob", "log_ratio"):
            tokens.numbers[name] *= 1 + apart

    edit_tokens(copy, 4, nudge)
    compared = diff_runs(episodes, copy)
    assert (compared.difference is None) == equal
    assert "which tokens are sampled together" in str(compared.rounding)
    assert first(episodes, copy, rtol=0.0).step == 3


def test_weights_of_episodes_are_compared_bit_by_bit(one: Path, copy: Path, tmp_path: Path) -> None:
    episodes = shutil.copytree(one, tmp_path / "episodes")
    make_episodes(episodes, copy)
    edit_trace(copy, 3, lambda x: x["weights"].__setitem__(0, "0"))
    assert first(episodes, copy).cause == "weight"


def test_rounding_grows_where_updates_use_numbers_of_episodes(tmp_path: Path) -> None:
    config = {"old_logprobs_source": "sampler"}
    runs = [
        MadeRun(tmp_path / name, config=config, noise=noise).directory
        for name, noise in (("a", 0.0), ("b", 1e-6))
    ]
    assert not is_equal(*runs)
    make_episodes(*runs)
    assert is_equal(*runs)


@pytest.mark.parametrize(
    ("config", "device", "equal"),
    [
        ({"rollout_drafts": "auto"}, "cpu (x86_64)", True),
        ({"rollout_drafts": "off"}, "cpu (x86_64)", False),
        ({}, "cpu (x86_64)", False),  # of an earlier version, which had no drafts
        ({"rollout_drafts": "auto"}, "NVIDIA H100", False),
        ({"rollout_drafts": "auto", "old_logprobs_source": "sampler"}, "cpu (x86_64)", False),
        ({"rollout_drafts": "auto", "sampler_correction": "token_mask"}, "cpu (x86_64)", False),
    ],
)
def test_drafts_leave_last_bits_of_sampler_logprobs(
    tmp_path: Path, config: dict[str, str], device: str, equal: bool
) -> None:
    runs = [
        MadeRun(tmp_path / name, config=config, start={"device": device}).directory
        for name in ("a", "b")
    ]
    edit_trace(runs[1], 3, lambda x: x["logprobs"].__setitem__(1, x["logprobs"][1] * (1 + 1e-6)))
    assert is_equal(*runs) == equal


def test_rtol_states_another_rounding(one: Path, made) -> None:
    other = made(noise=1e-5)
    assert diff_runs(one, other, rtol=1e-4).difference is None
    assert first(one, other, rtol=1e-7).step == 1


def test_rtol_0_is_bit_by_bit(one: Path, made) -> None:
    other = made(noise=1e-6, start={"processes": 2})
    assert is_equal(one, other)
    assert first(one, other, rtol=0.0).step == 1


def test_rounding_is_coarser_in_bfloat16_and_finer_in_float64(tmp_path: Path) -> None:
    def differ(dtype: str, noise: float) -> bool:
        place, config = tmp_path / f"{dtype}{noise}", {"dtype": dtype}
        a = MadeRun(place / "a", config=config).directory
        b = MadeRun(place / "b", config=config, noise=noise, start={"processes": 2}).directory
        return not is_equal(a, b)

    assert differ("float32", 0.01)
    assert not differ("bfloat16", 0.01)
    assert differ("float64", 1e-4)
    assert not differ("float64", 1e-8)


def test_rounding_may_grow_from_step_to_step_and_not_jump(one: Path, made) -> None:
    other = made(noise=1e-6, start={"processes": 2})

    def scale(by: float) -> Callable[[dict[str, Any]], None]:
        return lambda line: line.update(logprobs=[x * (1 + by) for x in line["logprobs"]])

    edit_trace(other, 5, scale(5e-3))
    assert first(one, other).step == 5
    edit_trace(other, 4, scale(5e-4))
    assert is_equal(one, other)
    assert first(one, other, rtol=1e-3).step == 5  # what is asked for does not grow


def test_reward_of_function_is_exact_within_rounding(one: Path, made) -> None:
    other = made(noise=1e-6, start={"processes": 2})

    def change(line: dict[str, Any]) -> None:
        line["rewards"]["accuracy"][2] += 1e-6
        line["rewards"]["model"][2] += 1e-6

    edit_trace(other, 5, change)
    difference = first(one, other)
    assert (difference.step, difference.cause) == (5, "reward")
    assert [found.what for found in difference.found] == ["rewards/accuracy"]


def test_sampled_id_within_rounding_is_difference_that_rounding_explains(one: Path, made) -> None:
    other = made(noise=1e-6, start={"processes": 2})
    edit_trace(other, 6, lambda line: line["ids"].__setitem__(3, "0"))
    difference = first(one, other)
    assert (difference.step, difference.cause) == (6, "sampled id")
    assert difference.because[1].startswith("rounding can do this where two tokens are almost")


def test_config_is_cause_within_rounding_too(one: Path, made) -> None:
    other = made(noise=1e-6, start={"processes": 2}, config={"learning_rate": 0.1})
    edit_trace(other, 2, lambda line: line["logprobs"].__setitem__(0, 9.0))
    difference = first(one, other)
    assert (difference.step, difference.cause) == (2, "config")


def test_small_metric_is_judged_by_its_usual_size() -> None:
    a, b = {"step": 1, "loss": 1e-5}, {"step": 1, "loss": 5e-5}
    within = Rounding(1e-3, 1e-6)
    assert [found.what for found in metric_findings(a, b, within)] == ["loss"]
    assert not list(metric_findings(a, b, within, {"loss": 1.0}))


def test_integer_beyond_every_float_is_compared_and_no_crash(one: Path, made) -> None:
    other = made(start={"processes": 2})
    edit_lines(
        *(other, "metrics.jsonl", lambda line: line.update(loss=10**400)),
        lambda line: line["step"] == 2,
    )
    assert (first(one, other).step, first(one, other).found[0].what) == (2, "loss")


def test_traces_are_not_all_kept_in_memory(one: Path) -> None:
    run = RunFiles(one)
    weights = [trace.weights for trace in run.traces.values()]
    assert len(weights) == STEPS > TRACES_KEPT
    mine = [x for x in gc.get_objects() if isinstance(x, Trace) and x.weights in weights]
    assert len(mine) <= TRACES_KEPT


def test_nan_is_within_no_rounding_of_a_number() -> None:
    within = Rounding(1e-3, 1e-6)
    assert within.same(float("nan"), float("nan"))
    assert not within.same(1.0, float("nan"))
    assert not within.same(1.0, None)


# ------------------------------------------------------------------------------------------- cause


def test_key_that_acts_later_is_not_cause(one: Path, copy: Path) -> None:
    """With equal weights before the step, a learning rate cannot have changed a reward."""
    edit_config(copy, "learning_rate", 0.5)
    edit_trace(copy, 4, lambda line: line["rewards"]["accuracy"].__setitem__(0, 5.0))
    compared = diff_runs(one, copy)
    assert compared.difference is not None
    assert (compared.difference.step, compared.difference.cause) == (4, "reward")
    assert compared.also == ["learning_rate was 0.001 and is 0.5"]


def test_key_of_data_is_not_cause_if_data_are_equal(one: Path, copy: Path) -> None:
    edit_config(copy, "dataset_name", ["other.jsonl"])
    edit_trace(copy, 4, lambda line: line["rewards"]["accuracy"].__setitem__(0, 5.0))
    assert first(one, copy).cause == "reward"
    edit_config(copy, "dataset_fingerprint", "beef")
    assert first(one, copy).cause == "config"


def test_version_is_not_cause_of_another_prompt(one: Path, copy: Path) -> None:
    change = lambda line: line["versions"].update(torch="9")  # noqa: E731
    edit_lines(copy, "trace.jsonl", change, lambda line: "versions" in line)
    edit_trace(copy, 4, lambda line: line["prompts"].__setitem__(0, "0"))
    difference = first(one, copy)
    assert (difference.step, difference.cause) == (4, "prompt text")
    assert "versions differ too: torch 2.12.0 and 9" in difference.because


def test_version_of_resumed_run_counts_from_its_step(one: Path, copy: Path) -> None:
    start = RunFiles(copy).starts[0]
    lines = (copy / "trace.jsonl").read_text().splitlines()
    resumed = replace(start, step=5, versions=VERSIONS | {"torch": "9"}, weights={})
    lines.insert(6, json.dumps(vars(resumed)))
    (copy / "trace.jsonl").write_text("\n".join(lines) + "\n")
    difference = first(one, copy)
    assert (difference.step, difference.cause) == (5, "library version")
    edit_trace(copy, 3, lambda line: line["logprobs"].__setitem__(0, 1.0))
    assert first(one, copy).cause == "log-probability"  # that step ran on the same versions


def test_run_that_went_on_with_other_weights_is_named(one: Path, copy: Path) -> None:
    start, trace = RunFiles(copy).starts[0], RunFiles(copy).traces[5]
    resumed = dict(zip(start.weights, trace.weights, strict=True)) | {"head.weight": "0"}
    lines = (copy / "trace.jsonl").read_text().splitlines()
    lines.insert(6, json.dumps(vars(replace(start, step=5, weights=resumed))))
    (copy / "trace.jsonl").write_text("\n".join(lines) + "\n")
    difference = first(one, copy)
    assert (difference.step, difference.cause) == (5, "weight")
    assert "B went on with other weights" in str(difference.found[0])


def test_other_source_of_reward_is_named(one: Path, copy: Path) -> None:
    change = lambda line: line["rewards"].update(accuracy="other")  # noqa: E731
    edit_lines(copy, "trace.jsonl", change, lambda line: "versions" in line)
    difference = first(one, copy)
    assert (difference.step, difference.cause) == (0, "reward")
    edit_trace(copy, 4, lambda line: line["rewards"]["accuracy"].__setitem__(0, 5.0))
    difference = first(one, copy)
    assert difference.step == 4
    assert "the source of accuracy is another" in difference.because


def test_prompts_of_other_rows_are_another_order(one: Path, copy: Path) -> None:
    """The rows of the dataset changed places: their numbers are as before, and the prompts not."""
    traces = RunFiles(one).traces

    def swap(line: dict[str, Any]) -> None:
        line["prompts"][:4], line["prompts"][4:8] = line["prompts"][4:8], line["prompts"][:4]

    edit_trace(copy, 2, swap)
    assert traces[2].prompts[0] != traces[2].prompts[4]
    difference = first(one, copy)
    assert (difference.step, difference.cause) == (2, "data order")
    assert "in another order" in difference.because[0]


def test_single_prompt_that_is_another_row_s_was_edited(one: Path, copy: Path) -> None:
    other = RunFiles(one).traces[3].prompts[0]
    edit_trace(copy, 2, lambda line: line["prompts"].__setitem__(slice(0, 4), [other] * 4))
    assert first(one, copy).cause == "prompt text"


def test_differing_data_are_told(one: Path, copy: Path) -> None:
    edit_trace(copy, 2, lambda line: line["prompts"].__setitem__(5, "0"))
    assert first(one, copy).because == ["the data are the same, by dataset_fingerprint"]
    edit_config(copy, "dataset_fingerprint", "beef")
    difference = first(one, copy)
    assert difference.cause == "prompt text"
    assert difference.because == ["the data differ: dataset_fingerprint is another"]


def test_weight_with_equal_gradient_is_told(one: Path, copy: Path) -> None:
    edit_trace(copy, 3, lambda line: line["weights"].__setitem__(1, "0"))
    difference = first(one, copy)
    assert difference.because[0].endswith("changed otherwise than by the update")
    assert difference.persists is False


def test_changed_checkpoint_is_told_by_its_manifest(one: Path, copy: Path) -> None:
    file = copy / "checkpoints/step-00000004/model.safetensors"
    stored = bytearray(file.read_bytes())
    stored[-1] ^= 1
    file.write_bytes(stored)
    found = first(one, copy).found[0]
    assert (found.step, found.what) == (4, "norm.bias")
    assert "B's file was changed after it was saved" in found.note
    assert "1 of 4 differ" in found.note


def test_checkpoint_of_one_run_alone_is_held_against_its_manifest(one: Path, copy: Path) -> None:
    shutil.rmtree(one.parent / "bare", ignore_errors=True)
    shutil.copytree(one, one.parent / "bare")
    shutil.rmtree(one.parent / "bare/checkpoints")
    assert is_equal(one.parent / "bare", copy)
    with (copy / "checkpoints/step-00000004/optimizer.safetensors").open("ab") as file:
        file.write(b"more")
    difference = first(one.parent / "bare", copy)
    assert (difference.step, difference.cause) == (4, "weight")


def test_weight_altered_between_steps_comes_before_the_step(one: Path, copy: Path) -> None:
    """What the step then samples is a consequence."""
    edit_config(copy, "learning_rate", 0.5)
    edit_trace(copy, 4, lambda line: line["ids"].__setitem__(0, "0"))
    assert first(one, copy).cause == "sampled id"
    edit_trace(copy, 4, lambda line: line.update(altered={"head.weight": "0"}))
    difference = first(one, copy)
    assert (difference.step, difference.cause) == (4, "weight")
    assert [found.what for found in difference.found] == ["head.weight"]
    assert difference.because == ["changed between two steps, and not by an update"]


def test_changed_manifest_is_difference(one: Path, copy: Path) -> None:
    file = copy / "final/manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"]["model.safetensors"]["sha256"] = "0" * 64
    file.write_text(json.dumps(manifest))
    difference = first(one, copy)
    assert (difference.step, difference.cause) == (STEPS, "weight")


@pytest.mark.parametrize("spoiled", [5, None, "x", True])
@pytest.mark.parametrize("name", ["prompts", "rewards", "rows", "weights"])
def test_spoiled_trace_is_refused_by_name(one: Path, copy: Path, name: str, spoiled: Any) -> None:
    edit_trace(copy, 3, lambda line: line.update({name: spoiled}))
    with pytest.raises(ValueError, match=rf"trace.jsonl cannot be read .*{name}.*step 3"):
        diff_runs(one, copy)


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff" * 40])
def test_damaged_files_are_differences_and_no_crash(one: Path, copy: Path, damage: bytes) -> None:
    for name in ("checkpoints/step-00000004/model.safetensors", "final/manifest.json"):
        (copy / name).write_bytes(damage)
    (copy / "tokens/step-00000002.safetensors").write_bytes(damage)
    difference = first(one, copy)
    assert (difference.step, difference.cause) == (2, "sampled id")
    shutil.copy(one / "tokens/step-00000002.safetensors", copy / "tokens")
    assert (first(one, copy).step, first(one, copy).cause) == (4, "weight")


def test_tokens_in_a_table_cannot_be_read(one: Path, copy: Path) -> None:
    file = tokens_file(copy, 2)
    tensors = load_file(file)
    save_file(tensors | {"prompt_index": tensors["prompt_index"].reshape(1, -1)}, file)
    assert RunFiles(copy).tokens(2) is None
    assert first(one, copy).found[0].note == "it cannot be read"


def test_shorter_run_differs_where_it_ends(one: Path, made) -> None:
    difference = first(one, made(steps=5))
    assert (difference.step, difference.cause) == (6, "length")
    assert difference.because == ["A has 8 steps, and B 5"]


def test_max_steps_explains_shorter_run(one: Path, made) -> None:
    difference = first(one, made(steps=5, config={"max_steps": 5}))
    assert (difference.step, difference.cause) == (6, "config")


@pytest.mark.parametrize(("source", "cause"), [("judge", "reward"), ("episode", "sampled id")])
def test_other_answer_from_outside_is_named(one, copy, tmp_path, source: str, cause: str) -> None:
    other = tmp_path / "other"
    shutil.copytree(copy, other)
    for directory, score in ((copy, 0.5), (other, 0.6)):
        where = {"step": 3, "source": source, "call": 0, "prompt_index": 7, "sample": 2}
        line = json.dumps(where | {"answer": {"score": score}})
        (directory / "outside.jsonl").write_text(line + "\n")
    assert is_equal(one, copy)
    difference = first(copy, other)
    assert (difference.step, difference.cause) == (3, cause)
    assert str(difference.found[0]).startswith(f"answer of {source} of prompt 7, sample 2")


# ------------------------------------------------------------------------------- tokens, old runs


def test_token_is_named_from_step_that_is_made_again(one: Path, copy: Path) -> None:
    shutil.rmtree(copy / "tokens")
    edit_trace(copy, 4, lambda line: line["ids"].__setitem__(6, "0"))
    asked = []

    def remake(directory: Path, step: int) -> StepTokens | None:
        asked.append((directory, step))
        made = RunFiles(one).tokens(step)
        assert made is not None
        ids = made.ids.copy()
        ids[6 * 5 + 3] += 1
        return replace(made, ids=ids)

    difference = first(one, copy, remake=remake)
    assert asked == [(copy, 4)]
    assert (difference.found[0].token, difference.found[0].what) == (3, "ids")
    assert difference.found[0].row == difference.found[1].row


def test_both_tokens_are_shown_with_their_chances(one: Path, copy: Path) -> None:
    edit_tokens(copy, 4, lambda tokens: tokens.ids.__setitem__(17, 499))
    (found,) = first(one, copy).found
    assert (found.place, found.token) == (3, 2)
    assert (found.a, found.b) != (499, 499)
    assert "log-probabilities" in found.note


def test_run_without_trace_is_compared_as_far_as_it_goes(one: Path, copy: Path) -> None:
    (copy / "trace.jsonl").unlink()
    compared = diff_runs(one, copy)
    assert compared.difference is None
    assert any(said.startswith("B without trace.jsonl") for said in compared.not_compared)
    change = lambda line: line.update(reward=9.0)  # noqa: E731
    edit_lines(copy, "metrics.jsonl", change, lambda line: line["step"] == 3)
    assert (first(one, copy).step, first(one, copy).cause) == (3, "reward")


def test_old_completions_are_compared_by_their_place(one: Path, copy: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(copy, old)
    for directory in (copy, old):
        file = directory / "completions.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [{k: line[k] for k in ("step", "prompt", "completion")} for line in lines[:3]]
        file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert is_equal(copy, old)
    change = lambda line: line.update(completion="other")  # noqa: E731
    edit_lines(old, "completions.jsonl", change, lambda line: line["step"] == 2)
    assert (first(copy, old).step, first(copy, old).cause) == (2, "sampled id")


def test_key_of_another_version_is_told_and_no_cause(one: Path, copy: Path) -> None:
    for key, value in {"new_key": 1}.items():
        edit_config(copy, key, value)
    assert first(one, copy).cause == "config"  # the same version has the same keys
    (copy / "trace.jsonl").unlink()
    compared = diff_runs(one, copy)
    assert compared.difference is None
    assert compared.also == ["only one run has the key new_key"]


def test_steps_before_a_run_was_traced_are_no_difference(one: Path, copy: Path) -> None:
    start = RunFiles(copy).starts[0]
    lines = (copy / "trace.jsonl").read_text().splitlines()
    late = [json.dumps(vars(replace(start, step=4, weights={}))), *lines[5:]]
    (copy / "trace.jsonl").write_text("\n".join(late) + "\n")
    assert is_equal(one, copy)


# ------------------------------------------------------------------------------------- the command


def test_json_has_step_cause_and_place(one: Path, copy: Path, capsys) -> None:
    edit_trace(copy, 4, lambda line: line["rewards"]["accuracy"].__setitem__(7, 5.0))
    with pytest.raises(SystemExit) as left:
        main(["diff", str(one), str(copy), "--json"])
    assert left.value.code == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["cause"], told["stage"], told["equal"]) == (
        4,
        "reward",
        "reward",
        False,
    )
    row = {"prompt_index": 10, "sample": 3, "dataset_row": 29}
    assert (told["found"][0]["row"], told["found"][0]["b"]) == (row, 5.0)
    main(["diff", str(one), str(one), "--json"])
    assert json.loads(capsys.readouterr().out)["equal"] is True


def test_text_of_a_model_is_shown_escaped(one: Path, copy: Path, capsys) -> None:
    change = lambda line: line.update(completion="\x1b[2Jgone", **{"\x1b[31mred": 1})  # noqa: E731
    edit_lines(copy, "completions.jsonl", change, lambda line: line["step"] == 2)
    with pytest.raises(SystemExit):
        main(["diff", str(one), str(copy)])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[2Jgone" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "diff needs RUN_A and RUN_B"),
        (["{one}"], "diff needs RUN_A and RUN_B"),
        (["{one}", "nowhere"], "nowhere is no directory"),
        (["{one}", "{empty}"], "is not the directory of a run"),
        (["{one}", "{one}", "--rtol", "-1"], "must be at least 0"),
        (["{one}", "{broken}"], "config.yaml cannot be read"),
    ],
)
def test_wrong_usage_is_status_2(one: Path, tmp_path: Path, flags, said: str, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.yaml").write_text("{a: [")
    places = {"one": one, "empty": tmp_path / "empty", "broken": tmp_path / "broken"}
    with pytest.raises(SystemExit) as left:
        main(["diff", *(flag.format(**places) for flag in flags)])
    assert left.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


# -------------------------------------------------------------------------------------- the tables


def test_tables_name_stages_and_keys_that_exist() -> None:
    from dataclasses import fields

    from rlhf_pg import config

    known = {
        field.name
        for name in ("GRPOConfig", "RLOOConfig", "ReinforceConfig", "PPOConfig")
        for field in fields(getattr(config, name))
    }
    named = [key for keys in ACTS_AT.values() for key in keys]
    assert {*named} <= known
    assert len(named) == len({*named})
    assert not {*named} & ASIDE
    assert {*ACTS_AT, *STAGE_OF_METRIC.values(), *STAGE_OF_FIELD.values()} <= {*STAGES}
    assert {*CONFIG} <= known


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *(("reward", "reward"), ("rewards/accuracy/mean", "reward"), ("reward_std", "reward")),
        *(("kl", "gradient"), ("kl/completion", "log-probability"), ("loss", "gradient")),
        *(("clip_ratio/high_mean", "gradient"), ("eval_reward", "metric"), ("mine", "metric")),
        *(("completions/mean_length", "sampled id"), ("klaxon", "metric"), ("lossless", "metric")),
    ],
)
def test_stage_of_metric_is_by_beginning_of_name(name: str, stage: str) -> None:
    assert stage_of(name, STAGE_OF_METRIC) == stage


def test_metrics_of_every_run_have_a_stage() -> None:
    walls = ("step", "step_time", "time/", "perf/", "learning_rate")
    known = [key for key in KEYS if not key.startswith(walls)]
    assert [key for key in known if stage_of(key, STAGE_OF_METRIC) == "metric"] == []
