"""Your own model, data and reward, in Python.

python examples/custom_reward.py --model Qwen/Qwen3-0.6B
"""

import argparse

from datasets import Dataset

from rlhf_pg import GRPOConfig, GRPOTrainer


def short_and_on_topic(prompts, completions, topic, **columns):
    """One float per completion; `topic` is a column of the dataset. Chats arrive as messages."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        float(word in text.lower()) - len(text) / 500
        for text, word in zip(texts, topic, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="path or Hub id")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--output_dir", default="runs/custom_reward")
    flags = parser.parse_args()

    topics = ["rain", "bread", "trains", "chess"]
    dataset = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": f"Say one thing about {t}."}] for t in topics],
            "topic": topics,
        }
    )
    trainer = GRPOTrainer(
        model=flags.model,
        reward_funcs=short_and_on_topic,
        args=GRPOConfig(
            output_dir=flags.output_dir,
            max_steps=flags.max_steps,
            prompts_per_step=4,
            num_generations=8,
            max_completion_length=32,
            learning_rate=1e-6,
        ),
        train_dataset=dataset,
    )
    trainer.train()


if __name__ == "__main__":
    main()
