"""A game that forgets: a number is carried over four legs, by notes alone.

    python examples/agents/relay.py
    rlhf-pg train ppo --config examples/agents/relay.yaml

The first line draws games and trains a tiny model to answer a leg, with any number as its note; RL
then has to find what to note. A leg is a call with a history of its own: its letter, the note of
the leg before, "=" (the same number) or "+" (the next), and a stake. The policy answers with the
number and a new note. A right number earns its stake; a note, what the legs after it earn. Stakes
are drawn anew in every game: a critic sees them, but a group of games has no baseline for its luck.
"""

import random
from pathlib import Path

import httpx2
from datasets import Dataset

from rlhf_pg.config import SFTConfig
from rlhf_pg.supervised import train_sft
from rlhf_pg.tasks.tiny import character_tokenizer, tiny_decoder

LEGS, NUMBERS, STAKES = "abcd", 5, (1, 9)


async def play(row, endpoint):
    """Return the reward of each leg of a game."""
    note, rewards, luck = row["number"], [], random.Random(endpoint.seed)
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60, verify=False) as client:
        for leg, operation in zip(LEGS, row["legs"], strict=True):
            stake = luck.choice(STAKES)
            body = {"prompt": f"{leg}{note}{operation}{stake}", "max_tokens": 2}
            answer = await client.post(f"{endpoint.base_url}/completions", json=body)
            said = answer.raise_for_status().json()["choices"][0]["text"]
            right = (int(row["number"]) + (operation == "+")) % NUMBERS
            rewards.append(stake / max(STAKES) / len(LEGS) * (said[:1] == str(right)))
            note = said[1:2] or "?"
    return rewards


def main(directory=Path("runs/relay")):
    rng = random.Random(0)
    directory.mkdir(parents=True, exist_ok=True)
    for name, count in (("games", 2000), ("held_out", 64)):
        rows = []
        for _ in range(count):
            legs = [rng.choice("=+") for _ in LEGS]
            rows.append({"prompt": "?", "number": str(rng.randrange(NUMBERS)), "legs": legs})
        Dataset.from_list(rows).to_json(directory / f"{name}.jsonl")
    examples = []
    for _ in range(32000):
        number, plus = rng.randrange(NUMBERS), rng.randrange(2)
        leg = f"{rng.choice(LEGS)}{number}{'=+'[plus]}{rng.choice(STAKES)}"
        said = f"{(number + plus) % NUMBERS}{rng.randrange(NUMBERS)}"
        examples.append({"prompt": leg, "completion": said})
    tokenizer = character_tokenizer("0123456789=+?" + LEGS)
    train_sft(
        SFTConfig(output_dir=str(directory), batch_size=128, learning_rate=1e-3, append_eos=False),
        model=tiny_decoder(tokenizer, max_positions=16),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(examples),
    )


if __name__ == "__main__":
    main()
