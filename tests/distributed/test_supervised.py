"""Supervised runs make the same updates in any number of processes, on any backend."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlhf_pg.report.run_files import read
from tests.distributed.launching import launch, saved_model
from tests.distributed.layouts import (
    ONE,
    SUPERVISED,
    SUPERVISED_DOUBLE,
    SUPERVISED_LAYOUTS,
    Layout,
)
from tests.distributed.test_invariance import noted

pytestmark = pytest.mark.distributed

COMMON = {"kind": "supervised", "learning_rate": 1e-3, "save_steps": 3, "max_grad_norm": 0.5}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("models")
    return {arch: saved_model(root / str(arch), arch) for arch in (None, "gpt2")}


def runs(root: Path, layout: Layout, models: dict, resumes: Path | None = None) -> dict:
    """The final weights, and losses, of every job by name; resumed after three steps, if asked."""
    jobs = {}
    for name, job in (SUPERVISED | SUPERVISED_DOUBLE).items():
        if name in SUPERVISED_DOUBLE and layout.backend.startswith("zero"):
            continue  # DeepSpeed has no float64
        jobs[name] = COMMON | job
        jobs[name]["model"] = models[jobs[name].pop("arch", None)]
        if resumes is not None:
            path = resumes / name / "run" / "checkpoints" / "step-00000003"
            jobs[name]["resume_from_checkpoint"] = str(path)
    launch(root, jobs, layout.backend, layout.processes)
    found = {}
    for name in jobs:
        run = root / name / "run"
        (file,) = (run / "final").glob("*.safetensors")
        found[name] = load_file(file), [line["loss"] for line in read(run / "metrics.jsonl")]
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory, models) -> dict:
    return runs(tmp_path_factory.mktemp("one") / "runs", ONE, models)


@pytest.fixture(scope="module", params=SUPERVISED_LAYOUTS, ids=str)
def layout(request) -> Layout:
    return request.param


@pytest.fixture(scope="module")
def root(layout, tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp(str(layout))


@pytest.fixture(scope="module")
def several(layout, root, models) -> dict:
    return runs(root / "whole", layout, models)


@pytest.fixture(scope="module")
def resumed(layout, root, several, models) -> dict:
    return runs(root / "resumed", layout, models, root / "whole")


def test_updates_match_single_process(layout, one, several) -> None:
    for name, (weights, losses) in several.items():
        expected, exact = one[name][0], name in SUPERVISED_DOUBLE
        assert losses == pytest.approx(one[name][1], rel=1e-9 if exact else 1e-4), name
        assert weights.keys() == expected.keys()
        apart, whole = (
            sum(float(x.double().square().sum()) for x in tensors) ** 0.5
            for tensors in ((weights[key] - expected[key] for key in expected), expected.values())
        )
        noted(layout, name, weights=apart / whole)
        assert apart <= (1e-10 if exact else 1e-5) * whole, name


def test_resumed_run_ends_with_same_weights_bit_for_bit(layout, several, resumed) -> None:
    """With more than two processes DDP's first buckets, and so the order of a sum, are others."""
    rounding = 1e-6 if layout.processes > 2 else 0.0
    for name, (weights, losses) in several.items():
        again, after = resumed[name]
        assert after == pytest.approx(losses[3:], rel=rounding, abs=0), name
        for key, value in weights.items():
            assert (again[key] - value).abs().max() <= rounding, (name, key)
