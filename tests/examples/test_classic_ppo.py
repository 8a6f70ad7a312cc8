"""The old loop, `generate` and `step`, makes the updates of PPOTrainer, and teaches by itself."""

import copy
from pathlib import Path

import torch
from datasets import Dataset

from rlhf_pg import PPOConfig, PPOTrainer
from rlhf_pg.tasks.tiny import character_tokenizer, tiny_decoder
from tests.examples import load

PROMPTS = [f"{a}+{b}=" for a in (1, 22, 3) for b in (4, 55)]


def score(completions: list[str], **_: object) -> list[float]:
    return [text.count("1") - 0.1 * len(text) for text in completions]


def test_loop_trains_to_weights_of_trainer(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("0123456789+=")
    torch.manual_seed(0)
    start = tiny_decoder(tokenizer)
    args = PPOConfig(
        output_dir=str(tmp_path),
        prompts_per_step=3,
        max_completion_length=5,
        micro_batch_tokens=20,
        learning_rate=1e-4,
        value_learning_rate=2e-4,
        lr_scheduler_type="constant",
        kl_controller="adaptive",
        kl_horizon=2,
        max_steps=4,
        shuffle_dataset=False,
    )
    library = copy.deepcopy(start)
    trainer = PPOTrainer(
        model=library,
        reward_funcs=score,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        args=args,
    )
    trainer.train()

    own = copy.deepcopy(start)
    classic, stats = load("classic_ppo").ClassicPPO(args, own, tokenizer), []
    for step in range(args.max_steps):
        queries = tokenizer(PROMPTS[step % 2 * 3 :][:3])["input_ids"]
        responses = classic.generate(queries)
        ids = [response.tokens for response in responses]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        stats.append(classic.step(queries, responses, score(texts)))

    assert [round(x["score"], 6) for x in stats] == [round(x["reward"], 6) for x in trainer.history]
    pairs = list(zip(library.parameters(), own.parameters(), strict=True))
    assert max((a - b).abs().max() for a, b in pairs) < 1e-5
    moved = zip(own.parameters(), start.parameters(), strict=True)
    assert max((a - b).abs().max() for a, b in moved) > 1e-3
    assert classic.beta.coef != args.beta
