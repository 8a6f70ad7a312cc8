"""Train with REINFORCE.

accelerate launch recipes/reinforce.py --config recipes/reinforce_arithmetic.yaml --max_steps 50
"""

from rlhf_pg import ReinforceConfig, ReinforceTrainer
from rlhf_pg.config.parse import parse
from rlhf_pg.tasks import TASKS
from rlhf_pg.tasks.warm_start import ensure_model

if __name__ == "__main__":
    args = parse(ReinforceConfig)
    task = TASKS[args.task]()
    trainer = ReinforceTrainer(
        model=ensure_model(args.task, args.model_name_or_path),
        reward_funcs=task.rewards(args.reward_model_name_or_path),
        args=args,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
        tools=task.tools,
        environment_factory=task.environment_factory,
    )
    trainer.train()
