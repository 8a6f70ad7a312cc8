"""Four training processes and two servers, of which one dies: the update of one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

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


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero3"])
def test_four_processes_outlive_one_of_two_servers(tmp_path, servers, backend) -> None:
    """Every process leaves it out after the same step's weights, and asks the other, which has been
    handed the weights of each step, even if no process has them whole.
    """
    model = saved_model(tmp_path / "model")
    urls = [server.url for server in servers]
    job = COMMON | JOB | {"model": model, "vllm_server_base_url": urls}
    handed: list[Tensor] = []

    def load(body: Any) -> None:
        path = Path(body["kwargs"]["weights_path"])
        loaded = AutoModelForCausalLM.from_pretrained(path).state_dict().values()
        handed.append(torch.cat([x.flatten() for x in loaded]))

    servers[0].answers["/collective_rpc"] = load
    expected, wanted = launch(tmp_path / "one", {"ahead": job})["ahead"], list(handed)
    before = servers[1].count("/v1/completions")
    handed.clear()

    def die(body: Any) -> Any:
        asked = servers[1].count("/v1/completions") - before
        return (500, b"EngineCore died") if asked > 20 else None

    servers[1].answers |= {"/v1/completions": die, "/collective_rpc": die}
    found = launch(tmp_path / "four", {"ahead": job}, backend, 4)["ahead"]
    moved = (expected.end - expected.start).norm()
    assert moved > 0
    assert (found.end - expected.end).norm() <= 1e-4 * moved
    assert [line["sampling/staleness"] for line in found.metrics] == [0, 1, 1, 1, 1]
    for own, other in zip(handed, wanted, strict=True):
        assert (own - other).norm() <= 1e-4 * moved
