"""Train a reward model on preference pairs, with the Bradley-Terry loss.

python recipes/reward_model.py --config recipes/reward_model_preference.yaml
"""

from rlhf_pg.cli.train import run_recipe

if __name__ == "__main__":
    run_recipe("reward_model")
