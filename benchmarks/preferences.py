"""The files of recipes/hh_reward_model.yaml, hh_ppo.yaml and hh_rloo.yaml.

    rlhf-pg fetch smollm2
    python -m benchmarks.preferences hh_harmless.jsonl.gz

The file is the test split of the harmless-base pairs of Bai et al. (2022,
github.com/anthropics/hh-rlhf, MIT). Pairs are left out whose two texts differ before the last
answer, or that have more than MOST tokens with it.
"""

import argparse
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

FOLDER = Path("runs/hh")
MOST = 256
HELD_OUT, TUNING = 300, 150  # pairs


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    flags = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained("models/smollm2")
    with gzip.open(flags.file, "rt") as lines:
        pairs = [found for line in lines if (found := pair(line))]
    short = []
    for row in pairs:
        texts = [
            tokenizer.apply_chat_template(
                [*row["prompt"], {"role": "assistant", "content": row[answer]}], tokenize=False
            )
            for answer in ("chosen", "rejected")
        ]
        if max(len(ids) for ids in tokenizer(texts)["input_ids"]) <= MOST:
            short.append(row)
    random.Random(0).shuffle(short)
    files = {"test": short[:HELD_OUT], "tune": short[HELD_OUT:][:TUNING]}
    files["train"] = short[HELD_OUT + TUNING :]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (FOLDER / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        print(f"{FOLDER / name}.jsonl: {len(rows)} of {len(pairs)} pairs")


if __name__ == "__main__":
    main()
