"""Agents in training: exact gradients over a cut history, credit, and runs that repeat."""

import asyncio
import json
import random
from functools import cache
from itertools import product
from typing import Any

import openai
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from rlhf_pg import GRPOConfig, GRPOTrainer, PPOTrainer, ReinforceTrainer
from rlhf_pg.data import Batch
from rlhf_pg.report.metrics import Meter
from rlhf_pg.tasks.tiny import character_tokenizer, tiny_decoder
from tests.enumeration import EOS, A, B, make_trainer
from tests.rows import batch_of

DELAYS = random.SystemRandom()  # a trainer seeds the others
TOKENS = (EOS, A, B)
# What the second call earns, by the tokens of both, and the first.
PAID = torch.tensor([(0.3, 1.0, -0.7), (2.0, -1.5, 0.4), (0.1, -0.2, 1.1)], dtype=torch.float64)
FIRST = torch.tensor((0.5, -0.4, 0.2), dtype=torch.float64)


def chances(model: Any, context: list[int]) -> Tensor:
    return model(torch.tensor([context])).logits[0, -1].log_softmax(-1)


def cut_episodes(prompt: list[int], sources: int, lines: bool) -> Batch:
    """Every episode of two calls: a token after the prompt, then one after that token alone."""
    pairs = list(product(TOKENS, TOKENS))
    batch = batch_of(
        [prompt] * 9,
        [[first, first, second] for first, second in pairs],
        actions=[[True, False, True]] * 9,
        offsets=[[1, 0, 1]] * 9,
        dtype=torch.float64,
    )
    scores = torch.full((9, 3, sources), torch.nan, dtype=torch.float64)
    scores[:, 0, 0], scores[:, 2, 0] = FIRST.repeat_interleave(3), PAID.flatten()
    batch = batch.with_columns(scores=scores)
    return batch.with_columns(branches=torch.tensor([[0, 0, 1]] * 9)) if lines else batch


def expected_gradient(trainer: Any, batch: Batch, values: Any = None) -> Tensor:
    """The gradient of each episode alone, by the probability of the episode."""
    with torch.no_grad():
        first = chances(trainer.model, batch.prompt_ids[0].tolist())
        seconds = [chances(trainer.model, [token]) for token in TOKENS]
    total, learner = torch.zeros((), dtype=torch.float64), trainer.learner
    for i, (one, two) in enumerate(product(TOKENS, TOKENS)):
        row = learner.infer(batch.select(torch.tensor([i])))
        if values is not None:
            row = row.with_columns(values=values[i : i + 1])
        row = trainer.credit(row, Meter())
        learner.module.zero_grad()
        learner.accumulate(row, trainer.objective, Meter())
        gradient = parameters_to_vector([p.grad for p in trainer.model.parameters()])
        total = total - (first[one] + seconds[one][two]).exp() * gradient
    return total


def true_gradient(model: Any, prompt: list[int], own: bool = False) -> Tensor:
    """grad E[r_1 + r_2]; with `own` credit, a call is not paid for what the other earns."""
    first = chances(model, prompt)
    total = torch.zeros((), dtype=torch.float64)
    for one in TOKENS:
        second = chances(model, [one])
        later = second.exp() @ PAID[one]
        paid = first[one].exp() * FIRST[one]
        total = total + paid + (first[one].exp().detach() if own else first[one].exp()) * later
    return parameters_to_vector(torch.autograd.grad(total, list(model.parameters())))


def exact_values(model: Any, prompt: list[int]) -> Tensor:
    with torch.no_grad():
        later = [chances(model, [one]).exp() @ PAID[one] for one in TOKENS]
        start = chances(model, prompt).exp() @ (torch.stack(later) + FIRST)
    rows = [[start, 0.0, later[one]] for one, _ in product(TOKENS, TOKENS)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "options", "exact"),
    [
        (ReinforceTrainer, {"advantage_estimator": "returns"}, False),
        (ReinforceTrainer, {"advantage_estimator": "total_returns"}, False),
        (PPOTrainer, {"lam": 1.0}, False),
        (PPOTrainer, {"lam": 0.3}, True),
        (PPOTrainer, {"lam": 0.3, "value_lam": 1.0}, True),
        (PPOTrainer, {"lam_alpha": 0.7}, True),
        (PPOTrainer, {"advantage_estimator": "n_step", "n_steps": 1}, True),
        (ReinforceTrainer, {"advantage_estimator": "returns", "agent_credit": "branch"}, False),
        (PPOTrainer, {"lam": 1.0, "agent_credit": "branch"}, False),
    ],
)
def test_expected_gradient_over_a_cut(kind: Any, options: Any, exact: bool, tmp_path: Any) -> None:
    """The first token is paid back for what its successor earns, though the history is new."""
    ppo = {"num_iterations": 1, "critic": "separate"} if kind is PPOTrainer else {}
    options = {"normalize_advantages": False, **ppo, **options}
    own = options.get("agent_credit") == "branch"
    options |= {"agent_program": "true"} if own else {}
    trainer = make_trainer(kind, tmp_path, max_completion_length=3, **options)
    prompt = [A, B]
    batch = cut_episodes(prompt, len(trainer.shaping.names), own)
    values = exact_values(trainer.model, prompt) if exact else None
    found = expected_gradient(trainer, batch, values) * 3  # per token of `constant`
    truth = true_gradient(trainer.model, prompt, own)
    assert (found - truth).norm() < 1e-8 * truth.norm()


@cache
def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="of each call")


async def wander(row: dict[str, Any], endpoint: Any) -> float:
    """Ask thrice after random delays, forget the first answer, and ask two others side by side."""
    client = client_of(endpoint.base_url)

    async def ask(own: Any, chat: Any) -> str:
        await asyncio.sleep(DELAYS.random() / 20)
        key = {"Authorization": f"Bearer {own.api_key}"}
        answer = await client.chat.completions.create(
            model="policy", messages=chat, max_tokens=4, extra_headers=key
        )
        return answer.choices[0].message.content or ""

    chat = [{"role": "user", "content": str(row["number"])}]
    for turn in range(3):
        said = await ask(endpoint, chat)
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": str(turn)}]
        chat = chat[-3:] if turn == 1 else chat
    parts = [ask(endpoint.fork(), [*chat, {"role": "user", "content": x}]) for x in "ab"]
    return float(sum(map(len, await asyncio.gather(*parts))))


def test_delays_change_neither_tokens_nor_weights(tmp_path: Any) -> None:
    """16 agents at a time, two runs: the same ids, and the same weights bit for bit."""
    runs = []
    for run in range(2):
        torch.manual_seed(0)
        tokenizer = character_tokenizer("0123456789ab?")
        trainer = GRPOTrainer(
            model=tiny_decoder(tokenizer, 128),
            processing_class=tokenizer,
            agent_program=wander,
            train_dataset=Dataset.from_list([{"prompt": "?", "number": n} for n in range(8)]),
            args=GRPOConfig(
                output_dir=str(tmp_path / str(run)),
                prompts_per_step=4,
                num_generations=4,
                max_completion_length=120,
                max_steps=2,
                learning_rate=1e-2,
                log_completions_steps=1,
            ),
        )
        trainer.train()
        assert trainer.history[-1]["episodes/failed"] == 0
        assert trainer.history[-1]["episodes/overlapping"] == 0
        assert trainer.history[-1]["episodes/tokens_encoded_again"] == 0
        texts = [json.loads(line) for line in (tmp_path / str(run) / "completions.jsonl").open()]
        runs.append(
            ([text["completion"] for text in texts], trainer.recorder.fingerprints(trained=True))
        )
    assert runs[0] == runs[1]
