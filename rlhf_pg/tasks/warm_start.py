"""The supervised warm start of an embedded task, by `recipes/sft.py` or for a recipe without a
model.
"""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, set_seed
from transformers.utils import get_json_schema

from rlhf_pg.config import SFTConfig
from rlhf_pg.config.parse import parse
from rlhf_pg.data.chat import encode, encode_answer
from rlhf_pg.runtime import Runtime
from rlhf_pg.supervised.examples import UNLABELLED, Example
from rlhf_pg.supervised.sft import fit
from rlhf_pg.tasks import Demonstration, load_task


def warm_start(args: SFTConfig) -> Path:
    """Train a new model on the task's answers, on a CPU; return the path of `final/`."""
    task = load_task(str(args.task))
    args = args.on("cpu")
    set_seed(args.seed)
    model, tokenizer = task.new_model()
    rows = examples(task.demonstrations(), tokenizer, [get_json_schema(one) for one in task.tools])
    model = model.to(getattr(torch, args.dtype))
    fit(args, model, tokenizer, rows, {}, Runtime(cpu=True))
    return Path(args.output_dir) / "final"


def ensure_model(task: str, path: str | None) -> str:
    """Return the path or Hub id of a recipe's model, or else the task's own, made once."""
    return path or load_task(task).warm_started_model()


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
            ids = ids + said
            labels = labels + said
            if answer is not None:
                heard = encode_answer(answer, tokenizer, prompt, tokenizer.eos_token_id, tools)
                ids = ids + heard
                labels = labels + [UNLABELLED] * len(heard)
        encoded.append({"input_ids": ids, "labels": labels})
    return encoded


if __name__ == "__main__":
    warm_start(parse(SFTConfig))
