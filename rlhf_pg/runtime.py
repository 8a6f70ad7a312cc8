"""Processes and devices: the only file that knows how a model is distributed.

Everything else sees a few verbs: prepare, micro_batch, backward, clip, gather and total. The
trackers are here too, since it is accelerate that knows them.
"""

import atexit
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker
from accelerate.utils import is_tensorboard_available, is_trackio_available, is_wandb_available
from torch import Tensor, nn

from rlhf_pg.metrics import finite

logger = logging.getLogger(__name__)

INSTALLED: dict[str, Callable[[], bool]] = {
    "tensorboard": is_tensorboard_available,
    "wandb": is_wandb_available,
    "trackio": is_trackio_available,
}
PROJECT = "rlhf_pg"


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


class Trackers:
    """TensorBoard, W&B and trackio of the main process; on the others nothing is opened.

    `Accelerator` has these too, but there one that fails takes the others and the run with it.

    Args:
        names: as `report_to` has them.

    Raises:
        ValueError: one is not installed.
    """

    def __init__(self, names: Sequence[str], runtime: Runtime) -> None:
        for name in names:
            if not INSTALLED[name]():
                raise ValueError(
                    f'report_to: {name} is not installed: pip install "rlhf-pg[trackers]"'
                )
        self._names, self._runtime = names, runtime
        self._open: dict[str, GeneralTracker] = {}

    @contextmanager
    def opened(
        self, directory: Path, run_name: str | None, config: dict[str, Any]
    ) -> Iterator[None]:
        """Around a run: its trackers are closed however it ends.

        Args:
            directory: of the run; one that is resumed goes on in the trackers too.
            run_name: None leaves it to them.
            config: logged as hyper-parameters.

        Raises:
            ValueError: one cannot start; on all processes, since the others would wait for ever.
        """
        try:
            failure = self._start(directory, run_name, config)
            if self._names and self._runtime.most(int(failure is not None)):
                raise ValueError(failure or "a tracker could not start in the main process")
            yield
        except BaseException:
            if "wandb" in self._open:  # which otherwise shows the run as finished
                self._try("wandb", lambda tracker: tracker.tracker.finish(exit_code=1))
            raise
        finally:
            for name in list(self._open):
                self._try(name, lambda tracker: tracker.finish())
            self._open.clear()

    def log(self, metrics: dict[str, Any]) -> None:
        """Report the line of a step, less the numbers that were not computed."""
        step = metrics["step"]
        values = {k: v for k, v in finite(metrics).items() if v is not None and k != "step"}
        for name in list(self._open):
            self._try(name, lambda tracker: tracker.log(values, step=step))

    def _start(self, directory: Path, run_name: str | None, config: dict[str, Any]) -> str | None:
        """Open all of them; returns what went wrong."""
        if not (self._names and self._runtime.is_main):
            return None
        plain = {
            k: v if isinstance(v, str | int | float) else json.dumps(v) for k, v in config.items()
        }
        name = ""
        try:
            makers = _trackers(directory, run_name)
            for name in self._names:
                tracker = makers[name]()
                tracker.start()
                self._open[name] = tracker
                tracker.store_init_configuration(plain)
        except Exception as error:  # of whatever kind its library raises
            return f"report_to: {name or 'the trackers'} cannot start: {error}"
        return None

    def _try(self, name: str, act: Callable[[GeneralTracker], None]) -> None:
        """Do something with a tracker; one that fails is left out of the rest of the run."""
        try:
            act(self._open[name])
        except Exception as error:  # of whatever kind its library raises
            del self._open[name]
            logger.warning("report_to: %s failed and gets nothing from here on: %s", name, error)


def _trackers(directory: Path, run_name: str | None) -> dict[str, Callable[[], GeneralTracker]]:
    """How each is made; a resumed run has the id that its directory keeps."""
    file = directory / "run-id"
    resumed = file.exists()
    if not resumed:
        file.write_text(secrets.token_hex(4))
    run_id = file.read_text()
    return {
        "tensorboard": lambda: TensorBoardTracker("tensorboard", directory),
        "wandb": lambda: WandBTracker(
            os.environ.get("WANDB_PROJECT", PROJECT),
            dir=directory,
            id=run_id,
            name=run_name,
            resume="allow",
        ),
        "trackio": lambda: TrackioTracker(
            PROJECT, name=run_name or run_id, resume="allow" if resumed else "never"
        ),
    }
