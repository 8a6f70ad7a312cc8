"""Log-probabilities and gradients of every kind of pass, against the CPU's."""

from typing import Any

import pytest
import torch

from rlhf_pg.data.records import Rollout
from rlhf_pg.models import Policy, gpu_attention
from rlhf_pg.models.gpu_attention import flex_compiles
from rlhf_pg.models.shared_prefix import Family, SharedPrefix
from tests.device.pretend import flex
from tests.device.runs import Run, trainer
from tests.tiny import tiny_model

PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8, 9], [9, 9, 9, 4]]
LENGTHS = [3, 9, 1, 6, 2, 5, 8, 7, 4, 9, 9, 3]
FAMILIES = [Family(5, [3, 0, 4, 4]), Family(2, [1]), Family(7, [20, 1])]


@pytest.fixture(autouse=True)
def _fresh():
    flex_compiles.cache_clear()


def rollout(device: str) -> Rollout:
    """Three completions of each prompt."""
    return Rollout.from_tokens(
        [prompt for prompt in PROMPTS for _ in range(3)],
        [[5 + i % 7] * n for i, n in enumerate(LENGTHS)],
        [[0.0] * n for n in LENGTHS],
        [False] * 12,
        [i for i in range(4) for _ in range(3)],
        pad_token_id=0,
        device=device,
    )


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("qwen2", {}),  # heads of 8 numbers, fewer than 128 tokens
        ("gemma", {}),
        ("opt", {}),  # positions that are learnt
        ("mistral", {"sliding_window": 4}),  # padded
        ("qwen3", {"dtype": torch.float64}),
    ],
)
def test_scores_and_gradients_match_cpu(arch: str, options: dict[str, Any], caplog) -> None:
    caplog.set_level("WARNING", "rlhf_pg")
    made = {}
    for device in ("cpu", "cuda"):
        model = tiny_model(arch, **options).to(device)
        out = Policy(model, most_tokens=64)(rollout(device)).logprobs
        out.sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        made[device] = [x.detach().cpu() for x in (out, *grads)]
    for here, there in zip(made["cpu"], made["cuda"], strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
    falls_back = any("without FlexAttention" in record.message for record in caplog.records)
    assert falls_back == (options.get("dtype") == torch.float64)


def attended(device: str, dtype: torch.dtype, width: int) -> list[torch.Tensor]:
    """What attention makes of random heads, and the gradients of what it was given."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(f.prompt + sum(f.completions) for f in FAMILIES)
    made = [torch.randn(h, tokens, width, generator=generator).to(dtype) for h in (4, 2, 2)]
    inputs = [x.to(device).requires_grad_() for x in made]
    out = SharedPrefix(FAMILIES, torch.device(device)).attend(0, *inputs, 0.3)
    slope = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(slope.to(device))
    return [x.detach().cpu() for x in (out, *(x.grad for x in inputs))]


@pytest.mark.parametrize("width", [8, 20, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_without_flex_attention_matches_cpu(dtype, width, monkeypatch, caplog) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no C compiler\nand more")

    monkeypatch.setattr(flex, "_refuse", broken)
    caplog.set_level("WARNING", "rlhf_pg")
    bound = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    for _ in range(2):
        for here, there in zip(
            attended("cpu", dtype, width), attended("cuda", dtype, width), strict=True
        ):
            torch.testing.assert_close(here, there, rtol=bound, atol=bound)
    [said] = [r.message for r in caplog.records if "without FlexAttention" in r.message]
    assert "SDPA" in said
    assert "more" not in said


def test_flex_attention_is_compiled_where_possible() -> None:
    flex.compilations.clear()
    gpu_attention._compiled.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=1000):  # that of a process, which tests share
        attended("cuda", torch.float32, 16)
    assert sum(flex.compilations.values()) > 0


def test_flex_attention_probe_works_under_checkpointing(tmp_path, caplog) -> None:
    """The first pass of a run may be one that trains: what is tried is none of the layer's."""
    caplog.set_level("WARNING", "rlhf_pg")
    options = {"gradient_checkpointing": True, "max_steps": 1}
    made = trainer(Run(options=options), tmp_path)
    flex_compiles.cache_clear()
    made.train()
    assert "without FlexAttention" not in caplog.text
