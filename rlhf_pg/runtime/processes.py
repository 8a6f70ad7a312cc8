"""Processes, their collectives, and the backends that distribute a module over them."""

import atexit
import logging
import os
import platform
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import (
    InitProcessGroupKwargs,
    disable_fsdp_ram_efficient_loading,
    gather_object,
)
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer
from transformers.integrations import unset_hf_deepspeed_config

from rlhf_pg.runtime.ddp import DDPBackend
from rlhf_pg.runtime.termination import Watch, waits

MARGIN = 30  # extra timeout of the process group in seconds, so that `Watch` reports stacks first
LAST_TENSORS = 0.3  # seconds for gloo's threads to drop the tensors that they have exchanged
SMALL = 1_000_000  # a model with fewer parameters has too little to compute for several threads
SHARED = "raised_together"  # attribute of errors that all processes raise at the same place

logger = logging.getLogger(__name__)


class Runtime:
    """The current process and its connection to the others.

    Args:
        timeout: in seconds.
        cpu: use no GPU.
        deterministic: let torch use deterministic kernels, or raise RuntimeError where there is
            none, from now on in this process.

    ValueError for an unsupported launcher's backend.
    """

    threads: int | None = None  # of torch, before a small model took one

    def __init__(
        self,
        timeout: int = 1800,
        cpu: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.timeout = timedelta(seconds=timeout + MARGIN)
        # The config, not the launcher, decides on precision and accumulation. Without CUDA
        # everything runs on the CPU, since Apple's GPUs lack float64 (for sampling and metrics).
        self._accelerator = Accelerator(
            cpu=cpu or not torch.cuda.is_available(),
            mixed_precision="no",
            gradient_accumulation_steps=1,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=self.timeout)],
        )
        self.kind, self._backend = _backend(self._accelerator)
        self.splits = self.kind in ("FSDP2", "ZeRO-3")  # a process has a shard of each weight
        self.rank = int(self._accelerator.process_index)
        self.world = int(self._accelerator.num_processes)
        self.is_main = self.rank == 0
        host = torch.device("cpu")
        self.device = torch.device(self._accelerator.device)
        self.device_name = f"{self.device.type} ({platform.machine()})"
        if self.device.type == "cuda":
            self.device_name = torch.cuda.get_device_name(self.device)
            if deterministic:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True)
        self.loading_device = host if self.splits else self.device  # a GPU may not hold it all
        self.main_host = host if self.is_main else None  # see `FullWeights.gathered`
        self.watch: Watch | None = None
        if self.world > 1:
            # At exit, in reverse order: destroying a group ends its gloo threads, which could abort
            # an ending interpreter; those of a group that FSDP2 still holds end during the sleep.
            atexit.register(time.sleep, LAST_TENSORS)
            atexit.register(self._accelerator.state.destroy_process_group)
            self.watch = Watch(_get_default_store(), self.rank, self.world, timeout)
            atexit.register(self.watch.stop)
        # For several processes accelerate sets this address, but without --multi_gpu starts one.
        several = os.environ.get("MASTER_ADDR") == "127.0.0.1" and "WORLD_SIZE" not in os.environ
        if self.world == 1 and several and "ACCELERATE_MIXED_PRECISION" in os.environ:
            logger.warning(
                "accelerate launch was asked for several processes, but has started one: on CPUs, "
                "use torchrun --nproc_per_node N SCRIPT"
            )

    @property
    def peak_memory(self) -> float:
        """The peak memory of this process in bytes, of the GPU if it uses one."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0

    def describe(self) -> str:
        """Describe the processes, for example "2 processes (gloo, ZeRO-3), cpu"."""
        if self.world > 1:
            how = f"{torch.distributed.get_backend()}, {self.kind}"
            return f"{self.world} processes ({how}), {self.device.type}"
        how = "" if self.kind == "DDP" else f" ({self.kind})"
        return f"1 process{how}, {self.device.type}"

    @waits
    def prepare(
        self, module: nn.Module, optimizer: Optimizer, max_grad_norm: float = 0.0
    ) -> DDPBackend:
        """Return the backend to train a module; ValueError if the launcher's config is wrong."""
        self._set_threads(sum(parameter.numel() for parameter in module.parameters()))
        trained = self._backend(self._accelerator, module, optimizer, max_grad_norm)
        trained.watch = self.watch
        return trained

    def _set_threads(self, parameters: int) -> None:
        """Compute a small model with one thread unless OMP_NUM_THREADS is set: several would wait
        for one another, for many times as long where the cores are shared.
        """
        if self.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
            return
        if parameters < SMALL and Runtime.threads is None:
            Runtime.threads = torch.get_num_threads()
            torch.set_num_threads(1)
        elif parameters >= SMALL and Runtime.threads is not None:
            torch.set_num_threads(Runtime.threads)
            Runtime.threads = None

    @waits
    def place(self, module: nn.Module) -> nn.Module:
        """Put a module that is not trained on its device, sharded if the trained one is."""
        return self._backend.place(self._accelerator, module)

    @waits
    def output(self, placed: nn.Module, *inputs: Any) -> Any:
        """Return the output of a placed module, whose hooks gather sharded weights."""
        return placed(*inputs)

    @waits
    def gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        """Return the rows (B,...) of all processes, where only B may differ, and the own slice."""
        if self.world == 1:
            return rows, slice(0, len(rows))
        count = torch.tensor([len(rows)], device=self.device)
        counts = self._accelerator.gather(count).tolist()
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        blocks = self._accelerator.gather(padded).tensor_split(self.world)
        everyone = torch.cat([block[:n] for block, n in zip(blocks, counts, strict=True)])
        start = sum(counts[: self.rank])
        return everyone, slice(start, start + len(rows))

    @waits
    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Sum over all processes."""
        summed: Tensor = self._accelerator.reduce(x, reduction="sum")
        return summed

    @waits
    def gather_objects(self, value: Any) -> list[Any]:
        """Return the picklable objects of all processes in order of rank."""
        return list(gather_object([value]))

    def today(self) -> str:
        """Return the date of the first process, such as 2026-11-29."""
        today: str = self.gather_objects(date.today().isoformat())[0]
        return today

    def all_reduce_max(self, x: int) -> int:
        """Take the maximum over all processes."""
        return int(max(self.gather_objects(x)))

    def first_error(self, failure: str | None) -> str | None:
        """Return, on all processes, the first process's failure, or None."""
        if self.world == 1:
            return failure
        for rank, text in enumerate(self.gather_objects(failure)):
            if text is not None:
                return f"rank {rank}: {text}"
        return None

    @contextmanager
    def raise_together(self, kind: type[Exception]) -> Iterator[None]:
        """Raise an error of this kind in any process's block on all processes; collective."""
        failure = None
        try:
            yield
        except kind as error:
            failure = error
        reason = self.first_error(None if failure is None else str(failure))
        if reason is not None:
            shared = kind(reason)
            shared.__dict__[SHARED] = True
            raise shared from failure

    def mean_and_var(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute mean and population variance over the True slots of all processes, in float64."""
        wide = torch.where(mask, x, 0.0).double()
        total, count = self.all_reduce_sum(torch.stack([wide.sum(), mask.sum().double()]))
        mean = total / count
        squares = torch.where(mask, (wide - mean) ** 2, 0.0).sum()
        return mean, self.all_reduce_sum(squares) / count

    def is_shared(self, error: BaseException) -> bool:
        """Return whether all processes have raised an error together."""
        return self.world == 1 or SHARED in error.__dict__

    @waits
    def barrier(self) -> None:
        """Wait until every process is here."""
        self._accelerator.wait_for_everyone()


class ThreadRuntime(Runtime):
    """The same processes, for a thread beside each main thread; collective.

    Its collectives have a group of their own, so they do not meet those of the main threads, and
    travel through the CPU.
    """

    def __init__(self, runtime: Runtime) -> None:
        vars(self).update(vars(runtime))
        self.watch = None
        self._group: Any = None
        if self.world > 1:
            self._group = torch.distributed.new_group(backend="gloo", timeout=self.timeout)

    def gather_objects(self, value: Any) -> list[Any]:
        if self.world == 1:
            return [value]
        everyone: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(everyone, value, self._group)
        return everyone

    def gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        blocks = self.gather_objects(rows.cpu())
        start = sum(len(block) for block in blocks[: self.rank])
        return torch.cat(blocks).to(rows), slice(start, start + len(rows))

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.gather_objects(x.cpu())).sum(0).to(x)

    def barrier(self) -> None:
        self.gather_objects(None)


def _backend(accelerator: Accelerator) -> tuple[str, type[DDPBackend]]:
    """Return the launcher's backend and its name.

    Every process reads the weights itself, even if the launcher asks one to send them: they are
    read tensor by tensor (`rlhf_pg.models.streaming`).
    """
    kind = accelerator.distributed_type
    state = accelerator.state
    if kind in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        return "DDP", DDPBackend
    if kind == DistributedType.FSDP and state.fsdp_plugin.fsdp_version == 2:
        from rlhf_pg.runtime.fsdp import FSDPBackend

        disable_fsdp_ram_efficient_loading()
        state.fsdp_plugin.cpu_ram_efficient_loading = False
        return "FSDP2", FSDPBackend
    if kind == DistributedType.DEEPSPEED:
        from rlhf_pg.runtime.deepspeed import DeepSpeedBackend

        unset_hf_deepspeed_config()
        return f"ZeRO-{state.deepspeed_plugin.zero_stage}", DeepSpeedBackend
    raise ValueError(
        f"the launcher asks for {kind.value}, which is not supported: use DDP, FSDP with "
        "fsdp_version 2, or DeepSpeed (ZeRO), as in recipes/accelerate/"
    )
