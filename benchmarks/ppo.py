"""What PPO costs beyond GRPO, by hand: both sides in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.ppo time
    OMP_NUM_THREADS=1 python -m benchmarks.ppo memory

`time`: the extra seconds of a PPO step, against one critic forward plus one forward and backward.
`memory`: the peak of LoRA-PPO against LoRA-GRPO on the same model, each in a process of its own,
less what the process held before the model was made.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rlhf_pg import GRPOTrainer, PPOTrainer
from rlhf_pg.report.metrics import Meter
from rlhf_pg.tasks.tiny import character_tokenizer
from rlhf_pg.trainers import PolicyGradientTrainer

TRAINERS = {"grpo": GRPOTrainer, "ppo": PPOTrainer}
CHARACTERS = "0123456789+-*= ?"
PROMPT, COMPLETION, ROWS = 32, 64, 16


def model(hidden: int, layers: int, vocabulary: int) -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            head_dim=64,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=1,
        )
    )


def trainer(algorithm: str, size: dict[str, int], **options: Any) -> PolicyGradientTrainer:
    """One update per step on the same rows, with the KL in the reward in both."""
    kind = TRAINERS[algorithm]
    torch.manual_seed(0)
    args: dict[str, Any] = {
        "prompts_per_step": ROWS // 4,
        "num_generations": 4,
        "num_iterations": 1,
        "max_completion_length": COMPLETION,
        "beta": 0.05,
        "kl_placement": "reward",
        "kl_estimator": "k1",
        "max_steps": 100,
        "output_dir": tempfile.mkdtemp(),
    }
    return kind(
        model=model(**size),
        reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        args=kind.config_type(**(args | options)),
        train_dataset=Dataset.from_dict({"prompt": ["1+" * (PROMPT // 2)] * 8}),
        processing_class=character_tokenizer(CHARACTERS),
    )


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure_time(repeats: int = 9) -> None:
    size = {"hidden": 256, "layers": 4, "vocabulary": 2048}
    trainers = {name: trainer(name, size) for name in TRAINERS}
    samples = trainers["grpo"].sampler.roll_out(range(ROWS // 4))
    ppo = trainers["ppo"]
    critic = ppo.critic
    assert critic is not None

    def learn(name: str) -> None:
        it = trainers[name]
        experience = it.credit(it.learner.infer(it.sampler.add_rewards(samples)), Meter())
        it.learner.update(experience, it.objective, Meter())

    def forward() -> None:
        with torch.no_grad():
            critic(samples)

    def forward_backward() -> None:
        critic(samples)[0].sum().backward()
        ppo.learner.optimizer.zero_grad()

    phases: dict[str, Callable[[], None]] = {
        "grpo": lambda: learn("grpo"),
        "ppo": lambda: learn("ppo"),
        "forward": forward,
        "forward_backward": forward_backward,
    }
    taken: dict[str, list[float]] = {name: [] for name in phases}
    for repeat in range(repeats + 1):
        for name, phase in phases.items():
            duration = seconds(phase)
            if repeat:  # the first warms up
                taken[name].append(duration)
    medians = {name: statistics.median(durations) for name, durations in taken.items()}
    rounds = zip(*taken.values(), strict=True)
    ratio = statistics.median((p - g) / (f + fb) for g, p, f, fb in rounds)
    for name, median in medians.items():
        print(f"{name:17} {1000 * median:7.1f} ms")
    print(f"extra of ppo / (forward + forward_backward): {ratio:.2f}  (median of {repeats})")


def peak(algorithm: str, checkpointing: bool) -> None:
    """Print the peak memory of two steps, in MiB, in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = {"hidden": 1024, "layers": 8, "vocabulary": 16384}
    it = trainer(algorithm, size, use_peft=True, gradient_checkpointing=checkpointing)
    for _ in range(2):
        samples = it.sampler.roll_out(range(ROWS // 4))
        experience = it.credit(it.learner.infer(it.sampler.add_rewards(samples)), Meter())
        it.learner.update(experience, it.objective, Meter())
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def measure_memory() -> None:
    for checkpointing in (False, True):
        peaks = {}
        for name in TRAINERS:
            command = [sys.executable, "-m", "benchmarks.ppo", "peak", name]
            command += ["--gradient_checkpointing"] * checkpointing
            # Freed blocks go back to the system: the peak is of what lives, not of fragments.
            env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
            peaks[name] = float(done.stdout.split()[-1])
        print(
            f"gradient_checkpointing {checkpointing!s:5}  LoRA-GRPO {peaks['grpo']:.0f} MiB  "
            f"LoRA-PPO {peaks['ppo']:.0f} MiB  ratio {peaks['ppo'] / peaks['grpo']:.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["time", "memory", "peak"])
    parser.add_argument("algorithm", choices=list(TRAINERS), nargs="?", default="ppo")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "time":
        measure_time()
    elif arguments.what == "memory":
        measure_memory()
    else:
        peak(arguments.algorithm, arguments.gradient_checkpointing)
