"""What trainers make of episodes: exact gradients by enumeration, failures, metrics, options."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer
from rlhf_pg.report.metrics import Meter
from rlhf_pg.report.run_files import read
from rlhf_pg.rollout import Request
from rlhf_pg.run.objective import unchosen_tokens
from rlhf_pg.tasks import calculator, guess
from rlhf_pg.trainers import PolicyGradientTrainer
from tests import enumeration
from tests.enumeration import EOS, PROMPTS, A, B, assert_close, make_trainer
from tests.episodes.scripted import ScriptedEngine
from tests.trainers.conftest import estimated

FIRST = {"": 0.7, "a": -1.0, "b": 0.4, "aa": 1.3, "ab": -0.2, "ba": 0.9, "bb": 0.1}
SECOND = {"": 1.0, "a": -0.6, "b": 0.8}


class TwoTurns:
    """Pays for the first turn by its text, answers "b" or "ab", and pays for the second by both."""

    def __init__(self) -> None:
        self.first: str | None = None

    def reset(self, example: dict[str, Any]) -> str:
        return str(example["prompt"])

    def step(self, completion: str) -> tuple[str, float | None, bool]:
        if self.first is None:
            self.first = completion
            return self.answer(completion), FIRST.get(completion, 0.3), False
        return "", SECOND.get(completion, -0.5) + len(self.first), True

    @staticmethod
    def answer(first: str) -> str:
        return "ab" if first == "a" else "b"


class Row(NamedTuple):
    """One way that an episode can go."""

    tokens: tuple[int, ...]
    own: tuple[bool, ...]
    paid: tuple[float, ...]  # by token
    ended: bool


def said(tokens: Sequence[int]) -> str:
    return "".join({EOS: "", A: "a", B: "b"}[token] for token in tokens)


def all_rows(limit: int) -> Iterator[Row]:
    """Every episode of `TwoTurns` within `limit` tokens."""
    for first in turns(limit):
        paid = [0.0] * (len(first) - 1) + [FIRST.get(said(first), 0.3)]
        answer = [{"a": A, "b": B}[c] for c in TwoTurns.answer(said(first))]
        room = limit - len(first) - len(answer)
        if first[-1] != EOS or room < 1:
            yield Row(first, (True,) * len(first), tuple(paid), False)
            continue
        for second in turns(room):
            tokens = (*first, *answer, *second)
            own = (True,) * len(first) + (False,) * len(answer) + (True,) * len(second)
            last = SECOND.get(said(second), -0.5) + len(said(first))
            rewards = (*paid, *[0.0] * (len(answer) + len(second) - 1), last)
            yield Row(tokens, own, rewards, second[-1] == EOS)


def turns(limit: int) -> Iterator[tuple[int, ...]]:
    """Every turn of at most `limit` tokens."""
    yield (EOS,)
    for token in (A, B):
        if limit == 1:
            yield (token,)
        else:
            yield from ((token, *rest) for rest in turns(limit - 1))


def says(rows: Sequence[Row]) -> ScriptedEngine:
    """An engine whose sample i goes through the i-th of these rows."""

    def script(request: Request, sample: int) -> list[int]:
        row, start = rows[sample], request.position
        assert tuple(request.tokens)[len(request.tokens) - start :] == row.tokens[:start]
        turn = row.own[start:]
        length = turn.index(False) if False in turn else len(turn)
        return list(row.tokens[start : start + length])

    return ScriptedEngine(script, EOS)


def play(
    trainer_type: type[PolicyGradientTrainer],
    tmp_path: Path,
    environment: Callable[[], Any] = TwoTurns,
    **options: Any,
) -> PolicyGradientTrainer:
    options = {"prompts": ("a",), "reward": (), "max_completion_length": 4} | options
    return make_trainer(
        trainer_type, tmp_path, inputs={"environment_factory": environment}, **options
    )


def experience_of(trainer: PolicyGradientTrainer, rows: Sequence[Row]):
    trainer.sampler.engine = says(rows)
    return estimated(trainer)


def gradient_of(trainer: PolicyGradientTrainer, rows: Sequence[Row]) -> Tensor:
    """Of the policy, by the trainer's own steps."""
    experience, _ = experience_of(trainer, rows)
    trainer.learner.module.zero_grad()
    trainer.learner.accumulate(experience, trainer.objective, Meter())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainer.model.parameters()]
    return torch.cat([grad.flatten() for grad in grads]).clone()


