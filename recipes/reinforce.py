"""Train with REINFORCE.

accelerate launch recipes/reinforce.py --config recipes/reinforce_arithmetic.yaml --max_steps 50
"""

from rlhf_pg.cli.train import run_recipe

if __name__ == "__main__":
    run_recipe("reinforce")
