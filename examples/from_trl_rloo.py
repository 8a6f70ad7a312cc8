"""TRL's first example of RLOO with the import changed: completions of many different characters.

    python examples/from_trl_rloo.py --max_steps 100

`--model` and `--dataset` take other names; any other flag is a key of `RLOOConfig`.
"""

import argparse

from datasets import load_dataset

from rlhf_pg import RLOOConfig, RLOOTrainer  # from trl import RLOOConfig, RLOOTrainer
from rlhf_pg.config import parse

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--model", default="Qwen/Qwen2-0.5B-Instruct")
parser.add_argument("--dataset", default="trl-lib/tldr")
names, flags = parser.parse_known_args()


def reward_num_unique_chars(completions, **kwargs):
    return [len(set(c)) for c in completions]


trainer = RLOOTrainer(
    model=names.model,
    reward_funcs=reward_num_unique_chars,
    args=parse(RLOOConfig, ["--output_dir", "Qwen2-0.5B-RLOO", *flags]),
    train_dataset=load_dataset(names.dataset, split="train"),
)
trainer.train()
