"""A stock server, for real: adapters and whole weights by path, and its end during a run."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from rlhf_pg import GRPOTrainer
from rlhf_pg.config import GRPOConfig
from rlhf_pg.report.run_files import read
from rlhf_pg.rollout import RolloutError, SamplingParams
from rlhf_pg.rollout.vllm.server import UNFINISHED, VllmServerEngine
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers import Callback
from tests.rollout.native.test_engine import assert_same, assert_teacher_forced, cut
from tests.tiny import adapter, stir
from tests.trainers.conftest import digits

pytestmark = pytest.mark.vllm

# As `vllm serve`, which in the CPU build does not find its own version.
SERVE = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}
LORA = ["--enable-lora", "--max-lora-rank", "16"]
PROCESSED = ["--logprobs-mode", "processed_logprobs"]
PROMPTS = [[5, 9, 2, 14], [17], [8, 3, 18, 12, 15, 6, 19]]
PARAMS = SamplingParams(temperature=0.8, max_tokens=10)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model with a head of its own, and a tokenizer that knows of unknown words: the
    server tries it on some.
    """
    torch.manual_seed(0)
    model, tokenizer = arithmetic().new_model()
    model.config.tie_word_embeddings = False
    path = tmp_path_factory.mktemp("model")
    type(model)(model.config).save_pretrained(path)
    tokenizer.backend_tokenizer.model.unk_token = tokenizer.pad_token
    tokenizer.save_pretrained(path)
    return str(path)


