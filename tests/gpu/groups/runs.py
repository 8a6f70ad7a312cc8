"""Whole runs: recipes, presets, backends with NCCL, vLLM."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM

from rlhf_pg.cli.train import train
from rlhf_pg.report.run_files import read
from tests.gpu.check import Check, Result, within
from tests.gpu.groups.common import save_model
from tests.gpu.groups.memory import SETUPS
from tests.gpu.report import ROOT

RECIPES = ROOT / "recipes"
# A random model is hardly ever right: what tells its completions apart is whether they end.
REWARDED = {"missing_eos_penalty": 1.0}
Flags = dict[str, Any]


def recipes(device: str) -> Iterator[Check]:
    """Every algorithm in each of `SETUPS`; on a CPU, where this takes long, one in some."""
    on_cpu = device == "cpu"
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(directory)
        for algorithm in ("ppo",) if on_cpu else ("ppo", "grpo", "rloo", "reinforce"):
            for setup in ("float32", "LoRA") if on_cpu else SETUPS:
                out = Path(directory) / f"{algorithm}-{setup}"
                recipe = RECIPES / f"{algorithm}_arithmetic.yaml"
                flags = {"model_name_or_path": model, "output_dir": out, **REWARDED}
                yield (
                    f"{algorithm}, {setup}",
                    partial(run, recipe, flags | SETUPS[setup], 2 if on_cpu else 10),
                )


def presets(device: str) -> Iterator[Check]:
    """Every preset, three steps of it; on a CPU one step of one."""
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(directory)
        found = sorted((RECIPES / "presets").glob("*.yaml"))
        for preset in found[:1] if device == "cpu" else found:
            flags = {"model_name_or_path": model, "output_dir": Path(directory) / preset.stem}
            flags["config"] = RECIPES / "arithmetic.yaml"
            yield preset.stem, partial(run, preset.stem, flags, 1 if device == "cpu" else 3)


def run(recipe: Path | str, flags: Flags, steps: int) -> Result:
    """Some steps of a recipe in this process, as `rlhf-pg train` takes them: their gradients are
    finite (and, where completions are told apart, not 0), and the medians are told.
    """
    if {"load_in_4bit", "optim"} & set(flags) and not find_spec("bitsandbytes"):
        return Result("bitsandbytes is not installed", None)
    given = {**flags, "max_steps": steps, "eval_steps": 0}
    train([str(recipe), *(f"--{key}={value}" for key, value in given.items())])
    lines = read(flags["output_dir"] / "metrics.jsonl")
    seconds = sorted(line["step_time"] for line in lines)[len(lines) // 2]
    speed = sorted(line["perf/tokens_per_second"] for line in lines)[len(lines) // 2]
    least = 1e-9 if set(REWARDED) <= set(flags) else 0.0
    finite = all(line["grad_norm"] is not None and line["grad_norm"] >= least for line in lines)
    figure = f"{seconds:.3f} s/step, {speed:.0f} tokens/s (median)"
    return Result(figure, finite and len(lines) == steps, seconds)


def backends(device: str) -> Iterator[Check]:
    """PPO (policy, critic and reference) by every file of recipes/accelerate, on all GPUs: norms of
    its first gradients against those of one process. On CPUs tests/distributed does that.
    """
    with tempfile.TemporaryDirectory() as directory:
        flags = {"model_name_or_path": save_model(directory), "max_steps": 3, "save_steps": 3}
        flags |= REWARDED
        alone = cache(partial(norms, None, flags, directory, device))
        yield "one process, launched", lambda: Result("done", min(alone()) > 0)
        for config in sorted((RECIPES / "accelerate").glob("*.yaml")) if device == "cuda" else ():
            if not config.stem.startswith("cpu"):
                check = partial(compared, config, flags, directory, alone)
                yield f"gradient norms, {config.stem}", check


def compared(
    config: Path, flags: Flags, directory: str, alone: Callable[[], list[float]]
) -> Result:
    if config.stem.startswith("zero") and not find_spec("deepspeed"):
        return Result("deepspeed is not installed", None)
    found = norms(config, flags, directory, "cuda")
    return within(max(abs(a / b - 1) for a, b in zip(found, alone(), strict=True)), 1e-3)


def norms(config: Path | None, flags: Flags, directory: str, device: str) -> list[float]:
    """Of the gradients of a run, whose model can be loaded afterwards."""
    out = Path(directory) / (config.stem if config else "one process")
    launch("ppo", {**flags, "output_dir": out}, device, config)
    AutoModelForCausalLM.from_pretrained(out / "final")
    return [line["grad_norm"] for line in read(out / "metrics.jsonl")]


def launch(algorithm: str, flags: Flags, device: str, config: Path | None) -> None:
    """Run a recipe script by `accelerate launch`, in one process or on all GPUs.

    Raises:
        RuntimeError: it failed; the first error that it told of.
        TimeoutExpired: it was not done after 200 seconds.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(config)] if config is not None else []
    processes = 1 if config is None else torch.cuda.device_count()
    command += ["--num_processes", str(processes), *(["--cpu"] if device == "cpu" else [])]
    recipe = RECIPES / f"{algorithm}_arithmetic.yaml"
    command += [str(RECIPES / f"{algorithm}.py"), "--config", str(recipe), "--eval_steps", "0"]
    for key, value in {"rollout_engine": "native", **flags}.items():
        command += [f"--{key}", str(value)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        try:
            said = process.communicate(timeout=200)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # which a launcher of several processes hands on to them
            raise
    print(said)
    if process.returncode:
        errors = [line for line in said.splitlines() if "Error: " in line]
        raise RuntimeError(errors[0] if errors else f"exit code {process.returncode}")


def vllm(device: str) -> Iterator[Check]:
    """GRPO with the vLLM in its process that auto takes: its log-probabilities, in every step,
    against those of the weights that it was handed over.
    """
    bounds = {"float32": 1e-3, "bfloat16": 5e-2}  # of the mean: kernels differ in both
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(directory)
        for dtype, use_peft in ((d, p) for d in bounds for p in (False, True)):
            flags = {"rollout_engine": "auto", "max_steps": 5}
            flags |= {"model_name_or_path": model, "dtype": dtype, "use_peft": use_peft}
            flags |= {"output_dir": Path(directory) / f"vllm-{dtype}-{use_peft}"}
            what = f"against the policy, {dtype}{', LoRA' * use_peft}"
            yield what, partial(by_vllm, flags, bounds[dtype], device)


def by_vllm(flags: Flags, bound: float, device: str) -> Result:
    if device == "cpu" or not find_spec("vllm"):
        return Result("on a CPU `make test-vllm`" if device == "cpu" else "not installed", None)
    launch("grpo", flags, device, None)
    name = "sampling/sampling_logp_difference/mean"
    off = max(line.get(name, 0.0) for line in read(flags["output_dir"] / "metrics.jsonl"))
    taken = yaml.safe_load((flags["output_dir"] / "config.yaml").read_text())["rollout_engine"]
    return Result(f"{off:.1e}, {taken}", off <= bound and taken == "vllm", off)
