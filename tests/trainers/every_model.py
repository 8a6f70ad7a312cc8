"""What the model check says of every causal language model of `transformers`, at tiny width.

`python -m tests.trainers.every_model` prints the table of docs/models.md.
"""

import logging
import re
import warnings
from collections import defaultdict
from pathlib import Path

import torch

from rlhf_pg.models import Policy, disable_dropout, settle_positions
from rlhf_pg.rollout import NativeEngine
from rlhf_pg.trainers.model_check import Examined, examine
from tests.models.architectures import NAMES, build, within

TABLE = Path(__file__).parents[2] / "docs" / "models.md"
TOKENS = [5, 9, 31, 17, 8, 3, 30, 12, 25, 6, 39, 11]
LENGTHS = (12, 20)
ROW = re.compile(r"^\| ([^|]*) \| (\d+) \| ([^|]*) \|$", re.MULTILINE)


def examined(model, **options) -> Examined:
    """As a run examines it, with short rows."""
    policy = Policy(model)
    fields = {"score": lambda batch: policy(batch).logprobs, "tokens": TOKENS, "lengths": LENGTHS}
    engine = NativeEngine(model, [], 0)
    return Examined(**{"policy": policy, "module": policy, "engine": engine} | fields | options)


def outcome(name: str) -> str:
    """How a model is computed in a run, in a word."""
    try:
        with within(60):
            model = build(name)
            token = torch.zeros(1, 1, dtype=torch.int64)
            model(input_ids=token, attention_mask=token + 1)
    except Exception:  # of any kind: its config, its layers, its size
        return "could not be built this small"
    settle_positions(model, sum(LENGTHS))
    disable_dropout(model)
    run = examined(model)
    try:
        verdict = examine(run)
    except ValueError:
        return "refused: what it samples is not what it scores"
    if not verdict.together:
        how = "each row alone"
    elif not verdict.pads:
        how = "rows of one length"
    elif not verdict.packs:
        how = "padded (packing changes it)"
    else:
        how = "packed" if run.policy.window else "padded"
    return how if verdict.samples_together else f"{how}, sampled one by one"


def documented() -> dict[str, str]:
    """Of every model, what the table says."""
    rows = ROW.findall(TABLE.read_text())
    return {name: how for how, _, names in rows for name in names.replace("`", "").split(", ")}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    table = defaultdict(list)
    for name in NAMES:
        table[outcome(name)].append(name)
    for how, names in sorted(table.items(), key=lambda item: -len(item[1])):
        print(f"| {how} | {len(names)} | {', '.join(f'`{name}`' for name in names)} |")


if __name__ == "__main__":
    main()
