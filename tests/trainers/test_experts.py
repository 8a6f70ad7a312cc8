"""The loss of a mixture's routers, in an update."""

import pytest
import torch

from rlhf_pg import GRPOTrainer, PPOTrainer
from rlhf_pg.models.policy import Balance
from rlhf_pg.report.metrics import Meter
from rlhf_pg.report.run_files import read
from rlhf_pg.tasks import arithmetic
from tests.enumeration import flat_gradient
from tests.tiny import tiny_model
from tests.trainers.conftest import estimated


def letters(completions, **_):
    return [len(set(text)) for text in completions]


def trainer_of(tmp_path, trainer_type=GRPOTrainer, score=None, **options):
    task = arithmetic()
    tokenizer = task.new_model()[1]
    args = trainer_type.config_type(
        output_dir=str(tmp_path),
        prompts_per_step=3,
        num_generations=2,
        max_completion_length=5,
        max_grad_norm=0.0,
        **{"router_aux_loss_coef": 0.5, "max_steps": 1} | options,
    )
    return trainer_type(
        model=tiny_model("olmoe", vocab_size=len(tokenizer)),
        reward_funcs=score or letters,
        args=args,
        train_dataset=task.train_dataset,
        processing_class=tokenizer,
    )


def accumulated(trainer, experience):
    """Gradient and auxiliary loss of one update."""
    meter = Meter()
    trainer.learner.module.zero_grad()
    trainer.learner.module.train()
    trainer.learner.accumulate(experience, meter)
    return flat_gradient(trainer), meter.means(meter.sums())["aux_loss"]


def by_rows(trainer, experience):
    """The same from one pass for each row, whose router probabilities are kept until the last."""
    layers = []
    for i in range(experience.num_rows):
        ids = [experience.prompt_ids[i][experience.prompt_mask[i]]]
        ids += [experience.completion_ids[i][experience.completion_mask[i]]]
        output = trainer.model.base_model(torch.cat(ids)[None], output_router_logits=True)
        layers.append(torch.stack(output.router_logits))
    probability = torch.cat(layers, dim=1).softmax(-1)
    top = probability.topk(2).indices
    total = 0.0
    for layer in range(len(probability)):
        for expert in range(4):
            share = (top[layer] == expert).any(1).double().mean()
            total = total + 4 * share * probability[layer, :, expert].mean()
    return total / len(probability)


def test_aux_loss_gradient_is_that_of_whole_batch(tmp_path):
    trainer = trainer_of(tmp_path, micro_batch_tokens=11, gradient_checkpointing=True)
    experience = estimated(trainer)[0]
    gradient, aux = accumulated(trainer, experience)
    plain = trainer_of(tmp_path, router_aux_loss_coef=0.0)
    meter = Meter()
    plain.learner.accumulate(experience, meter)
    expected = by_rows(plain, experience)
    (0.5 * expected).backward()
    assert aux == pytest.approx(expected.item(), rel=1e-5)
    expected_gradient = flat_gradient(plain)
    assert (gradient - expected_gradient).norm() <= 1e-4 * expected_gradient.norm()
    plain.learner.module.zero_grad()
    plain.learner.accumulate(experience, meter)
    assert (gradient - flat_gradient(plain)).norm() > 0.01 * gradient.norm()


def test_aux_loss_with_critic_matches_policy_routers(tmp_path):
    """Whose own routers are left as they are."""
    trainer = trainer_of(tmp_path, PPOTrainer)
    experience = estimated(trainer)[0]
    _, aux = accumulated(trainer, experience)
    assert aux == pytest.approx(by_rows(trainer, experience).item(), rel=1e-5)
    trainer.train()
    (line,) = read(tmp_path / "metrics.jsonl")
    assert line["aux_loss"] > 0


def test_empty_update_has_zero_aux_loss():
    nothing = torch.zeros(2, 4)
    assert Balance(2).loss(nothing, nothing).item() == 0
