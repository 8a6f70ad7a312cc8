"""Make recipes/smollm2/pairs.jsonl: pairs of SmolLM2's own sentences, the happier one chosen.

    python -m benchmarks.pairs

Each topic that smollm2_happy.yaml trains on gets eight sentences, which its reward orders: the
first is paired with the last, the second with the last but one, and so on.
"""

import json
from pathlib import Path

from rlhf_pg import GRPOTrainer
from rlhf_pg.config import GRPOConfig, parse

RECIPES = Path(__file__).parents[1] / "recipes"


def main() -> None:
    args = parse(GRPOConfig, ["--config", str(RECIPES / "smollm2_happy.yaml")])
    trainer = GRPOTrainer(args=args)
    prompts, n, lines = trainer.train_prompts, 8, list[str]()
    rows = list(range(len(prompts)))
    with trainer.sampler.sampling():
        everything = trainer.sampler.sample(prompts, rows, rows, n, args.temperature).completions
    for row in rows:
        said = everything[row * n : (row + 1) * n]
        scores = trainer.rewards.sources[0].function(completions=said)
        order = sorted(range(n), key=lambda i: -scores[i])
        topic = prompts.rows[row]["prompt"][-1]["content"]
        topic = topic.removeprefix("Write one sentence about ").removesuffix(".")
        for best, worst in zip(order[: n // 2], order[::-1], strict=False):
            if scores[best] > scores[worst]:
                chosen, rejected = (said[i][-1]["content"] for i in (best, worst))
                pair = {"prompt": topic, "chosen": chosen, "rejected": rejected}
                lines.append(json.dumps(pair, ensure_ascii=False) + "\n")
    (RECIPES / "smollm2" / "pairs.jsonl").write_text("".join(lines[:500]))


if __name__ == "__main__":
    main()
