"""What `cpu_threads: auto` chooses on quiet cores, and beside a program that uses one of them.

    env -u OMP_NUM_THREADS python -m tests.benchmarks.cpu_threads [--rounds 3]

Both in turns, for three sizes of a model.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf_pg import GRPOConfig
from rlhf_pg.models import Policy
from rlhf_pg.plan.cpu_threads import settled_threads
from rlhf_pg.runtime import Runtime
from tests.tiny import tiny_model

PROMPT, COMPLETION = 32, 128
SIZES = {  # width, layers, vocabulary
    "small": (96, 3, 32),
    "middle": (256, 6, 2048),
    "large": (640, 10, 8192),
}


def policy(width: int, layers: int, vocabulary: int) -> Policy:
    model = tiny_model(
        "qwen3",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
    )
    return Policy(model, most_tokens=1024).eval()


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Other programs, each of which uses a core all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds, most = parser.parse_args().rounds, torch.get_num_threads()
    args, runtime = GRPOConfig(max_completion_length=COMPLETION), Runtime()
    print(f"of {most} threads")
    for name, size in SIZES.items():
        own = policy(*size)
        parameters = sum(p.numel() for p in own.parameters())
        for _ in range(rounds):
            for others in (0, 1):
                torch.set_num_threads(most)
                with spinning(others):
                    start = time.perf_counter()
                    chosen = settled_threads(args, own, runtime, PROMPT)
                    took = time.perf_counter() - start
                where = "beside another program" if others else "on quiet cores"
                print(f"{name:6} {parameters / 1e6:5.1f}M  {where:22} {chosen}  ({took:.1f} s)")


if __name__ == "__main__":
    main()
