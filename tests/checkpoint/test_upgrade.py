"""Checkpoints of released versions are resumed to the same numbers.

`python -m tests.checkpoint.test_upgrade` saves one with the version at hand. One that cannot be
resumed is refused by its version (tests/faults/test_checkpoints.py).
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlhf_pg import PPOConfig, PPOTrainer, __version__
from rlhf_pg.checkpoint import atomic
from rlhf_pg.tasks.tiny import character_tokenizer

SAVED = Path(__file__).parent / "saved"
LAST = 4


def count_ones(completions: list[str], **columns: object) -> list[float]:
    return [text.count("1") / 4 for text in completions]


def trainer(output_dir: Path, model: Path, **keys: object) -> PPOTrainer:
    """A run with all that a checkpoint may have: a critic, moments, a controller, momenta."""
    config = PPOConfig(
        output_dir=str(output_dir),
        max_steps=LAST,
        save_steps=2,
        save_best=False,
        prompts_per_step=4,
        num_mini_batches=2,
        max_completion_length=4,
        learning_rate=1e-2,
        normalize_values=True,
        kl_controller="adaptive",
        dtype="float64",
        **keys,
    )
    prompts = [{"prompt": str(n)} for n in range(2, 8)]
    return PPOTrainer(model=str(model), reward_funcs=count_ones, args=config, train_dataset=prompts)


@pytest.mark.parametrize("version", ["0.1.0"])
def test_checkpoint_of_release_resumes(tmp_path: Path, version: str) -> None:
    run = shutil.copytree(SAVED / version, tmp_path / version)
    step = run / "checkpoints" / "step-00000002"
    resumed = trainer(run, run / "model", resume_from_checkpoint=str(step))
    resumed.train()
    expected = json.loads((run / "expected.json").read_text())
    for key, value in expected.items():
        assert resumed.history[-1][key] == pytest.approx(value, rel=1e-6), key


if __name__ == "__main__":
    run = SAVED / __version__
    tokenizer = character_tokenizer("1234567")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 4, "num_hidden_layers": 1}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = Qwen3Config(
        vocab_size=len(tokenizer), num_attention_heads=2, num_key_value_heads=2, **sizes, **ids
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(shape).save_pretrained(run / "model")
    tokenizer.save_pretrained(run / "model")
    ran = trainer(run, run / "model")
    ran.train()
    last = {key: ran.history[-1][key] for key in ("reward", "grad_norm", "value_loss", "kl")}
    (run / "expected.json").write_text(json.dumps(last))
    for path in run.iterdir():
        if path.name not in ("model", "checkpoints", "expected.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(run / "checkpoints" / f"step-{LAST:08d}")
    step = run / "checkpoints" / "step-00000002"
    facts = json.dumps(atomic.state(step)).replace(f"{run}/", "").replace(str(run), "run")
    (step / atomic.STATE).write_bytes(atomic.seal(json.loads(facts)))
