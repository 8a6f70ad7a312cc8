"""Weights from this GPU to those of a vLLM server, by NCCL (vLLM 0.32 and later).

As vLLM's `distributed/weight_transfer/nccl_engine.py`, `nccl_common.py` and `packed_tensor.py` have
it: the server's workers are the ranks 1 and up of a communicator whose id they are told by HTTP.
Each `/update_weights` names some tensors, whose bytes follow in one broadcast. Not yet run on GPUs.
"""

import base64
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import torch
from torch import Tensor

from rlhf_pg.boundary.user_code import call_concurrently

CHUNK = 2**30  # bytes of a broadcast; a larger tensor has one of its own

Ask = Callable[[str, Any], Future[Any]]  # begins a request of a path and a body, sent once


class Sender:
    """Sends weights to one server. RolloutError, by `ask`, if the server fails."""

    def __init__(self, ask: Ask, workers: int, device: torch.device, timeout: float) -> None:
        import nccl.core as nccl

        self.ask = ask
        # Of its own: one server that hangs does not hold up the others.
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        identity = nccl.get_unique_id()
        info = {
            "nccl_unique_id_b64": base64.b64encode(bytes(identity)).decode(),
            "rank_offset": 1,
            "world_size": 1 + workers,
            "packed": True,
            "packed_buffer_size_bytes": CHUNK,
        }

        def connect() -> Any:
            communicator = nccl.Communicator.init(1 + workers, 0, identity)
            one = torch.zeros(1, device=device)
            communicator.allreduce(one, one, nccl.SUM)  # as every worker does
            return communicator

        # Each waits for the other.
        connected = call_concurrently(timeout, connect)
        joined = ask("/init_weight_transfer_engine", {"init_info": info})
        for future in wait([joined, connected], return_when=FIRST_EXCEPTION).done:
            future.result()
        self.communicator = connected.result()

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the server's weights by these, which have the names of a checkpoint."""
        self.ask("/start_weight_update", {}).result()
        for chunk in chunks(weights):
            info = {
                "names": [name for name, _ in chunk],
                "dtype_names": [name_of(tensor.dtype) for _, tensor in chunk],
                "shapes": [list(tensor.shape) for _, tensor in chunk],
            }
            received = self.ask("/update_weights", {"update_info": info})
            try:
                with torch.cuda.stream(self.stream):
                    if self.stream is not None:
                        # The weights were computed on the default stream.
                        computed = torch.cuda.default_stream(self.stream.device)
                        self.stream.wait_stream(computed)
                    packed = torch.cat([bytes_in(tensor) for _, tensor in chunk])
                    self.communicator.broadcast(packed, packed, 0, stream=self.stream)
                received.result()
            except BaseException:
                self.communicator.abort()  # the broadcast would wait for the server for ever
                raise
        self.ask("/finish_weight_update", {}).result()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_in(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8)


def chunks(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield lists of tensors with up to `CHUNK` bytes, or one larger tensor."""
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if chunk and size + tensor.nbytes > CHUNK:
            yield chunk
            chunk = []
            size = 0
        chunk.append((name, tensor))
        size += tensor.nbytes
    if chunk:
        yield chunk