def log_prob(model: Any, row: Row) -> Tensor:
    """Of the row's own tokens, given all before each of them."""
    return log_probs(model, row)[torch.tensor(row.own)].sum()


def log_probs(model: Any, row: Row) -> Tensor:
    prompt = PROMPTS["a"]
    logits = model(torch.tensor([[*prompt, *row.tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(row.tokens)), torch.tensor(row.tokens)]


@pytest.mark.parametrize(
    ("trainer_type", "options"),
    [
        (ReinforceTrainer, {"advantage_estimator": "returns", "beta": 0.3}),
        (PPOTrainer, {"num_generations": 1, "lam": 1.0, "normalize_advantages": False}),
    ],
)
def test_expected_episode_gradient_is_exact(trainer_type, options, tmp_path: Path) -> None:
    """grad of E[all that is paid, less beta KL], over every way that two turns can go."""
    trainer = play(trainer_type, tmp_path, **options)
    limit, beta = trainer.args.max_completion_length, options.get("beta", 0.0)
    objective = torch.zeros((), dtype=torch.float64)
    expected, total = 0.0, 0.0
    for row in all_rows(limit):
        log_p = log_prob(trainer.model, row)
        with torch.no_grad():
            paid = sum(row.paid) - beta * (log_p - log_prob(enumeration.model(), row))
        objective = objective + log_p.exp() * paid
        total += (chance := log_p.exp().item())
        expected = expected + chance * gradient_of(trainer, [row])
    assert total == pytest.approx(1, abs=1e-12)
    assert_close(-limit * expected, enumeration.gradient(trainer.model, objective))


def test_discount_and_lambda_skip_observation_tokens(tmp_path: Path) -> None:
    """By hand: two tokens, an answer of two, one token; paid 2 and 3."""
    row = Row((A, EOS, A, B, EOS), (True, True, False, False, True), (0, -1.0, 0, 0, 2.0), True)
    options = {"max_completion_length": 6, "gamma": 0.5}
    trainer = play(ReinforceTrainer, tmp_path, advantage_estimator="returns", **options)
    experience, _ = experience_of(trainer, [row])
    # The second turn: said "", which is worth 1.0, and 1 more for the first turn's one letter.
    assert experience.advantages.tolist() == [[-0.5 + 0.25 * 2, -1 + 0.5 * 2, 0, 0, 2]]
    trainer = play(PPOTrainer, tmp_path, normalize_advantages=False, lam=0.9, **options)
    experience, _ = experience_of(trainer, [row])
    v = experience.values[0].tolist()
    assert v[2:4] == [0, 0]
    delta = [0.5 * v[1] - v[0], -1 + 0.5 * v[4] - v[1], 2 - v[4]]
    last = delta[1] + 0.45 * delta[2]
    expected = [delta[0] + 0.45 * last, last, 0, 0, delta[2]]
    assert experience.advantages[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_truncated_episode_bootstraps_from_last_action(tmp_path: Path) -> None:
    """Its answer left no room: what follows is the critic's opinion of the state before it."""
    rows = [row for row in all_rows(3) if row.tokens == (A, EOS)]
    trainer = play(PPOTrainer, tmp_path, max_completion_length=3, bootstrap_truncated=True)
    trainer.sampler.engine = says(rows)
    rollout = trainer.sampler.roll_out(range(1))
    assert rollout.truncated.tolist() == [True]
    scored = trainer.learner.infer(rollout)
    ids = torch.tensor([[*PROMPTS["a"], *rows[0].tokens]])
    hidden = trainer.critic.model(ids).last_hidden_state
    end = trainer.critic.head(hidden)[0, -1]
    _, bootstrap_value = trainer.values_of(scored)
    assert bootstrap_value.item() == pytest.approx(end.item())


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_aggregation_denominator_skips_observation_tokens(aggregation: str, tmp_path: Path) -> None:
    rows = [
        Row((EOS, B, A, EOS), (True, False, True, True), (0.7, 0, 0, -0.6), True),
        Row((A, B, A, B), (True,) * 4, (0, 0, 0, 0.3), False),
    ]
    trainer = play(
        GRPOTrainer, tmp_path, num_generations=2, scale_rewards="none", aggregation=aggregation
    )
    objective = torch.zeros((), dtype=torch.float64)
    for sign, row in zip((-0.1, 0.1), rows, strict=True):  # 0.1 and 0.3 about their mean
        length = sum(row.own)
        divisor = 7 if aggregation == "token_mean" else 2 * length
        objective = objective - sign * log_prob(trainer.model, row) / divisor
    assert_close(gradient_of(trainer, rows), enumeration.gradient(trainer.model, objective))


@pytest.mark.proves("rlhf_pg.losses.nll")
@pytest.mark.parametrize("trainer_type", [GRPOTrainer, PPOTrainer])
@pytest.mark.parametrize("budget", [6, 1000])
def test_tool_output_nll_gradient_covers_observation_tokens(trainer_type, budget, tmp_path) -> None:
    """It adds the mean of -log p over "b" and "ab", and nothing where a truncated row is left out;
    the policy, its critic and their metrics see what they did.
    """
    rows = [
        Row((EOS, B, A, EOS), (True, False, True, True), (0.7, 0, 0, -0.6), True),
        Row((A, EOS, A, B), (True, True, False, False), (0, -1.0, 0, 0), False),
        Row((B, EOS, B, EOS), (True, True, False, True), (0, 0.4, 0, 0.3), True),
    ]
    options: dict[str, Any] = {"num_generations": 3, "micro_batch_tokens": budget}
    options |= {"mask_truncated_completions": True, "entropy_coef": 0.2}
    meters, grads = [], []
    for coef in (0.0, 0.5):
        trainer = play(trainer_type, tmp_path, tool_output_nll_coef=coef, **options)
        batch = trainer.drop_truncated(experience_of(trainer, rows)[0])
        trainer.learner.module.zero_grad()
        meters.append(Meter())
        trainer.learner.accumulate(batch, trainer.objective, meters[-1])
        grads.append(enumeration.flat_gradient(trainer))
    seen = torch.cat([log_probs(trainer.model, rows[i])[[place]] for i, place in ((0, 1), (2, 2))])
    added, expected = grads[1] - grads[0], enumeration.gradient(trainer.model, -seen.mean())
    assert_close(added[: len(expected)], 0.5 * expected)
    assert not added[len(expected) :].any()
    without, means = (meter.means(meter.sums()) for meter in meters)
    assert means.pop("tool_output_nll") == pytest.approx(-seen.mean().item())
    assert without.pop("loss") != means.pop("loss")
    assert means == pytest.approx(without, nan_ok=True)
    offsets = torch.ones_like(batch.completion_ids)
    offsets[0, 1] = 0  # nothing predicts the first token of a context
    answers = unchosen_tokens(batch.with_columns(parent_offsets=offsets))
    assert answers.nonzero().tolist() == [[2, 2]]


class Failing(TwoTurns):
    """`TwoTurns`, of which those that said "bb" first have no second turn."""

    def step(self, completion: str) -> tuple[str, float | None, bool]:
        if completion == "bb":
            raise OSError("gone")
        return super().step(completion)


GOOD = [
    Row((EOS, B, A, EOS), (True, False, True, True), (0.7, 0, 0, -0.6), True),
    Row((EOS, B, EOS), (True, False, True), (0.7, 0, 1.0), True),
    Row((B, EOS, B, A), (True, True, False, True), (0, 0.4, 0, 0.4), False),
]
BROKEN = Row((B, B, EOS), (True, True, True), (0, 0, 0), True)
RETURNS = {"advantage_estimator": "returns"}


@pytest.mark.parametrize(
    ("trainer_type", "aggregation", "options"),
    [
        (GRPOTrainer, "token_mean", {"beta": 0.1}),
        (GRPOTrainer, "sequence_mean", {"scale_rewards": "batch", "entropy_coef": 0.1}),
        (RLOOTrainer, "constant", {"missing_eos_penalty": 1.0, "overlong_buffer": 2}),
        (ReinforceTrainer, "sequence_mean", {"beta": 0.1, "whiten_rewards": True, **RETURNS}),
        (ReinforceTrainer, "constant", {"normalize_rewards": True}),
        (PPOTrainer, "token_mean", {"normalize_advantages": True, "normalize_values": True}),
    ],
)
def test_failed_episode_leaves_gradient_unchanged(
    trainer_type, aggregation: str, options, tmp_path: Path
) -> None:
    """The gradient is that of the others alone."""
    gradients = []
    for rows in (GOOD, [GOOD[0], BROKEN, *GOOD[1:]]):
        trainer = play(
            trainer_type,
            tmp_path,
            Failing,
            num_generations=len(rows),
            aggregation=aggregation,
            **options,
        )
        gradients.append(gradient_of(trainer, rows))
    assert_close(gradients[1], gradients[0], rel=1e-10)


def test_failed_episode_leaves_metrics_unchanged(tmp_path: Path) -> None:
    options = {"beta": 0.1, "kl_controller": "adaptive", "kl_target": 1.0}
    seen = []
    for rows in (GOOD, [GOOD[0], BROKEN, *GOOD[1:]]):
        trainer = play(ReinforceTrainer, tmp_path, Failing, num_generations=len(rows), **options)
        seen.append(experience_of(trainer, rows)[1])
    for key in ("reward", "reward_std", "rewards/environment/mean", "kl/completion"):
        assert seen[1][key] == pytest.approx(seen[0][key], rel=1e-12), key


def test_reward_functions_skip_failed_episodes(tmp_path: Path) -> None:
    asked = []

    def length(completions, **columns):
        asked.append(list(zip(completions, columns["answer"], strict=True)))
        return [float(len(text)) for text in completions]

    trainer = play(RLOOTrainer, tmp_path, Failing, num_generations=2, reward=length)
    rows = Dataset.from_dict({"prompt": ["a"], "answer": [4]})
    trainer.sampler.prompts = dataclasses.replace(trainer.train_prompts, rows=rows)
    trainer.sampler.engine = says([BROKEN, GOOD[1]])
    scored = trainer.sampler.next_batch(trainer.state.prompt_index, Meter())
    assert asked == [[("b", 4)]]
    assert scored.scores[0].isnan().all()
    assert scored.scores[1, 2].tolist() == [1.0, 1.0]
    assert scored.completion_mask.sum(1).tolist() == [3, 3]  # they are still there
    assert scored.action_mask.sum(1).tolist() == [0, 2]


class Broken:
    def reset(self, example: dict[str, Any]) -> str:
        raise OSError("gone")

    def step(self, completion: str) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("trainer_type", "options"),
    [
        (GRPOTrainer, {"dynamic_sampling_rounds": 1, "entropy_target": 1.0}),
        (ReinforceTrainer, {"advantage_estimator": "returns_minus_moving_average"}),
        (
            PPOTrainer,
            {"normalize_values": True, "normalize_rewards": True, "whiten_rewards": True}
            | {"kl_adaptive_lr": 0.1, "num_iterations": 2},
        ),
    ],
)
def test_step_of_failed_episodes_leaves_weights_unchanged(
    trainer_type, options, tmp_path: Path
) -> None:
    trainer = play(
        trainer_type,
        tmp_path,
        Broken,
        num_generations=2,
        max_steps=2,
        output_dir=str(tmp_path),
        log_completions_steps=1,
        **options,
    )
    trainer.sampler.engine = says([])
    trainer.sampler.call_metrics = lambda errors: (
        {},
        {},
    )  # episodes of other processes have not failed
    before = [parameter.detach().clone() for parameter in trainer.learner.module.parameters()]
    trainer.train()
    after = trainer.learner.module.parameters()
    assert all(map(torch.equal, before, after))
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["episodes/failed"] for line in lines] == [2, 2]
    assert [line["reward"] for line in lines] == [None, None]
    shown = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert {record["error"] for record in shown} == {"OSError: gone"}


def number() -> Any:
    """A game of numbers below 16, in which an answer to anything is worth something."""

    class Closer(guess().environment_factory):  # type: ignore[misc]
        def step(self, completion: str) -> tuple[str, float, bool]:
            messages, reward, done = super().step(completion)
            return messages, reward + len(completion) / 10, done

    return Closer()


def player(make, trainer_type=GRPOTrainer, **options: Any) -> PolicyGradientTrainer:
    """A trainer on `number`, with the engine that samples in the same process."""
    torch.manual_seed(0)
    model, tokenizer = guess().new_model()
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokenizer("<>?:")["input_ids"]]
    defaults = {
        "model": model,
        "processing_class": tokenizer,
        "reward_funcs": (),
        "environment_factory": number,
        "train_dataset": guess().train_dataset,
        "eval_dataset": guess().eval_dataset.select(range(5)),
        "max_completion_length": 16,
        "log_completions_steps": 1,
    }
    return make(trainer_type, **(defaults | options))


