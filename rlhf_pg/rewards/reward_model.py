"""Reward models: a sequence classifier of prompt and completion as a reward function."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
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

from rlhf_pg.boundary.quoted import about
from rlhf_pg.data.batch import pad_rows
from rlhf_pg.data.chat import continues, encode
from rlhf_pg.data.micro_batches import RowLengths, split_padded
from rlhf_pg.masking import widen
from rlhf_pg.models.attention import max_positions
from rlhf_pg.models.loading import check_directory, from_pretrained, load_tokenizer

# Padded tokens in a forward pass; it never changes a score.
SCORING_TOKENS = 32768


@dataclass(eq=False, repr=False)
class RewardModel:
    """Scores prompt and completion by a sequence classifier (`num_labels` 1).

    With its own tokenizer it reads strings as prompt + completion, and chats by its chat template.
    A string that the policy ended by an EOS gets the model's own EOS (Stiennon et al. 2020; Huang
    et al. 2024), and a truncated chat turn is left open. ValueError if the model or tokenizer is
    missing, or they do not fit.
    """

    is_reward_model = True  # it scores all completions of a batch together

    model: Any  # a path, a Hub id or a loaded model; put in evaluation mode
    processing_class: Any = None  # its tokenizer; by default the one saved beside the model
    device: torch.device | str | None = None  # by default the model's
    trust_remote_code: bool = False  # run code that comes with a loaded model
    sees_eos: bool = True  # False appends no EOS to a string

    def __post_init__(self) -> None:
        trusted = self.trust_remote_code
        if not isinstance(self.model, PreTrainedModel):
            with about(f"reward model {name_of(self.model)}"):
                check_directory(self.model)
                self.model = from_pretrained(
                    AutoModelForSequenceClassification,
                    self.model,
                    dtype="auto",
                    trust_remote_code=trusted,
                )
        self.model = self.model.to(self.device or self.model.device).eval()
        self.__name__ = name_of(self.model.name_or_path or type(self.model).__name__)
        self.who = f"reward model {self.__name__}"
        check_head(self.model, self.who)
        with about(self.who):
            self.processing_class = load_tokenizer(
                self.processing_class,
                self.model,
                trust_remote_code=trusted,
                key="reward_processing_classes",
                needs_eos=False,
            )

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        ended: Sequence[bool] | None = None,
        truncated: Sequence[bool] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return one score per completion; ValueError if one cannot be encoded or is too long.

        Args:
            ended: whether the policy ended each by an EOS. By default strings are unchanged, and
                chats are closed.
            truncated: whether a limit ended each; a stop string is not a limit. By default, all
                that did not end by an EOS according to `ended`.
        """
        rows = []
        limit = max_positions(self.model)
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            end = ended is not None and ended[i]
            # A limit on turns does not cut the last turn off.
            cut = not end and (ended is not None if truncated is None else truncated[i])
            eos = self.sees_eos and end
            with about(self.who):
                rows.append(encode_whole(prompt, completion, self.processing_class, i, eos, cut))
                if limit is not None and len(rows[i]) > limit:
                    raise ValueError(
                        f"text in row {i} has {len(rows[i])} tokens, more than the model's "
                        f"max_position_embeddings of {limit}: lower max_completion_length, or "
                        "shorten the prompts"
                    )
        scores = [0.0] * len(rows)
        device = self.model.device
        lengths = [RowLengths(i, 0, len(ids)) for i, ids in enumerate(rows)]
        for batch in split_padded(lengths, SCORING_TOKENS):
            tokens, mask = pad_rows([rows[i] for i in batch], self.processing_class.pad_token_id)
            scored = sequence_scores(self.model, tokens.to(device), mask.to(device))
            for i, score in zip(batch, scored.tolist(), strict=True):
                scores[i] = score
        return scores


def sequence_scores(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Score each text of (B,T), padded on either side: (B,), in at least float32.

    A decoder scores the last token: the right-most position that the mask attends to. Its forward
    in `transformers` takes the right-most that is not `pad_token_id`, which is wrong if pad is EOS
    or absent (huggingface/transformers#35911). A model without a `score` head (an encoder) pools in
    its own way.
    """
    mask = attention_mask.long()
    if not hasattr(model, "score"):
        return widen(model(input_ids=input_ids, attention_mask=mask).logits.squeeze(1))
    inputs = {"input_ids": input_ids, "attention_mask": mask, "use_cache": False}
    # Positions count real tokens, not columns. ALiBi models have none and read the mask.
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
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Encode prompt and completion, both strings or both chat messages, as token ids.

    `eos` appends the EOS to a string, if the tokenizer has one; `cut` leaves the last turn of a
    chat open. ValueError, with the row, if the kinds differ or the tokenizer cannot encode them.
    """
    if {type(prompt), type(completion)} not in ({str}, {list}):
        raise ValueError(
            f"text in row {row}: prompt and completion must both be strings or both be messages, "
            f"got {prompt!r} and {completion!r}"
        )
    text = prompt + completion
    open_turn = cut and continues(text)
    ids = encode(text, tokenizer, row, "text", open_turn=open_turn, tools=tools)
    if eos and isinstance(text, str):
        return with_eos(ids, tokenizer)
    return ids


def with_eos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids with one EOS at the end, if the tokenizer has one."""
    eos = tokenizer.eos_token_id
    if eos is None or ids[-1] == eos:
        return ids
    return [*ids, eos]


def check_head(model: PreTrainedModel, who: str) -> None:
    """Refuse a model without a single output (ValueError)."""
    if model.config.num_labels != 1:
        raise ValueError(f"{who} has {model.config.num_labels} outputs: a reward has num_labels 1")


def name_of(path: str | PathLike[str]) -> str:
    """Return the last part of a path or Hub id; for a run's `final/`, the name of the run."""
    whole = Path(path)
    if whole.name == "final":
        return whole.parent.name
    return whole.name
