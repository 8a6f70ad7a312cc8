"""What the model check of a run costs, in seconds of one CPU core, by hand.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.model_check --layers 24 --width 1536 --row 128

Qwen2 of random weights in float32, the vocabulary of Qwen2.5; processor time, since nothing here
waits. Beside it the time of one row, scored alone.
"""

import argparse
import time
from collections.abc import Callable

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_pg.models import Policy
from rlhf_pg.rollout import NativeEngine
from rlhf_pg.trainers.model_check import Examined, by_row, examine, rows_of


def timed(what: Callable[[], object]) -> float:
    start = time.process_time()
    what()
    return time.process_time() - start


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 24), ("width", 1536), ("row", 128), ("vocabulary", 151936)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    config = Qwen2Config(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 128,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).eval()
    policy = Policy(model)
    run = Examined(
        policy=policy,
        module=policy,
        score=lambda batch: policy(batch).logprobs,
        engine=NativeEngine(model, [], 0),
        tokens=range(5, 500),
        lengths=(options.row // 2, options.row - options.row // 2),
    )
    row = rows_of(run, *run.lengths).select(torch.tensor([0]))
    seconds = timed(lambda: examine(run))
    alone = timed(lambda: by_row(run.score, row))
    size = sum(p.numel() for p in model.parameters()) / 1e9
    print(
        f"{size:.2f}B parameters, rows of {options.row} tokens: {seconds:.1f} s; a row {alone:.1f}"
    )


if __name__ == "__main__":
    main()
