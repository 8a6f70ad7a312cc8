"""Four training processes and two servers, of which one dies: the update of one process."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.launching import COMMON, launch, saved_model
from tests.rollout.vllm.fake_vllm import FakeVllm

pytestmark = pytest.mark.distributed

JOB = {"algorithm": "grpo", "prompts_per_step": 5, "num_generations": 4, "num_mini_batches": 2}
JOB |= {"rollout_engine": "vllm_server", "rollout_ahead": 1, "gradients": False}


@pytest.fixture
def servers() -> Iterator[list[FakeVllm]]:
    both = [FakeVllm(12), FakeVllm(12)]
    yield both
    for server in both:
        server.close()


def test_four_processes_outlive_one_of_two_servers(tmp_path, servers) -> None:
    """Every process leaves it out after the same step's weights, and asks the other."""
    model = saved_model(tmp_path / "model")
    urls = [server.url for server in servers]
    job = COMMON | JOB | {"model": model, "vllm_server_base_url": urls}
    expected = launch(tmp_path / "one", {"ahead": job})["ahead"]
    before = servers[1].count("/v1/completions")

    def die(body: Any) -> Any:
        asked = servers[1].count("/v1/completions") - before
        return (500, b"EngineCore died") if asked > 20 else None

    servers[1].answers |= {"/v1/completions": die, "/collective_rpc": die}
    found = launch(tmp_path / "four", {"ahead": job}, "ddp", 4)["ahead"]
    moved = (expected.end - expected.start).norm()
    assert moved > 0
    assert (found.end - expected.end).norm() <= 1e-4 * moved
    assert [line["sampling/staleness"] for line in found.metrics] == [0, 1, 1, 1, 1]
