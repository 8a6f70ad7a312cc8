"""Two multi-turn tasks: guess a number from hints, and sums with a calculator.

- `guess`: "6>10<8" may follow "1-13:". The policy's turns are guesses; the environment answers ">"
  if the number is greater, "<" if it is less and "?" if the guess was not a number.
- `calculator`: sums such as "37*48", hard without help, in a chat with a tool.
"""

import json
import math
import random
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from rlhf_pg.tasks.task import Demonstration, Task
from rlhf_pg.tasks.tiny import character_tokenizer, tool_tokenizer

HIGHEST = range(8, 16)  # 15 = 2^4 - 1: four guesses that halve the range find any number
TURNS = 4
DEMONSTRATIONS = 4096
BLIND = 0.5  # share of demonstrated guesses that ignore the answers

LIMIT = 100
PROBLEMS = 8192
HELD_OUT = 256
LONGEST = 32  # characters of an expression
# Any text without line breaks can be tokenized, such as an error message; a call has few tokens.
CHARACTERS = "".join(map(chr, range(32, 127)))
PIECES = [
    "<tool_call>",
    '{"name": "',
    "calculate",
    '", "arguments": {"',
    "expression",
    '": "',
    '"}}',
    "</tool_call>",
]
BY_HEAD = 0.4  # share of demonstrated answers that are invented without the calculator
MISREAD = 0.1  # share of demonstrated calls with one wrong digit


def guess() -> Task:
    """Make the task of every number from 1 to n for every n in `HIGHEST`: 92 pairs. None is held
    out: a player would learn that these numbers never come up.
    """
    rows = [
        {"prompt": f"1-{highest}:", "answer": str(number)}
        for highest in HIGHEST
        for number in range(1, highest + 1)
    ]
    return Task(
        name="guess",
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
        reward=found,
        make_tokenizer=lambda: character_tokenizer("0123456789-:<>?"),
        environment_factory=Guess,
        demonstrate=lambda: _games(rows, random.Random(1)),
    )


def found(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Score 1 if the last guess is the number, 0 otherwise."""
    pairs = zip(completions, answer, strict=True)
    return [float(re.split("[<>?]", text)[-1] == number) for text, number in pairs]


class Guess:
    """The environment of one hidden number from 1 to n, with what has been found out so far."""

    def reset(self, example: dict[str, str]) -> str:
        """Return the prompt, which has the range of the number."""
        self.number = int(example["answer"])
        self.low = 1
        self.high = self.highest = int(example["prompt"].strip(":").split("-")[1])
        return example["prompt"]

    def step(self, completion: str) -> tuple[str, float, bool]:
        """Answer whether the number is greater or less than the guess.

        The reward is log(left before / left after) / log n, where `left` counts the numbers that
        are still possible: the rewards of an episode add up to 1 once a single number is left.
        """
        if not re.fullmatch("[0-9]{1,2}", completion):
            return "?", 0.0, False
        guessed = int(completion)
        before = self.high - self.low + 1
        if guessed == self.number:
            self.low = self.high = guessed
        elif guessed < self.number:
            self.low = max(self.low, guessed + 1)
        else:
            self.high = min(self.high, guessed - 1)
        reward = math.log(before / (self.high - self.low + 1), self.highest)
        answer = ">" if guessed < self.number else "<"
        return answer, reward, guessed == self.number


def _games(rows: list[dict[str, str]], chance: random.Random) -> list[Demonstration]:
    """Demonstrate players who know the rules but use only some of the answers."""
    games = []
    for _ in range(DEMONSTRATIONS):
        environment = Guess()
        prompt = environment.reset(chance.choice(rows))
        turns: list[str] = []
        answers: list[str] = []
        done = False
        while not done and len(turns) < TURNS:
            if chance.random() < BLIND:
                number = chance.randint(1, environment.highest)
            else:
                number = chance.randint(environment.low, environment.high)
            turns.append(str(number))
            answer, _, done = environment.step(turns[-1])
            answers.append(answer)
        games.append(Demonstration(prompt, turns, answers[:-1]))
    return games


def calculator() -> Task:
    """Make the task of about 8000 problems a?b below 100, where ? is +, - or *; 256 held out."""
    chance = random.Random(0)
    problems = dict.fromkeys(_problem(chance) for _ in range(PROBLEMS))
    rows = [
        {"prompt": [{"role": "user", "content": problem}], "answer": calculate(problem)}
        for problem in problems
    ]
    return Task(
        name="calculator",
        train_dataset=Dataset.from_list(rows[HELD_OUT:]),
        eval_dataset=Dataset.from_list(rows[:HELD_OUT]),
        reward=last_word,
        make_tokenizer=lambda: tool_tokenizer(CHARACTERS, PIECES),
        max_positions=128,
        tools=(calculate,),
        demonstrate=lambda: _chats([row["prompt"] for row in rows[HELD_OUT:]], random.Random(1)),
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
    products = re.findall(r"(^|[-+])([\d*]+)", expression)
    values = [(sign, math.prod(map(int, product.split("*")))) for sign, product in products]
    return str(sum(-value if sign == "-" else value for sign, value in values))


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


def _chats(prompts: Sequence[Any], chance: random.Random) -> list[Demonstration]:
    """Demonstrate each problem: some invent an answer, some mistype, and some do it right."""
    chats = []
    for prompt in prompts:
        if chance.random() < BY_HEAD:
            chats.append(Demonstration(prompt, [calculate(_problem(chance))], []))
            continue
        typed = prompt[0]["content"]
        if chance.random() < MISREAD:
            index = chance.choice([i for i, x in enumerate(typed) if x.isdigit()])
            typed = typed[:index] + chance.choice("0123456789") + typed[index + 1 :]
        call = {"name": "calculate", "arguments": {"expression": typed}}
        result = calculate(typed)
        turns = [f"<tool_call>{json.dumps(call)}</tool_call>", result]
        answer = [{"role": "tool", "name": "calculate", "content": result}]
        chats.append(Demonstration(prompt, turns, [answer]))
    return chats
