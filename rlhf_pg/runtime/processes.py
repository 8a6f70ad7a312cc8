"""Processes, their collectives, and how a module is shared among them."""

import atexit
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn


class Runtime:
    """This process among the others."""

    def __init__(self) -> None:
        # The config decides on precision and accumulation, not what a launcher has in store; and
        # without CUDA the CPU, since float64 (sampling, metrics) is not to be had on Apple's GPUs.
        self._accelerator = Accelerator(
            cpu=not torch.cuda.is_available(), mixed_precision="no", gradient_accumulation_steps=1
        )
        kind = self._accelerator.distributed_type
        if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
            raise ValueError(f"the launcher asks for {kind.value}; only plain DDP is supported yet")
        if self.world > 1:
            # Left to the end of the interpreter, the threads of gloo may abort a finished process.
            atexit.register(self._accelerator.state.destroy_process_group)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._accelerator.device
        return device

    @property
    def rank(self) -> int:
        return int(self._accelerator.process_index)

    @property
    def world(self) -> int:
        return int(self._accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def describe(self) -> str:
        """For example "2 processes (gloo), cpu"."""
        if self.world == 1:
            return f"1 process, {self.device.type}"
        backend = torch.distributed.get_backend()
        return f"{self.world} processes ({backend}), {self.device.type}"

    def prepare(self, module: nn.Module) -> nn.Module:
        """The module on its device, wrapped so that its gradients are shared by all processes."""
        wrapped: nn.Module = self._accelerator.prepare_model(module)
        return wrapped

    def micro_batch(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch: gradients are exchanged on the last.

        Args:
            module: what `prepare` returned.
        """
        if last:
            return nullcontext()
        hold_back: AbstractContextManager[Any] = self._accelerator.no_sync(module)
        return hold_back

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this process's share of the loss.

        The shares of all processes sum to the loss, while DDP averages gradients: multiplying by
        the number of processes undoes that, here and nowhere else.
        """
        torch.autograd.backward(loss * self.world)

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradient to at most `max_norm` (0: leave it); returns its norm before that."""
        norm: Tensor = nn.utils.clip_grad_norm_(parameters, max_norm or torch.inf)
        return norm

    def gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        """The rows of all processes in order of rank, and where this process's own are.

        Args:
            rows: (B,...); B may differ between processes, the other dimensions may not.
        """
        if self.world == 1:
            return rows, slice(0, len(rows))
        count = torch.tensor([len(rows)], device=self.device)
        counts = self._accelerator.gather(count).tolist()
        widest = max(counts)
        padded = rows.new_zeros((widest, *rows.shape[1:]))
        padded[: len(rows)] = rows
        blocks = self._accelerator.gather(padded).split(widest)
        everyone = torch.cat([block[:n] for block, n in zip(blocks, counts, strict=True)])
        start = sum(counts[: self.rank])
        return everyone, slice(start, start + len(rows))

    def total(self, x: Tensor) -> Tensor:
        """Sum over processes."""
        if self.world == 1:
            return x
        summed: Tensor = self._accelerator.reduce(x, reduction="sum")
        return summed

    def most(self, x: int) -> int:
        """Maximum over processes."""
        everyone, _ = self.gather(torch.tensor([x], device=self.device))
        return int(everyone.max())

    def wait(self) -> None:
        """Until every process is here."""
        self._accelerator.wait_for_everyone()
