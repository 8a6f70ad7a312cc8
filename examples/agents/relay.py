"""A game that forgets: a number is passed on over legs, and each knows only the note before it.

    rlhf-pg train ppo --config examples/agents/relay.yaml

Every leg is a call with a history of its own: the last note, an operation ("+" asks for the next
number, "=" for the same) and a stake. The policy answers with the result and the note for the next
leg. A right answer earns its stake; a note earns what the legs after it earn. The history of a
whole game would not fit the model.
"""

import random

import httpx2
from datasets import Dataset

LEGS = 4
NUMBERS = 5


def games(seed: int, count: int) -> Dataset:
    """Draw games: the number, and an operation and a stake for each leg."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        legs = [rng.choice("+=") + str(rng.randint(1, 3)) for _ in range(LEGS)]
        rows.append({"prompt": "r", "number": rng.randrange(NUMBERS), "legs": legs})
    return Dataset.from_list(rows)


async def play(row, endpoint) -> list[float]:
    """Play a game; return the reward of each leg."""
    note, rewards = str(row["number"]), []
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60, verify=False) as client:
        for leg, (operation, stake) in zip("abcd", row["legs"], strict=True):
            body = {"prompt": f"{leg}{note}{operation}{stake}", "max_tokens": 2}
            answer = await client.post(f"{endpoint.base_url}/completions", json=body)
            said = answer.raise_for_status().json()["choices"][0]["text"]
            right = str((row["number"] + (operation == "+")) % NUMBERS)
            rewards.append(int(stake) / 3 / LEGS * (said[:1] == right))
            note = said[1:2] or "?"
    return rewards
