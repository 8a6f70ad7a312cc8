"""The likelihood of right completions (VAPO) and of other texts (PPO-ptx), in an update."""

import pytest
import torch

from rlhf_pg import GRPOTrainer, PPOTrainer
from rlhf_pg.data.prompts import permutation
from rlhf_pg.report.metrics import Meter
from tests.enumeration import (
    COMPLETIONS,
    EOS,
    SCORES,
    A,
    B,
    gradient,
    gradient_of,
    log_probs,
    make_trainer,
)
from tests.trainers.conftest import estimated

PROMPTS = ("ab", "bba")
SAYS = [*COMPLETIONS, *reversed(COMPLETIONS)]
LIKELY = {"positive_nll_coef": 0.5, "positive_nll_threshold": 0.55}


def trainer_of(tmp_path, trainer_type=GRPOTrainer, **options):
    """Every completion of two prompts, in one update."""
    return make_trainer(trainer_type, tmp_path, PROMPTS, num_generations=7, **options)


def by_hand(trainer, trains=lambda said: True):
    """Gradient of the mean -log p over the tokens of what is worth more than 0.55."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for prompt, said in zip([PROMPTS[0]] * 7 + [PROMPTS[1]] * 7, SAYS, strict=True):
        if SCORES[prompt][said] > 0.55 and trains(said):
            total = total - log_probs(trainer.model, prompt, said).sum()
            tokens += len(said)
    assert tokens
    return gradient(trainer.model, total / tokens)


def assert_adds(trainer, plain, expected):
    """To the policy's gradient, and nothing to a critic's."""
    added = gradient_of(trainer, SAYS) - gradient_of(plain, SAYS)
    policy, critic = added.tensor_split([len(expected)])
    assert (policy - 0.5 * expected).norm() <= 1e-9 * expected.norm()
    # But for rounding: texts are rows beside completions, so these are added in another order.
    assert not len(critic) or critic.abs().max() <= 1e-15


@pytest.mark.proves("rlhf_pg.losses.nll")
@pytest.mark.parametrize("budget", [6, 1000])
@pytest.mark.parametrize("trainer_type", [GRPOTrainer, PPOTrainer])
def test_positive_nll_gradient_covers_right_completions(trainer_type, budget, tmp_path):
    """Whatever the micro-batches, and whatever penalties make of the scores."""
    options = {"missing_eos_penalty": 5.0, "micro_batch_tokens": budget}
    trainer = trainer_of(tmp_path, trainer_type, **options, **LIKELY)
    plain = trainer_of(tmp_path, trainer_type, **options)
    assert_adds(trainer, plain, by_hand(plain))


def test_positive_nll_skips_masked_truncated_completions(tmp_path):
    options = {"mask_truncated_completions": True}
    trainer, plain = trainer_of(tmp_path, **options, **LIKELY), trainer_of(tmp_path, **options)
    assert_adds(trainer, plain, by_hand(plain, lambda said: said[-1] == EOS))


@pytest.mark.proves("rlhf_pg.losses.nll")
@pytest.mark.parametrize("budget", [6, 1000])
@pytest.mark.parametrize("trainer_type", [GRPOTrainer, PPOTrainer])
def test_ptx_gradient_covers_texts(trainer_type, budget, tmp_path):
    """Every token but the first of each, through the third; an update draws five of the six."""
    lines = ["abab", "ba", "bbaab", "aab", "bba", "a"]
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(lines))
    options = {"ptx_coef": 0.5, "ptx_dataset_name": str(texts), "ptx_batch_size": 5}
    trainer = trainer_of(tmp_path, trainer_type, micro_batch_tokens=budget, **options)
    plain = trainer_of(tmp_path, trainer_type, micro_batch_tokens=budget)
    terms = []
    for i in permutation(6, trainer.args.seed, 0, 0)[:5]:
        ids = torch.tensor([[{"a": A, "b": B}[c] for c in lines[i][:3]]])
        log_p = plain.model(ids).logits[0, :-1].log_softmax(-1)
        terms.append(-log_p[range(len(log_p)), ids[0, 1:]])
    assert_adds(trainer, plain, gradient(plain.model, torch.cat(terms).mean()))


def test_ptx_draws_by_seed_step_and_update(tmp_path):
    """A resumed run sees what the whole run saw; the loss and its metric have the texts."""
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(["abab", "ba", "bbaab", "aab", "bb", "baa"]))
    options = {"ptx_coef": 0.5, "ptx_dataset_name": str(texts), "ptx_batch_size": 2}
    trainer, numbers = trainer_of(tmp_path, **options), []
    for step, update in ((0, 0), (0, 1), (1, 0), (0, 0)):
        trainer.state.step = step
        batch, _ = estimated(trainer, SAYS)
        meter = Meter()
        trainer.learner.accumulate(batch, trainer.objective, meter, update)
        numbers.append(meter.means(meter.sums())["ptx_nll"])
    assert numbers[0] == numbers[3]
    assert len(set(numbers)) == 3


def test_metrics_report_auxiliary_loss(tmp_path):
    trainer = trainer_of(tmp_path, **LIKELY)
    batch, _ = estimated(trainer, SAYS)
    meter = Meter()
    trainer.learner.accumulate(batch, trainer.objective, meter)
    right = [
        (SCORES[prompt][said], log_probs(trainer.model, prompt, said))
        for prompt, said in zip([PROMPTS[0]] * 7 + [PROMPTS[1]] * 7, SAYS, strict=True)
    ]
    tokens = torch.cat([log_p for score, log_p in right if score > 0.55])
    assert meter.means(meter.sums())["positive_nll"] == pytest.approx(-tokens.mean().item())
