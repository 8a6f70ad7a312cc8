"""Train a reward model on preference pairs, with the Bradley-Terry loss.

python recipes/reward_model.py --config recipes/reward_model_preference.yaml
"""

from rlhf_pg.config import RewardModelConfig
from rlhf_pg.config.parse import parse
from rlhf_pg.rewards import train_reward_model
from rlhf_pg.tasks import TASKS
from rlhf_pg.tasks.warm_start import ensure_model

if __name__ == "__main__":
    args = parse(RewardModelConfig)
    pairs, held_out = TASKS[args.task]().pairs()
    train_reward_model(
        args,
        model=ensure_model(args.task, args.model_name_or_path),
        train_dataset=pairs,
        eval_dataset=held_out,
    )