@contextmanager
def serving(model_path: str, *flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--model", model_path, "--host", "127.0.0.1", "--port", str(port)]
    command = [*SERVE, *where, "--dtype", "float32", "--max-model-len", "64", *flags]
    log = Path(model_path) / f"server-{port}.log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=file, stderr=file, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        while not answers(url):
            assert server.poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url, server
    finally:
        server.terminate()
        server.wait()


def answers(url: str) -> bool:
    with suppress(urllib.error.URLError, ConnectionError):
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    return False


@pytest.fixture(scope="module")
def url(model_path: str) -> Iterator[str]:
    """A server that gets adapters first: later its own weights are replaced."""
    with serving(model_path, *LORA, *PROCESSED) as (url, _):
        yield url


def engine_of(model: Any, url: str, path: Path, eos: list[int]) -> VllmServerEngine:
    return VllmServerEngine(model, eos, url, path / "sync", timeout=60)


def trainer(model_path: str, url: str, output_dir: Path, **options: Any) -> GRPOTrainer:
    callbacks = options.pop("callbacks", None)
    args = GRPOConfig(
        rollout_engine="vllm_server",
        vllm_server_base_url=url,
        max_completion_length=6,
        prompts_per_step=4,
        num_generations=4,
        temperature=0.7,
        learning_rate=5e-3,
        max_steps=4,
        output_dir=str(output_dir),
        **options,
    )
    return GRPOTrainer(
        model=model_path,
        reward_funcs=digits,
        args=args,
        train_dataset=arithmetic().train_dataset,
        callbacks=callbacks,
    )


def test_adapter_on_server_follows_policy(url, model_path, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(model_path)
    model = stir(get_peft_model(base, adapter(r=8))).eval()
    engine = engine_of(model, url, tmp_path, [3, 7])
    for _ in range(3):
        assert_teacher_forced(model, PROMPTS, engine.generate(PROMPTS, 8, PARAMS, seed=0))
        stir(model)


@pytest.mark.parametrize("use_peft", [True, False])
def test_run_samples_from_current_policy_at_every_step(use_peft, url, model_path, tmp_path):
    trainer(model_path, url, tmp_path, use_peft=use_peft).train()
    lines = read(tmp_path / "metrics.jsonl")
    assert len(lines) == 4
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
        assert line["grad_norm"] > 0


def test_full_weights_on_server_follow_policy(url, model_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    engine = engine_of(model, url, tmp_path, [3, 7])
    for _ in range(3):
        assert_teacher_forced(model, PROMPTS, engine.generate(PROMPTS, 8, PARAMS, seed=0))
        stir(model)


def test_eos_ids_and_stop_strings_match_in_process_engine(url, model_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    free = engine_of(model, url, tmp_path, [0])
    free.eos_token_ids = []
    endless = free.generate(PROMPTS, 30, PARAMS, seed=0)
    assert all(len(c.tokens) == 10 and c.finish_reason == "length" for c in endless)
    eos = [endless[0].tokens[3], endless[1].tokens[1]]
    for max_tokens in (4, 10):
        params = SamplingParams(temperature=0.8, max_tokens=max_tokens)
        ended = engine_of(model, url, tmp_path, eos).generate(PROMPTS, 30, params, seed=0)
        assert_same(ended, [cut(c, eos, max_tokens) for c in endless])
    tokenizer = arithmetic().new_model()[1]
    stop = tokenizer.decode(endless[0].tokens[1:3])
    params = SamplingParams(temperature=0.8, max_tokens=10, stop=stop)
    [stopped, *_] = free.generate(PROMPTS, 1, params, seed=0)
    assert (stopped.tokens, stopped.finish_reason) == (endless[0].tokens[:3], "stop")


def test_raw_logprobs_mode_raises(model_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with (
        serving(model_path) as (url, _),
        pytest.raises(ValueError, match="start it with --logprobs-mode processed_logprobs"),
    ):
        engine_of(model, url, tmp_path, [3])


# ------------------------------------------------------------------------------------- in a run


def test_killed_server_costs_no_step(model_path, tmp_path):
    with serving(model_path, *LORA, *PROCESSED) as (url, server):

        class Kill(Callback):
            def on_step(self, trainer: Any, metrics: Any) -> None:
                if trainer.state.step == 2:
                    os.killpg(server.pid, 9)
                    server.wait()

        run = trainer(model_path, url, tmp_path, use_peft=True, callbacks=[Kill()])
        with pytest.raises(RolloutError, match=rf"(?s){url} gave no answer.*step-00000002"):
            run.train()
    with serving(model_path, *LORA, *PROCESSED) as (url, _):
        run = trainer(model_path, url, tmp_path, use_peft=True)
        run.train(resume_from_checkpoint=True)
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("use_peft", [True, False])
def test_run_ahead_on_two_servers_outlives_one(use_peft, model_path, tmp_path, caplog):
    """The weights of a step are those of its rule, on both servers and on the one that is left.
    With an adapter one is killed between two steps, without in the middle of a transfer.
    """
    flags = [*(LORA if use_peft else []), *PROCESSED]
    with serving(model_path, *flags) as (url, server), serving(model_path, *flags) as (other, _):
        weights: list[dict[str, torch.Tensor]] = []

        def kill() -> None:
            if server.poll() is None and run.state.step == 2:
                os.killpg(server.pid, 9)
                server.wait()

        class Kill(Callback):
            def on_step_begin(self, trainer: Any) -> None:
                own = trainer.model.named_parameters()
                weights.append({name: p.detach().clone() for name, p in own})
                if use_peft:
                    kill()

        options = {"rollout_ahead": 1, "sampler_correction": "sequence_truncate"}
        run = trainer(
            model_path, (url, other), tmp_path, use_peft=use_peft, callbacks=[Kill()], **options
        )
        first = run.sampler.engine.servers[0]  # type: ignore[attr-defined]
        name_version = first._name_version

        def begin(version: str) -> None:
            name_version(version)
            if version.startswith(UNFINISHED):
                kill()

        first._name_version = begin
        gaps, learn = [], run.learn

        def check(batch: Any, meter: Any) -> Any:
            run.model.load_state_dict(weights[max(0, run.state.step - 1)], strict=False)
            scored = run.learner.backend(batch).logprobs.detach()
            gaps.append((scored - batch.sampler_logprobs).abs()[batch.action_mask].max().item())
            run.model.load_state_dict(weights[-1], strict=False)
            return learn(batch, meter)

        run.learn = check  # type: ignore[method-assign]
        run.train()
    assert max(gaps) < 1e-4
    assert [line["sampling/staleness"] for line in run.history] == [0, 1, 1, 1]
    assert any(url in message and "left out" in message for message in caplog.messages)
