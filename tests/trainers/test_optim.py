"""AdamW in its three forms, and bfloat16 weights in theirs, in whole runs."""

from importlib.util import find_spec

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from rlhf_pg.models.loading import quantization
from rlhf_pg.report.metrics import Meter
from rlhf_pg.runtime.ddp import check_divisible
from tests.tiny import tiny_model

installed = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs bitsandbytes")
absent = pytest.mark.skipif(bool(find_spec("bitsandbytes")), reason="bitsandbytes is here")
STEP = "checkpoints/step-00000002"
FOUR_BIT = {"use_peft": True, "load_in_4bit": True}


def flat(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for p in trainer.learner.module.parameters()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"optim": "adamw_8bit"}, "needs bitsandbytes", marks=absent),
        pytest.param(FOUR_BIT, "cannot be loaded .*bitsandbytes", marks=absent),
        (FOUR_BIT | {"dtype": "float64"}, "change dtype"),
        (FOUR_BIT | {"model": tiny_model("llama")}, "give the model as a path"),
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "with load_in_4bit"),
    ],
)
def test_what_cannot_be_in_few_bits_is_refused(make, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_checkpoint_model_is_rounded_master_weights(make, tmp_path) -> None:
    trainer = make(dtype="bfloat16", save_steps=2, learning_rate=1e-5)
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


@installed
def test_load_in_4bit_without_adapter_or_with_merge_is_refused(make) -> None:
    with pytest.raises(ValueError, match="4-bit weights cannot be trained"):
        make(load_in_4bit=True)
    with pytest.raises(ValueError, match="save_merged"):
        make(load_in_4bit=True, use_peft=True, save_merged=True)


@installed
def test_qlora_gradient_matches_dequantized_weights(make, model_path) -> None:
    """A twin whose weights are what the 4 bits stand for, in float32."""
    from bitsandbytes.functional import dequantize_4bit

    config = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    quantized = make(
        peft_config=config, quantization_config=quantization(torch.float32), num_generations=2
    )
    twin_model = AutoModelForCausalLM.from_pretrained(model_path)
    torch.manual_seed(0)
    twin = make(model=twin_model, processing_class=quantized.processing_class, peft_config=config)
    sources = dict(quantized.model.named_parameters())
    for name, parameter in twin.model.named_parameters():
        source = sources[name].detach()
        if source.dtype == torch.uint8:
            source = dequantize_4bit(source, sources[name].quant_state)
        parameter.data = source.clone()
    batch = quantized.sampler.add_rewards(quantized.sampler.roll_out(range(4)))
    for trainer in (quantized, twin):
        experience = trainer.credit(trainer.learner.infer(batch), Meter())
        trainer.learner.accumulate(experience, trainer.objective, Meter())
    for p, q in zip(quantized.model.parameters(), twin.model.parameters(), strict=True):
        if p.requires_grad:
            assert p.grad.norm() > 0
            assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm()
