"""From scores to what is trained on: steps, clipping, normalising, penalties, whitening."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer

from rlhf_pg import (
    GRPOTrainer,
    ReinforceTrainer,
)
from rlhf_pg.advantages import AdvantageInputs
from rlhf_pg.rewards.functions import Source
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers import PolicyGradientTrainer
from tests import enumeration
from tests.enumeration import (
    EOS,
    MAX_LENGTH,
    A,
    B,
    expected_gradient,
    gradient,
    log_probs,
    make_trainer,
)
from tests.trainers.conftest import credited, estimated

NAN = math.nan
# What each completion is paid, token by token: lists and floats mixed, and gaps. A step's score
# does not look ahead: it is the same whatever follows.
STEPS: dict[tuple[int, ...], Any] = {
    (EOS,): 0.3,
    (A, EOS): [1.5, -0.5],
    (A, A): [1.5, None],
    (A, B): [1.5, 2.5],
    (B, EOS): -1.0,
    (B, A): [None, 0.2],
    (B, B): [None, 0.4],
}


def stepwise(completion_ids: list[list[int]], **_: Any) -> list[Any]:
    return [STEPS[tuple(ids)] for ids in completion_ids]


def paid_at(said: tuple[int, ...]) -> list[float]:
    """What each token of a completion is paid; a score of the whole is at the last one."""
    steps = STEPS[said]
    if isinstance(steps, float):
        return [0.0] * (len(said) - 1) + [steps]
    return [step or 0.0 for step in steps]


def says(*scores: Any, name: str = "said"):
    """A reward function that gives these scores, in the order of the completions."""

    def reward(prompts: list[str], **_: Any) -> list[Any]:
        assert len(prompts) == len(scores)
        return list(scores)

    reward.__name__ = name
    return reward


def reinforce(tmp_path: Path, reward: Any, n: int, **options: Any) -> PolicyGradientTrainer:
    defaults = {"num_generations": n, "advantage_estimator": "returns"}
    return make_trainer(ReinforceTrainer, tmp_path, reward=reward, **(defaults | options))


def look(
    trainer: PolicyGradientTrainer, said: Sequence[tuple[int, ...]]
) -> tuple[AdvantageInputs, dict[str, float]]:
    """What the estimator is given for these completions, and the metrics."""
    trainer.sampler.engine.says = said
    seen: list[AdvantageInputs] = []

    def spy(signals: AdvantageInputs) -> Tensor:
        seen.append(signals)
        return torch.zeros_like(signals.rewards)

    vars(trainer)["estimator"] = spy
    batch = trainer.sampler.add_rewards(
        trainer.sampler.roll_out(range(trainer.args.prompts_per_step))
    )
    given = batch.scores.clone()
    _, metrics = credited(trainer, trainer.learner.infer(batch))
    assert batch.scores.allclose(given, rtol=0, atol=0, equal_nan=True)  # left as they were
    return seen[0], metrics


def close(actual: Tensor, expected: Any) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert actual.shape == expected.shape
    assert actual.double().allclose(expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_min_max_squash_is_per_function_over_step(tmp_path) -> None:
    one, two = says(-1.0, [1.0, 3.0], [None, 0.0]), says(5.0, 5.0, 5.0)
    options = {"reward_weights": (2.0, 1.0), "missing_eos_penalty": 7.0}
    trainer = reinforce(tmp_path, [one, two], 3, reward_squash="min_max", **options)
    signals, metrics = look(trainer, [(EOS,), (A, EOS), (B, A)])
    # one: -1, 1, 3, 0 become 0, 1/2, 1, 1/4; two has no spread; the third row was cut off
    close(signals.rewards, [[0, 0], [1, 2], [0, 0.5 - 7]])
    assert metrics["rewards/said/mean"] == pytest.approx((-1 + 4 + 0) / 3)  # as they were said
    close(signals.scores[:, :3], [[0, 0, 0], [3, 0, 0], [0.5, 0, -7]])


def test_sigmoid_squash_follows_clip(tmp_path) -> None:
    options = {"reward_squash": "sigmoid", "reward_clip_range": (-1.0, 2.0)}
    trainer = reinforce(tmp_path, says(9.0, [0.0, None], -5.0), 3, **options)
    signals, _ = look(trainer, [(EOS,), (A, EOS), (B, A)])
    close(signals.rewards, [[1 / (1 + math.exp(-2)), 0], [0.5, 0], [0, 1 / (1 + math.e)]])


def test_step_scores_are_paid_at_own_tokens(tmp_path) -> None:
    one, two = says(1.0, [2.0, None], [None, None]), says(10.0, [None, 20.0], [30.0, 40.0])
    options = {"reward_weights": (1.0, 0.5)}
    trainer = reinforce(tmp_path, [one, two], 3, **options)
    signals, metrics = look(trainer, [(EOS,), (A, EOS), (B, A)])
    close(signals.rewards, [[6, 0], [2, 10], [15, 20]])
    close(signals.step_scores, [[6, 0], [2, 10], [15, 20]])
    assert signals.step_mask.tolist() == [[True, False], [True, True], [True, True]]
    close(signals.scores, [[1, 5, 0], [2, 10, 0], [NAN, 35, 0]])  # the last: no KL
    assert metrics["rewards/said/mean"] == 1.5
    assert metrics["rewards/said_2/mean"] == 100 / 3
    assert metrics["reward"] == pytest.approx(1.5 + 50 / 3)


def test_kl_reward_adds_no_step_score(tmp_path) -> None:
    trainer = reinforce(tmp_path, says([None, 2.0], 5.0), 2, beta=0.3)
    said = [(A, B), (B, EOS)]
    signals, _ = look(trainer, said)
    reference = enumeration.model()
    with torch.no_grad():
        kl = [log_probs(trainer.model, "ab", y) - log_probs(reference, "ab", y) for y in said]
    close(signals.rewards, torch.tensor([[0, 2.0], [0, 5.0]]) - 0.3 * torch.stack(kl))
    close(signals.scores[:, 1], -0.3 * torch.stack(kl).sum(1))
    close(signals.step_scores, [[0, 2], [0, 5]])
    assert signals.step_mask.tolist() == [[False, True], [False, True]]


@pytest.mark.proves("rlhf_pg.trainers.PolicyGradientTrainer.credit")
def test_discounted_token_credit_covers_only_later_rewards(tmp_path) -> None:
    """With a discount it also shows by how many tokens a reward is away."""
    trainer = reinforce(tmp_path, stepwise, 1, gamma=0.5)
    expected = 0.0
    for said, chance in enumeration.probabilities(trainer.model, "ab").items():
        paid, log_p = paid_at(said), log_probs(trainer.model, "ab", said)
        to_go = [
            sum(0.5 ** (i - t) * paid[i] for i in range(t, len(paid))) for t in range(len(paid))
        ]
        weighted = sum(g * log_p[t] for t, g in enumerate(to_go))
        expected = expected + chance * gradient(trainer.model, weighted)
    ascent = -MAX_LENGTH * expected_gradient(trainer)
    assert expected.norm() > 1e-2
    assert (ascent - expected).norm() <= 1e-8 * expected.norm()


def test_scores_are_clipped_before_weight_and_logged_raw(tmp_path) -> None:
    options = {"reward_clip_range": (-1.0, 2.0), "reward_weights": (3.0, 1.0)}
    functions = [says([5.0, -4.0], 1.5), says(None, 2.5, name="b")]
    trainer = reinforce(tmp_path, functions, 2, missing_eos_penalty=7.0, **options)
    signals, metrics = look(trainer, [(A, EOS), (B, B)])
    close(signals.rewards, [[6, -3], [0, 4.5 + 2 - 7]])
    close(signals.scores, [[3, NAN, 0, 0], [4.5, 2, -7, 0]])
    assert metrics["rewards/said/mean"] == (1 + 1.5) / 2
    assert metrics["rewards/b/mean"] == 2.5
    assert metrics["reward"] == (3 + 4.5) / 2 + 2 - 3.5


def test_normalize_rewards_divides_by_running_std(tmp_path) -> None:
    batches = [([1.0, 3.0], 2.0, None), (8.0, [None, -4.0], 0.5), (None, [0.25, 0.5], 1.0)]
    totals = [[4.0, 2.0], [8.0, -4.0, 0.5], [0.75, 1.0]]
    plain = says(100.0, 300.0, 200.0, name="plain")
    trainer = reinforce(
        tmp_path,
        [says(), plain],
        3,
        normalize_rewards=True,
        reward_weights=(2.0, 1.0),
        missing_eos_penalty=1.0,
    )
    seen: list[float] = []
    for batch, total in zip(batches, totals, strict=True):
        trainer.rewards.sources[0] = Source.of("said", says(*batch))
        signals, metrics = look(trainer, [(A, EOS), (B, EOS), (A, B)])
        seen += total  # this step's own are in it
        std = statistics.pstdev(seen)
        valid = [x for x in signals.scores[:, 0].tolist() if not math.isnan(x)]
        assert valid == pytest.approx([2 * x / std for x in total])  # weighted after, not shifted
        second = statistics.pstdev([100, 300, 200])
        close(signals.scores[:, 1], [100 / second, 300 / second, 200 / second])
        close(signals.scores[:, 2], [0, 0, -1])
        assert metrics["rewards/said/mean"] == pytest.approx(statistics.mean(total))
    paid = [0.5 * 2 / std, 1.0 * 2 / std - 1]
    close(signals.rewards[1:, 1], [paid[0] + 300 / second, paid[1] + 200 / second])
    assert signals.rewards[1, 0].item() == pytest.approx(0.25 * 2 / std)


CUT = [(A, EOS), (B, A)]  # the second is cut off


@pytest.mark.fault(39, "they pay missing_eos_penalty")
@pytest.mark.parametrize(
    ("mode", "paid"),
    [("subtract", [[1, 3], [2, 4 + 10 - 5]]), ("replace", [[1, 3], [0, -5]])],
)
def test_missing_eos_mode_subtracts_or_replaces(tmp_path, mode, paid) -> None:
    functions = [says([1.0, 3.0], [2.0, 4.0]), says(None, 10.0, name="b")]
    options = {"missing_eos_penalty": 5.0, "missing_eos_mode": mode}
    signals, metrics = look(reinforce(tmp_path, functions, 2, **options), CUT)
    close(signals.rewards, paid)
    assert signals.scores[1].sum().item() == sum(paid[1])
    assert metrics["reward"] == pytest.approx(
        signals.scores[:, 0].mean().item() + signals.scores[1, 1].item() - 2.5
    )
    assert metrics["rewards/said/mean"] == 5
    assert metrics["rewards/missing_eos_penalty/mean"] == -2.5


def test_missing_eos_replace_also_replaces_none_scores(tmp_path) -> None:
    """Its place would be filled with the mean of the group."""
    functions = [says(4.0, None, 8.0), says(0.0, 0.0, 0.0, name="b")]
    options = {"missing_eos_penalty": 5.0, "missing_eos_mode": "replace", "overlong_buffer": 1}
    said = [(EOS,), (A, B), (EOS,)]
    signals, metrics = look(reinforce(tmp_path, functions, 3, **options), said)
    close(signals.scores, [[4, 0, 0, 0, 0], [0, 0, -5, 0, 0], [8, 0, 0, 0, 0]])
    assert signals.step_mask.tolist() == [[True, False], [False, True], [True, False]]
    assert metrics["rewards/overlong_penalty/mean"] == pytest.approx(-1 / 3)  # raw


def test_missing_eos_replace_leaves_a_failed_row_without_score(tmp_path) -> None:
    def fails(completions: list[str], **_: Any) -> list[float]:
        raise ZeroDivisionError

    options = {"missing_eos_penalty": 5.0, "missing_eos_mode": "replace"}
    signals, _ = look(reinforce(tmp_path, fails, 2, on_reward_error="drop", **options), CUT)
    assert signals.scores[:, :-1].isnan().all()


def test_overlong_penalty_is_own_unweighted_source(tmp_path) -> None:
    options = {"overlong_buffer": 2, "overlong_penalty": 3.0, "reward_weights": (10.0,)}
    signals, metrics = look(
        reinforce(tmp_path, says(1.0, 1.0, 1.0), 3, **options), [(EOS,), (A, EOS), (A, B)]
    )
    close(signals.rewards, [[10 - 1.5, 0], [0, 10 - 3], [0, 10 - 3]])
    assert metrics["rewards/overlong_penalty/mean"] == -2.5
    assert metrics["reward"] == 7.5


def test_whitened_rewards_have_unit_variance_and_keep_mean(tmp_path) -> None:
    reward, said = says(3.0, [1.0, 5.0], [None, -2.0]), [(EOS,), (A, B), (B, B)]
    plain, white = (
        look(reinforce(tmp_path, reward, 3, beta=0.3, whiten_rewards=on), said)[0]
        for on in (False, True)
    )
    tokens = plain.rewards[plain.mask].tolist()
    assert len(tokens) == 5
    mean, var = statistics.mean(tokens), statistics.pvariance(tokens)
    expected = [(x - mean) / math.sqrt(var + 1e-8) + mean for x in tokens]
    assert white.rewards[white.mask].tolist() == pytest.approx(expected)
    assert white.rewards[0, 1] == 0
    close(white.scores, plain.scores)  # what a completion is worth stays


def test_evaluation_clips_and_penalizes_but_does_not_normalize(make) -> None:
    def reward(completions, **_):
        return [2.0 * len(text) - 1 for text in completions]

    options = {
        "reward_clip_range": (0.0, 4.0),
        "normalize_rewards": True,
        "missing_eos_penalty": 100.0,
        "missing_eos_mode": "replace",
        "eval_dataset": arithmetic().eval_dataset.select(range(12)),
    }
    trainer = make(reward_funcs=reward, **options)
    moments = trainer.running["rewards/reward"]
    moments.update(10, 0.0, 1e6)
    result = trainer.evaluate(temperature=1.0)
    assert moments.count == 10  # held-out scores are not taken in
    samples = trainer.sampler.sample(
        trainer.eval_sets[""], range(12), [-1 - i for i in range(12)], 1, 1.0
    )
    cut = samples.truncated.tolist()
    raw = reward(samples.completions)
    worth = [-100 if off else min(max(x, 0), 4) for x, off in zip(raw, cut, strict=True)]
    assert {-100, 4} <= set(worth)
    assert result["eval_reward"] == pytest.approx(statistics.mean(worth))
    assert result["eval_rewards/reward/mean"] == pytest.approx(statistics.mean(raw))


def test_continued_assistant_turn_is_judged_whole(make, model_path):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    asked, begun = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    seen = []

    def judge(prompts, completions, **_):
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    data = Dataset.from_list([{"prompt": [asked, begun]}])
    trainer = make(train_dataset=data, processing_class=tokenizer, reward_funcs=judge)
    assert tokenizer.decode(trainer.train_prompts.tokens[0]).endswith("1+1=2")
    samples = trainer.sampler.roll_out(range(1))
    trainer.sampler.add_rewards(samples)
    for (prompt, [turn]), written in zip(seen, samples.token_lists(), strict=True):
        assert prompt == [asked]
        assert turn["content"] == "2" + tokenizer.decode(written, skip_special_tokens=True)


def test_sources_are_weighted_after_they_are_normalised(tmp_path: Path) -> None:
    """By 3 and -1: 3 (-1, 1) / sqrt 2 - (1, -1) / sqrt 2, over its own deviation."""
    trainer = make_trainer(
        GRPOTrainer,
        tmp_path,
        reward=[says(0.0, 1.0, name="one"), says(40.0, -20.0, name="two")],
        num_generations=2,
        advantage_estimator="group_normalized_per_source",
        scale_rewards_eps=0.5,
        reward_weights=[3.0, -1.0],
    )
    batch, _ = estimated(trainer, [(EOS,), (EOS,)])
    assert batch.advantages is not None
    first = 1.5 / (0.5**0.5 + 0.5) + 30 / (1800**0.5 + 0.5)
    expected = first / (2**0.5 * first + 0.5)
    assert batch.advantages[:, 0].tolist() == pytest.approx([-expected, expected])


def test_changed_reward_function_on_resume_is_refused(make) -> None:
    def other(completions, **_):
        return [float(len(text)) for text in completions]

    make(normalize_rewards=True, save_steps=1, max_steps=1).train()
    again = make(normalize_rewards=True, reward_funcs=other)
    with pytest.raises(ValueError, match=r"of rewards/digits, but .* of rewards/other"):
        again.train(resume_from_checkpoint=True)


def test_finite_score_stays_finite(make) -> None:
    """1e39 is beyond float32: refused by name, unless it is clipped."""

    def huge(completions, **columns):
        return [1e39, *([0.0] * (len(completions) - 1))]

    with pytest.raises(ValueError, match=r"1e\+39 of huge for completion 0.*reward_clip_range"):
        make(reward_funcs=huge, max_steps=1).train()
    trainer = make(reward_funcs=huge, max_steps=1, reward_clip_range=(-1.0, 1.0))
    assert math.isfinite(trainer.train().metrics["reward"])
