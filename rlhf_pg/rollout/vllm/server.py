"""The engine that samples on stock `vllm serve`s, which load new weights from a path."""

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_pg.boundary import http
from rlhf_pg.boundary.quoted import show, tell
from rlhf_pg.boundary.user_code import begin, call_concurrently
from rlhf_pg.models.adapters import saves_base
from rlhf_pg.models.policy import has_experts
from rlhf_pg.models.streaming import files_of, read
from rlhf_pg.rollout.engine import (
    Completion,
    Copied,
    Finished,
    FutureSession,
    Request,
    RolloutEngine,
    RolloutError,
    SamplingParams,
)
from rlhf_pg.rollout.token_sampling import request_seed
from rlhf_pg.rollout.vllm import checksums
from rlhf_pg.rollout.vllm.handover import published_weights
from rlhf_pg.rollout.vllm.nccl import Sender
from rlhf_pg.rollout.vllm.requests import LONGEST, check_version, options

T = TypeVar("T")
logger = logging.getLogger(__name__)

ATTEMPTS = 3
CONNECTIONS = 256  # concurrent requests to a server
LEAST = -9999.0  # vLLM's number for minus infinity
ROUNDING = 1e-3  # by which the logarithm of a probability may be above 0
REMEDY = "check its log, restart it, and resume"
# Versions of a server's own weights, as it says them itself.
UNTOUCHED = "default"  # vLLM's name for those that it was started with
UNFINISHED = "unfinished"  # during a hand-over, before the version that it will have
FAILED = "failed"  # a load has failed: layers may be half of the old and half of the new weights


class RequestRefused(RolloutError):
    """The server answered, but refused the request."""


class RequestFailed(RolloutError):
    """The server said that it failed."""


