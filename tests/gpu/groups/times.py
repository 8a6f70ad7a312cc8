"""How fast: rollouts, and whole steps, beside what others make of the same work."""

import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import rollout as benchmark
from benchmarks.peer import ours
from benchmarks.peer.workload import WORKLOADS, Job, Workload, save_model
from tests.gpu.check import Check, Result

ROUNDS = 2
TINY = Workload(prompts=2, shortest=4, longest=8, n=2, new=8)
TINY_CASE = benchmark.Case(prompts=2, shortest=4, longest=8, n=2, new=8)
# The step that docs/distributed.md has on paper: 256 completions of up to 1024 tokens.
PAPER = Workload(prompts=16, shortest=256, longest=256, n=16, new=1024)
PHASES = ("rollout", "score", "update")


def rollouts(device: str) -> Iterator[Check]:
    """Tokens per second, see benchmarks/rollout.py."""
    cases = {"tiny": TINY_CASE} if device == "cpu" else benchmark.CASES
    model = benchmark.new_model(on_gpu=device == "cuda")
    for name, case in cases.items():
        yield f"{name}, tokens/s", partial(rates, model, case, ["native", "generate"])
    if device == "cuda":
        for name, case in cases.items():
            what = f"{name}, tokens/s beside continuous batching"
            yield what, partial(rates, model, case, ["native", "paged"])


def rates(model: Any, case: benchmark.Case, ways: list[str]) -> Result:
    benchmark.speeds(model, case, ways, rounds=1)  # kernels are compiled and chosen
    measured = benchmark.speeds(model, case, ways, ROUNDS)
    native, other = (measured[way] for way in ways)
    figure = f"native {native:.0f}, {ways[1]} {other:.0f}: {native / other:.2f}x"
    return Result(figure, None, native)


def steps(device: str) -> Iterator[Check]:
    """Seconds of a GRPO step, see benchmarks/peer; beside TRL's where that is installed."""
    on_cpu = device == "cpu"
    sizes = {"vocabulary": 64, "width": 64, "layers": 1} if on_cpu else {}
    sizes = sizes or {"vocabulary": 32768, "width": 1024, "layers": 24}
    dtype = "float32" if on_cpu else "bfloat16"
    with tempfile.TemporaryDirectory() as directory:
        if not on_cpu:
            model = benchmark.new_model(on_gpu=True)
            model.cpu().save_pretrained(f"{directory}/paper")
            vocabulary = model.config.vocab_size
            del model
            job = Job(PAPER, "grpo", f"{directory}/paper", vocabulary, dtype, directory)
            yield "Qwen3-0.6B, 256 x up to 1024 tokens, s", partial(alone, job)
        path = save_model(Path(directory) / "model", **sizes)
        for name, workload in ({"tiny": TINY} if on_cpu else WORKLOADS).items():
            job = Job(workload, "grpo", path, sizes["vocabulary"], dtype, directory)
            yield f"{name}, s", partial(alone, job)
            yield f"{name}, s, beside TRL", partial(beside, job)


def alone(job: Job) -> Result:
    step = ours.stepper(job, job.load())
    own = [step() for _ in range(1 + ROUNDS)][-1]  # compiled by then
    return Result(f"{own['step']:.2f} ({phases(own)})", True, own["step"])


def beside(job: Job) -> Result:
    if not find_spec("trl"):
        return Result("TRL is not installed", None)
    from benchmarks.peer import __main__ as peer, theirs

    batch = theirs.fastest(job, [job.workload.rows // 4, job.workload.rows])
    own, other = peer.alternate(job, batch, ROUNDS)
    ratio = other["step"] / own["step"]
    figure = f"{own['step']:.2f} ({phases(own)}), TRL {other['step']:.2f}: {ratio:.2f}x"
    return Result(figure, job.dtype == "float32" or ratio >= 1, own["step"])


def phases(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds[name]:.2f}" for name in PHASES)
