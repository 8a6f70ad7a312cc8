"""Fine-tune a model, or warm-start the tiny model of an embedded task.

    python recipes/sft.py --config recipes/sft_arithmetic.yaml

The other recipes do this by themselves, once, when they are given no model.
"""

from rlhf_pg.cli.train import run_recipe

if __name__ == "__main__":
    run_recipe("sft")