class VllmServerEngine(RolloutEngine):
    """Samples on servers, which read new weights from a directory.

    The weights are handed over at each `weights_synced`, under a version of their own. A server
    loads an adapter beside its own model, which has to be the base; its name is the version.
    Without an adapter the server's own weights are replaced, and the server keeps their version,
    which it reports with the tokens (vLLM 0.33) or when asked. With several processes, `agree` has
    to be called after the hand-over.

    The index of a prompt decides which server is asked. One that fails is left out from then on,
    and its requests go to the next, with the same seeds.

    Args:
        eos_token_ids: each ends a completion.
        urls: the servers' URLs, without a path.
        directory: a directory that the servers see under the same path; weights are put into a
            subdirectory with a secret name, which is removed at exit.
        timeout: seconds for one answer.
        is_main: whether this process hands over the weights; other processes must wait for it.
        save: saves the model's weights in a directory, or with None helps the main process to do
            so (collective); by default they have to be whole.
        quantization: fp8 if the servers compute in it, else None.

    Raises:
        ValueError: a server is not a vLLM of a supported version, or was started without a needed
            option.
        RolloutError: a server does not answer, or the directory cannot be made.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        urls: str | Sequence[str],
        directory: Path,
        timeout: float = 300.0,
        is_main: bool = True,
        save: Callable[[Path | None], None] | None = None,
        quantization: str | None = None,
    ) -> None:
        self.model = model
        self.eos_token_ids = list(eos_token_ids)
        self.directory = directory.absolute()
        self.save = save or (lambda folder: folder and model.save_pretrained(folder))
        self.adapted = isinstance(model, PeftModel)
        if self.adapted:
            self.gathers = "all" if saves_base(model) else "trained"
        elif save is not None:
            self.gathers = "none"
        self.own: Path | None = None  # of this run alone
        if is_main:
            with self._writing():
                for folder in [*reversed(self.directory.parents), self.directory]:
                    folder.mkdir(mode=0o700, exist_ok=True)  # another run may be making it
                self.own = Path(tempfile.mkdtemp(prefix="weights-", dir=self.directory))
            weakref.finalize(self, _remove, self.own, os.getpid())
        urls = [urls] if isinstance(urls, str) else urls
        self.servers = [VllmServer(url, timeout, self.eos_token_ids[0], is_main) for url in urls]
        self.max_model_length = min(server.max_model_length for server in self.servers)
        self.copies = 0  # of the weights, so far
        self.run = uuid4().hex[:8]  # of the main process: the beginning of its versions
        self.version = ""  # of the weights in use
        self.copy: WeightsCopy | None = None  # the one in use; an adapter's has to be there
        for server in self.servers:
            server.check_config(model, quantization)
        # Weights go from GPU to GPU where all have been started for that, else by a directory.
        self.sends = (
            not self.adapted
            and save is None
            and model.device.type == "cuda"
            and all(server.receives for server in self.servers)
        )
        if self.sends and find_spec("nccl") is None:
            logger.warning(
                "the servers take weights by NCCL, but nccl4py is not installed: weights are "
                "handed over by files"
            )
            self.sends = False

    def session(self, params: SamplingParams, seed: int) -> closing["_ServerSession"]:
        """Open a session, which raises RolloutError when no server is left."""
        self.check_synced()
        return closing(_ServerSession(self, params, seed))

    @property
    def alive(self) -> list["VllmServer"]:
        return [server for server in self.servers if not server.lost]

    def server_of(self, prompt_index: int) -> "VllmServer":
        """Return the server to ask about a prompt: the next that has not failed."""
        first = prompt_index % len(self.servers)
        order = self.servers[first:] + self.servers[:first]
        return next(server for server in order if not server.lost)

    def leave_out(self, server: "VllmServer", error: RolloutError) -> None:
        """Stop asking a server that has failed; raise the error if it was the last."""
        lost = server.lost
        server.lost = True
        if not self.alive:
            raise error
        if not lost:
            logger.warning("%s. It is left out, and its prompts go to other servers", error)

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:
        """Leave out, in all processes, servers that have failed in one; collective."""
        for server, *lost in zip(
            self.servers,
            *gather([server.lost for server in self.servers]),
            strict=True,
        ):
            server.lost = any(lost)
        self.version = gather(self.version)[0]
        if not self.alive:
            raise RolloutError(f"vllm_server_base_url: no server is left: {REMEDY}")

    def _load_weights(self) -> AbstractContextManager[None]:
        if self.sends:
            self.copies += 1
            return self._used(WeightsCopy(self.run, self.copies, None))
        return self.copy_weights()()

    def copy_weights(self) -> Copied:
        self.copies += 1
        folder = self._save(str(self.copies))
        return partial(self._used, WeightsCopy(self.run, self.copies, folder))

    @contextmanager
    def _used(self, copy: "WeightsCopy") -> Iterator[None]:
        """Sample from a copy, which the main process hands over unless the servers have it."""
        if not self.alive:  # they may have been started again
            self.copy = None
            for server in self.servers:
                server.lost = False
                server.adapter = None
                server.sender = None
        if self.copy is not copy:
            self._hand_over(copy)
        self.copy = copy
        if copy.folder is not None and not self.adapted:
            shutil.rmtree(copy.folder, ignore_errors=True)
        yield
        for server in self.alive:
            if server.reports_versions:  # every answer was checked
                continue
            try:
                has_changed = server.has_changed(self.base_version)
            except RolloutError as error:
                self.leave_out(server, error)
                continue
            if has_changed:
                raise RolloutError(
                    f"the server at {server.client.url} was started again or got other weights, "
                    "and sampled from them: resume"
                )

    @property
    def base_version(self) -> str:
        """The version of the servers' own weights, beside those of an adapter."""
        return UNTOUCHED if self.adapted else self.version

    def _hand_over(self, copy: "WeightsCopy") -> None:
        """Load a copy on all servers at the same time; those that fail are left out."""
        self.version = copy.version
        if self.own is None:
            return
        servers = self.alive
        loads = [call_concurrently(None, self._load, server, copy) for server in servers]
        for server, load in zip(servers, loads, strict=True):
            try:
                load.result()
            except RolloutError as error:
                see = f". It has to see {copy.folder} (vllm_sync_directory)" if copy.folder else ""
                self.leave_out(server, RolloutError(f"{error}{see}"))

    def _load(self, server: "VllmServer", copy: "WeightsCopy") -> None:
        if self.adapted:
            server.load_adapter(copy.version, str(copy.folder))
        else:
            source = copy.folder or self.model
            server.replace_weights(copy.version, source, checksums.is_due(copy.number))

    def _save(self, name: str) -> Path | None:
        """Save weights for the servers; return their path in the main process."""
        folder = None if self.own is None else self.own / name
        with self._writing():
            self.save(folder)
        return folder

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise RolloutError(
                f"vllm_sync_directory: weights cannot be written to {self.directory} "
                f"({tell(error)}): make room, or choose another"
            ) from error


