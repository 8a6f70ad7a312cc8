"""Reward models: a sequence classifier with one output, as a reward function."""

import inspect
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_pg.data.chat import continues, encode
from rlhf_pg.data.records import pad_rows
from rlhf_pg.masking import widen
from rlhf_pg.models import (
    about,
    check_directory,
    check_vocabulary,
    from_pretrained,
    has_tokenizer,
    max_positions,
    tokenizer_from_pretrained,
)

# Padded tokens forwarded at a time; it never changes a score.
SCORING_TOKENS = 32768


class Classifier:
    """A classifier as a reward function: what models of completions and of steps share.

    It reads text, with a tokenizer of its own.

    Args:
        model: a path, a Hub id or a loaded model (put in evaluation mode).
        processing_class: its tokenizer; by default the one saved beside the model.
        device: device to compute on; by default where the model is.
        trust_remote_code: run code that comes with a model that is loaded here.

    Raises:
        ValueError: no such model, another number of outputs, no tokenizer, or one that does not
            belong to the model. The message names the model.
    """

    kind: str = "reward model"
    head: Any = AutoModelForSequenceClassification
    labels: Sequence[int] = (1,)

    def __init__(
        self,
        model: str | PathLike[str] | PreTrainedModel,
        processing_class: PreTrainedTokenizerBase | None = None,
        device: torch.device | str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            with about(f"{self.kind} {name_of(model)}"):
                check_directory(model)
                model = from_pretrained(
                    self.head, model, dtype="auto", trust_remote_code=trust_remote_code
                )
        self.model = model.to(device or model.device).eval()
        self.__name__ = name_of(model.name_or_path or "") or type(model).__name__
        self.who = f"{self.kind} {self.__name__}"
        self.processing_class = score_tokenizer(
            processing_class, model, self.who, trust_remote_code, self.labels
        )

    def check_length(self, ids: Sequence[int], row: int) -> None:
        """Refuse a text without a position for every token (ValueError)."""
        limit = max_positions(self.model)
        if limit is not None and len(ids) > limit:
            raise ValueError(
                f"text in row {row} has {len(ids)} tokens, beyond its max_position_embeddings of "
                f"{limit}: lower max_completion_length, or shorten the prompts"
            )

    def padded(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return ids and mask, (B,T), on the model's device."""
        padded = pad_rows(rows, self.processing_class.pad_token_id)
        return [tensor.to(self.model.device) for tensor in padded]


class RewardModel(Classifier):
    """A scorer of prompt and completion by a sequence classifier (`num_labels` 1).

    It takes strings as prompt + completion, chats through its own chat template. It judges what the
    policy wrote: a string that the policy ended by an EOS gets the model's own EOS (Stiennon et al.
    2020; Huang et al. 2024), and a chat turn that was cut off is left open.

    Args:
        sees_eos: False appends no EOS to a string. The others: see `Classifier`.
    """

    def __init__(
        self,
        model: str | PathLike[str] | PreTrainedModel,
        processing_class: PreTrainedTokenizerBase | None = None,
        device: torch.device | str | None = None,
        sees_eos: bool = True,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(model, processing_class, device, trust_remote_code)
        self.sees_eos = sees_eos

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] = (),
        ended: Sequence[bool] | None = None,
        truncated: Sequence[bool] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return one score per completion.

        Args:
            ended: whether the policy ended it by an EOS. By default strings are taken as they
                stand, and chats are closed.
            truncated: whether a limit ended it; a stop string is not a limit. By default, all that
                are known not to have ended by an EOS.
        """
        known: Sequence[bool | None] = [None] * len(prompts) if ended is None else ended
        if truncated is None:
            truncated = [end is False for end in known]
        rows = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            eos = self.sees_eos and bool(known[i])
            cut = truncated[i] and not known[i]  # a limit on turns does not cut the last one off
            with about(self.who):
                ids = encode_whole(prompt, completion, self.processing_class, i, eos, cut)
                self.check_length(ids, i)
            rows.append(ids)
        scores = torch.zeros(len(rows), dtype=torch.float64)
        for batch in micro_batches([len(ids) for ids in rows]):
            said = sequence_scores(self.model, *self.padded([rows[i] for i in batch]))
            scores[batch] = said.to(scores)
        numbers: list[float] = scores.tolist()
        return numbers


def sequence_scores(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Score each text, (B,), in at least float32, at its last token for a decoder.

    The forward of a `transformers` decoder looks for that token by its id, the right-most that is
    not `pad_token_id`: wrong if pad is EOS, or absent (huggingface/transformers#35911). Here it is
    the right-most position attended to. A model without a `score` head (an encoder) pools in its
    own way.

    Args:
        input_ids, attention_mask: (B,T), padded on either side.
    """
    mask = attention_mask.long()
    if not hasattr(model, "score"):
        logits = model(input_ids=input_ids, attention_mask=mask).logits
        return widen(logits.squeeze(1))
    inputs = {"input_ids": input_ids, "attention_mask": mask, "use_cache": False}
    # Positions count real tokens, not columns. ALiBi models have none, and read the mask.
    if "position_ids" in inspect.signature(model.base_model.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    hidden = model.base_model(**inputs).last_hidden_state
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
    rows = torch.arange(len(mask), device=mask.device)
    return widen(model.score(hidden[rows, last]).squeeze(1))


def encode_whole(
    prompt: Any,
    completion: Any,
    tokenizer: PreTrainedTokenizerBase,
    row: int,
    eos: bool = False,
    cut: bool = False,
) -> list[int]:
    """Encode a whole text as token ids: both strings, or both chat messages.

    Args:
        eos: a string ends with the EOS, if the tokenizer has one.
        cut: a chat ends in the middle of the assistant's turn.

    Raises:
        ValueError: they are of two kinds, or do not fit the tokenizer; the row is named.
    """
    if {type(prompt), type(completion)} not in ({str}, {list}):
        raise ValueError(
            f"text in row {row}: prompt and completion must both be strings or both be messages, "
            f"got {prompt!r} and {completion!r}"
        )
    text = prompt + completion
    ids = encode(text, tokenizer, row, "text", open_turn=cut and continues(text))
    return with_eos(ids, tokenizer) if eos and isinstance(text, str) else ids


def with_eos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids with one EOS at the end, if the tokenizer has one."""
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1] == eos else [*ids, eos]


def score_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None,
    model: PreTrainedModel,
    who: str,
    trust_remote_code: bool = False,
    labels: Sequence[int] = (1,),
    pad_token: str | None = None,
    revision: str | None = None,
) -> PreTrainedTokenizerBase:
    """Return the given tokenizer, or the one saved beside the model; check it and the model's head.

    Args:
        who: name of the model in an error.
        labels: allowed numbers of outputs.
        pad_token: used if the tokenizer has none.
        revision: of the model on the Hub.

    Raises:
        ValueError: the model has another number of outputs; no tokenizer, no pad token, or ids
            beyond the embedding rows.
    """
    if model.config.num_labels not in labels:
        kind = "sequence classifier" if labels == (1,) else "token classifier"
        raise ValueError(
            f"{who} has {model.config.num_labels} outputs: a reward is one number, from a {kind} "
            f"with num_labels {' or '.join(map(str, labels))}"
        )
    if tokenizer is None and has_tokenizer(path := model.name_or_path):
        with about(who):
            tokenizer = tokenizer_from_pretrained(
                path, trust_remote_code=trust_remote_code, revision=revision
            )
    # Without files, some model types give a tokenizer with special tokens only.
    if tokenizer is None or set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"{who}: no tokenizer is saved beside it: give one (reward_processing_classes)"
        )
    if tokenizer.pad_token_id is None and pad_token in tokenizer.get_vocab():
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"{who}: its tokenizer has no pad token: set pad_token (the EOS token will do: padding "
            "is masked by position, not by id)"
        )
    check_vocabulary(tokenizer, model, who)
    return tokenizer


def name_of(path: str | PathLike[str]) -> str:
    """Return the last part of a path or Hub id; for a run's `final/`, the name of the run."""
    whole = Path(path)
    return whole.parent.name if whole.name == "final" else whole.name


def micro_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of texts of similar length, whose padded tokens fit SCORING_TOKENS."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[i] > SCORING_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
