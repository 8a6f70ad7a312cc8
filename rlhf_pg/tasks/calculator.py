"""A task of sums that are hard to do in one's head, in a chat with a calculator: "37*48"."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from rlhf_pg.tasks.task import Demonstration, Task
from rlhf_pg.tasks.tiny import tool_tokenizer

LIMIT = 100
PROBLEMS, HELD_OUT = 8192, 256
LONGEST = 32  # characters of an expression
# Any text without line breaks can be tokenized, such as an error message; a call has few tokens.
CHARACTERS = "".join(map(chr, range(32, 127)))
PIECES = [
    *("<tool_call>", '{"name": "', "calculate", '", "arguments": {"', "expression", '": "'),
    *('"}}', "</tool_call>"),
]
BY_HEAD = 0.4  # share of demonstrated answers that are invented without the calculator
MISREAD = 0.1  # share of demonstrated calls with one wrong digit


def calculator() -> Task:
    """Make the task of about 8000 problems a?b below 100, where ? is +, - or *; 256 held out."""
    chance = random.Random(0)
    problems = list(dict.fromkeys(_problem(chance) for _ in range(PROBLEMS)))
    train = problems[HELD_OUT:]
    return Task(
        name="calculator",
        train_dataset=_dataset(train),
        eval_dataset=_dataset(problems[:HELD_OUT]),
        reward=last_word,
        make_tokenizer=lambda: tool_tokenizer(CHARACTERS, PIECES),
        max_positions=128,
        tools=(calculate,),
        demonstrate=lambda: _demonstrations(train, random.Random(1)),
    )


def calculate(expression: str) -> str:
    """Work out an expression of whole numbers with +, - and *.

    Args:
        expression: for example 37*48-5

    Returns:
        Its value.
    """
    if len(expression) > LONGEST or not re.fullmatch(r"\d+([-+*]\d+)*", expression, re.ASCII):
        raise ValueError("not an expression")
    total = 0
    for sign, product in re.findall(r"(^|[-+])([\d*]+)", expression):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return str(total)


def last_word(
    prompts: Sequence[Any],
    completions: Sequence[list[dict[str, str]]],
    answer: Sequence[str],
    **columns: Any,
) -> list[float]:
    """Score 1 if the last message is the answer, 0 otherwise."""
    pairs = zip(completions, answer, strict=True)
    return [float(messages[-1]["content"] == right) for messages, right in pairs]


def _problem(chance: random.Random) -> str:
    return f"{chance.randrange(LIMIT)}{chance.choice('+-*')}{chance.randrange(LIMIT)}"


def _dataset(problems: Sequence[str]) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [_asked(problem) for problem in problems],
            "answer": [calculate(problem) for problem in problems],
        }
    )


def _asked(problem: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem}]


def _demonstrations(problems: Sequence[str], chance: random.Random) -> list[Demonstration]:
    """Demonstrate each problem: some invent an answer, some mistype, and some do it right."""
    demonstrations = []
    for problem in problems:
        if chance.random() < BY_HEAD:
            turns, told = [calculate(_problem(chance))], []
        else:
            typed = problem
            if chance.random() < MISREAD:
                place = chance.choice([i for i, said in enumerate(problem) if said.isdigit()])
                typed = problem[:place] + chance.choice("0123456789") + problem[place + 1 :]
            call = {"name": "calculate", "arguments": {"expression": typed}}
            result = calculate(typed)
            turns = [f"<tool_call>{json.dumps(call)}</tool_call>", result]
            told = [[{"role": "tool", "name": "calculate", "content": result}]]
        demonstrations.append(Demonstration(_asked(problem), turns, told))
    return demonstrations
