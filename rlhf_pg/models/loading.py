"""Models and tokenizers by path, Hub id or object, checked before anything is computed."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.peft_utils import find_adapter_config_file

from rlhf_pg.models.adapters import (
    LOADED,
    add_adapter,
    check_adapter,
    check_kind,
    freeze_unread,
)
from rlhf_pg.models.attention import configs_of, replaced_attention
from rlhf_pg.models.pretrained import (
    about,
    from_pretrained,
    opening,
    tokenizer_from_pretrained,
)
from rlhf_pg.quoted import quoted, shown, told

POOLER = ("pooler.",)  # of an encoder, which nothing here looks at
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")


def load_policy(
    model: str | os.PathLike[str] | PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device,
    peft_config: Any = None,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model to train, on its device and with its adapter, if it is to have one.

    Raises:
        ValueError: as in `load_model` and `add_adapter`, or nothing in the model can be trained.
    """
    loaded = load_model(
        model,
        dtype,
        quantization_config=quantization_config,
        trust_remote_code=trust_remote_code,
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
) -> PreTrainedModel:
    """A model with weights in `dtype`; an object's weights are cast in place.

    Args:
        model: a path or Hub id of a model, or of an adapter, which then comes on its base model and
            goes on being trained; or an object.
        auto_class: what to load a path as.
        quantization_config: of `transformers`, for a path: 4 bits of bitsandbytes.
        trust_remote_code: run code that comes with the model; unset, transformers would ask.

    Raises:
        ValueError: a path (what cannot be a Hub id) with no directory there, one that holds no
            model or not all of it, an adapter that does not fit its base model, or a quantization
            that does not work here.
    """
    if quantization_config is not None:
        _check_quantization(model, dtype, quantization_config)
    if not isinstance(model, str | os.PathLike):
        check_kind(model)
        return _cast(model, dtype)
    name = str(model)
    check_directory(name)
    with opening("model", name):
        is_adapter = find_adapter_config_file(name) is not None
    if is_adapter:
        return _load_adapter(name, dtype, auto_class, quantization_config, trust_remote_code)
    loaded = from_pretrained(
        auto_class,
        model,
        POOLER,
        dtype=dtype,
        quantization_config=quantization_config,
        trust_remote_code=trust_remote_code,
    )
    for module in loaded.modules():
        # bitsandbytes (0.50) repacks weights in place for some CPUs, and its backward pass then
        # reads them wrongly: a gradient that is 90 % off, without a word.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return loaded


