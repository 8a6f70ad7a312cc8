"""Reward models: a classifier of whole completions, or of their steps, as a reward function."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_pg.data.batch import pad_rows
from rlhf_pg.data.chat import continues, encode
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
HALF = "\N{REPLACEMENT CHARACTER}"  # decoded from an incomplete character
MOST = 4  # most tokens of one character, byte by byte


@dataclass(eq=False, repr=False)
class Classifier:
    """A classifier as a reward function: what models of completions and of steps share.

    It reads text, with a tokenizer of its own.

    Raises:
        ValueError: no such model, another number of outputs, no tokenizer, or one that does not
            belong to the model. The message names the model.
    """

    model: Any  # a path, a Hub id or a loaded model, which is put in evaluation mode
    processing_class: Any = None  # its tokenizer; by default the one saved beside the model
    device: torch.device | str | None = None  # to compute on; by default where the model is
    trust_remote_code: bool = False  # run code that comes with a model that is loaded here

    kind: ClassVar[str] = "reward model"
    head: ClassVar[Any] = AutoModelForSequenceClassification
    labels: ClassVar[Sequence[int]] = (1,)

    def __post_init__(self) -> None:
        if not isinstance(self.model, PreTrainedModel):
            with about(f"{self.kind} {name_of(self.model)}"):
                check_directory(self.model)
                self.model = from_pretrained(
                    self.head, self.model, dtype="auto", trust_remote_code=self.trust_remote_code
                )
        self.model = self.model.to(self.device or self.model.device).eval()
        self.__name__ = name_of(self.model.name_or_path or "") or type(self.model).__name__
        self.who = f"{self.kind} {self.__name__}"
        self.processing_class = score_tokenizer(
            self.processing_class, self.model, self.who, self.trust_remote_code, self.labels
        )

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield numbers of rows of similar length, with ids and mask (B,T) on the model's device.

        The padded tokens of a batch fit SCORING_TOKENS. A text without a position for every token
        is refused (ValueError).
        """
        limit = max_positions(self.model)
        for i, ids in enumerate(rows):
            if limit is not None and len(ids) > limit:
                raise ValueError(
                    f"{self.who}: text in row {i} has {len(ids)} tokens, beyond its "
                    f"max_position_embeddings of {limit}: lower max_completion_length, or shorten "
                    "the prompts"
                )
        batches: list[list[int]] = [[]]
        for i in sorted(range(len(rows)), key=lambda i: len(rows[i])):
            if batches[-1] and (len(batches[-1]) + 1) * len(rows[i]) > SCORING_TOKENS:
                batches.append([])
            batches[-1].append(i)
        for batch in filter(None, batches):
            tokens, mask = pad_rows([rows[i] for i in batch], self.processing_class.pad_token_id)
            yield batch, tokens.to(self.model.device), mask.to(self.model.device)


@dataclass(eq=False, repr=False)
class RewardModel(Classifier):
    """A scorer of prompt and completion by a sequence classifier (`num_labels` 1).

    It takes strings as prompt + completion, chats through its own chat template. It judges what the
    policy wrote: a string that the policy ended by an EOS gets the model's own EOS (Stiennon et al.
    2020; Huang et al. 2024), and a chat turn that was cut off is left open.
    """

    sees_eos: bool = True  # False appends no EOS to a string

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
        rows = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            end = ended is not None and bool(ended[i])
            # A limit on turns does not cut the last one off.
            cut = not end and (ended is not None if truncated is None else truncated[i])
            eos = self.sees_eos and end
            with about(self.who):
                rows.append(encode_whole(prompt, completion, self.processing_class, i, eos, cut))
        scores = torch.zeros(len(rows), dtype=torch.float64)
        for batch, tokens, mask in self.batches(rows):
            scores[batch] = sequence_scores(self.model, tokens, mask).to(scores)
        numbers: list[float] = scores.tolist()
        return numbers


@dataclass(eq=False, repr=False)
class ProcessRewardModel(Classifier):
    """A scorer of a completion's steps (Lightman et al. 2023), for `process_group_normalized`.

    Text between two separators is a step, unless it is blank. The model reads the prompt, and each
    step followed by the separator, tokenised apart, as the `PRMTrainer` of TRL trains it. Its score
    of a step, at the last token of the separator, is the probability of label 1 of two, or its only
    output. In the completion the score stands at the policy's token that completes the separator or
    ends the completion. If one token completes several steps, their mean stands there:
    `process_group_normalized` compares it with scores of single steps, which a sum would exceed.
    """

    policy_tokenizer: Any = None  # of the completions; by default the model's
    separator: str = "\n"  # text that separates steps

    kind, head, labels = "process reward model", AutoModelForTokenClassification, (1, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy_tokenizer = self.policy_tokenizer or self.processing_class

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[list[float | None]]:
        """Return a score for each step, at its last token, and None for the other tokens.

        Raises:
            ValueError: a completion of several messages, or more tokens than positions.
        """
        rows, places = [], []  # token ids, and where in them the steps are judged
        steps_of = [self._steps(ids) for ids in completion_ids]
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            if not isinstance(completion, str) and len(completion) != 1:
                raise ValueError(
                    f"{self.who}: the completion in row {i} has {len(completion)} messages, of "
                    "which steps are not told apart: use it without tools and environment"
                )
            with about(self.who):
                ids = encode(prompt, self.processing_class, i)
            ends = []
            for step, _ in steps_of[i]:
                for part in (step, self.separator):
                    ids += self.processing_class.encode(part, add_special_tokens=False)
                ends.append(len(ids) - 1)
            rows.append(ids)
            places.append(ends)
        scores: list[list[float | None]] = [[None] * len(ids) for ids in completion_ids]
        for batch, tokens, mask in self.batches(rows):
            logits = widen(self.model(input_ids=tokens, attention_mask=mask.long()).logits)
            by_token = logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., 1]
            for i, own in zip(batch, by_token.tolist(), strict=True):
                at_token: dict[int, list[float]] = {}
                for (_, t), place in zip(steps_of[i], places[i], strict=True):
                    at_token.setdefault(t, []).append(own[place])
                for t, several in at_token.items():
                    scores[i][t] = fmean(several)
        return scores

    def _steps(self, ids: Sequence[int]) -> list[tuple[str, int]]:
        """Return the steps of a completion, and the place of the token that ends each.

        Each token is decoded together with those right before it, on which its text depends: the
        blank before a word, or the first bytes of a character.
        """

        def decode(start: int, end: int) -> str:
            text: str = self.policy_tokenizer.decode(list(ids[start:end]), skip_special_tokens=True)
            return text

        text, through = "", list[int]()
        start = read = 0
        for t in range(len(ids)):
            new = decode(start, t + 1)[len(decode(start, read)) :]
            through += [t] * ((text + new).count(self.separator) - len(through))
            if not new.endswith(HALF) or t - read + 1 == MOST or t + 1 == len(ids):
                text, start, read = text + new, read, t + 1
        steps = [*zip(text.split(self.separator), [*through, len(ids) - 1], strict=True)]
        return [step for step in steps if step[0].strip()] or steps[-1:]


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
