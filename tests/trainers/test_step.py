"""What one step hands from sampling to scoring to the update."""

import dataclasses

import pytest
import torch
from datasets import Dataset

from rlhf_pg import GRPOTrainer, PPOTrainer, RLOOTrainer
from rlhf_pg.report.metrics import Meter
from tests.enumeration import COMPLETIONS, flat_gradient, make_trainer
from tests.trainers.conftest import estimated, objective_of


def test_reward_receives_sampled_ids(make) -> None:
    """Special tokens and all: they are not read back from the text."""
    seen = []

    def keep(completions, completion_ids, **_):
        seen.extend(completion_ids)
        return [0.0] * len(completions)

    trainer = make(reward_funcs=keep)
    batch = trainer.sampler.add_rewards(trainer.sampler.roll_out(range(4)))
    pairs = zip(batch.completion_ids, batch.completion_mask, strict=True)
    assert seen == [ids[mask].tolist() for ids, mask in pairs]
    eos = trainer.processing_class.eos_token_id
    assert any(ids[-1] == eos for ids in seen)


def test_sample_prompts_and_columns_match_rows(make) -> None:
    data = Dataset.from_dict({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"]})
    trainer = make(train_dataset=data, prompts_per_step=2, num_generations=3)
    samples = trainer.sampler.roll_out(range(2))
    pairs = zip(samples.prompt_ids, samples.prompt_mask, strict=True)
    read = [trainer.processing_class.decode(ids[mask]) for ids, mask in pairs]
    assert samples.prompts == [text.replace(" ", "") for text in read]
    answers = {"1+1=": "2", "2+2=": "4"}
    assert samples.columns["answer"] == [answers[prompt] for prompt in samples.prompts]
    assert set(samples.prompts) == set(answers)


def test_function_that_changes_its_arguments_changes_no_other_row(make) -> None:
    """The completions of one prompt come from one row of the data."""
    seen = []

    def pops(completions, words, **_):
        for row in words:
            seen.append(list(row))
            row.pop()
        return [0.0] * len(completions)

    data = Dataset.from_dict({"prompt": ["1+1="], "words": [["a", "b"]]})
    trainer = make(train_dataset=data, prompts_per_step=1, num_generations=3, reward_funcs=pops)
    trainer.sampler.add_rewards(trainer.sampler.roll_out(range(1)))
    assert seen == [["a", "b"]] * 3


@pytest.mark.parametrize("trainer_type", [GRPOTrainer, PPOTrainer])
def test_old_and_reference_logprobs_match_sampler(make, trainer_type) -> None:
    """At a temperature other than 1, by the policy and by its reference."""
    trainer = make(trainer_type, temperature=0.5, beta=0.1, num_iterations=2)
    experience = estimated(trainer)[0]
    sampled = experience.sampler_logprobs
    torch.testing.assert_close(experience.old_logprobs, sampled, atol=1e-5, rtol=0)
    torch.testing.assert_close(experience.ref_logprobs, sampled, atol=1e-5, rtol=0)


def test_sampling_noise_differs_between_steps_and_rows(make) -> None:
    """The same prompt and the same weights, and yet other completions in every step and row."""
    seen = []

    def keep(completions, completion_ids, **_):
        seen.append([tuple(ids) for ids in completion_ids])
        return [0.0] * len(completions)

    one = Dataset.from_dict({"prompt": ["1+1="]})
    make(train_dataset=one, reward_funcs=keep, learning_rate=1e-12, max_steps=2).train()
    assert len({tuple(group) for group in seen}) == len(seen) == 8


@pytest.mark.parametrize(("iterations", "is_scored"), [(1, False), (2, True)])
def test_old_logprobs_are_scored_only_for_several_updates(make, iterations, is_scored) -> None:
    """Even where the KL in the reward has made the old log-probabilities known."""
    trainer = make(RLOOTrainer, beta=0.1, num_iterations=iterations)
    assert (estimated(trainer)[0].old_logprobs is not None) == is_scored


def test_kl_in_reward_is_not_in_loss(make) -> None:
    trainer = make(RLOOTrainer, beta=0.5)
    experience = estimated(trainer)[0]
    experience = dataclasses.replace(experience, old_logprobs=experience.sampler_logprobs)
    far = dataclasses.replace(experience, ref_logprobs=experience.ref_logprobs - 10)
    with torch.no_grad():
        new = trainer.learner.module(experience)
        losses = [objective_of(trainer, new, batch) for batch in (experience, far)]
    assert losses[0].equal(losses[1])


def test_minibatch_denominator_counts_own_tokens(tmp_path) -> None:
    """Its gradient is that of a step with no other minibatch."""
    options = {"prompts": ("a", "ab"), "num_generations": 2, "aggregation": "token_mean"}
    gradients = []
    for minibatches in (2, 1):
        trainer = make_trainer(GRPOTrainer, tmp_path, num_mini_batches=minibatches, **options)
        trainer.sampler.engine.says = [COMPLETIONS[i] for i in (0, 3, 2, 5)]
        experience = estimated(trainer)[0]
        half = experience.select((experience.groups == 0).nonzero().squeeze(1))
        trainer.learner.accumulate(half, trainer.objective, Meter())
        gradients.append(flat_gradient(trainer))
    assert gradients[0].norm() > 0
    torch.testing.assert_close(gradients[0], gradients[1], atol=0, rtol=1e-12)


def test_gradient_is_clipped_to_max_norm(make) -> None:
    runtime = make().runtime
    for max_norm, expected in [(1.0, [0.6, 0.8]), (0.0, [3.0, 4.0]), (10.0, [3.0, 4.0])]:
        layer = torch.nn.Linear(2, 1, bias=False)
        before = layer.weight.detach().clone()
        trained = runtime.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0), max_norm)
        layer.weight.grad = torch.tensor([[3.0, 4.0]])
        assert trained.step() == pytest.approx(5.0)
        assert (before - layer.weight).flatten().tolist() == pytest.approx(expected, rel=1e-5)
        assert layer.weight.grad is None


def test_optimizer_uses_configured_settings(make) -> None:
    keys = {"adam_epsilon": 1e-5, "adam_beta1": 0.8, "adam_beta2": 0.99, "weight_decay": 0.1}
    trainer = make(PPOTrainer, **keys, learning_rate=1e-3, value_learning_rate=1e-2)
    rates = set()
    for group in trainer.learner.optimizer.param_groups:
        assert (group["eps"], group["betas"]) == (1e-5, (0.8, 0.99))
        # Biases and the weights of norms are vectors, and do not decay.
        assert {p.ndim >= 2 for p in group["params"]} <= {group["weight_decay"] == 0.1}
        assert group["weight_decay"] in (0.0, 0.1)
        rates.add(group["initial_lr"])
    assert rates == {1e-3, 1e-2}
