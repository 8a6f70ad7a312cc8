"""Read every reference answer of GSM8K by the rewards that its recipes use, whole and damaged.

    OMP_NUM_THREADS=1 python -m benchmarks.gsm8k DIRECTORY

DIRECTORY has gsm8k_train.jsonl and gsm8k_test.jsonl (github.com/openai/grade-school-math, MIT).
Each answer has to be read as right; each damaged one, in 20 ways, as wrong.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from rlhf_pg.rewards.verifiers import make_verifier

BATCH = 500


def number_of(answer: str) -> float:
    return float(answer.rpartition("#### ")[2].replace(",", ""))


def with_number(change: Callable[[str], str]) -> Callable[[str], str]:
    """Change the number after the marks."""

    def damaged(answer: str) -> str:
        reasoning, marks, number = answer.rpartition("#### ")
        return f"{reasoning}{marks}{change(number.strip().replace(',', ''))}"

    return damaged


def without_reasoning(text: str) -> Callable[[str], str]:
    return lambda answer: text


def digit_changed(number: str) -> str:
    first = next(i for i, c in enumerate(number) if c.isdigit())
    return f"{number[:first]}{(int(number[first]) + 3) % 9 + 1}{number[first + 1 :]}"


def written_twice(number: str) -> str:
    if float(number) == 0:
        return "10"  # 00 is 0
    return f"{number}{number.removeprefix('-')}"


def negated(number: str) -> str:
    if float(number) == 0:
        return "-1"
    return number.removeprefix("-") if number.startswith("-") else f"-{number}"


DAMAGES: dict[str, Callable[[str], str]] = {
    "one more": with_number(lambda number: str(float(number) + 1)),
    "one less": with_number(lambda number: str(float(number) - 1)),
    "a half more": with_number(lambda number: f"{float(number) + 0.5:.2f}"),
    "a hundredth more": with_number(lambda number: f"{float(number) + 0.01:.2f}"),
    "negated": with_number(negated),
    "a digit changed": with_number(digit_changed),
    "a digit more": with_number(lambda number: f"{number}7"),
    "a digit before": with_number(
        lambda number: f"-3{number[1:]}" if number.startswith("-") else f"3{number}"
    ),
    "ten times": with_number(lambda number: str(10 * float(number) or 10)),
    "a tenth": with_number(lambda number: str(float(number) / 10 or 0.1)),
    "doubled": with_number(lambda number: str(2 * float(number) or 2)),
    "written twice": with_number(written_twice),
    "a thousand times": with_number(lambda number: f"{1000 * float(number) or 1000:,.0f}"),
    "inverted": with_number(lambda number: f"1/{int(float(number)) + 3}"),
    "no number at all": without_reasoning("I do not know. ####"),
    "a number of its own": without_reasoning("#### 8792.5"),
    "corrected to another": lambda answer: f"{answer}\nWait. #### {number_of(answer) + 2}",
    "another in a box": lambda answer: f"It is \\boxed{{{number_of(answer) - 5}}}",
    "empty": without_reasoning(""),
    "in unfinished thoughts": lambda answer: f"<think>{answer}",
}


def scores(name: str, texts: list[str], answers: list[str]) -> list[float | None]:
    verify = make_verifier(name)
    said: list[float | None] = []
    for i in range(0, len(texts), BATCH):
        said += verify(texts[i : i + BATCH], answer=answers[i : i + BATCH])
    return said


def main(directory: Path) -> None:
    answers = []
    for part in ("train", "test"):
        with (directory / f"gsm8k_{part}.jsonl").open() as lines:
            answers += [json.loads(line)["answer"] for line in lines]
    for name in ("numeric", "math"):
        right = scores(name, answers, answers).count(1.0)
        print(f"{name}: {right} of {len(answers)} reference answers are read as right")
        for damage, change in DAMAGES.items():
            texts = [change(answer) for answer in answers]
            said = scores(name, texts, answers)
            print(f"  {damage}: {said.count(0.0)} as wrong", flush=True)
            for text, score in zip(texts, said, strict=True):
                if score != 0.0:
                    print(f"    not {text[-60:]!r}")
                    break


if __name__ == "__main__":
    main(Path(sys.argv[1]))
