"""A gradient that is not finite in one process is one in all: nobody makes the update."""

import json
from typing import Any

import pytest
import torch

from rlhf_pg.report.run_files import read
from tests.distributed.launching import COMMON, launch, saved_model
from tests.distributed.layouts import LAYOUTS

pytestmark = pytest.mark.distributed

CASES = [layout for layout in LAYOUTS if layout.processes == 2]
# DeepSpeed's own check depends on the dtype; in the others a bfloat16 model has float32 parts.
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, LoRA": {"dtype": "bfloat16", "lora": "random"},
}


@pytest.mark.fault(21, "all processes skip the update together, and it leaves no trace")
@pytest.mark.parametrize("layout", CASES, ids=str)
def test_nonfinite_gradient_on_one_rank_is_skipped_by_all(tmp_path, layout) -> None:
    job = {"algorithm": "ppo", "model": saved_model(tmp_path / "model"), "kind": "nan", **COMMON}
    job |= {"num_iterations": 2, "max_skipped_steps": 1}
    jobs = {kind: job | options for kind, options in KINDS.items()}
    launch(tmp_path / "runs", jobs, layout.backend, layout.processes)
    for kind in KINDS:
        out = tmp_path / "runs" / kind
        lines = read(out / "run" / "metrics.jsonl")
        assert [line["skipped_updates"] for line in lines] == [0, 2, 0, 2]
        assert json.loads((out / "trace.json").read_text()) == {"same": True, "moves": True}
        for rank in range(layout.processes):
            assert "the gradient is not finite" in (out / f"error-{rank}").read_text()
        tensors = torch.load(out / "tensors.pt", weights_only=True)
        assert tensors["good"].equal(tensors["end"])
        assert tensors["end"].isfinite().all()
