"""The supervised warm start of an embedded task.

`recipes/sft.py` runs it by hand; a recipe without a model runs it by itself.
"""

import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import PreTrainedTokenizerFast, set_seed
from transformers.utils import get_json_schema

from rlhf_pg.boundary.launcher import without_launcher
from rlhf_pg.config import SFTConfig
from rlhf_pg.config.parse import parse, recipe_file
from rlhf_pg.data.chat import encode, encode_answer
from rlhf_pg.supervised.examples import UNLABELLED, Example
from rlhf_pg.supervised.sft import fit
from rlhf_pg.tasks import Demonstration, embedded


def warm_start(args: SFTConfig) -> Path:
    """Train a new model on the task's answers; return `args.output_dir/final`, where it is."""
    task = embedded(args.task)
    set_seed(args.seed)
    model, tokenizer = task.new_model()
    tools = [get_json_schema(tool) for tool in task.tools]
    # Half a million parameters, and the same model on every machine.
    fit(args, model, tokenizer, examples(task.demonstrations(), tokenizer, tools), use_cpu=True)
    return Path(args.output_dir) / "final"


def ensure_model(task: str, path: str | None) -> str:
    """Return the model of a recipe: the path or Hub id it names, or the task's own, made once and
    cached as `recipes/sft_{task}.yaml` says, in a process of its own, so that it does not depend on
    how many processes ask for it.
    """
    if path is not None:
        return path
    recipe = ["--config", str(recipe_file(f"sft_{task}.yaml"))]
    final = Path(parse(SFTConfig, recipe).output_dir) / "final"
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(final.parent / "lock-once"):  # "lock" belongs to the training
        if not (final / "model.safetensors").exists():
            print(f"no model at {final}: warm-starting one (once)", flush=True)
            command = [sys.executable, "-m", "rlhf_pg.tasks.warm_start", *recipe]
            subprocess.run(command, env=without_launcher(), check=True)
    return str(final)


def examples(
    demonstrations: Sequence[Demonstration],
    tokenizer: PreTrainedTokenizerFast,
    tools: Sequence[dict[str, Any]] = (),
) -> list[Example]:
    """Encode each demonstration as ids; only the turns, through their EOS, have labels."""
    encoded: list[Example] = []
    for prompt, turns, answers in demonstrations:
        ids = encode(prompt, tokenizer, tools=tools)
        labels = [UNLABELLED] * len(ids)
        for turn, answer in zip_longest(turns, answers):
            said = [*tokenizer(turn)["input_ids"], tokenizer.eos_token_id]
            ids, labels = ids + said, labels + said
            if answer is not None:
                heard = encode_answer(answer, tokenizer, prompt, tokenizer.eos_token_id, tools)
                ids, labels = ids + heard, labels + [UNLABELLED] * len(heard)
        encoded.append({"input_ids": ids, "labels": labels})
    return encoded


if __name__ == "__main__":
    warm_start(parse(SFTConfig))
