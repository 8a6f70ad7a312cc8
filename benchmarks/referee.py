"""Ask released RL libraries for language models what the gradient of one update depends on.

    make referee        # installs them, without their dependencies, and makes docs/referee.json

The library's own code computes the gradient of one update of a model of two layers, on a CPU in
float32: with all rows in one micro-batch, in smaller ones, padded further, in another order, and on
two processes, whose gradients are averaged. What another one differs from the first is given
relative to its norm. The expected gradient of its KL over all completions of one token is compared
with that of KL(policy || reference). Modules that it imports and that are not here are stand-ins.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.libraries import (
    BEFORE,
    EOS,
    POLICY,
    REFERENCE,
    Update,
    make_model,
    openrlhf,
    trl,
    verl,
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


TRL_LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
VERL_LOSSES = ("token-mean", *(f"seq-mean-token-{name}" for name in ("mean", "sum", "sum-norm")))
UNBIASED = {"algo.kl.unbiased_gradient": True}
# What computes an update, its losses and its KL losses, each with the default first.
LIBRARIES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "trl": (
        trl,
        [{"loss_type": name} for name in TRL_LOSSES],
        [{"use_bias_correction_kl": flag} for flag in (True, False)],
    ),
    "verl": (
        verl,
        [{"loss_agg_mode": name} for name in VERL_LOSSES],
        [{"kl_loss_type": name} for name in ("low_var_kl", "k1", "abs", "k2", "k3+")],
    ),
    "openrlhf": (
        openrlhf,
        [{"actor.loss_agg_mode": name} for name in VERL_LOSSES[:2]],
        [*({"algo.kl.estimator": name} for name in ("k1", "k2", "k3")), UNBIASED],
    ),
}
# Modules that they import.
STAND_INS = {
    "verl": ("ray", "codetiming", "fastapi"),
    "openrlhf": (
        *("ray", "vllm", "pylatexenc", "aiohttp", "torchdata"),
        *("flash_attn.bert_padding", "flash_attn.utils"),
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


def gradient(library: Any, update: Update, **changes: Any) -> Tensor:
    """The gradient, which is averaged over processes."""
    parameters = library(replace(update, **changes)).parameters()
    summed = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(summed)
    return summed / dist.get_world_size()


def difference(other: Tensor, first: Tensor) -> float:
    return round(((other - first).norm() / first.norm()).item(), 4)


def kl_bias(library: Any, options: dict[str, Any], sampler: int) -> float:
    policy = make_model(POLICY)
    prompt = torch.tensor([[1]])
    logprobs = policy(prompt).logits[0, 0].log_softmax(-1)
    reference = make_model(REFERENCE)(prompt).logits[0, 0].log_softmax(-1).detach()
    (logprobs.exp() * (logprobs - reference)).sum().backward()
    exact = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    update = Update(options=options, kl_coef=1.0, sampler=sampler, rows=[], micro_batch=2)
    expected = torch.zeros(())
    for token, chance in enumerate(make_model(sampler)(prompt).logits[0, 0].softmax(-1).tolist()):
        rows = [((1,), (token,), 0.0)] * 2
        expected = expected + chance * gradient(library, update, rows=rows)
    return difference(expected, exact)


def main(name: str) -> None:
    """Add a library's answers to the file; those of two processes come after those of one."""
    library, losses, kl_losses = LIBRARIES[name]
    sys.meta_path.append(StandIns(STAND_INS.get(name, ())))
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    known = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    answers = known[name] if world > 1 else {"version": version(name)}
    for options in losses:
        [loss] = options.values()
        file = Path(tempfile.gettempdir()) / f"{name}-{loss}.pt"
        update = Update(options=options, rows=ROWS, micro_batch=len(ROWS) // world)
        ask = functools.partial(gradient, library, update)
        if world > 1:
            first_row = dist.get_rank() * update.micro_batch
            rows = ROWS[first_row:][: update.micro_batch]
            answers[loss]["processes"] = difference(ask(rows=rows), torch.load(file))
            continue
        first = ask()
        torch.save(first, file)
        few = ask(rows=ROWS[:6], micro_batch=6)
        answers[loss] = {
            "micro-batches": max(difference(ask(micro_batch=size), first) for size in (1, 2, 4)),
            "padding": difference(ask(padding=5), first),
            "order": difference(ask(rows=ROWS[::-1]), first),
            "truncated": difference(ask(mask_truncated=True), few),
        }
    for options in kl_losses if world == 1 else ():
        label = ", ".join(f"{key}: {value}" for key, value in options.items())
        biases = [kl_bias(library, options, sampler) for sampler in (POLICY, BEFORE)]
        answers[label] = dict(zip(("KL", "KL of rows before"), biases, strict=True))
    if dist.get_rank() == 0:
        ANSWERS.write_text(json.dumps(known | {name: answers}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
