"""Processes with different numbers of rows call the head as often, and the gradient is exact."""

import itertools
import os
import subprocess
import sys

import pytest
import torch

from tests.distributed.backends import environment
from tests.distributed.chunked_head import KINDS, ROWS, TEMPERATURE, loss, model_of, rows_of
from tests.distributed.launching import ROOT
from tests.distributed.runs import flat

pytestmark = pytest.mark.distributed


def expected(kind):
    """From all logits of every sequence, in one process."""
    model, total = model_of(kind), 0.0
    for rank, micro_batch in itertools.product(range(2), range(len(ROWS))):
        ids, tokens = rows_of(rank, micro_batch)
        everywhere = (model(ids).logits[0] / TEMPERATURE).log_softmax(-1)
        logprobs = everywhere[torch.arange(len(tokens)), tokens]
        total = total + loss(logprobs, -(everywhere.exp() * everywhere).sum(-1))
    trained = [p for p in model.parameters() if p.requires_grad]
    return flat(torch.autograd.grad(total, trained))


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero3"])
def test_head_gradient_and_calls_match_across_uneven_ranks(tmp_path, backend) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "tests.distributed.chunked_head", str(tmp_path), backend]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment(backend)
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")} | own
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    for kind, at_once in KINDS.items():
        found, calls = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        exact = expected(kind)
        assert float((found - exact).norm() / exact.norm()) < 1e-5, kind
        assert calls == at_once, kind
