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
import re
from collections import defaultdict
from itertools import permutations, product
from pathlib import Path
from typing import Any

from benchmarks.files import split_groups, write_rows

FOLDER = Path("runs/word_problems")
NUMBER = r"\d[\d,]*(?:\.\d+)?"
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
Problem = dict[str, Any]


def by_wording(file: Path) -> dict[str, list[Problem]]:
    """Return the problems, each once, by their text without names and numbers."""
    groups: dict[str, list[Problem]] = defaultdict(list)
    texts = set()
    for line in file.read_text().splitlines():
        row = json.loads(line)
        text = row["input"]
        if text not in texts:
            texts.add(text)
            wording = re.sub(r"\d[\d.,]*|\b[A-Z]\w+", "#", text)
            groups[wording].append({"problem": text, "answer": row["target"]})
    return groups


def equation(problem: Problem) -> str | None:
    """Return "3 + 4 = 7" of two of its numbers, or None if no one step leads to the answer."""
    numbers = [as_number(text.replace(",", "")) for text in re.findall(NUMBER, problem["problem"])]
    for (a, b), (sign, apply) in product(permutations(numbers, 2), OPERATORS.items()):
        if sign == "/" and b == 0:
            continue
        if abs(apply(a, b) - problem["answer"]) < 1e-6:
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
    groups = by_wording(flags.file)
    fifth = sum(len(problems) for problems in groups.values()) // 5
    parts = split_groups(groups, {"test": fifth, "tune": fifth})
    if flags.tune:
        test, train = parts["tune"], parts["train"]
    else:
        test, train = parts["test"], parts["tune"] + parts["train"]
    equations = []
    for problem in train:
        answer = equation(problem)
        if answer is not None:
            equations.append({**problem, "completion": answer})
    write_rows(FOLDER / "test.jsonl", test)
    write_rows(FOLDER / "train.jsonl", train)
    write_rows(FOLDER / "equations.jsonl", equations)


if __name__ == "__main__":
    main()
