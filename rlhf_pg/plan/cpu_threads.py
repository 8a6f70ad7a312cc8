"""The number of threads of a process on a CPU, if the config leaves it open."""

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.models import Policy
from rlhf_pg.plan.footprint import probe, tokens
from rlhf_pg.runtime import Runtime

TOLD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by the user or the launcher
# More threads have to save this share of a step: equal ones are not chosen by chance, and cores are
# left to others.
LEAST_SAVED = 0.1
# Every number of threads has its turn in each round; after these seconds no further round begins.
ROUNDS, SECONDS = 7, 1.0
# Parameters times tokens of a timed pass: a tenth of a second on one core.
WORK = 2 * 10**9
PASSES = 4  # over the tokens of a step: scoring and the update's forward pass, whose backward is 2


class Timed(NamedTuple):
    """A pass that is timed, and how often a step takes as long."""

    run: Callable[[], object]
    times: float


def settled_threads(
    args: PolicyGradientConfig, policy: Policy, runtime: Runtime, longest_prompt: int
) -> int:
    """Return `cpu_threads`, or for auto the number with which a step is fastest; collective.

    That depends on who else uses the cores: a thread that has to wait for one makes all others
    wait, in every operation. Where the environment has set a number, it is kept, and on a GPU
    torch's own.

    Args:
        policy: before it is sharded.
    """
    if args.cpu_threads != "auto":
        return int(args.cpu_threads)
    if runtime.device.type != "cpu":
        return torch.get_num_threads()
    told = bool(runtime.all_reduce_max(int(any(name in os.environ for name in TOLD))))
    sharing = 1 if told else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    most = -runtime.all_reduce_max(-max(1, torch.get_num_threads() // sharing))
    if told or most == 1:
        return most
    counts = sorted(most >> halved for halved in range(most.bit_length()))
    return fastest(counts, passes(args, policy, runtime.world, longest_prompt), runtime)


def passes(
    args: PolicyGradientConfig, policy: Policy, processes: int, longest_prompt: int
) -> list[Timed]:
    """Return what a step consists of: decoding of all rows token by token, and packed rows.

    A model too large for `WORK` is timed on fewer rows and tokens.
    """
    most = max(16, WORK // sum(p.numel() for p in policy.parameters()))
    groups = math.ceil(args.prompts_per_step / processes)
    width, count = args.max_completion_length, args.num_generations
    together = min(most, groups * count)
    ids = torch.zeros((together, 1), dtype=torch.int64)
    prompt = min(longest_prompt, most // 2)
    completion = min(width, most - prompt)
    batch = probe(1, min(count, (most - prompt) // completion), prompt, completion)
    in_step = groups * (longest_prompt + count * width)
    return [
        Timed(
            lambda: policy.model(input_ids=ids, use_cache=False), width * groups * count / together
        ),
        Timed(lambda: policy(batch), PASSES * in_step / tokens(policy, batch)),
    ]


@torch.no_grad()
def fastest(counts: Sequence[int], timed: Sequence[Timed], runtime: Runtime) -> int:
    """Return the number of threads with which a step is fastest on all processes; collective.

    They take turns, since others come and go. torch has the last of them afterwards.

    Args:
        counts: in ascending order.
    """
    seconds: dict[int, list[list[float]]] = {count: [] for count in counts}
    end = time.perf_counter() + SECONDS
    for _ in range(ROUNDS):
        for count, rounds in seconds.items():
            torch.set_num_threads(count)
            rounds.append([_seconds(one.run) for one in timed])
        if runtime.all_reduce_max(int(time.perf_counter() > end)):
            break
    times = torch.tensor([one.times for one in timed], dtype=torch.float64)
    medians = torch.tensor(list(seconds.values()), dtype=torch.float64).quantile(0.5, dim=1)
    totals = runtime.all_reduce_sum(medians @ times).tolist()
    best = 0
    for candidate, total in enumerate(totals):
        if total < (1 - LEAST_SAVED) * totals[best]:
            best = candidate
    return counts[best]


def _seconds(run: Callable[[], object]) -> float:
    """Time a pass, after one in which new threads start."""
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
