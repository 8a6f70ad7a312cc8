"""The GSM8K recipes up to their first step, with all prompts and their models' real tokenizers.

    pip install tiktoken trl
    pip install --no-deps --target .venv-tokenizers dashscope llama-models
    rlhf-pg fetch smollm2
    OMP_NUM_THREADS=1 python -m benchmarks.gsm8k_recipes DIRECTORY

DIRECTORY has gsm8k_train.jsonl and gsm8k_test.jsonl (github.com/openai/grade-school-math, MIT). The
vocabularies of Qwen and Llama 3 are those that these two packages ship, the chat templates those of
TRL. Each recipe's first step is that of a model of two narrow layers with random weights, which
samples 8 tokens, by the native engine; everything else is the recipe's.
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from rlhf_pg.cli.preview import of_prompts
from rlhf_pg.config.parse import load
from rlhf_pg.data.rendering import set_template
from rlhf_pg.trainers import TRAINERS
from tests.recipes.architectures import save_small

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / ".venv-tokenizers"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA_SPECIAL = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"),
    *("<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
]


def from_tiktoken(path: str, numbers: str, special: list[str]) -> PreTrainedTokenizerFast:
    """Convert a vocabulary; its special tokens follow it in this order."""
    converter = TikTokenConverter(
        vocab_file=str(PACKAGES / path),
        pattern=WORDS + numbers + REST,
        extra_special_tokens=special,
    )
    return PreTrainedTokenizerFast(tokenizer_object=converter.converted())


def template(name: str) -> str:
    trl = importlib.util.find_spec("trl")
    assert trl is not None
    assert trl.origin is not None
    return (Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def tokenizer_of(model: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a model that the recipes name."""
    if "Llama" in model:
        path = "llama_models/llama3/tokenizer.model"
        made = from_tiktoken(path, r"\p{N}{1,3}", LLAMA_SPECIAL)
        made.bos_token = "<|begin_of_text|>"
        made.eos_token = "<|eot_id|>"
        made.chat_template = template("llama3_1")
        return made
    made = from_tiktoken("dashscope/resources/qwen.tiktoken", r"\p{N}", QWEN_SPECIAL)
    made.eos_token = "<|im_end|>"
    made.pad_token = "<|endoftext|>"
    made.chat_template = template("qwen3" if "Qwen3" in model else "qwen2_5")
    return made


def count_tokens(args: Any, tokenizer: Any, texts: list[str]) -> str:
    """Tokenize all prompts as the trainers do, which refuse those that are too long."""
    set_template(tokenizer, args)
    prompts = of_prompts(args, None, tokenizer, None)
    lengths = [len(row.ids) for row in prompts.rows]
    answers = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    return (
        f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, reference answers of "
        f"up to {max(answers)}"
    )


def take_step(keys: dict[str, Any]) -> None:
    kind = TRAINERS[keys["algorithm"]]
    trainer: Any = kind(args=kind.config_type(**keys))
    trainer.train()
    [step] = trainer.history
    rows = keys["prompts_per_step"] * keys["num_generations"]
    print(
        f"  first step: {rows} completions, {step['num_tokens']} tokens, "
        f"{step['num_updates']} updates, loss {step['loss']:.4g}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    data = parser.parse_args().directory
    files = [data / f"gsm8k_{part}.jsonl" for part in ("train", "test")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    texts = [json.loads(line)["answer"] for line in lines]
    whole = Path(tempfile.mkdtemp()) / "gsm8k.jsonl"
    whole.write_text("\n".join(lines))
    smollm2 = AutoTokenizer.from_pretrained("models/smollm2")
    split = ("dataset_config", "dataset_test_split")  # of the Hub's dataset
    for recipe in sorted((ROOT / "recipes").glob("gsm8k_*.yaml")):
        keys: dict[str, Any] = load(recipe)
        name = keys["model_name_or_path"]
        limits = f"{keys['max_prompt_length']} and {keys['max_completion_length']}"
        print(f"{recipe.stem}, max_prompt_length and max_completion_length {limits}")
        keys = {k: v for k, v in keys.items() if k not in split and not k.startswith("vllm_")}
        keys |= {"rollout_engine": "native", "dtype": "float32", "eval_steps": 0, "max_steps": 1}
        tokenizer = tokenizer_of(name)
        config_type = TRAINERS[keys["algorithm"]].config_type
        args = config_type(**keys | {"dataset_name": str(whole), "pad_token": None})
        print(f"  SmolLM2: {count_tokens(args, smollm2, texts)}")
        print(f"  {name}: {count_tokens(args, tokenizer, texts)}", flush=True)
        keys |= {
            "model_name_or_path": str(save_small(name, Path(tempfile.mkdtemp()), tokenizer)),
            "dataset_name": str(files[0]),
            "eval_dataset_name": str(files[1]),
            "max_completion_length": 8,
            "output_dir": tempfile.mkdtemp(),
        }
        take_step(keys)


if __name__ == "__main__":
    main()
