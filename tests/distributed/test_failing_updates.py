"""A gradient that is not finite in one process is one in all: nobody takes the step."""

from typing import Any

import pytest
import torch

from tests.distributed.launching import COMMON, launch, saved_model
from tests.distributed.layouts import LAYOUTS, Layout

ALWAYS = {Layout("ddp", 2)}
CASES = [
    pytest.param(layout, id=str(layout), marks=() if layout in ALWAYS else pytest.mark.distributed)
    for layout in LAYOUTS
    if layout.processes == 2
]
# DeepSpeed's own check depends on the dtype; in the others a bfloat16 model has float32 parts.
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, LoRA": {"dtype": "bfloat16", "lora": "random"},
}


@pytest.mark.parametrize("layout", CASES)
def test_the_weights_stay_as_they_were_and_every_process_says_why(tmp_path, layout) -> None:
    job = {"algorithm": "ppo", "model": saved_model(tmp_path / "model"), "kind": "nan", **COMMON}
    jobs = {kind: job | options for kind, options in KINDS.items()}
    launch(tmp_path / "runs", jobs, layout.backend, layout.processes)
    for kind in KINDS:
        out = tmp_path / "runs" / kind
        for rank in range(layout.processes):
            assert "the gradient is not finite" in (out / f"error-{rank}").read_text()
        tensors = torch.load(out / "tensors.pt", weights_only=True)
        assert tensors["start"].equal(tensors["end"])
        assert tensors["end"].isfinite().all()
