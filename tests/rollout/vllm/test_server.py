"""The engine of `vllm serve` against a server that fails; a real one is in tests/vllm."""

import gc
import hashlib
import importlib.util
import itertools
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from rlhf_pg.boundary import http
from rlhf_pg.rollout import Request, RolloutError, SamplingParams
from rlhf_pg.rollout.vllm import nccl as sender
from rlhf_pg.rollout.vllm.handover import published_weights
from rlhf_pg.rollout.vllm.in_process import VllmEngine
from rlhf_pg.rollout.vllm.server import VllmServerEngine
from tests.rollout.vllm.fake_vllm import FakeVllm, digests_of, joined
from tests.tiny import adapter, stir, tiny_model

PARAMS = SamplingParams(temperature=0.5, max_tokens=6)
COMPLETIONS = "/v1/completions"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    monkeypatch.setattr(http, "PAUSE", 0.0)
    server = FakeVllm()
    yield server
    server.close()


def engine_of(fake: FakeVllm, path: Path, model: Any = None, **options: Any) -> VllmServerEngine:
    model = model or tiny_model("llama")
    return VllmServerEngine(model, [3, 7], fake.url, path / "sync", **options)


def reloaded(fake: FakeVllm) -> list[dict[str, Any]]:
    """Grows by the weights that the server is told to load."""
    loaded: list[dict[str, Any]] = []

    def reload(body: Any) -> None:
        assert body["method"] == "reload_weights"
        loaded.append(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors"))

    fake.answers["/collective_rpc"] = reload
    return loaded


def test_completions_match_server_answer_in_prompt_order(fake, tmp_path):
    engine = engine_of(fake, tmp_path)
    completions = engine.generate([[5], [8, 9]], 12, PARAMS, seed=0)
    for completion in completions:
        tokens = completion.tokens
        assert completion.logprobs == [-2.0] * len(tokens)
        assert not {3, 7} & set(tokens[:-1])
        ended = tokens[-1] in (3, 7)
        assert (completion.finish_reason == "stop") == ended
        assert ended or len(tokens) == 6
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    backward = engine.generate([[8, 9], [5]], 12, PARAMS, seed=0, prompt_ids=[1, 0])
    assert backward == completions[12:] + completions[:12]
    other = engine.generate([[5], [8, 9]], 12, PARAMS, seed=1)
    assert other != completions


def test_request_sends_own_position_and_token_limit(fake, tmp_path):
    engine, seeds = engine_of(fake, tmp_path), []
    for position, samples in ((0, (4,)), (1, (4,)), (0, (5,))):
        request = Request(
            tokens=[5, 6], prompt_index=2, samples=samples, position=position, max_tokens=2
        )
        with engine.weights_synced(), engine.session(PARAMS, seed=0) as session:
            session.add(request)
            while not session.idle:
                for finished in session.step():
                    assert finished.request is request
                    assert finished.sample == samples[0]
                    assert len(finished.completion.tokens) <= 2
        [*_, last] = [body for path, body in fake.asked if path == COMPLETIONS]
        assert last["max_tokens"] == 2
        seeds.append(last["seed"])
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ([], PARAMS, "prompt 1 is empty"),
        ([5] * 35, PARAMS, r"35 tokens; with max_tokens 6 .* longest sequence .* of 40"),
        ([5], SamplingParams(temperature=0.001), "temperature must be 0 or at least 0.01"),
    ],
)
def test_input_vllm_would_silently_change_raises(fake, tmp_path, prompt, params, said):
    with pytest.raises(ValueError, match=said):
        engine_of(fake, tmp_path).generate([[5], prompt], 1, params, seed=0)


def test_weights_are_loaded_once_per_sync(fake, tmp_path):
    engine, loaded = engine_of(fake, tmp_path, model := tiny_model("llama")), reloaded(fake)
    for _ in range(2):
        stir(model)
        with engine.weights_synced():
            engine.generate([[5]], 1, PARAMS, seed=0)
            engine.generate([[5]], 1, PARAMS, seed=0)
        assert loaded[-1]["model.norm.weight"].equal(model.model.norm.weight)
    assert len(loaded) == fake.count("/reset_prefix_cache") == 2
    [own] = (tmp_path / "sync").iterdir()
    assert not list(own.iterdir())


def nothing(held: dict[str, Tensor], old: dict[str, Tensor]) -> None:
    """A right hand-over."""


def stale(held: dict[str, Tensor], old: dict[str, Tensor]) -> None:
    held["model.layers.1.mlp.down_proj.weight"] = old["model.layers.1.mlp.down_proj.weight"]


