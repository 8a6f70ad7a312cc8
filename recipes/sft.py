"""Warm-start the tiny model of an embedded task, with the `Trainer` of transformers.

    python recipes/sft.py --config recipes/sft_arithmetic.yaml

The other recipes do this by themselves, once, when they are given no model.
"""

from rlhf_pg.config import SFTConfig
from rlhf_pg.config.parse import parse
from rlhf_pg.tasks.warm_start import warm_start

if __name__ == "__main__":
    print(f"saved {warm_start(parse(SFTConfig))}")
