"""Three tasks of reasoning-gym, learnt by the tiny model: a warm start, then GRPO.

pytest -s -m slow tests/tasks/test_reasoning_gym_learning.py    # prints before and after
"""

import pytest
import torch

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.config import SFTConfig
from rlhf_pg.supervised import train_sft
from rlhf_pg.tasks import load_task
from rlhf_pg.tasks.tiny import character_tokenizer, tiny_decoder

# Options of the generator, and steps of the warm start, which leaves something to learn.
TASKS = {
    "letter_counting": ({"min_words": 2, "max_words": 3}, 300),
    "spell_backward": ({"min_word_len": 3, "max_word_len": 5}, 300),
    "gcd": ({"max_value": 60}, 200),
}
STEPS = 60


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_tiny_model_learns_task(name, tmp_path):
    options, warm_up = TASKS[name]
    task = load_task(f"reasoning_gym:{name}", {"size": 3000, "eval_size": 200, **options}, 0)
    columns = task.train_dataset[:]
    texts = columns["prompt"] + columns["answer"]
    tokenizer = character_tokenizer("".join(sorted(set("".join(texts)))))
    torch.manual_seed(0)
    train_sft(
        SFTConfig(
            output_dir=str(tmp_path / "sft"),
            max_steps=warm_up,
            batch_size=64,
            learning_rate=2e-3,
            label_smoothing=0.2,
            save_steps=0,
        ),
        model=tiny_decoder(tokenizer, max_positions=192),
        processing_class=tokenizer,
        train_dataset=task.train_dataset.select_columns(["prompt", "answer"]),
    )
    trainer = GRPOTrainer(
        model=str(tmp_path / "sft" / "final"),
        reward_funcs=task.reward,
        args=GRPOConfig(
            output_dir=str(tmp_path / "grpo"),
            max_steps=STEPS,
            prompts_per_step=32,
            max_completion_length=12,
            learning_rate=4e-4,
            warmup_steps=5,
            save_steps=0,
        ),
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset,
    )
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    after = trainer.evaluate()["eval_reward"]
    print(
        f"\n{name}: {before:.3f} -> {after:.3f} on {len(trainer.eval_sets[''])} held-out problems"
    )
    assert after > before + 0.05
