"""An agent with OpenAI's client: the policy answers, looks again, and is paid for its last word.

    algorithm: grpo
    model_name_or_path: Qwen/Qwen3-0.6B
    dataset_name: sums.jsonl
    agent_program: examples/agents/chat.py:answer_twice
    max_completion_length: 1024
    max_steps: 100

Needs `pip install "rlhf-pg[agents]" openai`. With lines such as
{"prompt": "What is 17 + 25?", "answer": "42"} in sums.jsonl, train it by
`rlhf-pg train RECIPE.yaml`. An episode is one row with both turns; what the agent says between them
is context. Only its reward belongs to the training: it would run on any server.
"""

import re

import openai

AGAIN = "Look at it again. Then write the number alone."


async def answer_twice(row, endpoint):
    """Return 1 if the last number of the second answer is right."""
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        messages = []
        for question in (row["prompt"], AGAIN):
            messages.append({"role": "user", "content": question})
            reply = await client.chat.completions.create(
                model=endpoint.model, messages=messages, max_tokens=256
            )
            said = reply.choices[0].message.content
            messages.append({"role": "assistant", "content": said})
    numbers = re.findall(r"-?\d+", said)
    return float(numbers[-1:] == [row["answer"]])
