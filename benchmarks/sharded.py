"""Host memory of each process that loads, shards and saves a model of 1B random weights by FSDP2.

    python -m benchmarks.sharded make /tmp/model
    torchrun --nproc_per_node 4 -m benchmarks.sharded fsdp2 /tmp/model
    torchrun --nproc_per_node 4 -m benchmarks.sharded zero3 /tmp/model bfloat16

Memory is what a process alone has (`RssAnon`), above that after the imports: files that are mapped
are shared, and the system drops them.
"""

import os
import sys
import threading
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from rlhf_pg import GRPOConfig, GRPOTrainer
from tests.distributed import backends


def make(path: str) -> None:
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**shape, **heads))
    model.save_pretrained(path, max_shard_size="500MB")
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"eos_token": "<eos>", "pad_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(path)


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def load(backend: str, path: str, dtype: str = "float32") -> None:
    os.environ |= backends.environment(backend)
    backends.install(backend)  # on CPUs
    if backend == "zero3":
        import deepspeed  # noqa: F401
    peak, before = [0], anonymous()

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    args = GRPOConfig(
        output_dir=f"{path}/run",
        max_steps=1,
        max_completion_length=64,
        beta=0.1,
        micro_batch_tokens=512,
        dtype=dtype,
    )
    rows = [{"prompt": "a"}]
    trainer = GRPOTrainer(path, lambda completions, **_: [0.0] * len(completions), args, rows)
    sizes = [getattr(p, "ds_numel", 0) or p.numel() for p in trainer.model.parameters()]
    width = 2 if dtype == "bfloat16" else 4
    # Policy and reference; DeepSpeed also has float32 weights and moments from the start.
    each = 2 * width + (12 if backend == "zero3" else 0)
    share, largest = sum(sizes) * each / trainer.runtime.world, max(sizes) * width
    loaded, peak[0] = peak[0] - before, 0
    trainer.save_checkpoint()
    saved = peak[0] - before
    limit = 1.3 * share + largest
    print(
        f"rank {trainer.runtime.rank}: {sum(sizes) / 1e9:.2f}B weights, "
        f"share {share / 1e9:.2f} GB, loading {loaded / 1e9:.2f} GB, "
        f"saving {saved / 1e9:.2f} GB, limit {limit / 1e9:.2f} GB",
        flush=True,
    )
    trainer.runtime.barrier()


if __name__ == "__main__":
    make(sys.argv[2]) if sys.argv[1] == "make" else load(*sys.argv[1:])
