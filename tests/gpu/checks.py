"""What CPU tests cannot see: the same numbers on a GPU, the recipes in bfloat16 and with adapters,
the backends with NCCL, and step times.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen2Config

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.experience import Rollout
from rlhf_pg.metrics import Meter, read
from rlhf_pg.models import Policy
from rlhf_pg.plan import draw, predicted_memory
from rlhf_pg.rollout import NativeEngine, SamplingParams
from rlhf_pg.runtime import LAYOUTS
from rlhf_pg.tasks import arithmetic
from rlhf_pg.tasks.tiny import character_tokenizer
from tests.benchmarks import rollout as rollout_benchmark
from tests.tiny import ARCHS, tiny_model

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8, 9]]
SAMPLING = SamplingParams(max_tokens=12)
SETUPS = {
    "bfloat16": {"dtype": "bfloat16"},
    "stochastic rounding": {"dtype": "bfloat16", "bfloat16_update": "stochastic_rounding"},
    "8 bits": {"dtype": "bfloat16", "optim": "adamw_8bit"},
    "float32": {"dtype": "float32"},
    "LoRA": {"dtype": "bfloat16", "use_peft": True, "gradient_checkpointing": True},
    "QLoRA": {"dtype": "bfloat16", "use_peft": True, "load_in_4bit": True},
}
# Two prompts, with eight completions each that fill several micro-batches.
PLANNED: dict[str, Any] = {
    "max_prompt_length": 256,
    "max_completion_length": 256,
    "prompts_per_step": 2,
    "num_generations": 8,
    "micro_batch_tokens": 4096,
    "max_steps": 1,
}
Check = tuple[str, str, bool]  # what, figure, passed


def rollout_of(engine: NativeEngine, params: SamplingParams = SAMPLING) -> Rollout:
    sampled = engine.generate(PROMPTS, 4, params, seed=0)
    return Rollout.from_tokens(
        prompts=[prompt for prompt in PROMPTS for _ in range(4)],
        completions=[c.tokens for c in sampled],
        logprobs=[c.logprobs for c in sampled],
        truncated=[c.finish_reason == "length" for c in sampled],
        groups=[i for i in range(len(PROMPTS)) for _ in range(4)],
        pad_token_id=0,
    )


def on(rollout: Rollout, device: str) -> Rollout:
    return Rollout(**{name: value.to(device) for name, value in rollout._tensors()})


def agreement(device: str) -> Iterator[Check]:
    """Per-token numbers on the device against float32 on the CPU, for every architecture."""
    for arch in ARCHS:
        model = tiny_model(arch, scale=0.1)
        rollout = rollout_of(NativeEngine(model, 2, 0))
        with torch.no_grad():
            expected = Policy(model)(rollout).logprobs
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
            there = tiny_model(arch, scale=0.1, dtype=dtype).to(device)
            with torch.no_grad():
                actual = Policy(there)(on(rollout, device)).logprobs.cpu()
            # bfloat16 keeps 8 bits: single tokens may be further off, their mean may not.
            error = (actual - expected).abs()[rollout.action_mask]
            off = error.mean().item() if dtype == torch.bfloat16 else error.max().item()
            what = f"log-probabilities, {arch}, {str(dtype).removeprefix('torch.')}"
            yield what, f"{off:.1e}", off <= tolerance


def sampling(device: str) -> Iterator[Check]:
    """The engine's log-probabilities against a scoring pass, and sampled ids against the CPU."""
    for arch in ("qwen3", "gpt2"):
        here, there = tiny_model(arch), tiny_model(arch).to(device)
        rollout = rollout_of(NativeEngine(there, 2, 0))
        with torch.no_grad():
            scored = Policy(there)(on(rollout, device)).logprobs.cpu()
        off = (scored - rollout.sampler_logprobs).abs().max().item()
        yield f"sampler against scoring, {arch}", f"{off:.1e}", off <= 1e-4
        ids = rollout_of(NativeEngine(here, 2, 0)).completion_ids
        same = ids.equal(rollout.completion_ids)
        yield f"sampled ids as on the CPU, {arch}", "equal" if same else "differ", same


def decoding(device: str) -> Iterator[Check]:
    """Long completions, with decoding steps recorded and replayed, against a scoring pass."""
    for arch in ARCHS:
        model = tiny_model(arch, max_position_embeddings=128).to(device)
        engine = NativeEngine(model, [], 0)
        rollout = rollout_of(engine, SamplingParams(max_tokens=100))
        with torch.no_grad():
            scored = Policy(model)(on(rollout, device)).logprobs.cpu()
        off = (scored - rollout.sampler_logprobs).abs().max().item()
        recorded = sum(len(kept.graphs.recorded) for kept in engine.kept.values())
        fine = off <= 1e-4 and (recorded > 0 or device == "cpu")
        yield f"decoding by CUDA graphs, {arch}", f"{recorded} recorded, {off:.1e}", fine


