"""Runs whose completions come from a server, which is there, or dies."""

from collections.abc import Iterator

import pytest

from rlhf_pg.boundary import http
from rlhf_pg.report.run_files import read
from rlhf_pg.rollout import RolloutError
from rlhf_pg.trainers.agreement import DisagreementError
from tests.rollout.vllm.fake_vllm import FakeVllm

COMPLETIONS = "/v1/completions"


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    """A server with the vocabulary of the embedded model, which is tied."""
    monkeypatch.setattr(http, "PAUSE", 0.0)
    server = FakeVllm(vocab_size=20)
    yield server
    server.close()


def test_server_with_other_logprobs_ends_run(speaking, make, tmp_path):
    """The server says that every token has probability 1/e."""
    trainer = make(rollout_engine="vllm_server", vllm_server_base_url=speaking.url)
    with pytest.raises(DisagreementError, match="agreement/kl"):
        trainer.train()
    assert trainer.state.step == 0


def test_auto_sampler_correction_weighs_server_mismatch(speaking, make, any_sampler, tmp_path):
    """The policy as it was gives these tokens far less than 1/e, so their weights are below 1."""
    server = {"rollout_engine": "vllm_server", "vllm_server_base_url": speaking.url, "max_steps": 1}
    norms = {}
    for mode in ("auto", "token_truncate", "none"):
        make(**server, sampler_correction=mode, output_dir=str(tmp_path / mode)).train()
        norms[mode] = read(tmp_path / mode / "metrics.jsonl")[0]["grad_norm"]
    assert norms["auto"] == norms["token_truncate"]
    assert norms["auto"] < 0.9 * norms["none"]


def test_server_death_on_weight_sync_saves_checkpoint(speaking, make, any_sampler, tmp_path):
    trainer = make(rollout_engine="vllm_server", vllm_server_base_url=speaking.url, max_steps=4)
    reload = iter([None, None, (500, {"error": {"message": "EngineCore died"}})])
    speaking.answers["/collective_rpc"] = lambda body: next(reload, (500, b"dead"))
    with pytest.raises(RolloutError, match=r"(?s)status 500: dead.*Resume from .*step-00000002"):
        trainer.train()
    del speaking.answers["/collective_rpc"]
    again = make(rollout_engine="vllm_server", vllm_server_base_url=speaking.url, max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert again.state.step == 4
