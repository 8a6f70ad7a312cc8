"""An agent of smolagents, unchanged: its model is the policy, and its answer is judged.

    algorithm: grpo
    model_name_or_path: Qwen/Qwen3-0.6B
    dataset_name: sums.jsonl
    agent_program: examples/agents/smol.py:use_a_calculator
    max_completion_length: 4096
    max_steps: 100

Needs `pip install smolagents`; lines of sums.jsonl are such as
{"prompt": "What is 17 * 25?", "answer": "425"}. smolagents rewrites its history: it tells the
policy of an earlier call of a tool in other words than the policy's. Every step is then a branch.
"""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a * b


def use_a_calculator(row, endpoint):
    """Return 1 if the agent's final answer is right."""
    model = OpenAIServerModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key)
    agent = ToolCallingAgent(tools=[multiply], model=model, max_steps=4, verbosity_level=0)
    return float(str(agent.run(row["prompt"])).strip() == row["answer"])
