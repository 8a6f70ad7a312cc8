"""bfloat16 weights are updated alike in one process, in two, and in pieces: bit for bit, where
nothing else is rounded.
"""

import pytest
import torch

from tests.distributed.launching import launch

pytestmark = pytest.mark.distributed

JOBS: dict[str, dict] = {"updates": {"kind": "updates"}}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("bfloat16")


@pytest.fixture(scope="module")
def whole(root) -> dict:
    launch(root / "one", JOBS)
    return {job: root / "one" / job / "updates.pt" for job in JOBS}


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def pieces(request, root, whole) -> dict:
    """In two processes from the start, and resumed there from what one process saved."""
    resumed = {f"{job}, resumed": JOBS[job] | {"resume": str(whole[job])} for job in JOBS}
    launch(root / request.param, JOBS | resumed, request.param, 2)
    return {job: root / request.param / job / "updates.pt" for job in JOBS | resumed}


@pytest.mark.parametrize("suffix", ["", ", resumed"])
def test_sharded_bfloat16_update_matches_single_process(whole, pieces, suffix) -> None:
    expected, actual = (torch.load(f) for f in (whole["updates"], pieces["updates" + suffix]))
    for step, tensors in actual.items():
        assert tensors.keys() == expected[step].keys()
        assert all(tensors[name].equal(expected[step][name]) for name in tensors)
    assert not actual[6]["tall"].equal(actual[5]["tall"])
