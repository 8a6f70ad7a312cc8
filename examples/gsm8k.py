"""PPO on GSM8K, school problems in words, with a reward in Python.

accelerate launch examples/gsm8k.py --config examples/gsm8k.yaml --max_steps 100
"""

import re
from collections.abc import Sequence
from decimal import Decimal

from datasets import Dataset, load_dataset

from rlhf_pg import PPOConfig, PPOTrainer
from rlhf_pg.config.parse import parse

DATASET = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'  # verl's
NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"  # 18, -3, 1,234.50, $7, .5
MARKED = re.compile(rf"####\s*({NUMBER})")


def marked_answer(text: str) -> Decimal | None:
    """The number after the last "####", as the dataset gives its answers (Cobbe et al. 2021)."""
    found = MARKED.findall(text)
    return _value(found[-1]) if found else None


def last_answer(text: str) -> Decimal | None:
    """The number after the last "####", or where there is none, the last number."""
    marked, found = marked_answer(text), re.findall(NUMBER, text)
    return marked if marked is not None or not found else _value(found[-1])


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", ""))


def after_marks(completions: list, answer: list[str], **_: object) -> list[float]:
    """1 where the right number stands after "####", else 0: what verl trains on and reports."""
    return [
        float(marked_answer(chat[-1]["content"]) == Decimal(right))
        for chat, right in zip(completions, answer, strict=True)
    ]


def anywhere(completions: list, answer: list[str], **_: object) -> list[float]:
    """1 where the right number is given in whatever form: verl's "flexible"."""
    return [
        float(last_answer(chat[-1]["content"]) == Decimal(right))
        for chat, right in zip(completions, answer, strict=True)
    ]


def prepared(problems: Dataset) -> Dataset:
    """Prompts and answers, from the columns `question` and `answer` (reasoning, "####", number).

    Raises:
        ValueError: an answer has no number after "####".
    """

    def row(question: str, answer: str) -> dict[str, object]:
        right = marked_answer(answer)
        if right is None:
            raise ValueError(f'no number after "####" in the answer {answer!r}')
        prompt = [{"role": "user", "content": f"{question} {INSTRUCTION}"}]
        return {"prompt": prompt, "answer": str(right)}

    columns = ["question", "answer"]
    return problems.map(row, input_columns=columns, remove_columns=problems.column_names)


def main(flags: Sequence[str] | None = None) -> None:
    args = parse(PPOConfig, flags)
    problems = load_dataset(DATASET, "main")
    trainer = PPOTrainer(
        reward_funcs=[after_marks, anywhere],
        args=args,
        train_dataset=prepared(problems["train"]),
        eval_dataset=prepared(problems["test"]),
    )
    trainer.train()


if __name__ == "__main__":
    main()
