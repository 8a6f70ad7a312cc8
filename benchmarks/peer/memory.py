"""The peak memory of one side in a process of its own."""

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.peer.workload import Job, Workload

STEPS = 2  # the first ends with the optimizer's state


def peak(side: str, job: Job, **options: int) -> float:
    """MiB above imports and the loaded policy; `side` is the module "ours" or "theirs"."""
    what = json.dumps({"side": side, "job": dataclasses.asdict(job), "options": options})
    command = [sys.executable, "-m", "benchmarks.peer.memory", what]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the steps of {side} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def _run(side: str, job: dict, options: dict[str, int]) -> None:
    module = importlib.import_module(f"benchmarks.peer.{side}")
    described = Job(**job | {"workload": Workload(**job["workload"])})
    model = described.load()
    before = _begin()
    module.train(described, model, STEPS, **options)
    print((_highest() - before) / 2**20)


def _begin() -> int:
    """Bytes in use; from here on the peak is another."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # of Linux: VmHWM starts anew
    return _status("VmRSS")


def _highest() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    _run(**json.loads(sys.argv[1]))
