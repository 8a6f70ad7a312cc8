"""The files of recipes/smollm2_equations.yaml and recipes/smollm2_problems.yaml.

    python -m benchmarks.word_problems FILE

FILE has one-step word problems of MAWPS (Koncel-Kedziorski et al. 2016) in lines such as
{"input": "Ann has 3 pears and buys 4 more. How many has she?", "target": 7.0}. Problems that occur
twice are taken once. A fifth is held out for the results, and another fifth was to choose prompt,
length and learning rate (--tune); problems that differ in names and numbers alone are in one part.
"""

import argparse
import json
import operator
import random
import re
from collections import defaultdict
from itertools import permutations, product
from pathlib import Path
from typing import Any

FOLDER = Path("runs/word_problems")
NUMBER = r"\d[\d,]*(?:\.\d+)?"
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
Problem = dict[str, Any]


def parts(file: Path) -> list[list[Problem]]:
    """Split the problems into a fifth, another fifth, and the others."""
    by_wording: dict[str, dict[str, Problem]] = defaultdict(dict)
    for line in file.read_text().splitlines():
        row = json.loads(line)
        text = row["input"]
        wording = re.sub(r"\d[\d.,]*|\b[A-Z]\w+", "#", text)
        by_wording[wording][text] = {"problem": text, "answer": row["target"]}
    wordings = sorted(by_wording)
    random.Random(0).shuffle(wordings)
    size = sum(len(problems) for problems in by_wording.values()) // 5
    split: list[list[Problem]] = [[], [], []]
    for wording in wordings:
        part = next((part for part in split[:2] if len(part) < size), split[2])
        part += by_wording[wording].values()
    return split


def equation(problem: Problem) -> str | None:
    """Return "3 + 4 = 7" of two of its numbers, or None if no one step leads to the answer."""
    numbers = [as_number(text.replace(",", "")) for text in re.findall(NUMBER, problem["problem"])]
    for (a, b), (sign, apply) in product(permutations(numbers, 2), OPERATORS.items()):
        if (sign != "/" or b) and abs(apply(a, b) - problem["answer"]) < 1e-6:
            return f"{a} {sign} {b} = {as_number(problem['answer'])}"
    return None


def as_number(value: Any) -> int | float:
    number = float(value)
    return int(number) if number.is_integer() else number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tune", action="store_true", help="hold out the other fifth")
    flags = parser.parse_args()
    held_out, tuning, others = parts(flags.file)
    train = others if flags.tune else tuning + others
    equations = [{**row, "completion": found} for row in train if (found := equation(row))]
    FOLDER.mkdir(parents=True, exist_ok=True)
    files = {"test": tuning if flags.tune else held_out, "train": train, "equations": equations}
    for name, rows in files.items():
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (FOLDER / f"{name}.jsonl").write_text(text)
        print(f"{FOLDER / name}.jsonl: {len(rows)} problems")


if __name__ == "__main__":
    main()
