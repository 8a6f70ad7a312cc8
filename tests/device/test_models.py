"""Log-probabilities and gradients of every kind of pass, against the CPU's."""

from typing import Any

import pytest
import torch

from rlhf_pg.data.batch import Batch
from rlhf_pg.models.policy import Policy
from tests.rows import batch_of
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8, 9], [9, 9, 9, 4]]
LENGTHS = [3, 9, 1, 6, 2, 5, 8, 7, 4, 9, 9, 3]


def rollout(device: str, branches: bool) -> Batch:
    """Three completions of each prompt; the third token of each may follow the first."""
    return batch_of(
        [prompt for prompt in PROMPTS for _ in range(3)],
        [[5 + i % 7] * n for i, n in enumerate(LENGTHS)],
        groups=[i for i in range(4) for _ in range(3)],
        offsets=[[1, 1, 2, *[1] * 6][:n] for n in LENGTHS] if branches else None,
        device=device,
    )


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("qwen2", {}),  # heads of 8 numbers, fewer than 128 tokens
        ("mistral", {"sliding_window": 4}),  # padded
    ],
)
@pytest.mark.parametrize("branches", [False, True])
def test_scores_and_gradients_match_cpu(arch: str, options: dict[str, Any], branches: bool) -> None:
    made = {}
    for device in ("cpu", "cuda"):
        model = tiny_model(arch, **options).to(device)
        out = Policy(model, most_tokens=64)(rollout(device, branches)).logprobs
        out.sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        made[device] = [x.detach().cpu() for x in (out, *grads)]
    for here, there in zip(made["cpu"], made["cuda"], strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