class WeightsCopy:
    """A directory of weights, removed with the object; None where another process has it, or the
    policy's own are sent.
    """

    def __init__(self, run: str, number: int, folder: Path | None) -> None:
        self.version = f"{run}-{number}"
        self.number = number
        self.folder = folder
        if folder is not None:
            weakref.finalize(self, _remove, folder, os.getpid())


class VllmServer:
    """One `vllm serve`; the constructor checks the server, and may raise what the engine may."""

    def __init__(self, url: str, timeout: float, token: int, is_main: bool) -> None:
        self.client = http.Client(url.rstrip("/"), timeout, ATTEMPTS - 1, CONNECTIONS)
        self.without_retries = http.Client(self.client.url, timeout, 0, CONNECTIONS)
        self.receives = False  # weights by NCCL
        self.sender: Sender | None = None
        self.lost = False  # whether it has failed
        self.is_versioned = False  # whether its weights can have a version
        self.reports_versions = False  # whether answers have the version of each token's weights
        # Without versions, its number when weights were loaded, and when a load failed.
        self.instance: str | None = None
        self.failed_instance: str | None = None
        try:
            version = str(self.ask("/version", None, lambda answer: answer)["version"])
        except (RequestRefused, TypeError, LookupError) as error:
            raise ValueError(
                f"vllm_server_base_url: no vLLM server at {self.client.url} ({tell(error)})"
            ) from error
        self.number = check_version(version, f"the server at {url}")
        # The first model is the server's own.
        self.served, self.max_model_length = self.ask(
            "/v1/models",
            None,
            lambda answer: (str(answer["data"][0]["id"]), int(answer["data"][0]["max_model_len"])),
        )
        self.adapter: str | None = None  # that it has loaded for this run
        with suppress(RequestRefused):  # without VLLM_SERVER_DEV_MODE nobody hands over weights
            version_before = self.weight_version()
            self.is_versioned = True
            if version_before == FAILED:
                self._refuse_failed()
            if is_main and version_before.startswith(UNFINISHED):
                self.ask("/resume", {})  # a run was killed in the pause
        self._check_logprobs(token)

    def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter, and unload the one before it."""
        try:
            self.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        except RolloutError as error:
            # If the first answer was lost, the server refuses the retry of a completed load.
            if not (isinstance(error, RequestRefused) and name in self._models()):
                raise RolloutError(
                    f"{error}. The server needs --enable-lora, a --max-lora-rank that is not "
                    "below lora_r, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
                ) from error
        if self.adapter is not None:
            # Unloading only saves memory; the server may have lost the old adapter already.
            with suppress(RequestRefused):
                self.ask("/v1/unload_lora_adapter", {"lora_name": self.adapter})
        self.adapter = name

    def replace_weights(self, version: str, source: Path | PreTrainedModel, checks: bool) -> None:
        """Load weights from a directory, or send those of a model, while no token is sampled.

        After a failure the server stays paused, and no version of weights is said to be there.
        """
        if not self.is_versioned:
            self._replace_unversioned(source, checks)
            return
        version_before = self.weight_version()
        if version_before == FAILED:
            self._refuse_failed()
        self.ask("/pause?mode=keep", {})
        unfinished = f"{UNFINISHED}-{version}"
        self._name_version(unfinished)
        try:
            self._load(source)
        except RequestFailed:
            with suppress(RolloutError):
                self._name_version(FAILED)
            raise
        self._reset_cache()
        if checks or version_before.startswith(UNFINISHED):
            self.check_weights(source)
        if self.weight_version() != unfinished:
            raise RolloutError(
                f"the server at {self.client.url} was started again, or got other weights: {REMEDY}"
            )
        self._name_version(version)
        self.ask("/resume", {})

    def _replace_unversioned(self, source: Path | PreTrainedModel, checks: bool) -> None:
        """Load weights into a server without routes for pauses and versions."""
        self.instance = self._identity()
        if self.instance == self.failed_instance:
            self._refuse_failed()
        try:
            self._load(source)
        except RequestFailed:
            self.failed_instance = self.instance
            raise
        self._reset_cache()
        if checks:
            self.check_weights(source)

    def has_changed(self, version: str) -> bool:
        """Return whether the server's own weights are not those of a version any more."""
        if self.is_versioned:
            return self.weight_version() != version
        return self.instance is not None and self._identity() != self.instance

    def _load(self, source: Path | PreTrainedModel) -> None:
        """Load weights, once: vLLM keeps what a failed attempt has loaded of a layer, and a second
        would be cut off by as much.
        """
        if isinstance(source, Path):
            arguments = {"weights_path": str(source)}
            body = {"method": "reload_weights", "kwargs": arguments}
            self._ask_once("/collective_rpc", body).result()
            return
        try:
            if self.sender is None:
                workers = self.ask("/get_world_size", None, lambda answer: answer["world_size"])
                self.sender = Sender(self._ask_once, workers, source.device, self.client.timeout)
            self.sender.send(published_weights(source))
        except RolloutError:
            raise
        except Exception as error:  # of NCCL, or for want of memory
            raise RolloutError(
                f"weights cannot be sent to the server at {self.client.url} ({tell(error)}): start "
                "the servers without --weight-transfer-config to hand them over by files"
            ) from error

    def _reset_cache(self) -> None:
        """Drop keys and values of old weights."""
        if not self.ask("/reset_prefix_cache", {}, lambda answer: answer["success"]):
            raise RolloutError(
                f"the server at {self.client.url} keeps keys and values of old weights, since it "
                "has requests of other clients: give this run a server of its own"
            )

    def _identity(self) -> str:
        """Return the server's number for itself, which changes when it is started again."""
        return str(self._config()["instance_id"])

    def _config(self) -> dict[str, Any]:
        path = "/server_info?config_format=json"
        config: dict[str, Any] = self.ask(path, None, lambda answer: dict(answer["vllm_config"]))
        return config

    def _refuse_failed(self) -> NoReturn:
        raise RolloutError(
            f"the server at {self.client.url} failed to load weights, and may hold parts of them: "
            f"{REMEDY}"
        )

    def weight_version(self) -> str:
        """Return the version of the server's own weights."""
        version: str = self.ask("/weight_info", None, lambda answer: str(answer["weight_version"]))
        return version

    def _name_version(self, version: str) -> None:
        self.ask("/update_weight_version", {"new_version": version})

    def check_weights(self, source: Path | PreTrainedModel) -> None:
        """Compare the server's weights with those given to it; RolloutError if they differ."""
        try:
            held = self.ask("/weight_checker", {"action": "checksum"}, checksums.read)
        except RequestRefused:  # before vLLM 0.32
            held = {}
        checksums.check(f"the server at {self.client.url}", held, _tensors(source))

    def ask(self, path: str, body: Any, read: Callable[[Any], Any] = lambda answer: None) -> Any:
        """Call `begin` and wait for the result."""
        return self.begin(path, body, read).result()

    def _ask_once(self, path: str, body: Any) -> "Future[None]":
        """Begin a request that must not be sent a second time."""
        return self.begin(path, body, lambda answer: None, self.without_retries)

    def begin(
        self, path: str, body: Any, read: Callable[[Any], T], client: http.Client | None = None
    ) -> "Future[T]":
        """Send a request (`http.Client.ask`); the future raises RolloutError if it fails."""
        client = client or self.client

        async def asked() -> T:
            try:
                return await client.ask(path, body, read)
            except http.Refused as error:
                raise RequestRefused(str(error)) from error
            except http.Failed as error:
                raise RequestFailed(f"{error}: {REMEDY}") from error
            except http.Unanswered as error:
                raise RolloutError(f"{error}: {REMEDY}") from error

        return begin(asked, loop="vllm")  # a loop that user functions cannot block

    def _models(self) -> set[str]:
        return self.ask("/v1/models", None, lambda answer: {one["id"] for one in answer["data"]})  # type: ignore[no-any-return]

    def _check_logprobs(self, token: int) -> None:
        """Refuse raw log-probabilities, which do not change with the temperature."""

        def read(answer: Any) -> float:
            choice = answer["choices"][0]
            self.reports_versions = choice.get("weight_versions") is not None
            [token] = choice["logprobs"]["top_logprobs"]
            return _logprob(max(token.values()))

        body = {"model": self.served, "prompt": [token], "max_tokens": 1, "logprobs": 1}
        body["return_weight_versions"] = True
        cold, hot = (
            self.ask("/v1/completions", body | {"temperature": temperature}, read)
            for temperature in (0.1, 2.0)
        )
        if abs(cold - hot) < 1e-3:
            raise ValueError(
                f"the server at {self.client.url} returns raw log-probabilities, not those of the "
                "sampled distribution: start it with --logprobs-mode processed_logprobs"
            )

    def check_versions(self, choice: Any, version: str) -> None:
        """Refuse tokens that were not all sampled from this version of weights (RolloutError)."""
        end = 0
        for span in choice["weight_versions"]:
            if span["version"] != version or span["start"] != end:
                raise RolloutError(
                    f"the server at {self.client.url} sampled from weights of version "
                    f"{show(span['version'])}, not {version}: {REMEDY}"
                )
            end = span["end"]
        if end != len(choice["token_ids"]):
            raise ValueError(f"weight_versions of {end} tokens, not {len(choice['token_ids'])}")

    def check_config(self, model: PreTrainedModel, quantization: str | None) -> None:
        """Refuse a server that does not suit the model (ValueError), and set `receives`."""
        adapted = isinstance(model, PeftModel)
        where = f"the server at {self.client.url}"
        try:
            config = self._config()
            version = self.weight_version() if self.is_versioned else UNTOUCHED
        except RequestRefused as error:
            if adapted:  # its weights cannot be replaced, which is what an adapter needs
                return
            raise ValueError(
                f"{where} does not take weights: start it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment, or train an adapter (use_peft)"
            ) from error
        computes_in = config.get("model_config", {}).get("quantization")
        is_fp8 = "fp8" in str(computes_in)  # fp8_per_tensor, for example
        if is_fp8 != (quantization == "fp8"):
            raise ValueError(
                f"vllm_quantization is {quantization}, but {where} was started with --quantization "
                f"{computes_in}: change one of them"
            )
        transfer = config.get("weight_transfer_config") or {}
        self.receives = transfer.get("backend") == "nccl" and self.number >= (0, 32)
        if adapted and version != UNTOUCHED:
            raise ValueError(
                f"the weights of {where} were replaced by another run (version {show(version)}), "
                "so an adapter does not fit: start it again"
            )
        on_cpu = "cpu" in str(config["device_config"])
        if on_cpu and not adapted and (model.config.tie_word_embeddings or has_experts(model)):
            raise ValueError(
                f"{where} runs on a CPU, where vLLM replaces neither experts nor a head that is "
                "tied to the embedding: set rollout_engine to native, or train an adapter "
                "(use_peft)"
            )