def one_part_stale(held: dict[str, Tensor], old: dict[str, Tensor]) -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    rows = len(held[name])
    held[name] = torch.cat([held[name][: rows // 2], old[name][rows // 2 :]])


def scaled(held: dict[str, Tensor], old: dict[str, Tensor]) -> None:
    held["model.layers.1.mlp.gate_up_proj.weight"] *= 1.01


def replica_stale(held: dict[str, Tensor], old: dict[str, Tensor]) -> None:
    held["dp1:pp0:pcp0:tp0:model.norm.weight"] = old["model.norm.weight"]


def head_not_updated(held: dict[str, Tensor], old: dict[str, Tensor]) -> None:
    held["lm_head.weight"] = old["lm_head.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fault", [nothing, stale, one_part_stale, scaled, replica_stale, head_not_updated]
)
def test_weights_that_a_server_holds_are_those_it_was_given(fake, tmp_path, fault, dtype, caplog):
    model = tiny_model("llama")
    engine = engine_of(fake, tmp_path, model)
    caplog.set_level("INFO", "rlhf_pg")

    def old() -> dict[str, Tensor]:
        weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
        return joined({name: tensor.clone() for name, tensor in weights.items()})

    before = old()
    stir(model)

    def reload(body: Any) -> None:
        fake.held = old()
        fault(fake.held, before)

    fake.answers["/collective_rpc"] = reload
    if fault is nothing:
        assert engine.generate([[5]], 1, PARAMS, seed=0)
        assert f"in {len(before)} of {len(before)} tensors" in caplog.text
        return
    with pytest.raises(RolloutError, match=f"given, in 1 of {len(before)} tensors"):
        engine.generate([[5]], 1, PARAMS, seed=0)
    assert not prompts_of(fake)  # nothing is sampled


NORM = "dp0:pp0:pcp0:tp0:model.norm.weight"
TRANSPOSED = "dp0:pp0:pcp0:tp0:transformer.h.0.attn.c_attn.weight"


@pytest.mark.parametrize(
    ("arch", "held"),
    [
        ("llama", {NORM: "a1", NORM.replace("tp0", "tp1"): "b2"}),
        ("llama", {NORM: "a1", f"{NORM}_scale": "b2"}),
        ("llama", {NORM: hashlib.sha256(b"").hexdigest()}),
        ("gpt2", {TRANSPOSED: "a1"}),
        ("llama", None),
    ],
)
def test_weights_that_cannot_be_compared_are_counted(fake, tmp_path, caplog, arch, held):
    """Split over GPUs, quantized, packed for a CPU, transposed, or by a server before 0.32."""
    caplog.set_level("INFO", "rlhf_pg")
    answer = (200, {"checksums": held}) if held else (404, {"detail": "Not Found"})
    fake.answers["/weight_checker"] = lambda body: answer
    engine = engine_of(fake, tmp_path, tiny_model(arch))
    assert engine.generate([[5]], 1, PARAMS, seed=0)
    assert f"in 0 of {len(held or {})} tensors" in caplog.text


def test_user_files_in_sync_directory_are_kept(fake, tmp_path):
    theirs, elsewhere = tmp_path / "sync" / "policy", tmp_path / "elsewhere"
    theirs.mkdir(parents=True)
    elsewhere.mkdir()
    (theirs / "model.safetensors").write_text("years of work")
    engine = engine_of(fake, tmp_path)
    engine.generate([[5]], 1, PARAMS, seed=0)
    assert [path.read_text() for path in theirs.iterdir()] == ["years of work"]
    shutil.rmtree(theirs)
    theirs.symlink_to(elsewhere)
    engine.generate([[5]], 1, PARAMS, seed=0)
    assert theirs.is_symlink()
    assert not list(elsewhere.iterdir())


def test_runs_share_sync_directory_and_clean_up(fake, tmp_path):
    engines, places = [engine_of(fake, tmp_path) for _ in range(2)], set()
    fake.answers["/collective_rpc"] = lambda body: places.add(body["kwargs"]["weights_path"])
    with engines[0].weights_synced(), engines[1].weights_synced():
        owns = list((tmp_path / "sync").iterdir())
    assert len(places) == len(owns) == 2
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in [tmp_path / "sync", *owns])
    child = os.fork()
    if child == 0:
        engines.clear()
        os._exit(0)
    os.waitpid(child, 0)
    assert sorted((tmp_path / "sync").iterdir()) == sorted(owns)
    engines.clear()
    gc.collect()
    assert not list((tmp_path / "sync").iterdir())


def test_unwritable_sync_directory_is_one_error(fake, tmp_path):
    (tmp_path / "sync").write_text("a file")
    with pytest.raises(RolloutError, match=r"vllm_sync_directory: .*sync .*choose another"):
        engine_of(fake, tmp_path).generate([[5]], 1, PARAMS, seed=0)


def test_adapter_gets_new_name_each_time(fake, tmp_path):
    model = get_peft_model(tiny_model("llama"), adapter())
    engine = engine_of(fake, tmp_path, model)
    for loads in (1, 2):
        stir(model)
        engine.generate([[5]], 1, PARAMS, seed=0)
        assert fake.count("/v1/load_lora_adapter") == loads
    assert len(fake.models) == 2  # the base, and the newest
    [*_, (_, load)] = [asked for asked in fake.asked if asked[0] == "/v1/load_lora_adapter"]
    assert fake.models[1] == load["lora_name"] == fake.asked[-1][1]["model"]
    saved = load_file(Path(load["lora_path"]) / "adapter_model.safetensors")
    own = {name.replace(".default", ""): p for name, p in model.named_parameters()}
    assert all(tensor.equal(own[name]) for name, tensor in saved.items())
    [own] = (tmp_path / "sync").iterdir()
    assert list(own.iterdir()) == [Path(load["lora_path"])]


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
def test_other_rank_knows_the_version_without_loading(fake, tmp_path, adapted):
    model = stir(get_peft_model(tiny_model("llama"), adapter())) if adapted else None
    main, other = (engine_of(fake, tmp_path, model, is_main=here) for here in (True, False))
    with main.weights_synced(), other.weights_synced():
        other.agree(lambda own: [main.version if isinstance(own, str) else own, own])
        assert other.generate([[5]], 2, PARAMS, 0) == main.generate([[5]], 2, PARAMS, 0)
    assert fake.count("/v1/load_lora_adapter" if adapted else "/collective_rpc") == 1


def test_raw_logprobs_mode_raises(fake, tmp_path):
    fake.raw = True
    with pytest.raises(ValueError, match=f"{fake.url}.*--logprobs-mode processed_logprobs"):
        engine_of(fake, tmp_path)


NOT_FOUND = (404, {"detail": "Not Found"})


@pytest.mark.fault(58, "what it says of itself is one error")
@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("/version", (200, {"version": "0.34.0"}), "is version 0.34.0: use .*>=0.28,<0.34"),
        ("/version", NOT_FOUND, "vllm_server_base_url: no vLLM server at"),
        ("/version", (200, b"<html>"), "vllm_server_base_url: no vLLM server at"),
        ("/server_info", NOT_FOUND, "VLLM_SERVER_DEV_MODE=1.*use_peft"),
        ("/server_info", (200, {}), "KeyError"),
        ("/v1/models", (200, {"data": []}), "IndexError"),
        (COMPLETIONS, (200, {"choices": []}), "IndexError"),
    ],
)
def test_server_that_cannot_be_used_is_refused(fake, tmp_path, path, answer, said):
    fake.answers[path] = lambda body: answer
    with pytest.raises((ValueError, RolloutError), match=said):
        engine_of(fake, tmp_path)


