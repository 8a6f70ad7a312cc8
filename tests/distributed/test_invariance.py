"""The update is the same whatever the number of processes, the backend and the micro-batches.

Every cell compares a layout (backend and processes) with one process: what is sampled, the gradient
of one update split into micro-batches in three ways, the weights after five steps, and the metrics.
With INVARIANCE=file the distances are added to that file, for docs/reliability.md.
"""

import functools
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed.launching import COMMON, Outcome, launch, saved_model
from tests.distributed.layouts import DOUBLE, JOBS, LAYOUTS, ONE, TRAINED_WITH, Layout
from tests.distributed.runs import SPLITS, flat

# What is compared with every change; the rest is for `make test-distributed`.
ALWAYS = {
    Layout("ddp", 2): ["grpo", "ppo"],
    Layout("fsdp2", 2): ["grpo", "rloo, taught"],
}
CELLS = [
    pytest.param(
        layout,
        job,
        id=f"{layout}-{job}",
        marks=() if job in ALWAYS.get(layout, ()) else pytest.mark.distributed,
    )
    for layout in LAYOUTS
    for job in layout.jobs
]


@pytest.fixture(scope="module")
def launched(request, tmp_path_factory):
    """Layout -> outcomes by job; each layout is launched once, for the jobs of the chosen tests."""
    wanted: dict[Layout, set[str]] = defaultdict(set)
    for item in request.session.items:
        if item.path == request.path:
            wanted[item.callspec.params["layout"]].add(item.callspec.params["job"])
    wanted[ONE] = set().union(*wanted.values())
    root = tmp_path_factory.mktemp("layouts")
    archs = {job.get("arch") for job in (JOBS | DOUBLE).values()}
    models = {arch: saved_model(root / f"model-{arch}", arch) for arch in archs}

    def options(layout: Layout, name: str) -> dict[str, Any]:
        job = COMMON | (JOBS | DOUBLE)[name]
        split = "all" if layout == ONE else TRAINED_WITH[name]
        return job | {"model": models[job.pop("arch", None)], "micro_batch_tokens": SPLITS[split]}

    @functools.cache
    def attempt(layout: Layout) -> dict[str, Outcome] | AssertionError:
        jobs = {name: options(layout, name) for name in sorted(wanted[layout])}
        try:
            return launch(root / str(layout), jobs, layout.backend, layout.processes)
        except AssertionError as error:
            return error

    def outcomes(layout: Layout) -> dict[str, Outcome]:
        done = attempt(layout)
        if isinstance(done, AssertionError):
            raise done
        return done

    return outcomes


def noted(layout: Layout, job: str, **found: float) -> None:
    """For the table in docs/reliability.md."""
    if "INVARIANCE" in os.environ:
        file = Path(os.environ["INVARIANCE"])
        table = json.loads(file.read_text()) if file.exists() else {}
        table.setdefault(str(layout), {}).setdefault(job, {}).update(found)
        file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize(("layout", "job"), CELLS)
def test_samples_match_single_process(launched, layout, job) -> None:
    one, own = launched(ONE)[job], launched(layout)[job]
    assert own.sampled == one.sampled
    assert len({tuple(row) for row in one.sampled}) > len(one.sampled) / 2  # no repeated noise
    noted(layout, job, sampled=True)


@pytest.mark.parametrize(("layout", "job"), CELLS)
def test_gradient_matches_single_process(launched, layout, job) -> None:
    expected = launched(ONE)[job].gradients["all"]
    assert expected.norm() > 0
    gradients = launched(layout)[job].gradients
    distance = max(float((g - expected).norm() / expected.norm()) for g in gradients.values())
    noted(layout, job, gradient=distance)
    assert gradients.keys() == SPLITS.keys()
    assert distance <= (1e-10 if job in DOUBLE else 1e-5)


@pytest.mark.parametrize(("layout", "job"), CELLS)
def test_weights_after_five_steps_match_single_process(launched, layout, job) -> None:
    one, own = launched(ONE)[job], launched(layout)[job]
    assert own.start.equal(one.start)
    distance = float((own.end - one.end).norm() / (one.end - one.start).norm())
    noted(layout, job, weights=distance)
    assert distance <= (1e-9 if job in DOUBLE else 1e-4)


@pytest.mark.parametrize(("layout", "job"), CELLS)
def test_metrics_match_single_process(launched, layout, job) -> None:
    """The largest distance of sampler and policy is rounding, and has a bound of its own."""
    one, own = launched(ONE)[job], launched(layout)[job]
    for line, other in zip(one.numbers(), own.numbers(), strict=True):
        assert line.pop("agreement/max", None) == pytest.approx(
            other.pop("agreement/max", None), abs=2e-5
        )
        assert other == pytest.approx(line, rel=1e-3, abs=1e-6)
    assert own.evaluated == pytest.approx(one.evaluated)
    noted(layout, job, metrics=True)


@pytest.mark.parametrize(("layout", "job"), CELLS)
def test_final_model_loads_with_trained_weights(launched, layout, job) -> None:
    own = launched(layout)[job]
    final = own.directory / "final"
    if "LoRA" in job:
        model = AutoPeftModelForCausalLM.from_pretrained(final, is_trainable=True)
    else:
        model = AutoModelForCausalLM.from_pretrained(final, dtype=own.end.dtype)
    policy = flat(p for p in model.parameters() if p.requires_grad)
    assert policy.equal(own.end[: len(policy)])
    if job in ("ppo, shared critic", "ppo, LoRA"):
        head = load_file(final / "critic" / "value_head.safetensors")
        last = torch.cat([head["weight"].flatten(), head["bias"]])
        assert last.equal(own.end[-len(last) :])
