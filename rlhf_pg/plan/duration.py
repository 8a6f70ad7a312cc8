"""How long a run may take, by throughputs that others have published (docs/distributed.md)."""

import re
from typing import Any, NamedTuple


class Published(NamedTuple):
    """Throughputs of a GPU with Llama-3-8B in bfloat16."""

    tokens: float  # trained per second on each GPU, by torchtitan
    position: float  # seconds of vLLM for one more token of each row


PARAMETERS = 8.03e9  # of Llama-3-8B
PUBLISHED = {"h100": Published(5605, 6.5e-3), "a100": Published(2904, 13.3e-3)}
LEAST = 0.01  # of these
PASS = 1 / 3  # of the time of a token that is trained: forward, without back


def hours(meta: Any, processes: int, gpu: str) -> str | None:
    """Estimate the hours of a run, whose rows all have the maximal length; None for a GPU without
    published throughputs, and for a small model, which keeps no GPU busy.

        step = T t_position + N t_token (U + (S + R) / 3)

    with T tokens of a completion, N of a process's rows, U updates on each, and S and R passes for
    scoring by the policy and by the reference; t_position and t_token are those of Llama-3-8B times
    the share of its parameters.
    """
    kind = re.search("|".join(PUBLISHED), gpu, re.IGNORECASE)
    scale = sum(p.numel() for p in meta.policy.parameters()) / PARAMETERS
    if kind is None or scale < LEAST:
        return None
    args = meta.args
    published = PUBLISHED[kind[0].lower()]
    width = args.max_completion_length
    tokens = args.prompts_per_step * (meta.prompt + args.num_generations * width) / processes
    passes = args.num_iterations + PASS * (args.needs_old_logprobs + (args.beta > 0))
    seconds = scale * (width * published.position + tokens * passes / published.tokens)
    span = f"{seconds:.0f} s for each step"
    if args.max_steps > 0:
        span = f"{seconds * args.max_steps / 3600:.1f} hours for {args.max_steps} steps"
    return (
        f"About {span} with completions by vLLM, by throughputs that others have published for "
        "Llama-3-8B on this kind of GPU (docs/distributed.md), scaled by parameters: nothing was "
        "measured here, and a run may well take twice as long. Rewards are not counted. The native "
        "engine takes 4 to 5 times as long for completions, on paper."
    )
