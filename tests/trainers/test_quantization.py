"""QLoRA: where bitsandbytes is installed it trains, and elsewhere it is refused by name."""

from importlib.util import find_spec

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from rlhf_pg import GRPOTrainer, PPOTrainer
from rlhf_pg.models import quantization
from rlhf_pg.report.metrics import Meter

installed = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs bitsandbytes")
absent = pytest.mark.skipif(bool(find_spec("bitsandbytes")), reason="bitsandbytes is here")


@absent
def test_load_in_4bit_without_bitsandbytes_is_refused(make) -> None:
    with pytest.raises(ValueError, match=r"cannot be loaded .ImportError: .*bitsandbytes"):
        make(use_peft=True, load_in_4bit=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64", "load_in_4bit": True, "use_peft": True}, "change dtype"),
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "with load_in_4bit"),
    ],
)
def test_inexact_quantization_options_are_refused(make, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_load_in_4bit_with_loaded_model_is_refused(make, model_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with pytest.raises(ValueError, match="give the model as a path"):
        make(model=model, use_peft=True, load_in_4bit=True)


@installed
def test_load_in_4bit_without_adapter_or_with_merge_is_refused(make) -> None:
    with pytest.raises(ValueError, match="4-bit weights cannot be trained"):
        make(load_in_4bit=True)
    with pytest.raises(ValueError, match="save_merged"):
        make(load_in_4bit=True, use_peft=True, save_merged=True)


@installed
@pytest.mark.parametrize("trainer_type", [GRPOTrainer, PPOTrainer])
def test_qlora_trains_and_resumes(make, trainer_type, tmp_path) -> None:
    options = {"load_in_4bit": True, "use_peft": True, "beta": 0.05, "max_steps": 4}
    whole = make(trainer_type, output_dir=str(tmp_path / "whole"), **options)
    assert any(p.dtype == torch.uint8 for p in whole.model.parameters())
    whole.train()
    make(trainer_type, save_steps=2, **options).train()
    rest = make(trainer_type, output_dir=str(tmp_path / "rest"), **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoints" / "step-00000002"))
    pairs = zip(whole.learner.module.parameters(), rest.learner.module.parameters(), strict=True)
    assert all(p.equal(q) for p, q in pairs if p.requires_grad)
    assert any(p.any() for name, p in rest.model.named_parameters() if "lora_B" in name)


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
    batch = quantized.sampler.scored(quantized.sampler.roll_out(range(4)))
    for trainer in (quantized, twin):
        experience, _ = trainer.estimate(trainer.learner.score(batch), Meter())
        trainer.learner.accumulate(experience, Meter())
    for p, q in zip(quantized.model.parameters(), twin.model.parameters(), strict=True):
        if p.requires_grad:
            assert p.grad.norm() > 0
            assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm()