def rollouts(device: str) -> Iterator[Check]:
    """Tokens per second, see tests/benchmarks/rollout.py."""
    if device == "cpu":
        return
    model = rollout_benchmark.new_model(on_gpu=True)
    for name, case in rollout_benchmark.CASES.items():
        measured = rollout_benchmark.speeds(model, case, list(rollout_benchmark.WAYS), rounds=2)
        figure = ", ".join(f"{way} {speed:.0f}" for way, speed in measured.items())
        faster = measured["native"] >= max(measured["generate"], measured["paged"])
        yield f"rollout, {name}, tokens/s", figure, faster


def save_model(directory: str) -> str:
    """A random model of the embedded task."""
    for part in arithmetic().new_model():
        part.save_pretrained(f"{directory}/model")
    return f"{directory}/model"


def recipes(device: str) -> Iterator[Check]:
    """Every algorithm in each of `SETUPS`, by `accelerate launch`."""
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(directory)
        for algorithm in ("grpo", "ppo", "rloo", "reinforce"):
            for setup, options in SETUPS.items():
                if {"load_in_4bit", "optim"} & set(options) and not find_spec("bitsandbytes"):
                    continue
                out = Path(directory) / f"{algorithm}-{setup}"
                flags = {"model_name_or_path": model, "max_steps": 10, **options}
                recipe = RECIPES / f"{algorithm}_arithmetic.yaml"
                launch(recipe, algorithm, device, {**flags, "output_dir": str(out)})
                lines = read(out / "metrics.jsonl")
                seconds = sorted(line["step_time"] for line in lines)[len(lines) // 2]
                speed = sorted(line["perf/tokens_per_second"] for line in lines)[len(lines) // 2]
                figure = f"{seconds:.3f} s/step, {speed:.0f} tokens/s (median)"
                finite = all(line["grad_norm"] is not None for line in lines)
                yield f"recipe {algorithm}, {setup}", figure, finite and len(lines) == 10


def presets(device: str) -> Iterator[Check]:
    """Every preset, three steps of it."""
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(directory)
        for preset in sorted((RECIPES / "presets").glob("*.yaml")):
            out = Path(directory) / preset.stem
            flags = {"model_name_or_path": model, "max_steps": 3, "output_dir": str(out)}
            launch(preset, yaml.safe_load(preset.read_text())["algorithm"], device, flags)
            lines = read(out / "metrics.jsonl")
            finite = all(line["grad_norm"] is not None for line in lines)
            figure = f"{lines[-1]['step_time']:.3f} s/step"
            yield f"preset {preset.stem}", figure, finite and len(lines) == 3


def plans(device: str) -> Iterator[Check]:
    """Bytes that the plan foretells for an update, against the most that were allocated in one."""
    if device == "cpu":
        return
    with tempfile.TemporaryDirectory() as directory:
        model = save_wide_model(directory)
        for setup, options in SETUPS.items():
            if "load_in_4bit" in options:  # whose kernels have work space of their own
                continue
            args = GRPOConfig(
                model_name_or_path=model,
                output_dir=f"{directory}/{setup}",
                **{**PLANNED, **options},
            )
            room = float(torch.cuda.get_device_properties(device).total_memory)
            memory = predicted_memory(draw(args, device, "cuda"), LAYOUTS[0], 1, room, "cuda")
            prompts = Dataset.from_dict({"prompt": ["1" * 256, "2" * 256]})
            trainer = GRPOTrainer(reward_funcs=lengths, args=args, train_dataset=prompts)
            trainer.engine.eos_token_ids = []  # all completions have their full length
            samples = trainer.roll_out(range(2))
            scores = trainer.reward(samples)
            experience, _ = trainer.make_experience(samples.rollout, scores, Meter())
            torch.cuda.reset_peak_memory_stats()
            trainer.update(experience, Meter())
            most = torch.cuda.max_memory_allocated()
            off = sum(memory.update.values()) / most - 1
            yield f"plan, {setup}", f"{most / 1e9:.2f} GB, {100 * off:+.0f} %", abs(off) <= 0.2
            del trainer, experience, samples


def resuming(device: str) -> Iterator[Check]:
    """Four steps are two, a stop and two, to the last bit, by torch's deterministic algorithms."""
    with tempfile.TemporaryDirectory() as directory, deterministic():
        model = save_model(directory)
        for dtype, use_peft in (("float32", False), ("bfloat16", True)):
            ends = []
            for name, stops in (("whole", [4]), ("broken", [2, 4])):
                for steps in stops:
                    trainer = GRPOTrainer(
                        model=model,
                        reward_funcs=lengths,
                        args=GRPOConfig(
                            output_dir=f"{directory}/{name}-{dtype}",
                            dtype=dtype,
                            use_peft=use_peft,
                            beta=0.05,
                            max_steps=steps,
                            save_steps=2,
                            learning_rate=1e-3,
                            max_completion_length=16,
                            lr_scheduler_type="constant",
                            micro_batch_tokens=512,
                        ),
                        train_dataset=arithmetic().train_dataset,
                    )
                    trainer.train("latest" if len(stops) > 1 and steps == 4 else None)
                ends.append([p.detach().cpu() for p in trainer.model.parameters()])
            same = all(a.equal(b) for a, b in zip(*ends, strict=True))
            yield f"resumed, {dtype}{', LoRA' * use_peft}", "equal" if same else "differs", same


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # run.sh sets what cuBLAS needs for it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def save_wide_model(directory: str) -> str:
    """Of 0.2 billion parameters, with a large vocabulary and a tokenizer of digits."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32768}
    config = Qwen2Config(**shape, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(f"{directory}/wide")
    character_tokenizer("0123456789").save_pretrained(f"{directory}/wide")
    return f"{directory}/wide"


def backends(device: str) -> Iterator[Check]:
    """PPO (policy, critic and reference) by every file of recipes/accelerate, on all GPUs: norms of
    its first gradients against those of one process. On CPUs tests/distributed does that.
    """
    if device == "cpu":
        return
    recipe, norms = RECIPES / "ppo_arithmetic.yaml", {}
    with tempfile.TemporaryDirectory() as directory:
        flags = {"model_name_or_path": save_model(directory), "max_steps": 3, "save_steps": 3}
        for config in (None, *sorted((RECIPES / "accelerate").glob("*.yaml"))):
            name = config.stem if config else "one process"
            if name.startswith("cpu") or (name.startswith("zero") and not find_spec("deepspeed")):
                continue
            out = Path(directory) / name
            launch(recipe, "ppo", device, {**flags, "output_dir": str(out)}, config)
            norms[name] = [line["grad_norm"] for line in read(out / "metrics.jsonl")]
            off = max(
                abs(a / b - 1) for a, b in zip(norms[name], norms["one process"], strict=True)
            )
            saved = AutoModelForCausalLM.from_pretrained(out / "final").num_parameters() > 0
            yield f"gradient norms, {name}", f"{off:.1e}", saved and off <= 1e-3


def vllm(device: str) -> Iterator[Check]:
    """GRPO with vLLM in its process, asleep during updates: its log-probabilities, in every step,
    against those of the weights that it was handed over.
    """
    if device == "cpu" or not find_spec("vllm"):
        return
    bounds = {"float32": 1e-3, "bfloat16": 5e-2}  # of the mean: kernels differ in both
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(directory)
        for dtype, use_peft in ((d, p) for d in bounds for p in (False, True)):
            out = Path(directory) / f"vllm-{dtype}-{use_peft}"
            flags = {"rollout_engine": "vllm", "vllm_enable_sleep_mode": True, "max_steps": 5}
            flags |= {"model_name_or_path": model, "dtype": dtype, "use_peft": use_peft}
            launch(RECIPES / "grpo_arithmetic.yaml", "grpo", device, {**flags, "output_dir": out})
            name = "sampling/sampling_logp_difference/mean"
            off = max(line[name] for line in read(out / "metrics.jsonl"))
            what = f"vLLM against the policy, {dtype}{', LoRA' if use_peft else ''}"
            yield what, f"{off:.1e}", off <= bounds[dtype]


def launch(
    recipe: Path, algorithm: str, device: str, flags: dict[str, Any], config: Path | None = None
) -> None:
    """Run a recipe script in one process, or on all GPUs by a file of recipes/accelerate."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    if config is not None:
        command += ["--config_file", str(config)]
    processes = 1 if config is None else torch.cuda.device_count()
    command += ["--num_processes", str(processes), *(["--cpu"] if device == "cpu" else [])]
    command += [str(RECIPES / f"{algorithm}.py"), "--config", str(recipe)]
    for key, value in {**flags, "eval_steps": 0}.items():
        command += [f"--{key}", str(value)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=200)


GROUPS: list[Callable[[str], Iterator[Check]]] = [
    *(agreement, sampling, decoding, rollouts),
    *(resuming, recipes, presets, plans, backends, vllm),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    console = Console(width=100)
    if device == "cuda" and not torch.cuda.is_available():
        console.print("no GPU here: nothing checked")
        return
    name = torch.cuda.get_device_name() if device == "cuda" else device
    table = Table("check", "figure", "", title=f"{name}, torch {torch.__version__}")
    start, failed = time.perf_counter(), 0
    for group in GROUPS:
        for what, figure, passed in group(device):
            table.add_row(what, figure, "ok" if passed else "FAILED")
            failed += not passed
    console.print(table)
    console.print(f"{time.perf_counter() - start:.0f} s, {failed} failed")
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
