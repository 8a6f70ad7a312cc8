"""The prompt of the teacher of the recipe smollm2_shown: the policy's, after three examples."""

from typing import Any

EXAMPLES = {
    "the sea": "I love the beautiful sea, it makes me so happy!",
    "a cake": "What a wonderful, delicious cake, I love it!",
    "friends": "My great friends are the best and bring me joy!",
}


def examples(prompts: list[Any], **columns: Any) -> list[Any]:
    """Put a conversation with three happy sentences before each prompt."""
    said = [
        {"role": role, "content": text}
        for topic, sentence in EXAMPLES.items()
        for role, text in (
            ("user", f"Write one sentence about {topic}."),
            ("assistant", sentence),
        )
    ]
    return [said + prompt for prompt in prompts]
