"""The single-file editions make the updates of the library, weight by weight, in float64."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer
from rlhf_pg.tasks.tiny import character_tokenizer
from tests.examples import load

FOLDER = Path(__file__).parents[2] / "examples" / "single_file"
PROMPTS = [f"{a}+{b}=" for a in (1, 22, 3) for b in (4, 55)]
STEPS, LONGEST, RATE = 20, 6, 1e-3
# The trainer, and the same settings by the names of each.
RUNS = {
    "grpo": (
        GRPOTrainer,
        {"num_generations": 4, "beta": 0.1, "num_iterations": 2},
        {"group": 4, "beta": 0.1, "epochs": 2},
    ),
    "rloo": (RLOOTrainer, {"num_iterations": 2}, {"epochs": 2}),
    "reinforce": (ReinforceTrainer, {}, {}),
    "ppo": (PPOTrainer, {"value_learning_rate": 2e-3}, {"value_learning_rate": 2e-3}),
}


def score(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [sum(text.count(d) for d in "0246") - 0.1 * len(text) for text in completions]


@pytest.mark.parametrize("name", RUNS)
def test_edition_trains_to_weights_of_library(name: str, tmp_path: Path) -> None:
    trainer_type, keys, own_keys = RUNS[name]
    tokenizer = character_tokenizer("0123456789+=")
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=None, **shape, **ids)
    start = GPT2LMHeadModel(config).double()  # nothing in it is computed in float32

    library = copy.deepcopy(start)
    trainer_type(
        model=library,
        reward_funcs=score,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        args=trainer_type.config_type(
            output_dir=str(tmp_path),
            dtype="float64",
            prompts_per_step=2,
            max_completion_length=LONGEST,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_steps=STEPS,
            shuffle_dataset=False,
            **keys,
        ),
    ).train()
    module, own = load(f"single_file/{name}"), copy.deepcopy(start)
    settings = {"prompts_per_step": 2, "longest": LONGEST, "learning_rate": RATE, "rows_at_once": 5}
    module.train(own, tokenizer, PROMPTS, score, module.Config(steps=STEPS, **settings, **own_keys))

    pairs = list(zip(library.parameters(), own.parameters(), strict=True))
    assert max((a - b).abs().max() for a, b in pairs) < 1e-12
    moved = zip(own.parameters(), start.parameters(), strict=True)
    assert max((a - b).abs().max() for a, b in moved) > 1e-3


def test_editions_sample_and_score_by_the_same_text() -> None:
    """Each edition stands alone, so the shared parts are copies, which must not drift apart."""
    texts = [(FOLDER / f"{name}.py").read_text() for name in RUNS]
    shared = {
        text[text.index("1. sampling") : text.index("\n\n\n# --", text.index(" 2. "))]
        for text in texts
    }
    assert len(shared) == 1
    for text in texts:
        assert text.count("\n") <= 350
        assert "import rlhf_pg" not in text
        assert "from rlhf_pg" not in text