class _ServerSession(FutureSession):
    """A session in which every sample is a separate request.

    vLLM aborts those whose connections close.
    """

    def __init__(self, engine: VllmServerEngine, params: SamplingParams, seed: int) -> None:
        super().__init__()
        self._engine = engine
        self._params = params
        self._seed = seed
        self._options = options(params, engine.eos_token_ids) | {
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "return_weight_versions": True,
        }

    def add(self, request: Request) -> None:
        max_tokens = request.limit(self._params, self._engine.max_model_length, LONGEST)
        for sample in request.samples:
            self._ask(request, sample, max_tokens)

    def _ask(self, request: Request, sample: int, max_tokens: int) -> None:
        engine = self._engine
        stop = [*self._options["stop"], *request.stop]
        server = engine.server_of(request.prompt_index)
        body = self._options | {
            "model": engine.version if engine.adapted else server.served,
            "prompt": list(request.tokens),
            "max_tokens": max_tokens,
            "stop": stop,
            "seed": request_seed(self._seed, request.prompt_index, sample, request.position),
        }

        def read(answer: Any) -> Finished:
            if answer["model"] != body["model"]:
                raise ValueError(f"an answer of {show(answer['model'])}, not {body['model']}")
            completion = _completion(
                answer,
                max_tokens,
                engine.model.config.get_text_config().vocab_size,
                engine.eos_token_ids,
                by_string=bool(stop),
            )
            if server.reports_versions:
                server.check_versions(answer["choices"][0], engine.base_version)
            return Finished(request, sample, completion)

        future = server.begin("/v1/completions", body, read)
        self.wait_for(future, (server, request, sample, max_tokens))

    def read(
        self, future: "Future[Any]", asked: tuple[VllmServer, Request, int, int]
    ) -> list[Finished]:
        server, request, sample, max_tokens = asked
        try:
            return [future.result()]
        except RolloutError as error:
            self._engine.leave_out(server, error)
        self._ask(request, sample, max_tokens)
        # Its other requests are asked elsewhere too.
        for other, (theirs, *again) in list(self._asked.items()):
            if theirs is server:
                del self._asked[other]
                other.cancel()
                self._ask(*again)
        return []


