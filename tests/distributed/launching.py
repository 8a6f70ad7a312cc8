"""Starting runs in several processes, and reading what they leave behind."""

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from rlhf_pg.report.run_files import read
from rlhf_pg.tasks import arithmetic
from tests.distributed import runs
from tests.distributed.backends import environment
from tests.tiny import tiny_model
from tests.untimed import without_times

ROOT = Path(__file__).parents[2]
OWN = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
PATIENCE = 120  # seconds, far beyond what any run here takes that ends by itself
COMMON = {
    "max_steps": 5,
    "save_steps": 0,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.0,
    "max_completion_length": 6,
}


@dataclass
class Outcome:
    """What a run left behind."""

    sampled: list[list[int]]
    gradients: dict[str, Tensor]  # by split into micro-batches
    start: Tensor
    end: Tensor
    metrics: list[dict[str, Any]]
    evaluated: dict[str, float]
    exchanges: list[int]
    directory: Path

    @classmethod
    def of(cls, out: Path) -> "Outcome":
        files = sorted(out.glob("sampled-*.json"))
        tensors = torch.load(out / "tensors.pt", weights_only=True)
        return cls(
            sampled=sorted(row for file in files for row in read_json(file)),
            gradients=tensors.get("gradients", {}),
            start=tensors["start"],
            end=tensors["end"],
            metrics=read(out / "run" / "metrics.jsonl"),
            evaluated=read_json(out / "eval.json"),
            exchanges=read_json(out / "exchanges.json") if files else [],
            directory=out / "run",
        )

    def numbers(self) -> list[dict[str, float]]:
        """Of every step what was computed, and does not depend on the clock."""
        return [
            {k: v for k, v in without_times(line).items() if v is not None} for line in self.metrics
        ]


def start_two(
    module: str,
    arguments: Sequence[Sequence[str]],
    backend: str = "ddp",
    faults: Sequence[str] = ("", ""),
) -> list["subprocess.Popen[str]"]:
    """Two processes that no launcher looks after.

    Args:
        module: what they run.
        arguments, faults: command line and `RLHF_PG_FAULT` of each.
    """
    common = _meeting_place(2) | OWN | environment(backend)

    def start(rank: int) -> "subprocess.Popen[str]":
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "RLHF_PG_FAULT": faults[rank]}
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments[rank]],
            env=os.environ | common | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return [start(rank) for rank in (0, 1)]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def launch(
    root: Path, jobs: dict[str, dict[str, Any]], backend: str = "ddp", processes: int = 1
) -> dict[str, Outcome]:
    """Run the jobs, one after another in the same processes; each leaves a directory in `root`.

    The processes are forks of this one, which need not import anything.
    """
    root.mkdir()
    listed = [{"out": str(root / name), **job} for name, job in jobs.items()]
    plan, log = root / "jobs.json", root / "log"
    plan.write_text(json.dumps({"backend": backend, "jobs": listed}))
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    env |= OWN | environment(backend)
    if processes > 1 or backend != "ddp":
        env |= _meeting_place(processes)
    with log.open("w") as file:
        work = partial(_work, plan, env, file.fileno())
        forks = [get_context("fork").Process(target=work, args=(i,)) for i in range(processes)]
        for fork in forks:
            fork.start()
        for fork in forks:
            fork.join(900)
            fork.kill()
            fork.join()
    assert not any(fork.exitcode for fork in forks), log.read_text()[-10_000:]
    return {name: Outcome.of(root / name) for name, job in jobs.items() if "kind" not in job}


def _work(plan: Path, env: dict[str, str], log: int, rank: int) -> None:
    """Run the jobs in this fork, as a process that a launcher has started."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    atexit._clear()  # type: ignore[attr-defined]  # what the parent is to do at its end
    os.environ.clear()
    os.environ.update(env)
    if "WORLD_SIZE" in env:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(1)
    runs.main(plan)
    atexit._run_exitfuncs()


def _meeting_place(processes: int) -> dict[str, str]:
    """Return the variables by which so many processes find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def saved_model(path: Path, arch: str | None = None) -> str:
    """The embedded task's model and tokenizer, with random weights.

    Args:
        arch: of another model in its place, one of `tests.tiny.ARCHS`.
    """
    torch.manual_seed(0)
    model, tokenizer = arithmetic().new_model()
    if arch is not None:
        model = tiny_model(arch, vocab_size=len(tokenizer))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
