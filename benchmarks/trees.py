"""Measure the update of an agent's episode as one tree of tokens, and as a row for each call.

    OMP_NUM_THREADS=1 python -m benchmarks.trees

Eight calls, each with 20 new tokens and an answer of 40, to a history of 300: each forgets the
calls before it, or keeps half of the last answer. Median of five forward and backward passes.
"""

import random
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_pg.data.batch import Batch
from rlhf_pg.models.packing import lay_out_packed
from rlhf_pg.models.policy import Policy
from tests.rows import batch_of

CALLS, HISTORY, SEEN, SAID = 8, 300, 20, 40
RNG = random.Random(0)


def drawn(count: int) -> list[int]:
    return [RNG.randrange(1000) for _ in range(count)]


def trees(completions: list[list[int]], actions: list[list[bool]], **options: list[list[int]]):
    count = len(completions)
    batch = batch_of([PROMPT] * count, completions, actions=actions, **options)
    return batch.with_counts()


def measure(policy: Policy, batch: Batch) -> tuple[int, float, torch.Tensor]:
    """Return computed tokens, seconds and the gradient."""
    seconds = []
    for _ in range(6):
        policy.zero_grad()
        start = time.perf_counter()
        policy(batch).logprobs.sum().backward()
        seconds.append(time.perf_counter() - start)
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
    tokens = lay_out_packed(batch).inputs["input_ids"].numel()
    return tokens, statistics.median(seconds[1:]), gradient


PROMPT = drawn(HISTORY)
NEW = [drawn(SEEN + SAID) for _ in range(CALLS)]
ACTS = [False] * SEEN + [True] * SAID


def main() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    policy = Policy(LlamaForCausalLM(LlamaConfig(vocab_size=1000, **shape, **heads)).eval())
    for kept in (0, SAID // 2):
        offsets, rows, acts, history = [1] * (CALLS * len(ACTS)), [], [], []
        for i, own in enumerate(NEW):
            if i:
                offsets[i * len(ACTS)] = 1 + SAID - kept if kept else 1 + i * len(ACTS)
            rows.append(history + own)
            acts.append([False] * len(history) + ACTS)
            history = history + own[: SEEN + kept] if kept else []
        tree = trees([[token for own in NEW for token in own]], [ACTS * CALLS], offsets=[offsets])
        tokens, seconds, gradient = measure(policy, tree)
        more, longer, same = measure(policy, trees(rows, acts))
        apart = ((gradient - same).norm() / same.norm()).item()
        print(
            f"kept {kept}: {tokens} tokens for {more} ({more / tokens:.1f} times), {seconds:.3f} s "
            f"for {longer:.3f} s ({longer / seconds:.1f} times), gradients apart by {apart:.0e}"
        )


if __name__ == "__main__":
    main()
