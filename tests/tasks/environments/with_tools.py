"""A tool environment as users of `verifiers` write it."""

import verifiers as vf
from datasets import Dataset


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a * b


def load_environment() -> vf.Environment:
    async def right(completion, answer) -> float:
        return float(completion[-1].content == answer)

    async def calls(completion) -> float:
        return float(sum(len(m.tool_calls or []) for m in completion if m.role == "assistant"))

    return vf.ToolEnv(
        tools=[multiply],
        dataset=Dataset.from_list([{"question": "6*7", "answer": "42"}]),
        rubric=vf.Rubric(funcs=[right, calls], weights=[1.0, 0.25]),
    )