@pytest.mark.parametrize(("its", "ours"), [("fp8_per_tensor", None), (None, "fp8"), ("awq", "fp8")])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
def test_server_that_computes_otherwise_is_refused(fake, tmp_path, its, ours, adapted):
    model = get_peft_model(tiny_model("llama"), adapter()) if adapted else None
    fake.quantization = its
    with pytest.raises(ValueError, match=f"vllm_quantization is {ours}.*--quantization {its}"):
        engine_of(fake, tmp_path, model, quantization=ours)
    engine_of(fake, tmp_path, model, quantization=its and ("fp8" if "fp8" in its else None))


def test_server_without_weight_loading_takes_adapter(fake, tmp_path):
    fake.answers["/server_info"] = lambda body: NOT_FOUND
    engine_of(fake, tmp_path, get_peft_model(tiny_model("llama"), adapter()))


def test_tied_head_on_cpu_server_raises(fake, tmp_path):
    tied = tiny_model("llama", tie_word_embeddings=True)
    engine_of(fake, tmp_path, tied)
    fake.device = "cpu"
    engine_of(fake, tmp_path, tiny_model("llama", tie_word_embeddings=False))
    with pytest.raises(ValueError, match="head that is tied"):
        engine_of(fake, tmp_path, tied)


@pytest.mark.parametrize(("status", "times"), [(404, 1), (500, 3)])
def test_rejected_adapter_raises_with_explanation(fake, tmp_path, status, times):
    engine = engine_of(fake, tmp_path, get_peft_model(tiny_model("llama"), adapter()))
    answer = {"error": {"message": "LoRA rank 2 is greater than max_lora_rank 1."}}
    fake.answers["/v1/load_lora_adapter"] = lambda body: (status, answer)
    with pytest.raises(RolloutError, match=r"rank 2 is greater.*--enable-lora.*vllm_sync_dir"):
        engine.generate([[5]], 1, PARAMS, seed=0)
    assert fake.count("/v1/load_lora_adapter") == times


def test_busy_server_raises(fake, tmp_path):
    fake.answers["/reset_prefix_cache"] = lambda body: (200, {"success": False})
    with pytest.raises(RolloutError, match="keys and values of old weights"):
        engine_of(fake, tmp_path).generate([[5]], 1, PARAMS, seed=0)


def short(**changes: Any) -> dict[str, Any]:
    whole = {
        "token_ids": [5] * 6,
        "logprobs": {"token_logprobs": [-1.0] * 6},
        "finish_reason": "length",
    }
    return {"model": "base", "choices": [whole | changes]}


def logprobs(*numbers: Any) -> dict[str, Any]:
    return {"token_ids": [5] * len(numbers), "logprobs": {"token_logprobs": list(numbers)}}


FAULTS = {
    "status 429: slow down": (429, b"slow down"),
    "no answer": (200, b"{"),  # cut off within the body
    "KeyError": (200, {"id": "cmpl-1"}),
    "an answer of 'older'": (200, {"model": "older"}),
    "not enough values": (200, {"model": "base", "choices": []}),
    "5 of 6 tokens, 6 log-prob": (200, short(token_ids=[5] * 5)),
    "'length' after 4 of 6 tokens": (200, short(**logprobs(*[-1.0] * 4))),
    "finish_reason 'abort'": (200, short(finish_reason="abort")),
    "after EOS, which is at 1": (200, short(token_ids=[5, 3, 5, 5, 5, 5])),
    "'length' after 6 of 6 tokens, the last 7": (200, short(token_ids=[5, 5, 5, 5, 5, 7])),
    "-inf is not a log-prob": (200, short(**logprobs(*[-1.0] * 5, float("-inf")))),
    "nan is not a log-prob": (200, short(**logprobs(*[-1.0] * 5, float("nan")))),
    "0.5 is not a log-prob": (200, short(**logprobs(*[-1.0] * 5, 0.5))),
    "OverflowError": (200, short(**logprobs(*[-1.0] * 5, 10**400))),
    "40 is not one of the model's 40 token ids": (200, short(token_ids=[5] * 5 + [40])),
    "-1 is not one of": (200, short(token_ids=[-1] + [5] * 5)),
    "5.0 is not one of": (200, short(token_ids=[5.0] * 6)),
    "True is not one of": (200, short(token_ids=[True] * 6)),
    "'555555' is not one of": (200, short(token_ids=["555555"] * 6)),
    r"status 500: \x1b[2J": (500, b"\x1b[2J"),
}


