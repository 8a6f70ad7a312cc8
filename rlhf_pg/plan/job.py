"""One GPU's share of a training step, whatever the library that takes it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from rlhf_pg.plan.sharding import SHARDINGS, Sharding


@dataclass(frozen=True, kw_only=True)
class Job:
    """The samples of one GPU in a step, in tokens, and how they are learnt from.

    Args:
        prompt: tokens of each prompt.
        lengths: tokens of every completion.
        generations: completions of a prompt.
        rows: rows sampled at a time.
        micro_batch: tokens that a learner forwards at a time.
        recomputes: whether gradient checkpointing is on.
        trained: share of the parameters that is trained; less than 1 with adapters.
        old: whether the policy, or a critic on its trunk, is scored before the update.
        references: models beside the policy that are scored.
        models: models of the policy's size that learn, a separate critic included.
    """

    prompt: int
    lengths: tuple[int, ...]
    generations: int
    rows: int = 256
    micro_batch: int = 16384
    processes: int = 1
    layout: Sharding = SHARDINGS[0]
    recomputes: bool = False
    trained: float = 1.0
    old: bool = False
    references: int = 0
    epochs: int = 1
    updates: int = 1
    models: int = 1

    @property
    def groups(self) -> int:
        return math.ceil(len(self.lengths) / self.generations)


def spread(count: int, longest: int) -> tuple[int, ...]:
    """Return `count` lengths spread evenly from `longest / count` to `longest`."""
    return tuple(math.ceil(longest * (i + 1) / count) for i in range(count))


def positions(lengths: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """Yield, for every position of a rollout, the rows and the tokens that they already have.

    At most `room` rows run at a time; a waiting row begins where another has ended.
    """
    waiting, active = list(reversed(lengths)), list[tuple[int, int]]()
    step = begun = 0  # begun: sum of the steps at which the active rows began
    while waiting or active:
        while waiting and len(active) < room:
            heappush(active, (step + waiting.pop(), step))
            begun += step
        yield len(active), len(active) * step - begun
        step += 1
        while active and active[0][0] <= step:
            begun -= heappop(active)[1]
