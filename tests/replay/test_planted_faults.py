"""A fault is planted in one of two equal runs: `diff` has to name its step and its cause."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pg.cli import main
from rlhf_pg.replay.evidence import LABELS
from rlhf_pg.report.run_files import StepTokens
from tests.replay.made_run import (
    LOGGED,
    STEPS,
    TENSORS,
    MadeRun,
    edit_config,
    edit_lines,
    edit_tokens,
    edit_trace,
    flip_bit,
)

FAULTS = 120
Planted = tuple[int, str, str]  # step, cause, and what the output has to name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two equal runs, in directories of other names and at another pace."""
    place = tmp_path_factory.mktemp("runs")
    MadeRun(place / "one")
    MadeRun(place / "two", pace=3.0)
    return place / "one", place / "two"


def changed(draw: random.Random, key: str, column: str = "") -> Callable[..., Planted]:
    """A fault in a column of the trace, by a place in it."""
    causes = {"prompt_index": "data order", "rows": "data order", "ids": "sampled id"}
    causes |= {"prompts": "prompt text", "logprobs": "log-probability", "values": "value"}
    causes |= {"rewards": "reward", "advantages": "advantage"}

    def plant(run: Path) -> Planted:
        step = draw.randint(1, STEPS)

        def change(line: dict[str, Any]) -> None:
            numbers = line[key][column] if column else line[key]
            i = draw.randrange(len(numbers))
            x = numbers[i]
            numbers[i] = (
                "0badf00d" if isinstance(x, str) else x + (1 if column or key in causes else 0)
            )

        edit_trace(run, step, change)
        return step, causes[key], f"rewards/{column}" if column else LABELS[key]

    return plant


def a_rounding(draw: random.Random, run: Path) -> Planted:
    """The last bit of a log-probability, and another version of torch."""
    step = draw.randint(1, STEPS)

    def change(line: dict[str, Any]) -> None:
        i = draw.randrange(len(line["logprobs"]))
        line["logprobs"][i] = float(np.nextafter(line["logprobs"][i], 9.0))

    edit_trace(run, step, change)
    a_version(draw, run)
    return step, "library version", "torch"


def a_version(draw: random.Random, run: Path) -> Planted:
    name = draw.choice(["torch", "transformers", "python"])

    def change(line: dict[str, Any]) -> None:
        line["versions"]["torch"] = line["versions"][name] = "9.9.9"

    edit_lines(run, "trace.jsonl", change, lambda line: "versions" in line)
    return 0, "library version", name


def a_last_bit(draw: random.Random, run: Path) -> Planted:
    """The last bit of a log-probability, on the same versions."""
    step = draw.randint(1, STEPS)

    def change(line: dict[str, Any]) -> None:
        i = draw.randrange(len(line["logprobs"]))
        line["logprobs"][i] = float(np.nextafter(line["logprobs"][i], 9.0))

    edit_trace(run, step, change)
    return step, "log-probability", "another rounding"


def a_key(draw: random.Random, run: Path) -> Planted:
    keys = {"learning_rate": 0.002, "seed": 43, "temperature": 0.9, "epsilon": 0.3, "dtype": "f"}
    keys |= {"dataset_fingerprint": "beef", "reward_funcs": ["/code/one/rewards.py:other"]}
    key = draw.choice(sorted(keys))
    edit_config(run, key, keys[key])
    return 0, "config", key


def a_key_with_effect(draw: random.Random, run: Path) -> Planted:
    """The learning rate, and the weights of every step from one on."""
    step = draw.randint(1, STEPS)
    edit_config(run, "learning_rate", 0.002)
    for later in range(step, STEPS + 1):
        edit_trace(run, later, lambda line: line.update(weights=["0"] * len(TENSORS)))
    return step, "config", "learning_rate was 0.001 and is 0.002"


def a_prompt(draw: random.Random, run: Path) -> Planted:
    """A token of a prompt, in completions.jsonl."""
    step = draw.choice(LOGGED)
    sample = draw.randrange(4)

    def change(line: dict[str, Any]) -> None:
        line["prompt"] = line["prompt"].replace("plus", "minus")

    where = lambda line: (line["step"], line["sample"]) == (step, sample)  # noqa: E731
    edit_lines(run, "completions.jsonl", change, where)
    return step, "prompt text", "from character"


def a_field(draw: random.Random, run: Path) -> Planted:
    step, (field, value, cause) = (
        draw.choice(LOGGED),
        draw.choice(
            [
                ("completion", "other", "sampled id"),
                ("rewards/accuracy", 7.0, "reward"),
                ("advantage", 9.0, "advantage"),
            ]
        ),
    )
    sample = draw.randrange(4)
    where = lambda line: (line["step"], line["sample"]) == (step, sample)  # noqa: E731
    edit_lines(run, "completions.jsonl", lambda line: line.update({field: value}), where)
    return step, cause, f"sample {sample}"


def a_metric(draw: random.Random, run: Path) -> Planted:
    step = draw.randint(1, STEPS)
    names = {"reward": "reward", "loss": "gradient", "grad_norm": "gradient", "my_own": "metric"}
    names |= {"num_tokens": "sampled id", "kl": "gradient"}
    name = draw.choice(sorted(names))
    change = lambda line: line.update({name: 0.123})  # noqa: E731
    edit_lines(run, "metrics.jsonl", change, lambda line: line["step"] == step)
    return step, names[name], name


