"""Train with GRPO.

accelerate launch recipes/grpo.py --config recipes/grpo_arithmetic.yaml --max_steps 50
"""

from rlhf_pg.cli.train import run_recipe

if __name__ == "__main__":
    run_recipe("grpo")
