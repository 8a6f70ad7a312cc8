"""The tables of docs/scaling.md on the seconds of a step: on paper, none of them measured.

`make docs` puts them into the page.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from scaling import rollout_bytes, short, table, update_bytes

from rlhf_pg.plan.devices import DEVICES, Device
from rlhf_pg.plan.job import Job, spread
from rlhf_pg.plan.paper import LIBRARIES, WITH_VLLM, Library, engine_gpus, stages
from rlhf_pg.plan.shapes import Shape
from rlhf_pg.plan.sharding import SHARDINGS, Sharding
from tests.plan.published import SHAPES, UNITS, agreement, fit, left_out, points

H100 = DEVICES["h100"]
DDP, _, ZERO2, _, FSDP2 = SHARDINGS
FREE = 0.9  # of a GPU's memory, as `micro_batch_tokens: auto` takes it
SAMPLING = 0.25  # of it is left to keys and values
MOST = 65536  # tokens of a micro-batch
SIZES = (
    "Qwen3-0.6B",
    "Qwen2.5-1.5B",
    "Qwen2.5-7B",
    "Qwen2.5-14B",
    "Qwen2.5-32B",
    "Llama-3-70B",
)
GPUS = (1, 8, 64)
# 8 prompts of 256 tokens on each GPU, 16 completions each.
JOB = Job(prompt=256, lengths=spread(128, 1024), generations=16)


def activations(shape: Shape, recomputes: bool) -> float:
    """Bytes of a token that wait for the backward pass, in bfloat16.

    Of a layer its input, the two norms (in float32 inside), what attention reads and gives, and
    four numbers for every one that is `inner`; with recomputing its input, and one layer's rest.
    """
    layer = 2 * (8 * shape.hidden + 3 * shape.attention + 3 * shape.keys + 4 * shape.inner)
    return 2 * shape.layers * shape.hidden + layer if recomputes else shape.layers * layer


def fitted(library: Library, device: Device, shape: Shape, job: Job) -> Job | None:
    """The job under the simplest of DDP, ZeRO-2 and FSDP2 that fits, in full; None: none does.

    It recomputes what the library would, or else only where not even one row fits without.
    """
    for layout in (DDP, ZERO2, FSDP2):
        placed = replace(job, layout=layout)
        free = FREE * device.memory - shape.parameters * update_bytes(layout, 2, job.processes)
        row = job.prompt + max(job.lengths)
        if not samples(library, device, shape, placed):
            continue
        for recomputes in (library.recomputes, True):
            tokens = int(free // activations(shape, recomputes))
            if tokens >= row:
                return replace(placed, recomputes=recomputes, micro_batch=min(MOST, tokens))
    return None


def samples(library: Library, device: Device, shape: Shape, job: Job) -> bool:
    """Whether what training keeps leaves room for the engine's weights and a cache."""
    try:
        gpus = engine_gpus(library, device, shape, job)
    except ValueError:
        return False
    kept = rollout_bytes(job.layout, 2, job.processes)
    if not library.in_process:
        kept += 2 / gpus - (2 if job.layout.weights else 0)  # its own in place of the copy
    return shape.parameters * kept <= (1 - SAMPLING) * device.memory


def totals() -> str:
    """Seconds of a step by size, number of GPUs and library."""
    rows = []
    for name in SIZES:
        for processes in GPUS:
            job = replace(JOB, processes=processes)
            jobs = [fitted(library, H100, SHAPES[name], job) for library in LIBRARIES]
            layouts = [own.layout.name for own in jobs if own is not None]
            if layouts:
                cells = [_total(*pair, SHAPES[name]) for pair in zip(LIBRARIES, jobs, strict=True)]
                which = " or ".join(dict.fromkeys(layouts)) if processes > 1 else "one process"
                rows.append([name, str(processes), which, *cells])
    return table(["", "GPUs", "", *(f"{library.name}, s" for library in LIBRARIES)], rows)


def _total(library: Library, job: Job | None, shape: Shape) -> str:
    return "-" if job is None else short(stages(library, H100, shape, job)["total"])


class Case(NamedTuple):
    """A step whose stages are shown."""

    what: str
    model: str
    completions: int  # on each GPU
    processes: int
    trained: float  # share of the parameters
    layout: Sharding


CASES = (
    Case("0.6B, one GPU, 256 completions", "Qwen3-0.6B", 256, 1, 1.0, DDP),
    Case("0.6B, 8 GPUs, 256 on each", "Qwen3-0.6B", 256, 8, 1.0, DDP),
    Case("7B, 8 GPUs, 64 on each", "Qwen2.5-7B", 64, 8, 1.0, ZERO2),
    Case("7B LoRA, one GPU, 64", "Qwen2.5-7B", 64, 1, 0.005, DDP),
)


def by_stage() -> str:
    """Seconds of a step, and of its stages."""
    rows = []
    for what, name, count, processes, trained, layout in CASES:
        job = replace(JOB, lengths=spread(count, 1024), processes=processes, layout=layout)
        job = replace(job, trained=trained)
        for library in LIBRARIES:
            seconds = stages(library, H100, SHAPES[name], job)
            name_of = f"**{library.name}**" if library is WITH_VLLM else library.name
            cells = [short(x) if x >= 0.005 else "0" for x in seconds.values()]
            rows.append([what, name_of, *cells])
            what = ""
    names = stages(WITH_VLLM, H100, SHAPES["Qwen3-0.6B"], JOB)
    return table(["", "", *(f"{name}, s" for name in names)], rows)


def published() -> str:
    """What others have measured, and what the model predicts."""
    rows = []
    for point in points():
        numbers = (point.published, point.predicted())
        cells = [f"{number:,.2f}" if number < 100 else f"{number:,.0f}" for number in numbers]
        what = f"[{point.what}]({point.source})"
        rows.append([point.model, what, UNITS[point.kind], *cells, f"{point.off():.2f}"])
    return table(["", "", "", "published", "on paper", "off by"], rows)


def errors() -> str:
    """The factors by which it is off, by kind of point; fitted and left out."""
    kinds = list(dict.fromkeys(point.kind for point in points()))
    rows = []
    for kind in kinds:
        off = [point.off() for point in points() if point.kind == kind]
        left = left_out(kind) if kind in ("train", "decode") else None
        cells = [f"{left.median:.2f}, {left.worst:.2f}" if left else "not fitted"]
        rows.append([kind, str(len(off)), f"{median(off):.2f}, {max(off):.2f}", *cells])
    every = agreement()
    whole = f"{every.median:.2f}, {every.worst:.2f}"
    rows.append(["all", str(every.points), whole, ""])
    head = ["", "points", "median, worst", "each estimated by a fit to the others"]
    return table(head, rows)


def constants() -> str:
    """What is fitted, and to what."""
    train, decode = fit("train"), fit("decode")
    rows: Iterable[list[str]] = [
        ["share of the peak of matrix products", f"{train.efficiency:.2f}", "train"],
        ["times a layer's numbers are read or written", f"{train.traffic:.0f}", "train"],
        ["vLLM's host, ms a position", f"{1e3 * decode.host:.1f}", "decode"],
    ]
    return table(["", "", "fitted to"], rows)


# By the name of the place in the page.
TABLES: dict[str, Callable[[], str]] = {
    "paper": totals,
    "paper-stages": by_stage,
    "published": published,
    "published-errors": errors,
    "published-constants": constants,
}
