"""TensorBoard, W&B and trackio, used through accelerate."""

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker
from accelerate.utils import is_tensorboard_available, is_trackio_available, is_wandb_available

from rlhf_pg.boundary.output_files import write_file
from rlhf_pg.boundary.quoted import tell
from rlhf_pg.report.run_files import finite
from rlhf_pg.runtime.processes import Runtime

logger = logging.getLogger(__name__)

INSTALLED: dict[str, Callable[[], bool]] = {
    "tensorboard": is_tensorboard_available,
    "wandb": is_wandb_available,
    "trackio": is_trackio_available,
}
PROJECT = "rlhf_pg"


class Trackers:
    """The main process's trackers, whose failure does not end a run; ValueError for one that is not
    installed.
    """

    def __init__(self, names: Sequence[str], runtime: Runtime) -> None:
        for name in names:
            if not INSTALLED[name]():
                raise ValueError(
                    f'report_to: {name} is not installed: pip install "rlhf-pg[trackers]"'
                )
        self._names = names
        self._runtime = runtime
        self._open: dict[str, GeneralTracker] = {}

    @contextmanager
    def open(
        self, directory: Path, run_name: str | None, config: dict[str, Any], resumed: bool = False
    ) -> Iterator[None]:
        """Open the trackers for a run, and close them at its end. If one cannot start, a resumed
        run goes on without it; a new run raises ValueError on all processes.
        """
        try:
            failure = self._start(directory, run_name, config)
            if failure is not None and resumed:
                logger.warning("%s; the run goes on without it", failure)
                failure = None
            reason = self._runtime.first_error(failure) if self._names else None
            if reason is not None:
                raise ValueError(reason)
            yield
        except BaseException:
            if "wandb" in self._open:  # else it would show the run as finished
                self._try("wandb", lambda tracker: tracker.tracker.finish(exit_code=1))
            raise
        finally:
            for name in list(self._open):
                self._try(name, lambda tracker: tracker.finish())
            self._open.clear()

    def log(self, metrics: dict[str, Any]) -> None:
        """Report the metrics of a step, without those that were not computed."""
        step = metrics["step"]
        values = {k: v for k, v in finite(metrics).items() if v is not None and k != "step"}
        for name in list(self._open):
            self._try(name, lambda tracker: tracker.log(values, step=step))

    def _start(self, directory: Path, run_name: str | None, config: dict[str, Any]) -> str | None:
        """Open all trackers that can start; return the errors."""
        if not (self._names and self._runtime.is_main):
            return None
        plain = {
            k: v if isinstance(v, str | int | float) else json.dumps(v) for k, v in config.items()
        }
        failures = []
        id_file = directory / "run-id"  # a resumed run reuses it
        resumed = id_file.exists()
        for name in self._names:
            try:
                if not id_file.exists():
                    write_file(id_file, [secrets.token_hex(4).encode()])
                tracker = _tracker(name, directory, run_name, id_file.read_text(), resumed)
                tracker.start()
                self._open[name] = tracker
                tracker.store_init_configuration(plain)
            except Exception as error:  # each library has its own errors
                failures.append(f"report_to: {name} cannot start: {tell(error)}")
                if name in self._open:
                    self._try(name, lambda tracker: tracker.finish())
                self._open.pop(name, None)
        return "; ".join(failures) or None

    def _try(self, name: str, act: Callable[[GeneralTracker], None]) -> None:
        """Call a tracker; one that fails is dropped for the rest of the run."""
        try:
            act(self._open[name])
        except Exception as error:  # each library has its own errors
            del self._open[name]
            text = "report_to: %s failed and is disabled: %s"
            logger.warning(text, name, tell(error))


def _tracker(
    name: str, directory: Path, run_name: str | None, run_id: str, resumed: bool
) -> GeneralTracker:
    if name == "tensorboard":
        return TensorBoardTracker("tensorboard", directory)
    if name == "wandb":
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        options = {"resume": "allow"}
        return WandBTracker(project, dir=directory, id=run_id, name=run_name, **options)
    how = "allow" if resumed else "never"
    return TrackioTracker(PROJECT, name=run_name or run_id, resume=how)