@pytest.mark.fault(57, "asked three times, then one error with address and remedy")
@pytest.mark.fault(58, "asked three times, then one error: none is trained on")
@pytest.mark.parametrize("said", FAULTS)
def test_transient_fault_is_retried_lasting_fault_is_one_error(fake, tmp_path, said):
    engine = engine_of(fake, tmp_path)
    expected = engine.generate([[5]], 1, PARAMS, seed=0)
    before, failures = fake.count(COMPLETIONS), [FAULTS[said]] * 2
    fake.answers[COMPLETIONS] = lambda body: failures.pop() if failures else None
    assert engine.generate([[5]], 1, PARAMS, seed=0) == expected
    assert fake.count(COMPLETIONS) == before + 3
    failures += [FAULTS[said]] * 4
    with pytest.raises(RolloutError) as error:
        engine.generate([[5]], 1, PARAMS, seed=0)
    assert fake.count(COMPLETIONS) == before + 6
    for part in (fake.url, said, "3 attempts", "restart it, and resume"):
        assert part in str(error.value)


def test_rejected_request_is_not_retried(fake, tmp_path):
    engine = engine_of(fake, tmp_path)
    before = fake.count(COMPLETIONS)
    fake.answers[COMPLETIONS] = lambda body: (400, {"error": {"message": "out of vocabulary"}})
    with pytest.raises(RolloutError, match=r"the server at .* refuses .*400: .*out of vocabulary"):
        engine.generate([[5]], 1, PARAMS, seed=0)
    assert fake.count(COMPLETIONS) == before + 1


@pytest.mark.fault(57, "given up after vllm_server_timeout")
def test_hanging_server_times_out(fake, tmp_path):
    engine = engine_of(fake, tmp_path, timeout=0.2)
    fake.answers[COMPLETIONS] = lambda body: time.sleep(0.5)
    with pytest.raises(RolloutError, match=r"no answer within 0\.2 s.*3 attempts"):
        engine.generate([[5]], 1, PARAMS, seed=0)


