"""What a few minutes on a GPU can show: nine stages in one process of at most 480 seconds.

    python -m benchmarks.lease [--only ceilings decode] > lease.jsonl
    python -m benchmarks.lease --tiny        # rehearsed on a CPU

Wheels to carry to a machine without a network: torch 2.13.0 (its CUDA build) with triton,
transformers 5.23.0, accelerate, peft, datasets, safetensors, pydantic, PyYAML, rich, trl 1.16.0,
and liger-kernel if the head is to be compared with it.

Each stage has an alarm, and prints a line of JSON when it is done: its figures and seconds, or its
error. The most telling come first, so that one that is cut off still has them.
"""

import argparse
import gc
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from benchmarks.peer import ours, theirs
from benchmarks.peer.workload import Job, Workload, synchronize
from benchmarks.rollout import new_model
from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.models import lm_head
from rlhf_pg.rollout import NativeEngine, Request, SamplingParams
from rlhf_pg.tasks import load_task
from tests.gpu.groups import memory, unsure
from tests.gpu.groups.common import save_wide_model
from tests.tiny import tiny_model

MOST = 480.0  # seconds of all stages
ROOT = Path(__file__).parents[1]
# Qwen3-0.6B's shape in `new_model`: 16 prompts with 16 completions of up to 1,024 tokens.
PAPER = Workload(prompts=16, shortest=256, longest=256, n=16, new=1024)
TINY = Workload(prompts=2, shortest=4, longest=8, n=2, new=8)
Figures = dict[str, Any]


@dataclass
class Lease:
    """What the stages are given."""

    directory: Path
    is_tiny: bool

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def dtype(self) -> str:
        return "float32" if self.is_tiny else "bfloat16"

    @cached_property
    def job(self) -> Job:
        """The step of the paper estimate, or a tiny one."""
        path = self.directory / "model"
        model: PreTrainedModel = tiny_model("qwen3", vocab_size=64)
        if not self.is_tiny:
            model = new_model(on_gpu=True).cpu()
        model.save_pretrained(path)
        workload = TINY if self.is_tiny else PAPER
        vocabulary = model.config.vocab_size
        output = str(self.directory / "run")
        return Job(workload, "grpo", str(path), vocabulary, self.dtype, output)


def seconds_of(act: Callable[[], Any], rounds: int = 5) -> float:
    """Return the median seconds of an act after a first one, which compiles."""
    act()
    measured = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        act()
        synchronize()
        measured.append(time.perf_counter() - start)
    return statistics.median(measured)


def ceilings(lease: Lease) -> Figures:
    """What products of matrices and copies reach."""
    size = 256 if lease.is_tiny else 8192
    a = torch.ones(size, size, dtype=torch.bfloat16, device=lease.device)
    numbers = torch.ones(size * size * 8, device=lease.device)
    product = seconds_of(lambda: a @ a)
    copy = seconds_of(lambda: numbers.clone())
    return {
        "torch": torch.__version__,
        "tflops": 2 * size**3 / product / 1e12,
        "gb_per_s": 2 * numbers.nbytes / copy / 1e9,
    }


def step(lease: Lease) -> Figures:
    """Two real steps in the device's own dtype, and how far scores are from the sampler's."""
    task = load_task("arithmetic")
    model, tokenizer = task.new_model()
    args = GRPOConfig(
        output_dir=str(lease.directory / "arithmetic"),
        max_steps=2,
        max_completion_length=6,
        save_steps=0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=task.reward,
        args=args,
        train_dataset=task.train_dataset,
        processing_class=tokenizer,
    )
    trainer.train()
    last = trainer.history[-1]
    agreement = {name: x for name, x in last.items() if name.startswith("agreement/")}
    return {"dtype": trainer.args.dtype, "loss": last["loss"], **agreement}


def our_step(lease: Lease) -> Figures:
    """A step of the paper estimate, by phases."""
    take = ours.stepper(lease.job, lease.job.load())
    take()
    return take()