def quantization(dtype: torch.dtype) -> BitsAndBytesConfig:
    """QLoRA (Dettmers et al. 2023): weights in NF4, computing in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def _check_quantization(model: Any, dtype: torch.dtype, config: Any) -> None:
    if not isinstance(model, str | os.PathLike):
        raise ValueError("quantization_config is for loading: give the model as a path or Hub id")
    if not getattr(config, "load_in_4bit", False):
        raise ValueError(
            "quantization_config must be a BitsAndBytesConfig with load_in_4bit: in 8 bits a row's "
            "numbers depend on the other rows of its batch, and others are not supported"
        )
    if dtype == torch.float64:
        raise ValueError("4-bit weights compute in float32 or bfloat16: change dtype")


def _load_adapter(
    path: str,
    dtype: torch.dtype,
    auto_class: Any,
    quantization_config: Any,
    trust_remote_code: bool,
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
        model = load_model(base, dtype, auto_class, quantization_config, trust_remote_code)
        model = PeftModel.from_pretrained(model, path, is_trainable=True)
        check_adapter(model, path)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # safetensors has one of its own
        reason = " ".join(str(error).split("\n\t")[:2])  # torch goes on to list every tensor
        raise ValueError(
            f"the adapter {path} does not fit its base model {base!r} (base_model_name_or_path in "
            f"adapter_config.json): {reason}"
        ) from error
    check_kind(model)
    if has_tokenizer(path):
        model.name_or_path = path  # the base model's own may lack a chat template, say
    return _cast(model, dtype)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """All weights to `dtype`, but trained adapters to float32 at least."""
    has_adapter = isinstance(model, PeftModel)
    for parameter in model.parameters():
        # Not model.to(dtype), which would round the rotary frequencies too: they are buffers.
        if parameter.is_floating_point():  # 4-bit weights are stored as bytes
            wide = has_adapter and parameter.requires_grad
            own = torch.promote_types(dtype, torch.float32) if wide else dtype
            parameter.data = parameter.data.to(own)
    return model


def check_directory(model: str | os.PathLike[str]) -> None:
    """Refuse a path (what cannot be a Hub id) with no directory there, and a directory with a pipe
    or a device in it: reading that might never end.

    Raises:
        ValueError: there is none, or such a one.
    """
    name = str(model)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not os.path.isdir(name):
        raise ValueError(f"there is no model directory {quoted(name)}")
    with opening("model", name):
        files = list(Path(name).iterdir()) if os.path.isdir(name) else []
    for file in files:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ValueError(f"{quoted(str(file))} is no regular file: move it away")


def load_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None,
    model: PreTrainedModel,
    pad_token: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """The tokenizer given, or the one saved beside the model.

    Args:
        pad_token: used where the tokenizer has none.

    Raises:
        ValueError: no tokenizer, or none that can be loaded, no pad or EOS token, ids beyond the
            model's embedding rows, or embedding rows whose id it cannot decode.
    """
    if tokenizer is None and not model.name_or_path:
        raise ValueError(
            "the model was not loaded from a path: give its tokenizer as processing_class"
        )
    if tokenizer is None and not has_tokenizer(model.name_or_path):
        raise ValueError(
            f"no tokenizer was saved with the model in {model.name_or_path}: give it as "
            "processing_class"
        )
    if tokenizer is None:
        with about("processing_class"):
            tokenizer = tokenizer_from_pretrained(
                model.name_or_path, trust_remote_code=trust_remote_code
            )
    if tokenizer.pad_token_id is None and pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ValueError(f"pad_token {pad_token!r} is no token of the tokenizer")
        tokenizer.pad_token = pad_token
    _check_special(tokenizer)
    check_vocabulary(tokenizer, model, "processing_class")
    _check_decoding(tokenizer, model)
    return tokenizer


def _check_special(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make sure that there are an EOS and a pad token.

    Raises:
        ValueError: there are not.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no EOS token, so no completion could end: set "
            "processing_class.eos_token"
        )
    is_unknown = tokenizer.eos_token_id == tokenizer.unk_token_id
    if is_unknown and tokenizer.eos_token != tokenizer.unk_token:
        raise ValueError(
            f"the tokenizer has no EOS token {shown(tokenizer.eos_token)}, and takes it for any "
            "unknown one: set processing_class.eos_token to one of its own"
        )
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "the tokenizer has no pad token: set the key pad_token, or processing_class.pad_token "
            "(the EOS token will do: padding is masked by position, not by id)"
        )


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Whether one was saved there; where none was, `AutoTokenizer` may make up an empty one.

    A Hub id is taken at its word.
    """
    here = Path(path)
    return not here.is_dir() or any((here / name).exists() for name in TOKENIZER_FILES)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str) -> None:
    """Make sure that every id has an embedding.

    Raises:
        ValueError: there are more ids.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    remedy = "they do not belong together, or model.resize_token_embeddings is due"
    if len(tokenizer) > rows:
        raise ValueError(
            f"{name}: the tokenizer has {len(tokenizer)} ids but the model only {rows} embedding "
            f"rows: {remedy}"
        )
    vocabulary = tokenizer.get_vocab()  # which may have gaps
    last = max(vocabulary, key=lambda token: vocabulary[token], default=None)
    if last is not None and vocabulary[last] >= rows:
        raise ValueError(
            f"{name}: the token {shown(last)} has the id {vocabulary[last]} but the model has only "
            f"{rows} embedding rows: {remedy}"
        )


def _check_decoding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Make sure that whatever the model can sample has a text, or a reward would never see it.

    Raises:
        ValueError: some id has none, and the tokenizer raises an error of its own over it.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    for id_ in sorted(set(range(rows)) - set(tokenizer.get_vocab().values())):
        try:
            tokenizer.decode([id_])
        except Exception as error:
            raise ValueError(
                f"processing_class: the model has {rows} embedding rows and can sample the id "
                f"{id_}, which the tokenizer cannot decode ({told(error)}): add tokens for such "
                "ids, or resize the embeddings (model.resize_token_embeddings)"
            ) from error


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion: the tokenizer's EOS and those of the generation config.

    Raises:
        ValueError: one is no number.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    if not all(i is None or isinstance(i, int) for i in ids):
        raise ValueError(
            f"eos_token_id in the model's generation_config must be an id or a list of ids, got "
            f"{shown(configured)}"
        )
    return sorted({tokenizer.eos_token_id, *(i for i in ids if i is not None)})


def max_positions(model: PreTrainedModel) -> int | None:
    """Longest sequence that the model has positions for; None if it sets no limit."""
    limit: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def checkpoint_activations(model: nn.Module | None) -> None:
    """Recompute activations in the backward pass, in a model of `transformers`."""
    if not isinstance(model, LOADED):
        return
    configs = configs_of(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for part in model.modules():
        if getattr(part, "gradient_checkpointing", False):
            contexts: Any = partial(_contexts, part, configs)
            part._gradient_checkpointing_func = partial(
                checkpoint, use_reentrant=False, context_fn=contexts
            )


def _contexts(
    part: nn.Module, configs: list[Any]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of the forward pass, and of the recomputation, which has to attend as that did."""
    return _mode_of_children(part), _again(part, configs, configs[0]._attn_implementation)


@contextmanager
def _again(part: nn.Module, configs: list[Any], attention: str) -> Iterator[None]:
    with _mode_of_children(part), replaced_attention(configs, attention):
        yield


@contextmanager
def _mode_of_children(part: nn.Module) -> Iterator[None]:
    """For what a part does itself, whose own mode may only say that it recomputes."""
    own = part.training
    part.training = all(child.training for child in part.children())
    try:
        yield
    finally:
        part.training = own


def checkpoints(model: nn.Module | None) -> bool:
    """Whether any part of it recomputes its activations.

    (`transformers` has a property for that, under another name in every other version.)
    """
    parts = () if model is None else model.modules()
    return any(getattr(part, "gradient_checkpointing", False) for part in parts)


def train_as_evaluated(model: nn.Module) -> None:
    """Evaluation mode, in which a gradient is as good: train mode is more than dropout (jitter of
    routers, clipped coefficients), so that what is trained would not be what samples.

    Only what recomputes its activations is in train mode, itself and not what is in it: in
    `transformers` nothing else does.
    """
    model.eval()
    for part in model.modules():
        part.training = bool(getattr(part, "gradient_checkpointing", False))


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: the modules, and the rates that attention functions read."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module's own mode again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
