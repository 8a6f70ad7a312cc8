"""An environment of verifiers, which runs its own rollout and asks the policy as it would any
server; its rubric pays.

    algorithm: grpo
    model_name_or_path: Qwen/Qwen3-0.6B
    dataset_name: rows.jsonl
    agent_program: examples/agents/verifiers_env.py:run
    max_completion_length: 2048
    max_steps: 100

Needs `pip install verifiers==0.3.1` and an installed environment, which ENVIRONMENT names. Its rows
are written once, by `ENVIRONMENT=gsm8k python examples/agents/verifiers_env.py rows.jsonl`; set it
for the training too. `task: verifiers:NAME` needs no endpoint, if the environment only appends to
its messages; here it may also rewrite them.
"""

import os
import sys

import openai
import verifiers as vf
from verifiers.clients import OpenAIChatCompletionsClient

environment = vf.load_environment(os.environ["ENVIRONMENT"])


async def run(row, endpoint):
    """Return the reward of a rollout."""
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        rollout = await environment.run_rollout(
            row, OpenAIChatCompletionsClient(client), endpoint.model, sampling_args={}
        )
    if rollout["error"] is not None:
        raise RuntimeError(rollout["error"])  # ends this episode, which is not trained on
    return rollout["reward"]


if __name__ == "__main__":
    environment.get_dataset().to_json(sys.argv[1])