def _completion(
    answer: Any,
    max_tokens: int,
    vocabulary: int,
    eos_token_ids: Sequence[int],
    by_string: bool,
) -> Completion:
    """Parse the only choice of an answer, which with `by_string` may end with any token.

    ValueError, LookupError or TypeError if a field is missing or impossible.
    """
    [choice] = answer["choices"]
    tokens = choice["token_ids"]
    reason = choice["finish_reason"]
    logprobs = [_logprob(number) for number in choice["logprobs"]["token_logprobs"]]
    if not 0 < len(tokens) == len(logprobs) <= max_tokens:
        raise ValueError(f"{len(tokens)} of {max_tokens} tokens, {len(logprobs)} log-probabilities")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ValueError(f"{show(token)} is not one of the model's {vocabulary} token ids")
    ended = [token in eos_token_ids for token in tokens]
    if any(ended[:-1]):
        raise ValueError(f"tokens after EOS, which is at {ended.index(True)}")
    fits = {
        "stop": ended[-1] or by_string,
        "length": len(tokens) == max_tokens and not ended[-1],
    }
    if not fits.get(reason):
        ended_by = f"after {len(tokens)} of {max_tokens} tokens, the last {show(tokens[-1])}"
        raise ValueError(f"finish_reason {show(reason)} {ended_by}")
    return Completion(tokens, logprobs, reason)


def _logprob(number: Any) -> float:
    """Return the log-probability of a sampled token; ValueError if it cannot be one."""
    if not LEAST < float(number) <= ROUNDING:
        raise ValueError(f"{show(number)} is not a log-probability of a sampled token")
    return float(number)


def _tensors(source: Path | PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in a directory, or of a model, by their names in a checkpoint."""
    if isinstance(source, Path):
        for name in files_of(str(source)):
            yield name, read(str(source), "", name)
    else:
        yield from published_weights(source)


def _remove(folder: Path, owner: int) -> None:
    """Remove the directory when the process that made it ends, but not when its forks do."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
