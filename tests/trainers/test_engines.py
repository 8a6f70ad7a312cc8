"""`rollout_engine: auto`: what is chosen, said, saved and kept, with an engine in place of vLLM."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_pg import GRPOConfig
from rlhf_pg.boundary import http
from rlhf_pg.cli.demo import _answers
from rlhf_pg.config.parse import parse
from rlhf_pg.report.run_files import read
from rlhf_pg.rollout import NativeEngine, RolloutError, factory
from rlhf_pg.rollout.vllm import in_process
from tests.rollout.vllm.fake_vllm import FakeVllm
from tests.trainers.conftest import PROMPTS


class Stand(NativeEngine):
    """In the place of vLLM: keeps how it was made."""

    made: list[dict[str, Any]]

    def __init__(self, model: Any, eos: Any, tokenizer: Any, **options: Any) -> None:
        super().__init__(model, eos, tokenizer.pad_token_id, tokenizer)
        type(self).made.append(options)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[Stand]:
    """A machine on which vLLM is there and suits."""
    Stand.made = []
    monkeypatch.setattr(factory, "reason_against", lambda *_: None)
    monkeypatch.setattr(in_process, "VllmEngine", Stand)
    return Stand


def saved_config(trainer: Any) -> GRPOConfig:
    return parse(GRPOConfig, ["--config", str(Path(trainer.args.output_dir) / "config.yaml")])


def test_auto_engine_on_cpu_is_native_with_reason(make, capsys, caplog):
    trainer = make(max_steps=1, vllm_max_model_length=99)
    trainer.train()
    assert type(trainer.sampler.engine) is NativeEngine
    assert "steps; rollout_engine native (auto: the device is cpu)" in capsys.readouterr().out
    assert not caplog.records
    config = saved_config(trainer)
    assert (config.rollout_engine, config.vllm_max_model_length) == ("native", None)


def test_auto_vllm_sleeps_and_is_written_to_config(make, vllm, capsys):
    trainer = make(max_steps=1, vllm_gpu_memory_utilization=0.4)
    assert type(trainer.sampler.engine) is vllm
    [made] = vllm.made
    assert made["sleeps"]
    assert made["memory"] == 0.4
    assert made["longest"] == trainer.train_prompts.longest + 6
    trainer.train()
    assert "rollout_engine vllm (auto: vLLM suits)" in capsys.readouterr().out
    line = read(Path(trainer.args.output_dir) / "metrics.jsonl")[0]
    assert "sampling/sampling_logp_difference/max" in line  # measured, as with any vLLM
    config = saved_config(trainer)
    assert (config.rollout_engine, config.vllm_enable_sleep_mode) == ("vllm", True)


def test_failing_vllm_start_falls_back_to_native_with_warning(make, vllm, monkeypatch, caplog):
    def broken(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("2 GiB")

    monkeypatch.setattr(in_process, "VllmEngine", broken)
    trainer = make(max_steps=1)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "vLLM cannot start (OutOfMemoryError: 2 GiB), so the native engine" in record.message
    assert type(trainer.sampler.engine) is NativeEngine
    trainer.train()
    assert trainer.engine_name == trainer.checkpointer.config["rollout_engine"] == "native"
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        make(rollout_engine="vllm")


def elsewhere(failure: str | None) -> Any:
    """A runtime in which this is what another process says."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        is_main=False,
        watch=None,
        first_error=lambda own: own or (failure and f"rank 1: {failure}"),
    )


def test_vllm_unsuited_on_one_rank_selects_native_on_all(make, vllm):
    args, model = GRPOConfig(), make().model
    assert factory.choose_engine(args, model, elsewhere(None))[0] == "vllm"
    taken, why = factory.choose_engine(args, model, elsewhere("vLLM is not installed"))
    assert (taken, why) == ("native", "auto: rank 1: vLLM is not installed")