def test_failed_evaluation_episodes_count_as_wrong(make) -> None:
    """And one that has failed is no success."""
    trainer = player(make, environment_factory=Broken, num_generations_eval=2)
    metrics = trainer.evaluate(temperature=1.0)
    assert metrics["eval_pass@2"] == 0
    assert math.isnan(metrics["eval_majority@2"])  # nothing to vote on
    assert metrics["eval_episodes/failed"] == 10


@pytest.mark.parametrize("score", [1.0, -1.0])
def test_failed_episode_is_wrong_for_every_source_and_has_no_vote(make, score) -> None:
    """Of four episodes of a prompt two fail, which are right at no threshold, and not the best."""
    played = itertools.count()

    class Half(guess().environment_factory):  # type: ignore[misc]
        def reset(self, example: dict[str, Any]) -> Any:
            if next(played) % 2:
                raise OSError("gone")
            return super().reset(example)

    def paid(completions, **_) -> list[float]:
        return [score] * len(completions)

    def nothing(completions, **_) -> list[float]:
        return [0.0] * len(completions)

    trainer = player(
        make,
        environment_factory=Half,
        reward_funcs=[paid, nothing],
        reward_weights=(1.0, 0.0, 0.0),
        num_generations_eval=4,
        eval_success_threshold=min(score, 0.0),
    )
    metrics = trainer.evaluate(temperature=1.0)
    for name in ("eval_", "eval_rewards/paid/", "eval_rewards/nothing/"):
        values = [metrics[f"{name}pass@{k}"] for k in (1, 2, 4)]
        assert values == pytest.approx([1 / 2, 5 / 6, 1.0])
    assert metrics["eval_best@4"] == metrics["eval_majority@4"] == score


