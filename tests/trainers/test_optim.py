"""AdamW in its three forms, and bfloat16 weights in theirs, in whole runs."""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_pg.runtime.ddp import check_divisible

installed = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs bitsandbytes")
absent = pytest.mark.skipif(bool(find_spec("bitsandbytes")), reason="bitsandbytes is here")
STEP = "checkpoints/step-00000002"


def flat(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for p in trainer.learner.module.parameters()])


def test_fused_adamw_matches_plain_adamw(make, tmp_path) -> None:
    ends = {}
    for optim in ("adamw_torch_fused", "adamw_torch"):
        trainer = make(optim=optim, output_dir=str(tmp_path / optim))
        start = flat(trainer)
        trainer.train()
        ends[optim] = flat(trainer)
    fused, plain = ends.values()
    assert trainer.learner.optimizer.defaults["fused"] is None
    assert (fused - plain).norm() <= 1e-4 * (plain - start).norm()


@absent
def test_adamw_8bit_without_bitsandbytes_is_refused(make) -> None:
    with pytest.raises(ValueError, match="optim adamw_8bit needs bitsandbytes"):
        make(optim="adamw_8bit")


EIGHT_BIT = {"optim": "adamw_8bit"}
NARROW = {"dtype": "bfloat16"}


def test_checkpoint_model_is_rounded_master_weights(make, tmp_path) -> None:
    trainer = make(**NARROW, save_steps=2, learning_rate=1e-5)
    trainer.train()
    path = tmp_path / "run" / STEP
    tensors = load_file(path / "optimizer.safetensors")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    finer = 0
    for name, weight in model.named_parameters():
        master = tensors[f"{name}.master"]
        assert master.bfloat16().equal(weight)
        finer += int((master != weight.float()).sum())
    assert finer > 0
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final", dtype="auto")
    assert final.dtype == torch.bfloat16


@installed
def test_adamw_8bit_follows_32bit_adamw(make, tmp_path) -> None:
    moved = {}
    for optim in ("adamw_torch_fused", "adamw_8bit"):
        trainer = make(optim=optim, output_dir=str(tmp_path / optim))
        start = flat(trainer)
        trainer.train()
        moved[optim] = flat(trainer) - start
    assert torch.nn.functional.cosine_similarity(*moved.values(), dim=0) > 0.95
    assert not moved["adamw_8bit"].equal(moved["adamw_torch_fused"])
    large = [s["state1"] for p, s in trainer.learner.optimizer.state.items() if p.numel() >= 4096]
    assert {moments.dtype for moments in large} == {torch.uint8}


def test_check_divisible_refuses_8bit_moments() -> None:
    """They come in blocks of 256 numbers that no piece ends with."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.args = type("Args", (), {"optim_bits": 8})()  # as bitsandbytes has it
    with pytest.raises(ValueError, match="8-bit moments are for one process or DDP"):
        check_divisible(model, optimizer)
    optimizer.args.optim_bits = 32
    check_divisible(model, optimizer)
