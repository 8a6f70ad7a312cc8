"""Train with RLOO.

accelerate launch recipes/rloo.py --config recipes/rloo_arithmetic.yaml --max_steps 50
"""

from rlhf_pg import RLOOConfig, RLOOTrainer
from rlhf_pg.config.parse import parse
from rlhf_pg.tasks import TASKS
from rlhf_pg.tasks.warm_start import ensure_model

if __name__ == "__main__":
    args = parse(RLOOConfig)
    task = TASKS[args.task]()
    trainer = RLOOTrainer(
        model=ensure_model(args.task, args.model_name_or_path),
        reward_funcs=task.rewards(args.reward_model_name_or_path),
        args=args,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
        tools=task.tools,
        environment_factory=task.environment_factory,
    )
    trainer.train()
