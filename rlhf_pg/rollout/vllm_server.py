"""The engine that samples on a stock `vllm serve`, which is told of new weights by path."""

import hashlib
import queue
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import PreTrainedModel

from rlhf_pg.rollout.engine import (
    Completion,
    Finished,
    Request,
    RolloutEngine,
    RolloutError,
    SamplingParams,
)
from rlhf_pg.rollout.handover import has_experts
from rlhf_pg.rollout.http import Refused, Server
from rlhf_pg.rollout.sampling import request_seed
from rlhf_pg.rollout.vllm_requests import check_version, completion, options, room

CONNECTIONS = 256  # requests that a server is given at once
MOMENT = 0.05  # seconds that a step waits for an answer
REMEDY = "look into its log, start it again, and resume"


class VllmServerEngine(RolloutEngine):
    """Samples on a server, which reads the weights of each `synced` from a directory.

    An adapter is loaded beside the server's own model, which has to be the one it was made for,
    under a name made from its values: so every process knows the name, and keys and values that
    the server has kept are those of these weights. Of a model without an adapter the server's own
    weights are replaced.

    Args:
        model: the policy; its weights are looked at in `synced` alone.
        eos_token_ids: each ends a completion.
        url: of the server, without a path.
        directory: for weights, under a path that the server sees too.
        timeout: seconds for one answer.
        is_main: this process hands over the weights; the others have to wait until it has.

    Raises:
        ValueError: the server is no vLLM of a known version, or was started without an option that
            is needed.
        RolloutError: there is no server.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        url: str,
        directory: Path,
        timeout: float = 300.0,
        is_main: bool = True,
    ) -> None:
        self.model, self.eos_token_ids = model, list(eos_token_ids)
        self.server = Server(url, timeout, REMEDY)
        self.directory, self.is_main = directory.absolute(), is_main
        check_version(self._version(), f"the server at {url}")
        [served, *_] = self.server.get("/v1/models")["data"]
        self.served: str = served["id"]
        self.max_model_length: int = served["max_model_len"]
        self.name = self.served  # of the weights to sample from
        self._check_logprobs()
        if not isinstance(model, PeftModel):
            self._check_replaceable(model)

    def session(self, params: SamplingParams, seed: int) -> closing["_Session"]:
        """See `RolloutEngine`.

        Raises:
            ValueError: a temperature that vLLM would change.
            RolloutError: the server fails.
            FloatingPointError: the model's log-probabilities are NaN.
        """
        return closing(_Session(self, params, seed))

    # ------------------------------------------------------------------------------- the weights

    @contextmanager
    def _taking_over(self) -> Iterator[None]:
        if not isinstance(self.model, PeftModel):
            if self.is_main:
                self._replace_weights()
        elif (name := f"policy-{_digest(self.model)}") != self.name:
            if self.is_main:
                self._load_adapter(self.model, name)
            self.name = name
        yield

    def _load_adapter(self, model: PeftModel, name: str) -> None:
        place = self.directory / name
        model.save_pretrained(place)
        if name not in self._models():
            try:
                self.server.post(
                    "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(place)}
                )
            except RolloutError as error:
                raise RolloutError(
                    f"{error}. The server needs --enable-lora, a --max-lora-rank that is not below "
                    f"lora_r, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, and to see "
                    f"{place} (vllm_sync_directory)"
                ) from error
        if self.name != self.served:
            # It is only memory: a server that has lost the old one has done what is asked.
            with suppress(Refused):
                self.server.post("/v1/unload_lora_adapter", {"lora_name": self.name})
            shutil.rmtree(self.directory / self.name, ignore_errors=True)

    def _replace_weights(self) -> None:
        place = self.directory / "policy"
        self.model.save_pretrained(place)
        try:
            self.server.post(
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": str(place)}},
            )
        except RolloutError as error:
            raise RolloutError(f"{error}. It has to see {place} (vllm_sync_directory)") from error
        shutil.rmtree(place)
        if not self.server.post("/reset_prefix_cache", {})["success"]:
            raise RolloutError(
                f"the server at {self.server.url} keeps keys and values of old weights, since it "
                "is at work for others: it has to be for this run alone"
            )

    # ------------------------------------------------------------------------ what has to be true

    def _version(self) -> str:
        try:
            return str(self.server.get("/version")["version"])
        except (Refused, TypeError, LookupError) as error:
            raise ValueError(
                f"vllm_server_base_url: at {self.server.url} is no vLLM ({error!r})"
            ) from error

    def _models(self) -> list[str]:
        return [model["id"] for model in self.server.get("/v1/models")["data"]]

    def _check_logprobs(self) -> None:
        """Raw log-probabilities do not depend on the temperature, which may be up to 2."""
        cold, hot = (self._likeliest(temperature) for temperature in (0.1, 2.0))
        if abs(cold - hot) < 1e-3:
            raise ValueError(
                f"the server at {self.server.url} gives raw log-probabilities, not those of the "
                "distribution sampled from: start it with --logprobs-mode processed_logprobs"
            )

    def _likeliest(self, temperature: float) -> float:
        """Log-probability of the likeliest token after an arbitrary one."""
        body = {"model": self.served, "prompt": [self.eos_token_ids[0]], "max_tokens": 1}
        body |= {"temperature": temperature, "logprobs": 1}

        def read(answer: Any) -> float:
            return float(max(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()))

        return self.server.ask("/v1/completions", body, read)

    def _check_replaceable(self, model: PreTrainedModel) -> None:
        try:
            info = self.server.get("/server_info?config_format=json")["vllm_config"]
        except Refused as error:
            raise ValueError(
                f"the server at {self.server.url} does not take weights: start it with "
                "VLLM_SERVER_DEV_MODE=1 in its environment, or train an adapter (use_peft)"
            ) from error
        on_cpu = "cpu" in str(info["device_config"])
        if on_cpu and model.config.tie_word_embeddings:
            raise ValueError(
                f"the server at {self.server.url} runs on a CPU, where vLLM does not replace a "
                "head that is tied to the input: train an adapter (use_peft), or use "
                "rollout_engine vllm"
            )
        if on_cpu and has_experts(model):
            raise ValueError(
                f"the server at {self.server.url} runs on a CPU, where vLLM does not replace the "
                "weights of experts: set rollout_engine to native"
            )


class _Session:
    """Every sample is an HTTP request in a thread of its own."""

    def __init__(self, engine: VllmServerEngine, params: SamplingParams, seed: int) -> None:
        self._engine, self._params, self._seed = engine, params, seed
        self._options = options(params, engine.eos_token_ids) | {
            "model": engine.name,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        self._pool = ThreadPoolExecutor(CONNECTIONS)
        self._answers: queue.SimpleQueue[Future[Finished]] = queue.SimpleQueue()
        self._waiting = 0

    def add(self, request: Request) -> None:
        max_tokens = room(request, self._params, self._engine.max_model_length)
        for sample in request.samples:
            self._waiting += 1
            future = self._pool.submit(self._complete, request, sample, max_tokens)
            future.add_done_callback(self._answers.put)

    def step(self) -> list[Finished]:
        arrived = []
        with suppress(queue.Empty):
            arrived.append(self._answers.get(timeout=MOMENT))
            while True:
                arrived.append(self._answers.get_nowait())
        self._waiting -= len(arrived)
        return [future.result() for future in arrived]

    @property
    def idle(self) -> bool:
        return not self._waiting

    def close(self) -> None:
        """Ask for nothing more; what is under way ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _complete(self, request: Request, sample: int, max_tokens: int) -> Finished:
        body = self._options | {
            "prompt": list(request.tokens),
            "max_tokens": max_tokens,
            "seed": request_seed(self._seed, request.draw, sample, request.position),
        }

        def read(answer: Any) -> Completion:
            return _completion(answer, max_tokens)

        return Finished(request, sample, self._engine.server.ask("/v1/completions", body, read))


def _completion(answer: Any, max_tokens: int) -> Completion:
    """The only choice of an answer.

    Raises:
        ValueError, LookupError, TypeError: something is missing.
    """
    [choice] = answer["choices"]
    tokens, reason = choice["token_ids"], choice["finish_reason"]
    logprobs = choice["logprobs"]["token_logprobs"]
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason {reason!r}")
    if len(tokens) != len(logprobs) or not tokens:
        raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities")
    if reason == "length" and len(tokens) < max_tokens:
        raise ValueError(f"{len(tokens)} of {max_tokens} tokens, and no stop")
    return completion(tokens, logprobs, reason)


def _digest(model: PeftModel) -> str:
    """Of the values of the adapter."""
    digest = hashlib.sha256()
    for name, tensor in sorted(get_peft_model_state_dict(model).items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
