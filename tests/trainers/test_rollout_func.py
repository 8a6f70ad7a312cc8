"""A `rollout_func` in place of the engine: what it is given, and what of its answer is used."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_pg import GRPOTrainer, PPOTrainer
from rlhf_pg.rollout import RolloutError
from rlhf_pg.tasks import calculator


def sampled(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Sample as the engine does without the function."""
    tokenizer, rows = trainer.processing_class, list(trainer.train_prompts.rows["prompt"])
    n = trainer.args.num_generations
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts[::n]]
    places = [rows.index(prompt) for prompt in prompts[::n]]
    said = trainer.engine.generate(
        ids, n, trainer.sampling_params, trainer.args.seed, prompt_ids=places
    )
    return {
        "prompt_ids": [one for one in ids for _ in range(n)],
        "completion_ids": [completion.tokens for completion in said],
        "logprobs": [completion.logprobs for completion in said],
    }


@pytest.mark.parametrize("trainer_type", [GRPOTrainer, PPOTrainer])
def test_function_that_samples_like_engine_trains_like_it(make, tmp_path, trainer_type) -> None:
    """In order, every prompt has the number of its row, which keys the noise."""
    weights = []
    for name, function in {"a": None, "b": sampled}.items():
        options = {"shuffle_dataset": False, "max_steps": 1, "output_dir": str(tmp_path / name)}
        trainer = make(trainer_type, rollout_func=function, **options)
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_answer_becomes_samples_token_by_token(make) -> None:
    seen = {}

    def roll(prompts, trainer):
        seen["prompts"], seen["params"] = list(prompts), trainer.sampling_params
        stop = trainer.processing_class.eos_token_id
        count = len(prompts)
        return {
            "prompt_ids": np.full((count, 3), 4),
            "completion_ids": [[5, 6, 7, stop] if i % 2 else [5, 6, 7] for i in range(count)],
            "logprobs": [
                [[-1.0, -9.0]] * 4 if i % 2 else torch.tensor([-2.0] * 3) for i in range(count)
            ],
            "env_mask": [[1, 0, 1, 1] if i % 2 else [1, 1, 1] for i in range(count)],
            "won": [i / 8 for i in range(count)],
            "answer": ["mine"] * count,
            "place": "here",
        }

    def reward(completions, won, place, answer, **_):
        assert place == ["here"] * 4
        assert answer == ["mine"] * 4
        return won

    trainer = make(reward_funcs=reward, rollout_func=roll, num_generations=2, prompts_per_step=2)
    samples = trainer.roll_out(range(2))
    rows = trainer.prompt_order.rows([0, 1])
    expected = [trainer.train_prompts.rows[row]["prompt"] for row in rows for _ in range(2)]
    assert seen["prompts"] == expected
    assert samples.prompts == expected
    assert seen["params"].max_tokens == 6
    rollout = samples.rollout
    assert rollout.prompt_ids.tolist() == [[4, 4, 4]] * 4
    assert rollout.completion_mask.sum(1).tolist() == [3, 4, 3, 4]
    assert rollout.action_mask[1].tolist() == [True, False, True, True]
    assert rollout.sampler_logprobs[:2].tolist() == [[-2, -2, -2, 0], [-1, -1, -1, -1]]
    assert rollout.truncated.tolist() == [True, False, True, False]
    assert trainer.reward(samples).nansum(dim=(1, 2)).tolist() == [0, 1 / 8, 2 / 8, 3 / 8]


def test_chat_is_told_to_rewards_as_messages(make) -> None:
    task = calculator()
    torch.manual_seed(0)
    model, tokenizer = task.new_model()
    word = tokenizer("ok")["input_ids"]

    async def roll(prompts, trainer):
        prompts[0][0]["content"] = "changed"  # it is a copy
        rows = len(prompts)
        return {
            "prompt_ids": [[4]] * rows,
            "completion_ids": [[*word, tokenizer.eos_token_id]] * rows,
            "logprobs": [[-1.0] * (len(word) + 1)] * rows,
        }

    trainer = make(
        model=model,
        processing_class=tokenizer,
        train_dataset=task.train_dataset,
        rollout_func=roll,
        max_completion_length=20,
    )
    samples = trainer.roll_out(range(4))
    assert samples.completions[0] == [{"role": "assistant", "content": "ok"}]
    row = trainer.prompt_order.rows([0])[0]
    assert samples.prompts[0] == trainer.train_prompts.rows[row]["prompt"]


def good(count: int) -> dict[str, Any]:
    return {
        "prompt_ids": [[4]] * count,
        "completion_ids": [[5, 6]] * count,
        "logprobs": [[-1.0, -1.0]] * count,
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (None, "must return a dictionary with prompt_ids, completion_ids, logprobs"),
        ({"logprobs": None}, "must return logprobs in its dictionary"),
        ({"logprobs": [[-1.0] * 2]}, "one entry of logprobs for each of the 16 prompts, got 1"),
        ({"won": [1.0]}, "one entry of won for each of the 16 prompts, got 1"),
        ({"completions": 1}, "'completions', which reward functions get anyway"),
        ({"prompt_ids": [[]] * 16}, "prompt_ids for prompt 0 as a list of token ids"),
        ({"prompt_ids": [["a"]] * 16}, "as a list of token ids, got .'a'"),
        ({"completion_ids": [[True, 1]] * 16}, "as a list of token ids"),
        ({"completion_ids": [[5, 10**6]] * 16}, "returned the token 1000000"),
        ({"completion_ids": [[5] * 7] * 16}, "7 tokens as completion_ids .* at most 6"),
        ({"logprobs": [[-1.0]] * 16}, r"per token \(2\), got 1 entries"),
        ({"logprobs": [[-1.0, math.nan]] * 16}, "finite numbers up to 0, got nan"),
        ({"logprobs": [[-1.0, 0.9]] * 16}, r"finite numbers up to 0, got 0\.9"),
        ({"env_mask": [[1]] * 16}, "env_mask for prompt 0 as 2 numbers 0 or 1"),
        ({"env_mask": [[1, 2]] * 16}, "env_mask for prompt 0 as 2 numbers 0 or 1"),
        (7, "rollout_func raised TypeError"),
    ],
)
def test_answer_that_does_not_fit_is_refused(make, changed, message) -> None:
    def roll(prompts, trainer):
        return None if changed is None else good(len(prompts)) | changed

    with pytest.raises(RolloutError, match=message):
        make(rollout_func=roll).roll_out(range(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_func": 3}, "rollout_func must be a function, got 3"),
        ({"tools": calculator().tools}, "give rollout_func, or tools or environment_factory"),
        ({"environment_factory": object}, "give rollout_func, or tools or environment_factory"),
        ({"max_turns": 3}, "max_turns is for episodes"),
        ({"top_k": 3, "truncated_sampling": "saved_support"}, "which tokens were kept"),
        ({"advantage_estimator": "returns_minus_greedy"}, "needs greedy completions"),
    ],
)
def test_bad_option_is_refused(make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**({"rollout_func": sampled} | options))
