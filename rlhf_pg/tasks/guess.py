"""A task of guessing a hidden number from "higher" and "lower": "6>10<8" may follow "1-13:".

The policy's turns are guesses; the environment answers ">" if the number is greater, "<" if it is
less and "?" if the guess was not a number. It pays each guess for what it has found out, and a
reward function pays for the right one at the end.
"""

import math
import random
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from rlhf_pg.tasks.task import Demonstration, Task
from rlhf_pg.tasks.tiny import character_tokenizer

HIGHEST = range(8, 16)  # 15 = 2^4 - 1: four guesses that halve the range find any number
TURNS = 4
DEMONSTRATIONS = 4096
BLIND = 0.5  # share of demonstrated guesses that ignore the answers


def guess() -> Task:
    """Make the task of every number from 1 to n for every n in `HIGHEST`: 92 pairs.

    No pair is held out: a player would learn that these numbers never come up.
    """
    pairs = [(highest, number) for highest in HIGHEST for number in range(1, highest + 1)]
    problems = {
        "prompt": [f"1-{highest}:" for highest, _ in pairs],
        "answer": [str(number) for _, number in pairs],
    }
    return Task(
        name="guess",
        train_dataset=Dataset.from_dict(problems),
        eval_dataset=Dataset.from_dict(problems),
        reward=found,
        make_tokenizer=lambda: character_tokenizer("0123456789-:<>?"),
        environment_factory=Guess,
        demonstrate=lambda: _demonstrations(pairs, random.Random(1)),
    )


def found(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Score 1 if the last guess is the number, 0 otherwise."""
    pairs = zip(completions, answer, strict=True)
    return [float(re.split("[<>?]", text)[-1] == number) for text, number in pairs]


class Guess:
    """The environment of one hidden number from 1 to n, with what has been found out so far."""

    def __init__(self) -> None:
        self.number = 0
        self.low = self.high = self.highest = 1

    def reset(self, example: dict[str, str]) -> str:
        """Return the prompt as it is, with the range of the number."""
        self.number = int(example["answer"])
        self.high = self.highest = int(example["prompt"].strip(":").split("-")[1])
        return example["prompt"]

    def step(self, completion: str) -> tuple[str, float, bool]:
        """Answer whether the number is greater or less than the guess.

        The reward is log(left before / left after) / log n, where `left` counts the numbers that
        the answers leave possible: the rewards of an episode add up to 1 once one number is left.
        """
        if not re.fullmatch("[0-9]{1,2}", completion):
            return "?", 0.0, False
        said, before = int(completion), self.high - self.low + 1
        if said == self.number:
            self.low = self.high = said
        elif said < self.number:
            self.low = max(self.low, said + 1)
        else:
            self.high = min(self.high, said - 1)
        reward = math.log(before / (self.high - self.low + 1), self.highest)
        return (">" if self.number > said else "<"), reward, said == self.number


def _demonstrations(pairs: list[tuple[int, int]], chance: random.Random) -> list[Demonstration]:
    """Demonstrate players who know the form of the game and heed only some answers."""
    demonstrations = []
    for _ in range(DEMONSTRATIONS):
        highest, number = chance.choice(pairs)
        environment = Guess()
        prompt = environment.reset({"prompt": f"1-{highest}:", "answer": str(number)})
        turns: list[str] = []
        answers: list[str] = []
        for _ in range(TURNS):
            blind = chance.random() < BLIND
            bounds = (1, highest) if blind else (environment.low, environment.high)
            turns.append(str(chance.randint(*bounds)))
            answer, _, done = environment.step(turns[-1])
            if done:
                break
            answers.append(answer)
        demonstrations.append(Demonstration(prompt, turns, answers[: len(turns) - 1]))
    return demonstrations
