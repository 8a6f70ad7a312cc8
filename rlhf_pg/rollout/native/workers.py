"""The native engine in worker processes, which sample while the trainer trains.

A request is sampled by whichever worker is free, its samples together and nothing beside them. So
neither the number of workers nor their speed changes a bit of a completion or a log-probability.
"""

import dataclasses
import itertools
import logging
import os
import pickle
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.boundary.pool import Pool
from rlhf_pg.boundary.user_code import CallFailed
from rlhf_pg.models import is_quantized
from rlhf_pg.rollout.engine import (
    Completion,
    Finished,
    FutureSession,
    Request,
    RolloutEngine,
    RolloutError,
    SamplingParams,
    never,
)
from rlhf_pg.rollout.native.engine import NativeEngine
from rlhf_pg.runtime import hollow, put_in_place

ATTEMPTS = 3  # for a request whose workers end
ALIGNMENT = 64  # bytes
Place = tuple[str, int, int]  # path and size of shared memory, and a number of its own
NUMBERS = itertools.count()  # paths are used again


class SharedMemory:
    """Memory that other processes map, and that the system frees when none does any more."""

    def __init__(self, size: int) -> None:
        file = os.memfd_create("rlhf_pg")
        os.ftruncate(file, size)
        self.place: Place = (f"/proc/{os.getpid()}/fd/{file}", size, next(NUMBERS))
        self.bytes = map_memory(self.place)
        self.close = weakref.finalize(self, os.close, file)


def map_memory(place: Place) -> Tensor:
    path, size, _ = place
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def places(model: nn.Module) -> list[tuple[Tensor, slice]]:
    """Return every parameter of a model with its place among the bytes of all."""
    found, end = list[tuple[Tensor, slice]](), 0
    for parameter in model.parameters():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + parameter.nbytes
        found.append((parameter, slice(start, end)))
    return found


class WorkerEngine(RolloutEngine):
    """Samples with `count` native engines in processes of their own, on CPUs with one thread each.

    They share one copy of the weights, with an adapter merged. A worker that dies is replaced.

    Args:
        model, eos_token_ids, pad_token_id, tokenizer, cache_tokens: as in `NativeEngine`.

    Raises:
        ValueError: the weights are quantized.
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
        self.pickled: SharedMemory | None = None  # the engine, without its weights
        self.weights: Place | None = None  # the copy in use

    def session(self, params: SamplingParams, seed: int) -> AbstractContextManager["WorkerSession"]:
        """Open a session, which raises RolloutError if workers keep dying."""
        return closing(WorkerSession(self, params, seed))

    def _load_weights(self) -> AbstractContextManager[None]:
        return self.copy_weights()

    @torch.no_grad()
    def copy_weights(self) -> AbstractContextManager[None]:
        native = self.native
        with native.weights_synced():
            if self.pickled is None:
                empty = hollow(native.weights)
                for part in empty.modules():
                    part._buffers = {
                        n: b if b is None else b.cpu() for n, b in part._buffers.items()
                    }
                rest = native.pad_token_id, native.tokenizer, native.cache_tokens
                data = pickle.dumps(NativeEngine(empty, native.eos_token_ids, *rest))
                self.pickled = SharedMemory(len(data))
                self.pickled.bytes.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            placed = places(native.weights)
            memory = SharedMemory(placed[-1][1].stop)
            for parameter, place in placed:
                memory.bytes[place].view(parameter.dtype).copy_(parameter.flatten())

        @contextmanager
        def used() -> Iterator[None]:
            self.weights = memory.place
            yield
            memory.close()

        return used()


class WorkerSession(FutureSession):
    """A session in which every request is a task of a worker."""

    def __init__(self, engine: WorkerEngine, params: SamplingParams, seed: int) -> None:
        super().__init__()
        self.engine, self.params, self.seed = engine, params, seed
        self.requests: dict[Future[Any], Request] = {}
        self.tries: Counter[int] = Counter()  # by the id of the request

    def add(self, request: Request) -> None:
        self.engine.native.check(request, self.params)
        self._ask(request)

    def _ask(self, request: Request) -> None:
        engine, plain = self.engine, dataclasses.replace(request, cancelled=never)
        assert engine.pickled is not None
        self.tries[id(request)] += 1
        places = engine.pickled.place, engine.weights
        future = engine.pool.schedule(sample_alone, *places, plain, self.params, self.seed)
        self.requests[future] = request
        self.wait_for(future)

    def read(self, future: Future[Any]) -> list[Finished]:
        request = self.requests.pop(future)
        try:
            found = future.result()
        except CallFailed as failure:  # out of memory, say
            if self.tries[id(request)] == ATTEMPTS:
                raise RolloutError(f"rollout_workers: a worker {failure}") from failure
            self._ask(request)
            return []
        if isinstance(found, FloatingPointError):
            raise found
        return [Finished(request, number, completion) for number, completion in found]


@cache
def engine_of(place: Place) -> NativeEngine:
    """Return the engine of this worker."""
    logging.disable(logging.WARNING)  # the trainer has warned
    engine: NativeEngine = pickle.loads(map_memory(place).numpy().tobytes())
    return engine


_loaded: Place | None = None  # the weights of this worker


def sample_alone(
    pickled: Place, weights: Place, request: Request, params: SamplingParams, seed: int
) -> list[tuple[int, Completion]] | FloatingPointError:
    """Sample the completions of a request in a worker; return them with their sample numbers."""
    global _loaded
    engine = engine_of(pickled)
    if weights != _loaded:
        whole = map_memory(weights)
        for parameter, place in places(engine.model):
            value = whole[place].view(parameter.dtype).view(parameter.shape)
            put_in_place(parameter, value)
        _loaded = weights
    found = []
    try:
        with engine.session(params, seed) as session:
            session.add(request)
            while not session.idle:
                found += [(number, completion) for _, number, completion in session.step()]
    except FloatingPointError as error:
        return error
    return found
