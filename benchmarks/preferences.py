"""Human preferences: the files of recipes/smollm2_hh*.yaml, and reward models by number of pairs.

    rlhf-pg fetch smollm2
    python -m benchmarks.preferences prepare hh_harmless.jsonl.gz
    OMP_NUM_THREADS=1 python -m benchmarks.preferences curve --jobs 2    # docs/results/hh.jsonl

The file is the test split of the harmless-base pairs of Bai et al. (2022,
github.com/anthropics/hh-rlhf, MIT). Pairs are left out whose two texts differ before the last
answer, or that have more than MOST tokens with it.
"""

import argparse
import gzip
import json
import re
import subprocess
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.files import make_missing, split_groups, write_rows

FOLDER = Path("runs/hh")
MOST = 256
SHARES = {"test": 300, "tune": 150}  # pairs that are held out, and that choose the learning rate
SIZES = (150, 300, 600, 1200)
SEEDS = (1, 2, 3)
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "hh.jsonl"


def chat(text: str) -> list[dict[str, str]]:
    """Return the turns of "\\n\\nHuman: ...\\n\\nAssistant: ..." as messages."""
    _, *turns = re.split(r"\n\n(Human|Assistant):", text)
    roles = {"Human": "user", "Assistant": "assistant"}
    pairs = zip(turns[::2], turns[1::2], strict=True)
    return [{"role": roles[role], "content": content.strip()} for role, content in pairs]


def pair(line: str) -> dict[str, Any] | None:
    """Return a pair of answers to one prompt, or None."""
    row = json.loads(line)
    *prompt, chosen = chat(row["chosen"])
    *other, rejected = chat(row["rejected"])
    answers = [chosen["content"], rejected["content"]]
    roles = {chosen["role"], rejected["role"]}
    if prompt != other or roles != {"assistant"} or not all(answers) or len({*answers}) == 1:
        return None
    return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}


def prepare(file: Path) -> None:
    """Write the held-out pairs, those to choose the learning rate with, and those to train on."""
    tokenizer = AutoTokenizer.from_pretrained("models/smollm2")
    with gzip.open(file, "rt") as lines:
        pairs = [pair(line) for line in lines]
    by_opening: dict[str, list[dict[str, Any]]] = defaultdict(list)  # of chats
    for row in pairs:
        if row is None:
            continue
        texts = []
        for answer in ("chosen", "rejected"):
            turns = [*row["prompt"], {"role": "assistant", "content": row[answer]}]
            texts.append(tokenizer.apply_chat_template(turns, tokenize=False))
        if max(len(ids) for ids in tokenizer(texts)["input_ids"]) <= MOST:
            by_opening[row["prompt"][0]["content"]].append(row)
    for name, rows in split_groups(by_opening, SHARES).items():
        write_rows(FOLDER / f"{name}.jsonl", rows)


def train(size: int, seed: int) -> dict[str, Any]:
    """Train a reward model on so many pairs; return its held-out metrics."""
    folder = FOLDER / f"reward-model-{size}-{seed}"
    command = ["rlhf-pg", "train", str(ROOT / "recipes" / "smollm2_hh_reward_model.yaml")]
    command += ["--dataset_train_split", f"train[:{size}]", "--seed", str(seed)]
    command += ["--output_dir", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    metrics = json.loads((folder / "metrics.json").read_text())
    return {"pairs": size, "seed": seed, "command": " ".join(command)} | metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare").add_argument("file", type=Path)
    commands.add_parser("curve").add_argument("--jobs", type=int, default=1)
    flags = parser.parse_args()
    if flags.command == "prepare":
        prepare(flags.file)
    else:
        wanted = product(SIZES, SEEDS)
        make_missing(RESULTS, ("pairs", "seed"), wanted, train, flags.jobs)


if __name__ == "__main__":
    main()
