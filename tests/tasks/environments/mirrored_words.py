"""A single-turn environment as users of `verifiers` write it: words to be written backwards."""

import verifiers as vf
from datasets import Dataset


def load_environment(words: int = 4, system_prompt: str | None = "Backwards.") -> vf.Environment:
    def exact(completion, answer, **kwargs) -> float:
        return float(completion[-1].content == answer)

    async def brevity(completion) -> float:
        return -float(len(completion[-1].content))

    texts = [chr(97 + i) * 2 + "z" for i in range(words)]
    rows = [
        {"question": text, "answer": text[::-1], "info": {"word": i}}
        for i, text in enumerate(texts)
    ]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:1]),
        system_prompt=system_prompt,
        rubric=vf.Rubric(funcs=[exact, brevity], weights=[1.0, 0.01]),
    )
