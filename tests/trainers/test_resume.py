"""A run that is resumed ends bit for bit where it would have ended without the stop.

Every case has several kinds of state at once that a checkpoint has to keep.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer
from tests.trainers.conftest import of_task
from tests.untimed import untimed

FOLLOWING = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.25}
ADAPTIVE = {"beta": 0.1, "kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 100}
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "the order of prompts, the reference, coefficients": (
        GRPOTrainer,
        FOLLOWING
        | ADAPTIVE
        | {"dynamic_sampling_rounds": 1, "num_mini_batches": 2}
        # The learning rate of every step is another.
        | {"entropy_target": 1.5, "entropy_coef": 0.01, "warmup_steps": 1},
    ),
    "moments, a moving average, the factor of the rate": (
        ReinforceTrainer,
        {"advantage_estimator": "returns_minus_moving_average", "normalize_rewards": True}
        | {"kl_adaptive_lr": 1e-9, "lr_scheduler_type": "constant"},
    ),
    "dropout, adapters, a critic that is still trained alone": (
        PPOTrainer,
        {"use_peft": True, "lora_dropout": 0.1, "disable_dropout": False, "critic": "shared"}
        | {"value_pretraining_steps": 2, "save_steps": 1, "normalize_values": True}
        | {"policy_loss": "kl_penalty", "old_kl_target": 1e-4, "num_mini_batches": 2}
        | FOLLOWING,
    ),
    "a teacher that follows": (
        GRPOTrainer,
        {"teacher_model_name_or_path": "policy", "teacher_mixup_alpha": 0.25}
        | {"privileged_prompt": "{prompt}{answer}", "num_mini_batches": 2},
    ),
    "batches sampled ahead, with new prompts and a greedy baseline": (
        ReinforceTrainer,
        {"rollout_ahead": 2, "rollout_workers": 2, "dynamic_sampling_rounds": 1}
        | {"advantage_estimator": "returns_minus_greedy", "num_generations": 2, "save_steps": 1},
    ),
    "bfloat16": (PPOTrainer, {"dtype": "bfloat16", "num_mini_batches": 2}),
    "QLoRA": (GRPOTrainer, {"load_in_4bit": True, "use_peft": True, "beta": 0.05}),
    "bfloat16, texts": (
        PPOTrainer,
        {"dtype": "bfloat16", "num_mini_batches": 2, "ptx_coef": 0.1}
        | {"ptx_dataset_name": str(Path(__file__).with_name("texts.txt")), "ptx_batch_size": 2},
    ),
    "states along the rows": (
        GRPOTrainer,
        {"arch": "qwen3_5_text", "gradient_checkpointing": True},
    ),
    "windows and sinks": (PPOTrainer, {"arch": "gpt_oss", "dtype": "bfloat16", "use_peft": True}),
    "8-bit moments": (PPOTrainer, {"optim": "adamw_8bit"}),
    "8-bit moments, bfloat16": (PPOTrainer, {"optim": "adamw_8bit", "dtype": "bfloat16"}),
}


def weights(trainer) -> dict[str, torch.Tensor]:
    models = {name: getattr(trainer.learner, name) for name in ("module", "reference", "teacher")}
    there = [part.named_parameters(prefix=name) for name, part in models.items() if part]
    return {name: weight for part in there for name, weight in part}


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("case", CASES)
def test_resumed_run_is_bit_identical(make, tmp_path, case) -> None:
    trainer_type, options = CASES[case]
    if {"adamw_8bit", True} & {options.get("optim"), options.get("load_in_4bit")} and not find_spec(
        "bitsandbytes"
    ):
        pytest.skip("needs bitsandbytes")
    options = {"max_steps": 4, "save_steps": 2, "save_total_limit": None} | options
    arch = options.pop("arch", None)

    def trainer_of(run: str):
        inputs = {} if arch is None else of_task(arch)
        return make(trainer_type, output_dir=str(tmp_path / run), **options, **inputs)

    whole = trainer_of("whole")
    start = {name: weight.detach().clone() for name, weight in weights(whole).items()}
    whole.train()
    torch.manual_seed(999)
    rest = trainer_of("rest")
    stop = options["save_steps"]
    rest.train(resume_from_checkpoint=str(tmp_path / f"whole/checkpoints/step-{stop:08d}"))
    ends = weights(whole)
    assert all(weight.equal(ends[name]) for name, weight in weights(rest).items())
    assert not all(weight.equal(start[name]) for name, weight in ends.items())
    assert (rest.state, rest.running) == (whole.state, whole.running)
    assert untimed(tmp_path / "rest") == untimed(tmp_path / "whole")[stop:]


@pytest.mark.parametrize("by_name", [False, True])
def test_resumed_run_keeps_its_dtype(make, tmp_path, by_name) -> None:
    """A run that began on another device, or before `auto` was the default."""
    output = {"output_dir": str(tmp_path / "run")}
    make(dtype="bfloat16", max_steps=1, save_steps=1, **output).train()
    checkpoint = str(tmp_path / "run/checkpoints/step-00000001") if by_name else "latest"
    trainer = make(max_steps=2, resume_from_checkpoint=checkpoint, **output)
    assert trainer.model.dtype == torch.bfloat16
    trainer.train()
    assert trainer.state.step == 2
    assert make().model.dtype == torch.float32
