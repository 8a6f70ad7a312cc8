"""An agent whose tools are those of an MCP server: here this file itself, with one tool.

    algorithm: grpo
    model_name_or_path: Qwen/Qwen3-0.6B
    dataset_name: products.jsonl
    agent_program: examples/agents/mcp_tools.py:use_server
    max_completion_length: 2048
    max_steps: 100

Needs `pip install "rlhf-pg[agents]" openai "mcp>=2"`; lines of products.jsonl are such as
{"prompt": "What is 17 * 25?", "answer": "425"}. Every episode starts a server of its own, which is
right for servers with a state; `mcp.Client("https://...")` takes one that runs already.
"""

import json
import re
import sys

import mcp
import openai
from mcp.server.mcpserver import MCPServer

CALLS = 4  # of the policy, in an episode

server = MCPServer("products")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def use_server(row, endpoint):
    """Return 1 if the last number of the last answer is right."""
    place = mcp.StdioServerParameters(command=sys.executable, args=[__file__])
    policy = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    async with mcp.Client(place) as client, policy:
        tools = []
        for tool in (await client.list_tools()).tools:
            about = {"name": tool.name, "description": tool.description}
            about["parameters"] = tool.input_schema
            tools.append({"type": "function", "function": about})
        messages = [{"role": "user", "content": row["prompt"]}]
        for _ in range(CALLS):
            reply = await policy.chat.completions.create(
                model=endpoint.model, messages=messages, tools=tools
            )
            answer = reply.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            if not answer.tool_calls:
                break
            for call in answer.tool_calls:
                arguments = json.loads(call.function.arguments)
                result = await client.call_tool(call.function.name, arguments)
                text = "".join(part.text for part in result.content if part.type == "text")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    numbers = re.findall(r"-?\d+", answer.content or "")
    return float(numbers[-1:] == [row["answer"]])


if __name__ == "__main__":
    server.run()