def step_of_trl(lease: Lease) -> Figures:
    """The same step by TRL, in micro-batches of a quarter of the rows."""
    if not find_spec("trl"):
        return {"missing": "trl"}
    taken: list[Figures] = []
    rows = lease.job.workload.rows
    theirs.train(lease.job, lease.job.load(), 2, rows // 4, taken.append)
    return taken[-1]


def decode(lease: Lease) -> Figures:
    """A call of decoding: launches per token, the share of time that the GPU is busy, and what a
    whole forward pass takes, launched one by one and as a CUDA graph.
    """
    rows = 4 if lease.is_tiny else 16
    model = lease.job.load()
    engine = NativeEngine(model, [], 0)
    params = SamplingParams(max_tokens=32 if lease.is_tiny else 256)
    with engine.weights_synced(), engine.session(params, 0) as session:
        for prompt in range(rows):
            session.add(Request(tokens=[5, 6, 7, 8], prompt_index=prompt, samples=range(rows)))
        for _ in range(2):
            session.step()
        [inner] = session.sessions.values()
        before = len(inner.rows[0].tokens)
        activities = [ProfilerActivity.CPU]
        if lease.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        synchronize()
        start = time.perf_counter()
        with profile(activities=activities) as recorded:
            session.step()
            synchronize()
        seconds = time.perf_counter() - start
        tokens = len(inner.rows[0].tokens) - before
    kernels = [x for x in recorded.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    figures: Figures = {
        "rows": rows * rows,
        "tokens": tokens,
        "launches_per_token": len(kernels) / tokens,
        "busy": sum(x.device_time for x in kernels) / 1e6 / seconds,
        "ms_per_token_under_the_profiler": 1e3 * seconds / tokens,
    }
    ids = torch.full((rows * rows, 1), 5, device=lease.device)
    with torch.no_grad():
        figures["forward_ms"] = 1e3 * seconds_of(lambda: model(ids, use_cache=False))
        if lease.device == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(ids, use_cache=False)
            figures["forward_in_a_graph_ms"] = 1e3 * seconds_of(graph.replay)
    return figures


def update(lease: Lease) -> Figures:
    """The head forward and backward on 65,536 tokens: by eager passes, compiled, and liger's."""
    tokens, width, vocabulary = (256, 32, 512) if lease.is_tiny else (65536, 1024, 151936)
    dtype = getattr(torch, lease.dtype)
    head = torch.nn.Linear(width, vocabulary, bias=False, dtype=dtype, device=lease.device)
    hidden = torch.randn(tokens, width, dtype=dtype, device=lease.device, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device=lease.device)
    distribution = lm_head.TokenDistribution(1.0, lm_head.NOTHING, False)
    total = torch.cuda.mem_get_info()[1] if lease.device == "cuda" else None
    chunks = lm_head.num_chunks(tokens, vocabulary, lm_head.chunk_size_for(total))

    def pass_through() -> None:
        logprobs, _ = lm_head._ChunkedStatistics.apply(
            hidden, head.weight, None, targets, distribution, chunks, None
        )
        logprobs.sum().backward()

    figures: Figures = {"tokens": tokens, "chunks": chunks}
    for name, compiles in (("eager", False), ("compiled", True)):
        if compiles and lease.device == "cpu":
            continue
        before = lm_head._compiles
        lm_head._compiles = before if compiles else lambda output, compare: False
        try:
            figures[f"{name}_ms"] = 1e3 * seconds_of(pass_through, 2)
        finally:
            lm_head._compiles = before
    if find_spec("liger_kernel") and lease.device == "cuda":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")

        def fused() -> None:
            loss(head.weight, hidden, targets).backward()

        figures["liger_ms"] = 1e3 * seconds_of(fused, 2)
    return figures


def plan(lease: Lease) -> Figures:
    """Bytes of an update by `rlhf-pg plan`, beside the most that were allocated."""
    folder = str(lease.directory)
    model = save_wide_model(folder, lease.device)
    result = memory.planned("bfloat16", model, folder, lease.device)
    return {"figure": result.figure, "off": result.value}


def flex(lease: Lease) -> Figures:
    """FlexAttention of several blocks, forward and backward, against the CPU; and its gradient
    twice.
    """
    families = unsure.FEW if lease.is_tiny else unsure.MANY
    off = unsure.fused(64, families, torch.float32, 1e-4, lease.device)
    return {"off": off.value, "twice": unsure.twice(lease.device).figure}


def fsdp2(lease: Lease) -> Figures:
    """Two steps under FSDP2 with LoRA, by the launch file, in a process of its own."""
    if lease.device == "cpu":
        return {"missing": "a GPU"}
    config = ROOT / "recipes/accelerate/fsdp2.yaml"
    output = lease.directory / "fsdp2"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--num_processes", "1", str(ROOT / "recipes/grpo.py")]
    command += ["--config", str(ROOT / "recipes/grpo_arithmetic.yaml"), "--use_peft"]
    command += ["--dtype", "bfloat16", "--max_steps", "2", "--output_dir", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-500:]}
    line = (output / "metrics.jsonl").read_text().splitlines()[-1]
    metrics = json.loads(line)
    return {"grad_norm": metrics["grad_norm"], "step_time": metrics["step_time"]}


# The seconds of each stage, at most.
STAGES: dict[str, tuple[Callable[[Lease], Figures], int]] = {
    "ceilings": (ceilings, 40),
    "step": (step, 60),
    "our_step": (our_step, 150),
    "trl": (step_of_trl, 180),
    "decode": (decode, 60),
    "update": (update, 90),
    "plan": (plan, 60),
    "flex": (flex, 60),
    "fsdp2": (fsdp2, 90),
}


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} s")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--tiny", action="store_true", help="small shapes, in float32")
    flags = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    output = sys.stdout
    sys.stdout = sys.stderr  # what trainers print
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        lease = Lease(Path(directory), flags.tiny)
        for name in flags.only:
            stage, limit = STAGES[name]
            start = time.monotonic()
            left = MOST - (start - begin)
            if left < 1:
                figures: Figures = {"error": "no time left"}
            else:
                try:
                    with alarm(min(limit, left)):
                        figures = stage(lease)
                except Exception as error:
                    figures = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            seconds = round(time.monotonic() - start, 2)
            line = {"stage": name, "seconds": seconds, **figures}
            print(json.dumps(line, default=str), file=output, flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
