"""Loading of models by path, Hub id or object, with checks before anything is computed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.config.foreign_keys import nearest
from rlhf_pg.config.inputs import ModelConfig
from rlhf_pg.models.adapters import add_adapter, check_kind, freeze_unread
from rlhf_pg.models.pretrained import check_directory, from_pretrained, is_adapter, opening, place
from rlhf_pg.models.tokenizers import has_tokenizer

POOLER = ("pooler.",)  # of an encoder; nothing here uses it
ATTENTION = "attn_implementation"
# Arguments of from_pretrained on where the files of a model are, and on how they are read.
PLACES = {"revision", "subfolder", "variant"}
READING = {
    *("cache_dir", "force_download", "local_files_only", "proxies", "use_safetensors"),
    *("use_kernels", "key_mapping"),
}


def load_policy(
    model: str | os.PathLike[str] | PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device,
    peft_config: Any = None,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
    options: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load the model to train, perhaps with an adapter; ValueError if nothing can be trained."""
    loaded = load_model(
        model, dtype, AutoModelForCausalLM, quantization_config, trust_remote_code, options
    ).to(device)
    if peft_config is not None:
        loaded = add_adapter(loaded, peft_config)
    freeze_unread(loaded)
    if quantization_config is not None and not isinstance(loaded, PeftModel):
        raise ValueError("4-bit weights cannot be trained: add an adapter (peft_config, use_peft)")
    if not any(parameter.requires_grad for parameter in loaded.parameters()):
        raise ValueError(
            "every weight of the model is frozen, so there is nothing to train: load its adapter "
            "with is_trainable=True, or give peft_config or use_peft"
        )
    return loaded


def load_model(
    model: str | os.PathLike[str] | PreTrainedModel,
    dtype: torch.dtype,
    auto_class: Any = AutoModelForCausalLM,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
    options: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a model with weights in `dtype`; an object's weights are cast in place.

    Args:
        model: a path or Hub id of a model, or of an adapter, which is loaded on its base model and
            trained further; or an object.
        quantization_config: of `transformers`, for a path: 4 bits of bitsandbytes.
        trust_remote_code: run code that comes with the model; unset, transformers would ask.
        options: `attn_implementation`, and other arguments of `from_pretrained`, which are for a
            path; of an adapter they are those of its base model.

    Raises:
        ValueError: there is no such or no whole model; an adapter does not fit its base model; the
            quantization does not work here; an option is unknown, or of no use for an object.
    """
    options = options or {}
    if quantization_config is not None:
        if not isinstance(model, str | os.PathLike):
            raise ValueError(
                "quantization_config is for loading: give the model as a path or Hub id"
            )
        if not getattr(quantization_config, "load_in_4bit", False):
            raise ValueError(
                "quantization_config must be a BitsAndBytesConfig with load_in_4bit: in 8 bits a "
                "row's numbers depend on the other rows of its batch, and others are not supported"
            )
        if dtype == torch.float64:
            raise ValueError("4-bit weights compute in float32 or bfloat16: change dtype")
    if not isinstance(model, str | os.PathLike):
        check_kind(model)
        set_options(model, options)
        return _cast(model, dtype)
    name = str(model)
    check_directory(name)
    if is_adapter(name):
        return _load_adapter(
            name, dtype, auto_class, quantization_config, trust_remote_code, options
        )
    check_options(name, options, trust_remote_code)
    loaded = from_pretrained(
        auto_class,
        model,
        POOLER,
        dtype=dtype,
        quantization_config=quantization_config,
        trust_remote_code=trust_remote_code,
        **options,
    )
    for module in loaded.modules():
        # bitsandbytes (0.50) repacks weights in place for some CPUs, and its backward pass then
        # misreads them: the gradient is 90 % off, without a warning.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return loaded


def init_options(args: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that a config asks for."""
    attention = {} if args.attn_implementation is None else {ATTENTION: args.attn_implementation}
    return attention | args.model_init_kwargs


def check_options(path: str, options: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Refuse an option that is neither an argument of `from_pretrained` nor a field of the config
    (ValueError). Left to transformers, some models would ignore it.
    """
    fields = options.keys() - PLACES - READING - {ATTENTION}
    if not fields:
        return
    places = {key: value for key, value in options.items() if key in PLACES - {"variant"}}
    places |= place(path)
    with opening("model", path):
        config = AutoConfig.from_pretrained(trust_remote_code=trust_remote_code, **places)
    known = {*PLACES, *READING, *config.to_dict(), *config.attribute_map}
    for key in sorted(fields):
        if key not in known:
            raise ValueError(
                f"model_init_kwargs: {shown(key)} is neither an argument of from_pretrained nor a "
                f"field of {type(config).__name__}{nearest(key, known)}"
            )


def set_options(model: PreTrainedModel, options: Mapping[str, Any]) -> None:
    """Give an object its attention, and refuse (ValueError) options that are for loading."""
    others = sorted(options.keys() - {ATTENTION})
    if others:
        raise ValueError(
            f"model_init_kwargs ({others[0]}) is for loading: give the model as a path or Hub id"
        )
    if ATTENTION in options:
        with opening("attention of the model", options[ATTENTION]):
            model.set_attn_implementation(options[ATTENTION])


def quantization(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the config of QLoRA (Dettmers et al. 2023): weights in NF4, computing in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def _load_adapter(
    path: str,
    dtype: torch.dtype,
    auto_class: Any,
    quantization_config: Any,
    trust_remote_code: bool,
    options: Mapping[str, Any],
) -> PreTrainedModel:
    with opening("adapter", path):
        config = PeftConfig.from_pretrained(path)
    if config.task_type == "CAUSAL_LM":
        auto_class = AutoModelForCausalLM
    base = config.base_model_name_or_path
    if not base:
        raise ValueError(
            f"the adapter {path} does not say what its base model is: set base_model_name_or_path "
            "in adapter_config.json, or load both and give the object"
        )
    try:
        model = load_model(base, dtype, auto_class, quantization_config, trust_remote_code, options)
        model = PeftModel.from_pretrained(model, path, is_trainable=True)
        file = Path(path) / "adapter_model.safetensors"
        if file.exists():  # not on the Hub, nor in an older format
            saved = load_file(file)
            if odd := sorted(saved.keys() ^ get_peft_model_state_dict(model).keys()):
                raise ValueError(  # peft would make random tensors up
                    f"{len(odd)} tensors are only in the file or the model, such as {odd[0]}"
                )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # safetensors raises its own class
        reason = " ".join(str(error).split("\n\t")[:2])  # torch would list every tensor
        raise ValueError(
            f"the adapter {path} does not fit its base model {base!r} (base_model_name_or_path in "
            f"adapter_config.json): {reason}"
        ) from error
    check_kind(model)
    if has_tokenizer(path):
        model.name_or_path = path  # the base model's tokenizer may lack, say, a chat template
    return _cast(model, dtype)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast all weights to `dtype`, but trained adapters to at least float32."""
    has_adapter = isinstance(model, PeftModel)
    for parameter in model.parameters():
        # model.to(dtype) would also round the rotary frequencies, which are buffers.
        if parameter.is_floating_point():  # 4-bit weights are stored as bytes
            wide = has_adapter and parameter.requires_grad
            own = torch.promote_types(dtype, torch.float32) if wide else dtype
            parameter.data = parameter.data.to(own)
    return model


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the longest sequence that the model has positions for; None if it sets no limit."""
    limit: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None