def an_order_of_lines(draw: random.Random, run: Path) -> Planted:
    """Two neighbouring lines change places."""
    file = run / draw.choice(["metrics.jsonl", "completions.jsonl"])
    lines = file.read_text().splitlines()
    i = draw.randrange(len(lines) - 1)
    lines[i], lines[i + 1] = lines[i + 1], lines[i]
    file.write_text("\n".join(lines) + "\n")
    if file.name == "completions.jsonl":
        steps = [json.loads(line)["step"] for line in lines]
        return (
            steps[i] if steps[i] == steps[i + 1] else min(steps[i : i + 2]),
            "data order",
            "order",
        )
    return i + 1, "data order", "order of the lines"


def an_order_of_rows(draw: random.Random, run: Path) -> Planted:
    """Two prompts of a step change places."""
    step = draw.randint(1, STEPS)

    def change(line: dict[str, Any]) -> None:
        line["rows"][0], line["rows"][1] = line["rows"][1], line["rows"][0]

    edit_trace(run, step, change)
    return step, "data order", "row of the data of prompt"


def a_token(draw: random.Random, run: Path) -> Planted:
    step = draw.choice(LOGGED)
    i = draw.randrange(60)

    def change(tokens: StepTokens) -> None:
        tokens.ids[i] += 1

    edit_tokens(run, step, change)
    return (
        step,
        "sampled id",
        f"sample {i // 5 % 4} (row {(step * 7 + i // 20) % 50} of the data), token {i % 5}",
    )


def a_number_of_token(draw: random.Random, run: Path) -> Planted:
    step, i = draw.choice(LOGGED), draw.randrange(60)
    names = {"advantage": "advantage", "reward": "reward", "value": "value"}
    names |= {"log_ratio": "gradient", "sampler_logprob": "log-probability"}
    name = draw.choice(sorted(names))

    def change(tokens: StepTokens) -> None:
        column = tokens.numbers[name]
        bits = column.view(np.uint16 if column.dtype == np.float16 else np.uint32)
        bits[i] ^= 1

    edit_tokens(run, step, change)
    return step, names[name], f"token {i % 5}"


def a_weight_of_trace(draw: random.Random, run: Path) -> Planted:
    step, k = draw.randint(0, STEPS), draw.randrange(len(TENSORS))
    name = list(TENSORS)[k]
    if step == 0:
        change = lambda line: line["weights"].update({name: "0"})  # noqa: E731
        edit_lines(run, "trace.jsonl", change, lambda line: "versions" in line)
    else:
        edit_trace(run, step, lambda line: line["weights"].__setitem__(k, "0"))
    return step, "weight", name


def a_weight_of_file(draw: random.Random, run: Path) -> Planted:
    step, file = draw.choice(
        [
            (4, "checkpoints/step-00000004/model.safetensors"),
            (8, "checkpoints/step-00000008/model.safetensors"),
            (4, "checkpoints/step-00000004/optimizer.safetensors"),
            (8, "final/model.safetensors"),
        ]
    )
    name = draw.choice(list(TENSORS))
    stored = f"{name}.exp_avg" if "optimizer" in file else name
    element = draw.randrange(int(np.prod(TENSORS[name])))
    flip_bit(run / file, stored, element, draw.randrange(32))
    return step, "weight", f"{stored}: "


def a_counter(draw: random.Random, run: Path) -> Planted:
    file = run / "checkpoints/step-00000004/state.json"
    state = json.loads(file.read_text())
    state["counters"]["num_tokens"] += 1
    file.write_text(json.dumps(state))
    return 4, "weight", "counters.num_tokens"


KINDS: list[Callable[[random.Random, Path], Planted]] = [
    lambda draw, run: changed(draw, "prompt_index")(run),
    lambda draw, run: changed(draw, "prompts")(run),
    lambda draw, run: changed(draw, "ids")(run),
    lambda draw, run: changed(draw, "logprobs")(run),
    lambda draw, run: changed(draw, "values")(run),
    lambda draw, run: changed(draw, "rewards", "accuracy")(run),
    lambda draw, run: changed(draw, "rewards", "model")(run),
    lambda draw, run: changed(draw, "advantages")(run),
    *(a_rounding, a_version, a_last_bit, a_key, a_key_with_effect, a_prompt, a_field, a_metric),
    *(an_order_of_lines, an_order_of_rows, a_token, a_number_of_token),
    *(a_weight_of_trace, a_weight_of_file, a_counter),
]


def test_equal_runs_have_no_difference(made, capsys) -> None:
    main(["diff", str(made[0]), str(made[1])])
    out = capsys.readouterr().out
    assert out.startswith(f"no difference in {STEPS} steps\n")
    assert "not compared" not in out


@pytest.mark.parametrize("seed", range(FAULTS))
def test_planted_fault_is_named(made, seed: int, tmp_path: Path, capsys) -> None:
    draw = random.Random(seed)
    faulty = tmp_path / "faulty"
    shutil.copytree(made[1], faulty)
    step, cause, named = KINDS[seed % len(KINDS)](draw, faulty)
    with pytest.raises(SystemExit) as left:
        main(["diff", str(made[0]), str(faulty)])
    assert left.value.code == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"step {step}: {cause}"
    assert named in out, out
