"""The gradient through a head, where processes have different numbers of rows.

python -m tests.distributed.chunked_head OUT BACKEND
"""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from rlhf_pg.models.adapters import add_adapter
from rlhf_pg.models.lm_head import ChunkedLMHead, _ChunkedStatistics, trunk
from rlhf_pg.runtime.processes import Runtime
from tests.distributed import backends
from tests.distributed.runs import flat, gradient_of
from tests.tiny import adapter, stir, tiny_model

ROWS = ((1, 9), (7, 4))  # of each process in each micro-batch; at first one has two empty pieces
PARTS = 3
# Of a head, and how often it gives all scores at once: in two micro-batches, and without gradients.
KINDS = {"plain": 3, "tied": 3, "bias": 3, "whole": 3, "LoRA": 0}
TEMPERATURE = 0.7


def model_of(kind: str) -> Any:
    arch = "phi" if kind == "bias" else "llama"
    model = tiny_model(arch, tie_word_embeddings=kind == "tied")
    torch.manual_seed(0)
    if kind == "LoRA":
        model = add_adapter(model, adapter(target_modules=["q_proj", "lm_head"]))
    if kind == "whole":
        options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
        model = add_adapter(model, adapter(**options))
    return stir(model)


def rows_of(rank: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """A sequence (1,S), and what follows each of its tokens."""
    ids = torch.arange(rank + 3, rank + 4 + ROWS[micro_batch][rank])
    return ids[None, :-1], ids[1:]


def loss(logprobs: Tensor, entropies: Tensor) -> Tensor:
    return (logprobs * torch.linspace(1, 2, len(logprobs)) + 0.5 * entropies).sum()


class Scorer(nn.Module):
    def __init__(self, model: Any, parts: int) -> None:
        super().__init__()
        self.model = model
        self.head = ChunkedLMHead(model, TEMPERATURE, True, parts)

    def forward(self, ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = trunk(self.model)(ids, use_cache=False).last_hidden_state[0]
        return self.head(hidden, tokens)


def main(out: Path, backend: str) -> None:
    backends.install(backend)
    runtime = Runtime(timeout=60)
    for kind in KINDS:
        scorer = Scorer(model_of(kind), PARTS)
        trained = [p for p in scorer.parameters() if p.requires_grad]
        wrapped = runtime.prepare(scorer, torch.optim.SGD(trained, lr=0.1))
        with patch.object(_ChunkedStatistics, "apply", wraps=_ChunkedStatistics.apply) as at_once:
            with torch.no_grad():
                wrapped(*rows_of(runtime.rank, 0))
            for micro_batch in range(len(ROWS)):
                with wrapped.micro_batch(last=micro_batch + 1 == len(ROWS)):
                    wrapped.backward(loss(*wrapped(*rows_of(runtime.rank, micro_batch))))
        found = flat(gradient_of(p, wrapped) for p in scorer.parameters() if p.requires_grad)
        if runtime.is_main:
            torch.save((found, at_once.call_count), out / f"{kind}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
