"""Worker processes that sample: the same completions, whoever samples them and whoever dies."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rlhf_pg.rollout import RolloutError, SamplingParams
from rlhf_pg.rollout.native import workers
from rlhf_pg.rollout.native.engine import NativeEngine
from rlhf_pg.rollout.native.workers import WorkerEngine, sample_alone
from rlhf_pg.tasks.tiny import character_tokenizer, tiny_decoder

TOKENIZER = character_tokenizer("0123456789ab?")
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
PARAMS = SamplingParams(max_tokens=24)


@pytest.fixture
def make(warm_workers: None) -> Any:
    def build(model: Any) -> WorkerEngine:
        eos, pad = [TOKENIZER.eos_token_id], TOKENIZER.pad_token_id
        return WorkerEngine(model, eos, pad, TOKENIZER, 2)

    return build


def sampled(engine: Any, **options: Any) -> list[Any]:
    return engine.generate(PROMPTS, 3, PARAMS, seed=5, **options)


def in_process(model: Any) -> list[Any]:
    return sampled(NativeEngine(model, [TOKENIZER.eos_token_id], TOKENIZER.pad_token_id, TOKENIZER))


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
def test_workers_sample_what_the_trainer_would(make: Any, adapted: bool) -> None:
    """Also after the weights have changed, and from a copy that was made before they did."""
    torch.manual_seed(0)
    model = tiny_decoder(TOKENIZER, 64).double()
    if adapted:
        config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config)
    engine = make(model)
    first, expected = sampled(engine), in_process(model)
    copied = engine.copy_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter) * parameter.requires_grad
    second, changed = sampled(engine), in_process(model)
    with engine.weights_synced(copied):
        third = sampled(engine)
    assert third == first
    for own, others in ((first, expected), (second, changed)):
        assert [x.tokens for x in own] == [x.tokens for x in others]
        for one, other in zip(own, others, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12)
    assert [x.tokens for x in first] != [x.tokens for x in second]


def test_errors_are_those_of_the_native_engine(make: Any) -> None:
    model = tiny_decoder(TOKENIZER, 64)
    engine = make(model)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        engine.generate([[1] * 60], 1, PARAMS, seed=0)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="logits"):
        sampled(engine)


def dies(places: str, times: int, *arguments: Any) -> Any:
    """Be killed the first `times` times, which files count."""
    count = len(os.listdir(places))
    if count < times:
        (Path(places) / str(count)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sample_alone(*arguments)


def test_request_of_a_killed_worker_is_sampled_again(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(tiny_decoder(TOKENIZER, 64))
    expected = sampled(engine)
    monkeypatch.setattr(workers, "sample_alone", partial(dies, str(tmp_path), 1))
    assert sampled(engine) == expected
    monkeypatch.setattr(workers, "ATTEMPTS", 1)
    monkeypatch.setattr(workers, "sample_alone", partial(dies, str(tmp_path), 99))
    with pytest.raises(RolloutError, match=r"rollout_workers.*-9"):
        sampled(engine)
