"""Ask released RL libraries for language models what the gradient of one update depends on.

    make referee        # installs them, without their dependencies, and makes docs/referee.json

The library's own code computes the gradient of one update of a model of two layers, on a CPU in
float32: with all rows in one micro-batch, in smaller ones, padded further, in other micro-batches,
and on two processes, whose gradients are averaged. What another one differs from the first is given
relative to its norm. The expected gradient of its KL over all completions of one token is compared
with that of KL(policy || reference). Modules that it imports and that are not here are stand-ins.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.libraries import (
    BEFORE,
    EOS,
    POLICY,
    REFERENCE,
    Update,
    log_probs,
    make_model,
    update_of_openrlhf,
    update_of_trl,
    update_of_verl,
)

ANSWERS = Path(__file__).parents[1] / "docs" / "referee.json"
# Prompt, completion, and score, which is centred in groups of two. The first half has 8 tokens to
# train, the second 16; the last group is truncated.
ROWS: list[tuple[tuple[int, ...], tuple[int, ...], float]] = [
    ((1,), (1, EOS), 1.0),
    ((1,), (EOS,), -1.0),
    ((1, 2), (2, 1, EOS), 0.3),
    ((1, 2), (1, EOS), -0.3),
    ((2, 2, 1), (2, 1, 1, 2, EOS), 0.8),
    ((2, 2, 1), (1, 2, EOS), -0.8),
    ((2,), (1, 1, 2, 2, 1), 0.5),
    ((2,), (2, 1, 2), -0.5),
]
REGROUPED = [*ROWS[:2], *ROWS[4:6], *ROWS[2:4], *ROWS[6:]]


class Library(NamedTuple):
    update: Callable[[Update], PreTrainedModel]  # its gradients are left in the model
    losses: list[dict[str, Any]]  # of which the first, the default, is a mean over tokens
    kl_losses: list[dict[str, Any]]
    unasked: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()


TRL_LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo")
NORMED = {"loss_agg_mode": "seq-mean-token-sum-norm"}
VERL_LOSSES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum")
LIBRARIES = {
    "trl": Library(
        update_of_trl,
        [
            *({"loss_type": name} for name in TRL_LOSSES),
            {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        ],
        [{"use_bias_correction_kl": flag} for flag in (True, False)],
    ),
    "verl": Library(
        update_of_verl,
        [*({"loss_agg_mode": n} for n in VERL_LOSSES), NORMED, NORMED | {"loss_scale_factor": 5}],
        [{"kl_loss_type": name} for name in ("low_var_kl", "k1", "abs", "k2", "k3+")],
        unasked=("padding",),  # it packs
        stand_ins=("ray", "codetiming", "fastapi"),
    ),
    "openrlhf": Library(
        update_of_openrlhf,
        [{"actor.loss_agg_mode": name} for name in ("token-mean", "seq-mean-token-mean")],
        [
            *({"algo.kl.estimator": name} for name in ("k1", "k2", "k3")),
            {"algo.kl.unbiased_gradient": True},
        ],
        unasked=("masked micro-batches",),  # it has no key that masks rows
        stand_ins=(
            *("ray", "vllm", "pylatexenc", "aiohttp", "torchdata"),
            *("flash_attn.bert_padding", "flash_attn.utils"),
        ),
    ),
}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds, after all others, modules of which nothing is asked."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = [f"{name}." for name in names]

    def find_spec(self, name: str, *_: Any) -> Any:
        whole = f"{name}."
        if any(whole.startswith(known) or known.startswith(whole) for known in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module: Any) -> None: ...


def label_of(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in options.items())


def flat_gradient(model: PreTrainedModel) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def difference(other: Tensor, first: Tensor) -> float:
    relative = ((other - first).norm() / first.norm()).item()
    assert math.isfinite(relative)
    return round(relative, 4)


def token_mean() -> Tensor:
    """The gradient of -(1 / tokens) sum_t A_t log pi_t, written out."""
    model = make_model(POLICY)
    tokens = sum(len(completion) for _, completion, _ in ROWS)
    for prompt, completion, score in ROWS:
        (-score * log_probs(model, prompt, completion).sum() / tokens).backward()
    return flat_gradient(model)


def ask_loss(
    gradient: Callable[..., Tensor], unasked: Sequence[str]
) -> tuple[Tensor, dict[str, Any]]:
    """Return the gradient of all rows at once, and how much other ways to compute it differ."""
    first = gradient()
    turned = [(prompt, completion, -score) for prompt, completion, score in ROWS]
    assert difference(gradient(rows=turned), first) > 0.5  # it depends on the scores
    masked = functools.partial(gradient, mask_truncated=True)
    without_truncated = gradient(rows=ROWS[:6], micro_batch=6)
    answers = {
        "micro-batches": largest_difference(gradient, first),
        "order": difference(gradient(rows=REGROUPED, micro_batch=4), gradient(micro_batch=4)),
        "truncated": difference(masked(), without_truncated),
    }
    if "masked micro-batches" not in unasked:
        answers["masked micro-batches"] = largest_difference(masked, masked())
    if "padding" not in unasked:
        answers["padding"] = difference(gradient(padding=5), first)
    return first, answers


def largest_difference(gradient: Callable[..., Tensor], first: Tensor) -> float:
    return max(difference(gradient(micro_batch=size), first) for size in (1, 2, 4))


def ask_kl(library: Library, options: dict[str, Any], sampler: int) -> float:
    """Compare the expected gradient of a KL loss, of one token, with that of the KL."""
    policy = make_model(POLICY)
    prompt = torch.tensor([[1]])
    logprobs = policy(prompt).logits[0, 0].log_softmax(-1)
    reference = make_model(REFERENCE)(prompt).logits[0, 0].log_softmax(-1).detach()
    (logprobs.exp() * (logprobs - reference)).sum().backward()
    update = Update(options=options, kl_coef=1.0, sampler=sampler, rows=[], micro_batch=2)
    expected = torch.zeros(())
    for token, chance in enumerate(make_model(sampler)(prompt).logits[0, 0].softmax(-1).tolist()):
        rows = [((1,), (token,), 0.0)] * 2
        expected = expected + chance * flat_gradient(library.update(replace(update, rows=rows)))
    return difference(expected, flat_gradient(policy))


def main(name: str) -> None:
    """Add a library's answers to the file; those of two processes come after those of one."""
    library = LIBRARIES[name]
    sys.meta_path.append(StandIns(library.stand_ins))
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    share = len(ROWS) // world
    known = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    answers = known[name] if world > 1 else {"version": version(name)}
    saved_gradients = Path(tempfile.gettempdir()) / f"referee-{name}.pt"
    gradients = torch.load(saved_gradients) if world > 1 else {}

    def gradient(options: dict[str, Any], **changes: Any) -> Tensor:
        update = Update(options=options, rows=ROWS, micro_batch=share)
        return flat_gradient(library.update(replace(update, **changes)))

    for options in library.losses:
        label = label_of(options)
        if world > 1:
            summed = gradient(options, rows=ROWS[dist.get_rank() * share :][:share])
            dist.all_reduce(summed)
            answers[label]["processes"] = difference(summed / world, gradients[label])
            continue
        of_loss = functools.partial(gradient, options)
        gradients[label], answers[label] = ask_loss(of_loss, library.unasked)
    for options in library.kl_losses if world == 1 else ():
        label = label_of(options)
        biases = [ask_kl(library, options, sampler) for sampler in (POLICY, BEFORE)]
        answers[label] = dict(zip(("KL", "KL of rows before"), biases, strict=True))
    if world == 1:
        torch.save(gradients, saved_gradients)
        assert difference(next(iter(gradients.values())), token_mean()) < 1e-3
    if dist.get_rank() == 0:
        ANSWERS.write_text(json.dumps(known | {name: answers}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
