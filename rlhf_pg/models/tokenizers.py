"""Loading of tokenizers by path, Hub id or object, and checks that they fit the model."""

import os
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import shown, told
from rlhf_pg.models.pretrained import about, tokenizer_from_pretrained

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None,
    model: PreTrainedModel,
    pad_token: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PreTrainedTokenizerBase:
    """Return the given tokenizer, or load the one saved beside the model.

    Raises:
        ValueError: there is no tokenizer that can be loaded, it has no EOS token, or no pad token
            but `pad_token`, it has ids beyond the model's embedding rows, or cannot decode one of
            the model's.
    """
    if tokenizer is None:
        path = model.name_or_path
        if not path:
            raise ValueError(
                "the model was not loaded from a path: give its tokenizer as processing_class"
            )
        if not has_tokenizer(path):
            raise ValueError(
                f"no tokenizer was saved with the model in {path}: give it as processing_class"
            )
        with about("processing_class"):
            tokenizer = tokenizer_from_pretrained(
                path, trust_remote_code=trust_remote_code, revision=revision
            )
    if tokenizer.pad_token_id is None and pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ValueError(f"pad_token {pad_token!r} is no token of the tokenizer")
        tokenizer.pad_token = pad_token
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
    check_vocabulary(tokenizer, model, "processing_class")
    # Rewards read the text of every id that the model can sample.
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
    return tokenizer


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Return whether a tokenizer was saved at a path; a Hub id is assumed to have one."""
    here = Path(path)  # without these files, `AutoTokenizer` may make up an empty one
    return not here.is_dir() or any((here / name).exists() for name in TOKENIZER_FILES)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str) -> None:
    """Refuse a tokenizer with an id that has no embedding (ValueError)."""
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


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a completion: the tokenizer's EOS and the generation config's.

    Raises:
        ValueError: the generation config's `eos_token_id` is neither an id nor a list of ids.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    known = [i for i in ids if i is not None]
    if not all(type(i) is int for i in known):
        raise ValueError(
            "eos_token_id in the model's generation_config must be an id or a list of ids, got "
            f"{shown(configured)}"
        )
    return sorted({tokenizer.eos_token_id, *known})
