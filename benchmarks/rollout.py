"""How fast completions are sampled, by hand: each way in turn, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.rollout [--rounds 3] [--case short] [--paged]

Beside the native engine stands `generate(num_return_sequences=n)` of transformers, and with
`--paged` its continuous batching. All have a Qwen3 of 28M parameters with random weights (on a GPU
of 0.6B, in bfloat16), the same prompts, and the same lengths, uniform from 1 to the longest: EOS is
forced at them and nowhere else. Tokens that count are those of completions. Only the native engine
returns log-probabilities.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlhf_pg.rollout import NativeEngine, SamplingParams
from rlhf_pg.rollout.native.continuous_batching import SampleState
from rlhf_pg.rollout.token_sampling import Stopping

EOS, PAD = 1, 0


@dataclass(frozen=True)
class Case:
    """P prompts of these lengths, n completions of each."""

    prompts: int
    shortest: int
    longest: int
    n: int
    new: int

    def draw(self, vocabulary: int) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts, and the lengths (P,n) of their completions."""
        generator = torch.Generator().manual_seed(0)

        def whole(low: int, high: int, *shape: int) -> list[Any]:
            return torch.randint(low, high + 1, shape, generator=generator).tolist()

        widths = whole(self.shortest, self.longest, self.prompts)
        prompts = [whole(2, vocabulary - 1, width) for width in widths]
        return prompts, whole(1, self.new, self.prompts, self.n)


CASES = {
    "short": Case(prompts=16, shortest=32, longest=128, n=8, new=128),
    "shared": Case(prompts=8, shortest=480, longest=480, n=16, new=64),
    "long": Case(prompts=8, shortest=32, longest=128, n=16, new=384),
}


def new_model(on_gpu: bool) -> PreTrainedModel:
    """28 layers of the shape of Qwen3-0.6B, or 8 of half its width and a small vocabulary."""
    shape = (
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
        | {"vocab_size": 151936}
        if on_gpu
        else {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
        | {"vocab_size": 8192}
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=EOS
    )
    model = Qwen3ForCausalLM(config).eval()
    return model.to("cuda", torch.bfloat16) if on_gpu else model


def force(logits: Tensor, lengths: Tensor, position: Tensor | int) -> Tensor:
    """EOS where a row has its length, and no EOS before; never padding, which is not counted."""
    ends = lengths == position + 1
    logits = logits.masked_fill(ends[:, None], -torch.inf)
    logits[:, PAD] = -torch.inf
    logits[:, EOS] = torch.where(ends, 0.0, -torch.inf).to(logits.dtype)
    return logits


def forced(wanted: Sequence[Sequence[int]]) -> AbstractContextManager[Any]:
    """Inside, completions of the native engine have the lengths `wanted` (P,n), with EOS at their
    ends alone; those of prompt p are in row p mod P.
    """

    def append(row: SampleState, token: int, logprob: float, stopping: Stopping) -> None:
        lengths = wanted[row.prompt.request.prompt_index % len(wanted)]
        row.stopped = len(row.tokens) + 1 == lengths[row.sample]
        if row.stopped:
            token = EOS
        elif token in (EOS, PAD):
            token = PAD + 2
        row.tokens.append(token)
        row.logprobs.append(logprob)

    return patch.object(SampleState, "append", append)


def native(model: PreTrainedModel, case: Case) -> Callable[[], int]:
    prompts, lengths = case.draw(model.config.vocab_size)

    def run() -> int:
        with forced(lengths):
            engine = NativeEngine(model, EOS, PAD)
            done = engine.generate(prompts, case.n, SamplingParams(max_tokens=case.new), seed=0)
        assert [len(c.tokens) for c in done] == [length for row in lengths for length in row]
        return sum(len(c.tokens) for c in done)

    return run


def generate(model: PreTrainedModel, case: Case) -> Callable[[], int]:
    prompts, lengths = case.draw(model.config.vocab_size)
    width, wanted = max(map(len, prompts)), torch.tensor(lengths, device=model.device).flatten()
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts], device=model.device)

    def run() -> int:
        out = model.generate(
            input_ids=ids,
            attention_mask=(ids != PAD).long(),
            generation_config=GenerationConfig(
                max_new_tokens=case.new,
                num_return_sequences=case.n,
                do_sample=True,
                top_k=0,
                eos_token_id=EOS,
                pad_token_id=PAD,
            ),
            logits_processor=LogitsProcessorList(
                [lambda ids, scores: force(scores, wanted, ids.shape[1] - width)]
            ),
        )
        tokens = int((out[:, width:] != PAD).sum())
        assert tokens == int(wanted.sum())
        return tokens

    return run


def paged(model: PreTrainedModel, case: Case) -> Callable[[], int]:
    prompts, lengths = case.draw(model.config.vocab_size)
    config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, max_new_tokens=case.new)

    def run() -> int:
        with model.continuous_batching_context_manager(
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True),
        ) as manager:
            for prompt, group in zip(prompts, lengths, strict=True):
                for length in group:
                    manager.add_request(prompt, max_new_tokens=length)
            results = []
            while len(results) < len(prompts) * case.n:
                result = manager.get_result(timeout=60)
                if result is not None and result.is_finished():
                    results.append(result)
        return sum(len(result.generated_tokens) for result in results)

    return run


WAYS = {"native": native, "generate": generate, "paged": paged}


def speeds(
    model: PreTrainedModel, case: Case, ways: Sequence[str], rounds: int
) -> dict[str, float]:
    """Median tokens per second of each way, which take turns."""
    runs = {way: WAYS[way](model, case) for way in ways}
    measured: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in runs.items():
            start = time.perf_counter()
            tokens = run()
            measured[way].append(tokens / (time.perf_counter() - start))
    return {way: statistics.median(values) for way, values in measured.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=CASES, nargs="*", default=list(CASES))
    parser.add_argument("--paged", action="store_true")
    flags = parser.parse_args()
    model = new_model(torch.cuda.is_available())
    ways = ["native", "generate", *(["paged"] if flags.paged else [])]
    print(f"{'case':10}{'way':10}{'tokens/s':>10}{'against generate':>18}")
    for name in flags.case:
        measured = speeds(model, CASES[name], ways, flags.rounds)
        for way, speed in measured.items():
            ratio = speed / measured["generate"]
            print(f"{name:10}{way:10}{speed:10.0f}{ratio:17.2f}x", flush=True)


if __name__ == "__main__":
    main()
