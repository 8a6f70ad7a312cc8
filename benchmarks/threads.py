"""How many threads a recipe takes best on this CPU: `python -m benchmarks.threads RECIPE`.

Prints the number, for OMP_NUM_THREADS: 1 or 2, whichever computes a training micro-batch faster,
forward and back (the faster of two times each; the model's first pass is left out).
"""

import sys
import time
from pathlib import Path

import torch

from rlhf_pg.cli.recipes import config_of
from rlhf_pg.models.critic import assemble
from rlhf_pg.models.lm_head import CHUNK_SIZE
from rlhf_pg.models.loading import adapter_of, policy_of
from rlhf_pg.run.token_budget import footprint, probe

PROMPT = 32  # tokens


def seconds(threads: int, module: torch.nn.Module, batch: object) -> float:
    torch.set_num_threads(threads)
    start = time.perf_counter()
    footprint(module, batch)
    return time.perf_counter() - start


def main(recipe: str) -> None:
    args = config_of([Path(recipe)], [], "demo")
    device = torch.device("cpu")
    model = policy_of(args.model_name_or_path, args, device, adapter_of(args, None))
    batch = probe(1, args.num_generations, PROMPT, args.max_completion_length)
    _, module = assemble(model, args, None, 1024, CHUNK_SIZE)
    footprint(module, batch)
    times = {n: min(seconds(n, module, batch) for _ in range(2)) for n in (1, 2)}
    print(min(times, key=times.__getitem__))


if __name__ == "__main__":
    main(sys.argv[1])