def test_training_evaluation_resampling_and_greedy_baselines_play_episodes(make, tmp_path) -> None:
    """With an environment that pays nothing to half of the groups."""

    class Odd(guess().environment_factory):  # type: ignore[misc]
        def step(self, completion: str) -> tuple[str, float, bool]:
            messages, _, done = super().step(completion)
            return messages, len(completion) * (self.number % 2) / 10, done

    trainer = player(
        make,
        ReinforceTrainer,
        environment_factory=Odd,
        advantage_estimator="returns_minus_greedy",
        dynamic_sampling_rounds=3,
        tool_output_nll_coef=0.1,
        max_turns=3,
        max_steps=1,
        eval_steps=1,
    )
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    assert not before.equal(trainer.model.lm_head.weight)
    (line,) = read(tmp_path / "run" / "metrics.jsonl")
    assert line["reward"] == line["rewards/environment/mean"] > 0
    assert line["sampling/kept_fraction"] < 1
    assert line["rewards/greedy"] > 0
    assert line["tool_output_nll"] > 0
    assert 1 < line["episodes/turns"] <= 3
    assert line["episodes/failed"] == 0
    assert 1 < line["eval_episodes/turns"] <= 3
    assert line["eval_greedy_rewards/environment/mean"] > 0
    shown = (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
    assert {json.loads(record)["turns"] for record in shown} <= {1, 2, 3}


def test_environment_reward_comes_after_reward_functions(make) -> None:
    def length(completions, **_):
        return [float(len(text)) for text in completions]

    trainer = player(make, reward_funcs=length, reward_weights=(0.0, 2.0))
    assert trainer.shaping.names == ["length", "environment"]
    samples = trainer.sampler.roll_out(range(2))
    scores = trainer.sampler.add_rewards(samples).scores
    shaped = trainer.shaping.shape(scores, samples)
    total = scores.nansum(1)
    assert total[:, 0].tolist() == [len(text) for text in samples.completions]
    torch.testing.assert_close(shaped.nansum(dim=(1, 2)), 2 * total[:, 1])
    per_turn = (~scores[:, :, 1].isnan()).sum(1).tolist()
    assert per_turn == [episode.turns for episode in samples.episodes]


TOOLS = {"tools": calculator().tools}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turns": 3}, "^max_turns has no effect"),
        (TOOLS | {"environment_factory": TwoTurns}, "tools or environment_factory, not both"),
        (TOOLS, "the chat template .* does not show them to the model"),
        ({"environment_factory": "guess"}, "environment_factory must make environments"),
        ({"environment_factory": TwoTurns, "reward_weights": (1.0,)}, "one entry per source"),
    ],
)
def test_bad_episode_option_raises(make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
