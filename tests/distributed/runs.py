"""A run of a trainer in any number of processes, for the tests beside this file to start.

python runs.py OUT CONFIG.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer
from rlhf_pg.metrics import Meter
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers.drawing import draw_batch

TRAINERS = {
    "grpo": GRPOTrainer,
    "ppo": PPOTrainer,
    "rloo": RLOOTrainer,
    "reinforce": ReinforceTrainer,
}


def even_digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that a random model can find at once."""
    return [sum(c in "02468" for c in text) / 6 for text in completions]


def main(out: Path, config: dict) -> None:
    """Save what is sampled first, the first unclipped gradient, and the weights before and after
    training; of policy and critic, where there is one.
    """
    trainer_type = TRAINERS[config.pop("algorithm")]
    model = config.pop("model")
    task = arithmetic()
    trainer = trainer_type(
        model=model,
        reward_funcs=even_digits,
        args=trainer_type.config_type(output_dir=str(out / "run"), **config),
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset.select(range(33)),
    )
    start = weights(trainer.learner.module)
    batch = draw_batch(trainer, Meter())
    samples, scores = batch.judged
    experience, _ = trainer.make_experience(samples.rollout, scores, Meter(), batch.greedy)
    exchanges: list[int] = []
    if trainer.runtime.world > 1:

        def count(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            exchanges.append(bucket.index())
            return default_hooks.allreduce_hook(None, bucket)

        trainer.learner.trained.register_comm_hook(None, count)
    trainer.learner.accumulate(experience, Meter())
    (out / "exchanges.json").write_text(json.dumps(exchanges))
    gradient = torch.cat([p.grad.flatten() for p in trainer.learner.module.parameters()])
    trainer.learner.optimizer.zero_grad()
    sampled = [
        [group, *ids]
        for group, ids in zip(samples.rollout.groups.tolist(), samples.completion_ids, strict=True)
    ]
    rank = trainer.runtime.rank
    (out / f"sampled-{rank}.json").write_text(json.dumps(sampled))
    evaluated = trainer.evaluate()
    trainer.train()
    if rank == 0:
        torch.save(
            {
                "gradient": gradient,
                "start": start,
                "end": weights(trainer.learner.module),
            },
            out / "tensors.pt",
        )
        (out / "eval.json").write_text(json.dumps(evaluated))


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
