"""A gradient that is not finite in one process is one in all: nobody takes the step."""

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
DTYPES = ("float32", "bfloat16")  # DeepSpeed's own check depends on it


@pytest.mark.parametrize("layout", CASES)
def test_the_weights_stay_as_they_were_and_every_process_says_why(tmp_path, layout) -> None:
    job = {"algorithm": "grpo", "model": saved_model(tmp_path / "model"), "nan": True, **COMMON}
    jobs = {dtype: job | {"dtype": dtype} for dtype in DTYPES}
    launch(tmp_path / "runs", jobs, layout.backend, layout.processes)
    for dtype in DTYPES:
        out = tmp_path / "runs" / dtype
        for rank in range(layout.processes):
            assert "the gradient is not finite" in (out / f"error-{rank}").read_text()
        tensors = torch.load(out / "tensors.pt", weights_only=True)
        assert tensors["start"].equal(tensors["end"])
        assert tensors["end"].isfinite().all()
