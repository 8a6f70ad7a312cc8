"""Whole runs give the CPU's numbers, and are really on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.runs import METRICS, RUNS, numbers

# Of a number: attention is another kernel, which sums in another order. In bfloat16 that moves
# weights by a rounding, and rewards of the few completions that follow by what they say.
TOLERANCE = {"float32": 1e-4, "float64": 1e-12, "bfloat16": 2e-2}


@pytest.mark.parametrize("run", RUNS)
def test_run_matches_cpu(expected: Any, run: str, record_property: Any, tmp_path: Path) -> None:
    there, here = numbers(run, tmp_path), expected[run]
    assert (there["device"], here["device"]) == ("cuda:0", "cpu")
    dtype = RUNS[run].dtype
    if dtype == "bfloat16":  # from the second step on it is another policy's sample
        there, here = _first_step(there), _first_step(here)
    record_property("distance", distance(there, here))
    assert there["samples"] == here["samples"]
    assert distance(there, here) <= TOLERANCE[dtype]


def _first_step(of: dict[str, Any]) -> dict[str, Any]:
    metrics = {key: values[:1] for key, values in of["metrics"].items()}
    samples = of["samples"][: len(of["samples"]) // 2]
    return {**of, "metrics": metrics, "samples": samples}


def _flat(of: dict[str, Any]) -> torch.Tensor:
    metrics = [value or 0.0 for key in METRICS for value in of["metrics"][key]]
    return torch.tensor([*metrics, *of["eval"], *of["weights"]], dtype=torch.float64)


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of two numbers, relative to them; to 1e-2 where both are small."""
    x, y = _flat(a), _flat(b)
    return float(((x - y).abs() / y.abs().clamp(min=1e-2)).max())
