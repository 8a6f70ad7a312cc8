"""The native engine in worker processes, which sample while the trainer trains.

A request is sampled by whichever worker is free, and its samples form a batch of their own. So
neither the number of workers nor their speed changes a bit of a completion or a log-probability.
"""

import dataclasses
import itertools
import logging
import os
import pickle
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.boundary.pool import Pool
from rlhf_pg.boundary.user_code import CallFailed
from rlhf_pg.models.adapters import is_quantized
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
from rlhf_pg.rollout.native.engine import NativeEngine
from rlhf_pg.runtime import hollow, put_in_place

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # for a request whose workers end
ALIGNMENT = 64  # bytes
SharedRegion = tuple[str, int, int]  # path and size of shared memory, and a number of its own
NUMBERS = itertools.count()  # paths are used again


class SharedMemory:
    """Memory that other processes map; the system frees it once no process maps it."""

    def __init__(self, size: int) -> None:
        file = os.memfd_create("rlhf_pg")
        os.ftruncate(file, size)
        self.region: SharedRegion = (f"/proc/{os.getpid()}/fd/{file}", size, next(NUMBERS))
        self.bytes = map_memory(self.region)
        weakref.finalize(self, os.close, file)


def map_memory(region: SharedRegion) -> Tensor:
    path, size, _ = region
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def parameter_slices(model: nn.Module) -> list[tuple[Tensor, slice]]:
    """Return every parameter of a model with its place among the bytes of all."""
    slices = list[tuple[Tensor, slice]]()
    end = 0
    for parameter in model.parameters():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + parameter.nbytes
        slices.append((parameter, slice(start, end)))
    return slices


class WorkerEngine(RolloutEngine):
    """Samples with `count` native engines in processes of their own, on CPUs with one thread each.

    They share one copy of the weights. A worker that dies is replaced. A request that its caller
    has given up (`Request.cancelled`) is sampled to its end. The other arguments are those of
    `NativeEngine`; ValueError if the weights are quantized.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: int | Iterable[int],
        pad_token_id: int,
        tokenizer: PreTrainedTokenizerBase | None,
        count: int,
        cache_tokens: int | None = None,
    ) -> None:
        if is_quantized(model):
            raise ValueError("rollout_workers cannot sample from quantized weights: set it to 0")
        self.native = NativeEngine(model, eos_token_ids, pad_token_id, tokenizer, cache_tokens)
        self.pool = Pool(count)
        # The engine without its weights, by whether an adapter was merged into them.
        self.pickled: dict[bool, SharedMemory] = {}
        self.copy: tuple[SharedMemory, SharedMemory] | None = None  # engine and weights in use

    def session(self, params: SamplingParams, seed: int) -> AbstractContextManager["WorkerSession"]:
        """Open a session, which raises RolloutError if workers keep dying."""
        self.check_synced()
        return closing(WorkerSession(self, params, seed))

    @torch.no_grad()
    def _load_weights(self) -> AbstractContextManager[None]:
        return self.copy_weights()()

    def copy_weights(self) -> Copied:
        native = self.native
        with native.weights_synced():
            model = native.weights
            merged = native.weights is not native.model
            if merged not in self.pickled:
                self.pickled[merged] = self._pickle(model)
            slices = parameter_slices(model)
            memory = SharedMemory(slices[-1][1].stop)
            for parameter, part in slices:
                memory.bytes[part].view(parameter.dtype).copy_(parameter.flatten())
        return partial(self._used, (self.pickled[merged], memory))

    @contextmanager
    def _used(self, copy: tuple[SharedMemory, SharedMemory]) -> Iterator[None]:
        self.copy = copy
        yield
        self.copy = None

    def _pickle(self, model: PreTrainedModel) -> SharedMemory:
        native = self.native
        empty = hollow(model)
        if (reason := native.unsupported_reason(0)) is not None:
            logger.warning("sampling by transformers' generate, which is slower: %s", reason)
        for part in empty.modules():
            buffers = part._buffers.items()
            part._buffers = {name: x if x is None else x.cpu() for name, x in buffers}
        engine = NativeEngine(
            empty,
            native.eos_token_ids,
            native.pad_token_id,
            native.tokenizer,
            native.cache_tokens,
        )
        data = pickle.dumps(engine)
        memory = SharedMemory(len(data))
        memory.bytes.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return memory


class WorkerSession(FutureSession):
    """A session in which every request is a task of a worker."""

    def __init__(self, engine: WorkerEngine, params: SamplingParams, seed: int) -> None:
        super().__init__()
        self.engine = engine
        self.params = params
        self.seed = seed

    def add(self, request: Request) -> None:
        self.engine.native.check(request, self.params)
        self._ask(request, 1)

    def _ask(self, request: Request, attempt: int) -> None:
        engine = self.engine
        plain = dataclasses.replace(request, cancelled=bool)
        assert engine.copy is not None
        regions = [memory.region for memory in engine.copy]
        future: Any = engine.pool.schedule(sample_alone, *regions, plain, self.params, self.seed)
        future.memory = engine.copy  # must outlive the task
        self.wait_for(future, (request, attempt))

    def read(self, future: Future[Any], asked: tuple[Request, int]) -> list[Finished]:
        request, attempt = asked
        try:
            completions = future.result()
        except CallFailed as failure:  # out of memory, say
            if attempt == ATTEMPTS:
                raise RolloutError(f"rollout_workers: a worker {failure}") from failure
            self._ask(request, attempt + 1)
            return []
        if isinstance(completions, FloatingPointError):
            raise completions
        return [Finished(request, number, completion) for number, completion in completions]


@cache
def engine_of(region: SharedRegion) -> NativeEngine:
    logging.disable(logging.WARNING)  # the trainer warns
    engine: NativeEngine = pickle.loads(map_memory(region).numpy().tobytes())
    return engine


@lru_cache(maxsize=1)
def engine_with(pickled: SharedRegion, weights: SharedRegion) -> NativeEngine:
    """Return the engine of this worker, which samples from these weights."""
    engine = engine_of(pickled)
    memory = map_memory(weights)
    for parameter, part in parameter_slices(engine.model):
        value = memory[part].view(parameter.dtype)
        put_in_place(parameter, value.view(parameter.shape))
    return engine


def sample_alone(
    pickled: SharedRegion,
    weights: SharedRegion,
    request: Request,
    params: SamplingParams,
    seed: int,
) -> list[tuple[int, Completion]] | FloatingPointError:
    """Sample the completions of a request in a worker; return them with their sample numbers."""
    engine = engine_with(pickled, weights)
    completions = []
    try:
        with engine.session(params, seed) as session:
            session.add(request)
            while not session.idle:
                for _, number, completion in session.step():
                    completions.append((number, completion))
    except FloatingPointError as error:
        return error
    return completions