def test_vllm_start_failure_on_one_rank_selects_native_on_all(vllm):
    taken = factory.start_engine(GRPOConfig(), "vllm", "it suits", elsewhere(None), str.upper)
    assert taken == ("VLLM", "vllm", "it suits")
    there = elsewhere("out of memory")
    engine, name, why = factory.start_engine(GRPOConfig(), "vllm", "", there, str.upper)
    assert (engine, name) == ("NATIVE", "native")
    assert "rank 1: out of memory" in why


def test_engine_is_chosen_before_sharding_renames_the_model(make, monkeypatch):
    build, order = sys.modules["rlhf_pg.trainers.parts"], []
    for module, name in ((factory, "choose_engine"), (build, "PolicyLearner")):
        made = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, n=name, f=made: (order.append(n), f(*given))[1]
        )
    make()
    assert order == ["choose_engine", "PolicyLearner"]


def test_resumed_run_keeps_native_engine_when_vllm_is_available(make, vllm, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(factory, "reason_against", lambda *_: "vLLM is not installed")
        make(max_steps=1, save_steps=1).train()
    again = make(max_steps=2)
    assert type(again.sampler.engine) is vllm
    again.train(resume_from_checkpoint=True)
    assert type(again.sampler.engine) is NativeEngine
    assert again.engine_name == again.checkpointer.config["rollout_engine"] == "native"
    assert not again.checkpointer.config["vllm_enable_sleep_mode"]
    assert saved_config(again).rollout_engine == "native"


def test_resumed_run_has_the_engine_of_its_checkpoint_or_is_refused(make, vllm, monkeypatch):
    make(max_steps=1, save_steps=1).train()
    with pytest.raises(ValueError, match="rollout_engine was 'vllm' and is 'native'"):
        make(max_steps=2, rollout_engine="native").train(resume_from_checkpoint=True)
    make(max_steps=2, rollout_engine="vllm").train(resume_from_checkpoint=True)
    monkeypatch.setattr(factory, "reason_against", lambda *_: "vLLM is not installed")
    with pytest.raises(ValueError, match="rollout_engine vllm, but auto chooses native here"):
        make(max_steps=2).train(resume_from_checkpoint=True)


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    """A server with the vocabulary of the embedded model, which is tied."""
    monkeypatch.setattr(http, "PAUSE", 0.0)
    server = FakeVllm(vocab_size=20)
    yield server
    server.close()


def test_server_death_on_weight_sync_saves_checkpoint(speaking, make, any_sampler, tmp_path):
    trainer = make(rollout_engine="vllm_server", vllm_server_base_url=speaking.url, max_steps=4)
    reload = iter([None, None, (500, {"error": {"message": "EngineCore died"}})])
    speaking.answers["/collective_rpc"] = lambda body: next(reload, (500, b"dead"))
    with pytest.raises(RolloutError, match=r"(?s)status 500.*died.*Resume from .*step-00000002"):
        trainer.train()
    del speaking.answers["/collective_rpc"]
    speaking.weight_version = "default"  # started again
    speaking.goes_on.set()
    again = make(rollout_engine="vllm_server", vllm_server_base_url=speaking.url, max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert again.state.step == 4


@pytest.mark.parametrize("options", [{}, {"dynamic_sampling_rounds": 1, "rollout_ahead": 0}])
def test_everything_is_sampled_from_weights_that_were_handed_over(make, monkeypatch, options):
    """Steps, evaluations and the demo's answers, as engines need it that hold a copy."""
    session = NativeEngine.session
    monkeypatch.setattr(
        NativeEngine, "session", lambda self, *given: self.check_synced() or session(self, *given)
    )
    trainer = make(eval_dataset=PROMPTS, **options)
    trainer.step()
    trainer.evaluate()
    assert len(_answers(trainer, 2)) == 2
    with pytest.raises(RuntimeError, match="weights_synced"):
        trainer.sampler.roll_out(range(1))