def drip(part: bytes) -> Any:
    def write(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n")
        for _ in range(15):
            handler.wfile.write(part)
            time.sleep(0.1)

    return write


@pytest.mark.fault(59, "given up after vllm_server_timeout")
@pytest.mark.parametrize("part", [b"X-More: 1\r\n", b"\r\n{"])
def test_endlessly_sending_server_times_out(fake, tmp_path, part):
    engine = engine_of(fake, tmp_path, timeout=0.3)
    fake.answers[COMPLETIONS] = lambda body: drip(part)
    with pytest.raises(RolloutError, match=r"no answer within 0\.3 s.*3 attempts"):
        engine.generate([[5]], 1, PARAMS, seed=0)


@pytest.mark.fault(59, "not followed")
def test_redirect_is_not_followed(fake, tmp_path):
    engine, other = engine_of(fake, tmp_path), FakeVllm()

    def elsewhere(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(307)
        handler.send_header("Location", f"{other.url}{COMPLETIONS}?token=S3CRET")
        handler.end_headers()

    fake.answers[COMPLETIONS] = lambda body: elsewhere
    with pytest.raises(RolloutError, match=r"status 307") as error:
        engine.generate([[5]], 1, PARAMS, seed=0)
    other.close()
    assert other.asked == []
    assert "S3CRET" not in str(error.value)


@pytest.mark.fault(60, "an adapter is there, and not loaded twice")
def test_adapter_loaded_despite_bad_answer_is_used(fake, tmp_path):
    engine = engine_of(fake, tmp_path, get_peft_model(tiny_model("llama"), adapter()))

    def load_and_say_nothing(body: Any) -> Any:
        if body["lora_name"] in fake.models:
            return 400, {"error": {"message": "it has already been loaded"}}
        fake.models.append(body["lora_name"])
        return 200, b"{"

    fake.answers["/v1/load_lora_adapter"] = load_and_say_nothing
    assert engine.generate([[5]], 1, PARAMS, seed=0)
    assert fake.count("/v1/load_lora_adapter") == 2


def test_abandoned_request_is_cancelled(fake, tmp_path):
    """The server hears of it, and stops."""
    engine, heard = engine_of(fake, tmp_path), threading.Event()

    def wait_for_the_end(handler: BaseHTTPRequestHandler) -> None:
        if handler.connection.recv(1) == b"":
            heard.set()

    fake.answers[COMPLETIONS] = lambda body: wait_for_the_end
    with engine.weights_synced(), engine.session(PARAMS, seed=0) as session:
        session.add(Request(tokens=[5], prompt_index=0))
        session.step()
    assert heard.wait(10)


def test_session_without_the_weights_is_refused(fake, tmp_path):
    """Else the server would sample from those of an earlier step, and nobody would know."""
    engine = engine_of(fake, tmp_path)
    with pytest.raises(RuntimeError, match="weights_synced"):
        engine.session(PARAMS, seed=0)
    again = pytest.raises(RuntimeError, match="already")
    with engine.weights_synced(), again, engine.weights_synced():
        pass


@pytest.mark.fault(57, "one error")
def test_unreachable_server_is_one_error(fake, tmp_path):
    engine = engine_of(fake, tmp_path)
    fake.close()
    with pytest.raises(RolloutError, match=f"{fake.url} gave no answer .*3 attempts"):
        engine.generate([[5]], 1, PARAMS, seed=0)
    with pytest.raises(RolloutError, match=f"{fake.url} gave no answer"):
        engine_of(fake, tmp_path)


@pytest.fixture
def two(fake: FakeVllm) -> Iterator[list[FakeVllm]]:
    other = FakeVllm()
    yield [fake, other]
    other.close()


def prompts_of(fake: FakeVllm) -> set[int]:
    asked = [body for path, body in fake.asked if path == COMPLETIONS]
    return {body["prompt"][0] for body in asked if "seed" in body}


def test_prompts_are_shared_out_by_index(two, tmp_path):
    alone = engine_of(two[0], tmp_path).generate([[5], [8], [9]], 2, PARAMS, 0)
    two[0].asked.clear()
    engine = VllmServerEngine(tiny_model("llama"), [3, 7], [x.url for x in two], tmp_path / "sync")
    assert engine.generate([[5], [8], [9]], 2, PARAMS, 0) == alone
    assert [prompts_of(fake) for fake in two] == [{5, 9}, {8}]
    assert all(fake.count("/collective_rpc") for fake in two)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
def test_servers_load_weights_at_the_same_time(two, tmp_path, adapted):
    """Each answers only once the other has been asked too."""
    model = get_peft_model(tiny_model("llama"), adapter()) if adapted else tiny_model("llama")
    path = "/v1/load_lora_adapter" if adapted else "/collective_rpc"
    both = threading.Barrier(2)

    def wait(body):
        with suppress(threading.BrokenBarrierError):  # of a later request of one server
            both.wait(timeout=10)

    engine = VllmServerEngine(model, [3, 7], [x.url for x in two], tmp_path / "sync")
    for fake in two:
        fake.answers[path] = wait
    assert engine.generate([[5], [8]], 1, PARAMS, 0)
    assert not both.broken


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
def test_server_that_dies_is_left_out(two, tmp_path, caplog, adapted):
    """Its prompts get the same ids elsewhere, in this batch and in the next ones."""
    model = get_peft_model(tiny_model("llama"), adapter()) if adapted else tiny_model("llama")
    engine = VllmServerEngine(model, [3, 7], [x.url for x in two], tmp_path / "sync")
    expected = engine.generate([[5], [8]], 4, PARAMS, 0)
    two[1].answers[COMPLETIONS] = lambda body: (500, b"EngineCore died")
    two[0].asked.clear()
    assert engine.generate([[5], [8]], 4, PARAMS, 0) == expected
    assert prompts_of(two[0]) == {5, 8}
    two[1].asked.clear()
    stir(model)
    assert engine.generate([[5], [8]], 4, PARAMS, 0) == expected  # by their seeds
    # What was cancelled may still arrive, but it is told of no new weights.
    assert {path for path, _ in two[1].asked} <= {COMPLETIONS}
    [warning] = caplog.messages
    assert two[1].url in warning
    two[0].close()
    with pytest.raises(RolloutError, match=two[0].url):
        engine.generate([[5], [8]], 1, PARAMS, 0)
    two[1].answers.clear()  # started again, without what it had been given
    two[1].models[1:] = []
    assert engine.generate([[5], [8]], 4, PARAMS, 0) == expected


def test_server_that_dies_with_new_weights_is_left_out(two, tmp_path):
    engine = VllmServerEngine(tiny_model("llama"), [3, 7], [x.url for x in two], tmp_path / "sync")
    two[0].answers["/collective_rpc"] = lambda body: (500, b"EngineCore died")
    assert engine.generate([[5], [8]], 1, PARAMS, 0)
    assert prompts_of(two[1]) == {5, 8}


def test_server_with_impossible_tokens_is_left_out(two, tmp_path):
    engine = VllmServerEngine(tiny_model("llama"), [3, 7], [x.url for x in two], tmp_path / "sync")
    expected = engine.generate([[5], [8]], 4, PARAMS, 0)
    two[0].answers[COMPLETIONS] = lambda body: (200, short(token_ids=[40] * 6))
    before = two[0].count(COMPLETIONS)
    assert engine.generate([[5], [8]], 4, PARAMS, 0) == expected
    assert two[0].count(COMPLETIONS) > before + 2


def test_certain_token_may_be_rounded_above_zero(fake, tmp_path):
    fake.version = "0.32.1"
    engine = engine_of(fake, tmp_path)
    fake.answers[COMPLETIONS] = lambda body: (200, short(**logprobs(*[1e-7] * 6)))
    [completion] = engine.generate([[5]], 1, PARAMS, seed=0)
    assert completion.logprobs == [1e-7] * 6


# ------------------------------------------------------------------------- versions of weights


def started_again(fake: FakeVllm) -> None:
    fake.instance = "b2"
    fake.weight_version = "default"
    fake.goes_on.set()


def taken_by_another_run(fake: FakeVllm) -> None:
    fake.weight_version = "another-policy-1"


LOST = [started_again, taken_by_another_run]


@pytest.mark.parametrize(
    ("lose", "adapted"),
    [(started_again, False), (taken_by_another_run, False), (taken_by_another_run, True)],
)
@pytest.mark.parametrize("version", ["0.28.0", "0.32.1"])
def test_answers_without_version_are_refused_after_weights_were_lost(
    fake, tmp_path, version, lose, adapted
):
    """Between two answers the server may have lost the weights of the step."""
    fake.version = version
    model = get_peft_model(tiny_model("llama"), adapter()) if adapted else None
    engine = engine_of(fake, tmp_path, model)
    synced = engine.weights_synced()
    synced.__enter__()
    engine.generate([[5]], 1, PARAMS, 0)
    lose(fake)
    with pytest.raises(RolloutError, match=f"{fake.url} was started again or got other weights"):
        synced.__exit__(None, None, None)


def test_server_without_versions_is_known_by_its_number(fake, tmp_path):
    """As others may speak that call themselves vLLM 0.28."""
    fake.version = "0.28.0"
    fake.has_versions = False
    engine = engine_of(fake, tmp_path)
    loaded = reloaded(fake)
    assert engine.generate([[5]], 1, PARAMS, 0)
    assert len(loaded) == 1
    synced = engine.weights_synced()
    synced.__enter__()
    started_again(fake)
    with pytest.raises(RolloutError, match=f"{fake.url} was started again"):
        synced.__exit__(None, None, None)
    adapted = engine_of(fake, tmp_path, get_peft_model(tiny_model("llama"), adapter()))
    assert adapted.generate([[5]], 1, PARAMS, 0)


def old_for_some_tokens(choice: dict[str, Any]) -> None:
    [span] = choice["weight_versions"]
    first = span | {"version": "default", "end": 1}
    choice["weight_versions"] = [first, span | {"start": 1}]


def hole(choice: dict[str, Any]) -> None:
    choice["weight_versions"][0]["start"] = 1


def some_tokens(choice: dict[str, Any]) -> None:
    choice["weight_versions"][0]["end"] -= 1


@pytest.mark.fault(58, "tokens of other weights are sampled elsewhere, by the versions of weights")
@pytest.mark.parametrize("fault", [*LOST, old_for_some_tokens, hole, some_tokens])
@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_of_other_weights_are_sampled_elsewhere(two, tmp_path, fault, ahead):
    bad = two[1]
    engine = VllmServerEngine(tiny_model("llama"), [3, 7], [x.url for x in two], tmp_path / "sync")
    expected = engine.generate([[5], [8]], 4, PARAMS, 0)

    def answer(body: Any) -> Any:
        if fault in LOST:
            fault(bad)
            return None
        status, answer = bad.on_v1_completions(body)
        fault(answer["choices"][0])
        return status, answer

    bad.answers[COMPLETIONS] = answer
    copied = engine.copy_weights() if ahead else None
    with engine.weights_synced(copied):
        assert engine.generate([[5], [8]], 4, PARAMS, 0) == expected
        assert engine.alive == engine.servers[:1]


def steps_of(fake: FakeVllm) -> list[Any]:
    paths = {
        "/pause": "pause",
        "/update_weight_version": "version",
        "/collective_rpc": "load",
        "/reset_prefix_cache": "reset",
        "/weight_checker": "check",
        "/resume": "resume",
        COMPLETIONS: "sample",
    }
    return [paths[path] for path, _ in fake.asked if path in paths]


@pytest.mark.parametrize("version", ["0.28.0", "0.32.1", "0.33.0"])
def test_weights_are_loaded_in_a_pause(fake, tmp_path, version):
    fake.version = version
    engine = engine_of(fake, tmp_path)
    fake.asked.clear()
    engine.generate([[5]], 1, PARAMS, 0)
    names = [body["new_version"] for path, body in fake.asked if "weight_version" in path]
    assert names == [f"unfinished-{engine.version}", engine.version]
    assert steps_of(fake) == [
        "pause", "version", "load", "reset", "check", "version", "resume", "sample"
    ]  # fmt: skip


BROKEN, LOST_ANSWER = (500, b"CUDA error"), (200, b"{")


@pytest.mark.parametrize(
    ("path", "answer", "copies"),  # only the first copy is checked
    [
        ("/pause", BROKEN, 1),
        ("/collective_rpc", LOST_ANSWER, 1),
        ("/weight_checker", BROKEN, 0),
        ("/resume", BROKEN, 1),
    ],
)
def test_server_that_fails_in_a_transfer_is_given_weights_again(
    fake, tmp_path, path, answer, copies
):
    """It samples nothing before: it stays paused, and no version is that of the run."""
    model = tiny_model("llama")
    engine = engine_of(fake, tmp_path, model)
    engine.copies = copies
    fake.answers[path] = lambda body: answer
    with pytest.raises(RolloutError, match=f"{fake.url} gave .*, to {path}"):
        engine.generate([[5]], 1, PARAMS, 0)
    assert fake.weight_version != engine.version or not fake.goes_on.is_set()
    fake.answers.clear()
    loaded = reloaded(fake)
    fake.asked.clear()
    resumed = engine_of(fake, tmp_path, model)
    resumed.copies = 1
    assert resumed.generate([[5]], 1, PARAMS, 0)
    was_unfinished = path in ("/collective_rpc", "/weight_checker")
    assert ("check" in steps_of(fake)) == was_unfinished
    assert fake.weight_version == resumed.version
    assert engine.generate([[5]], 1, PARAMS, 0)
    assert fake.weight_version == engine.version
    assert len(loaded) == 2


@pytest.mark.parametrize("has_versions", [True, False])
def test_server_that_could_not_load_has_to_be_started_again(fake, tmp_path, has_versions):
    """vLLM would cut off a second load by what it has kept of the first."""
    fake.has_versions = has_versions
    fake.version = "0.33.0" if has_versions else "0.28.0"
    engine = engine_of(fake, tmp_path)
    fake.answers["/collective_rpc"] = lambda body: BROKEN
    with pytest.raises(RolloutError, match=f"{fake.url} gave status 500: CUDA error"):
        engine.generate([[5]], 1, PARAMS, 0)
    assert fake.count("/collective_rpc") == 1
    fake.answers.clear()
    fake.asked.clear()
    with pytest.raises(RolloutError, match=f"{fake.url} failed to load weights"):
        engine.generate([[5]], 1, PARAMS, 0)
    assert not steps_of(fake)
    if has_versions:  # another run knows it too
        with pytest.raises(RolloutError, match=f"{fake.url} failed to load weights"):
            engine_of(fake, tmp_path)
    started_again(fake)
    assert engine.generate([[5]], 1, PARAMS, 0)


def test_two_runs_on_one_server_end_one_of_them(fake, tmp_path):
    """Both are in the middle of a transfer: whose weights it holds is not known."""
    first, second = (engine_of(fake, tmp_path) for _ in range(2))

    def load(body: Any) -> None:
        fake.answers.clear()
        second.generate([[5]], 1, PARAMS, 0)

    fake.answers["/collective_rpc"] = load
    with pytest.raises(RolloutError, match=f"{fake.url} was started again, or got other weights"):
        first.generate([[5]], 1, PARAMS, 0)


@pytest.mark.fault(57, "left out, also in the middle of a transfer")
@pytest.mark.parametrize("step", ["/pause", "/collective_rpc", "/update_weight_version"])
def test_server_killed_in_a_transfer_is_left_out(two, tmp_path, step):
    model = tiny_model("llama")
    engine = VllmServerEngine(model, [3, 7], [x.url for x in two], tmp_path / "sync")
    expected = engine.generate([[5], [8]], 4, PARAMS, 0)
    two[1].answers[step] = lambda body: (two[1].close(), (200, b"{"))[1]
    stir(model)
    assert engine.generate([[5], [8]], 4, PARAMS, 0) == expected  # by their seeds
    assert engine.alive == engine.servers[:1]


def test_server_started_again_in_a_transfer_is_left_out(two, tmp_path):
    """Its successor was told the version of weights that it never got."""
    engine = VllmServerEngine(tiny_model("llama"), [3, 7], [x.url for x in two], tmp_path / "sync")
    two[1].answers["/reset_prefix_cache"] = lambda body: started_again(two[1])
    assert engine.generate([[5], [8]], 4, PARAMS, 0)
    assert engine.alive == engine.servers[:1]


CHILD = """
import sys
from pathlib import Path
from rlhf_pg.rollout import SamplingParams
from rlhf_pg.rollout.vllm.server import VllmServerEngine
from tests.tiny import tiny_model
engine = VllmServerEngine(tiny_model("llama"), [3, 7], sys.argv[1], Path(sys.argv[2]))
engine.generate([[5]], 1, SamplingParams(max_tokens=6), 0)
"""


def test_run_killed_in_a_transfer_can_be_started_again(fake, tmp_path):
    loading = threading.Event()
    killed = threading.Event()

    def load(body: Any) -> None:
        loading.set()
        killed.wait(30)

    fake.answers["/collective_rpc"] = load
    child = subprocess.Popen([sys.executable, "-c", CHILD, fake.url, str(tmp_path / "sync")])
    assert loading.wait(60)
    child.kill()
    child.wait()
    killed.set()
    fake.answers.clear()
    assert fake.weight_version.startswith("unfinished")
    engine = engine_of(fake, tmp_path)
    assert engine.generate([[5]], 1, PARAMS, 0)
    assert fake.weight_version == engine.version


# ------------------------------------------------------------------------- weights by NCCL


class FakeNccl(ModuleType):
    """`nccl.core`, with wires to servers in place of GPUs."""

    SUM = "sum"

    def __init__(self, servers: list[FakeVllm]) -> None:
        super().__init__("nccl.core")
        self.servers = servers
        self.numbers = itertools.count(1)
        self.said: list[Any] = []
        self.Communicator = SimpleNamespace(init=self.init)
        self.is_over = False

    def get_unique_id(self) -> bytes:
        return bytes([next(self.numbers)]) * 128

    def init(self, ranks: int, rank: int, identity: bytes) -> Any:
        """Waits for a server that has been told of it."""
        assert (ranks, rank) == (3, 0)
        joined = None
        while joined is None and not self.is_over:
            for server in self.servers:
                if list(server.identities.queue)[-1:] == [identity]:
                    joined = server
            time.sleep(0.01)

        def allreduce(one: Tensor, out: Tensor, op: str) -> None:
            assert (one.numel(), op) == (1, "sum")
            self.said.append("joined")

        return SimpleNamespace(
            allreduce=allreduce,
            broadcast=lambda packed, out, root, stream: joined.wire.put(packed.clone()),
            abort=lambda: self.said.append("aborted"),
        )


@pytest.fixture
def nccl(two, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    monkeypatch.setattr(sender, "CHUNK", 3000)  # bytes: many broadcasts, some of one tensor
    fake = FakeNccl(two)
    monkeypatch.setitem(sys.modules, "nccl", ModuleType("nccl"))
    monkeypatch.setitem(sys.modules, "nccl.core", fake)
    for server in two:
        server.backend = "nccl"
    yield fake
    fake.is_over = True


def sending(two: list[FakeVllm], path: Path, model: Any) -> VllmServerEngine:
    """As on a GPU."""
    engine = VllmServerEngine(model, [3, 7], [x.url for x in two], path / "sync")
    assert not engine.sends  # the model is on a CPU
    assert all(server.receives for server in engine.servers)
    engine.sends = True
    return engine


def test_weights_are_sent_from_gpu_to_gpu(two, nccl, tmp_path):
    model = tiny_model("llama").to(torch.bfloat16)
    model.model.norm.float()
    engine = sending(two, tmp_path, model)
    for fake in two:
        fake.on_weight_checker = lambda body, own=fake: (  # type: ignore[method-assign]
            200,
            {"checksums": digests_of(joined(own.received))},
        )
        fake.asked.clear()
    for copies in (1, 2):
        stir(model)
        assert engine.generate([[5], [8]], 2, PARAMS, 0)
        for fake in two:
            given = dict(published_weights(model))
            assert fake.received.keys() == given.keys()
            assert all(fake.received[name].equal(given[name]) for name in given)
            assert fake.wire.empty()
            assert fake.count("/update_weights") > 5 * copies
            assert fake.weight_version == engine.version
    assert nccl.said == ["joined", "joined"]  # once for each server
    paths = [path for path, _ in two[0].asked if path not in ("/update_weights", COMPLETIONS)]
    assert paths[:10] == [
        "/weight_info", "/pause", "/update_weight_version", "/get_world_size",
        "/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update",
        "/reset_prefix_cache", "/weight_checker", "/weight_info",
    ]  # fmt: skip
    assert not list((tmp_path / "sync").glob("*/*"))


def test_server_killed_in_a_broadcast_is_left_out(two, nccl, tmp_path):
    model = tiny_model("llama")
    engine = sending(two, tmp_path, model)
    for fake in two:
        fake.on_weight_checker = lambda body: (404, {})  # type: ignore[method-assign]
    expected = engine.generate([[5], [8]], 4, PARAMS, 0)
    two[1].answers["/update_weights"] = lambda body: (two[1].close(), (200, b"{"))[1]
    stir(model)
    assert engine.generate([[5], [8]], 4, PARAMS, 0) == expected  # by their seeds
    assert engine.alive == engine.servers[:1]
    assert nccl.said[2:] == ["aborted"]
    assert two[1].count("/update_weights") <= two[0].count("/update_weights")


def test_server_that_cannot_join_is_one_error(two, nccl, tmp_path):
    engine = sending(two[:1], tmp_path, tiny_model("llama"))
    two[0].answers["/init_weight_transfer_engine"] = lambda body: (500, b"no NCCL")
    with pytest.raises(RolloutError, match=f"{two[0].url} gave status 500: no NCCL"):
        engine.generate([[5]], 1, PARAMS, 0)
    assert two[0].count("/init_weight_transfer_engine") == 1  # a second would wait for ever


def test_adapter_on_replaced_weights_is_refused(fake, tmp_path):
    engine_of(fake, tmp_path).generate([[5]], 1, PARAMS, 0)
    adapted = get_peft_model(tiny_model("llama"), adapter())
    with pytest.raises(ValueError, match=f"{fake.url} were replaced by another run"):
        engine_of(fake, tmp_path, adapted)
    started_again(fake)
    engine = engine_of(fake, tmp_path, adapted)
    with engine.weights_synced():
        assert engine.generate([[5]], 1, PARAMS, 0)
        taken_by_another_run(fake)
        with pytest.raises(RolloutError, match="version 'another-policy-1', not default"):
            engine.generate([[5]], 1, PARAMS, 0)


def test_weights_copied_before_an_update_are_those_loaded_later(fake, tmp_path):
    engine, loaded = engine_of(fake, tmp_path, model := tiny_model("llama")), reloaded(fake)
    before, copied = model.model.norm.weight.clone(), engine.copy_weights()
    stir(model)
    second = engine.copy_weights()
    for one in (copied, second):
        with engine.weights_synced(one):
            engine.generate([[5]], 1, PARAMS, 0)
    assert [x["model.norm.weight"].equal(before) for x in loaded] == [True, False]
    assert loaded[1]["model.norm.weight"].equal(model.model.norm.weight)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="it is installed")
def test_missing_vllm_is_one_error():
    with pytest.raises(ValueError, match=r'needs vLLM.*pip install "rlhf-pg\[vllm\]"'):
        VllmEngine(tiny_model("llama"), [3], None)
