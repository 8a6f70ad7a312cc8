"""Process reward models: a token classifier that scores every step of a completion."""

from collections.abc import Sequence
from os import PathLike
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_pg.data.chat import encode
from rlhf_pg.data.records import pad_rows
from rlhf_pg.masking import widen
from rlhf_pg.models import about, check_directory, from_pretrained, max_positions
from rlhf_pg.rewards.reward_model import micro_batches, name_of, score_tokenizer

HALF = "\N{REPLACEMENT CHARACTER}"  # decoded from an incomplete character
MOST = 4  # most tokens of one character, byte by byte


class ProcessRewardModel:
    """A scorer of a completion's steps (Lightman et al. 2023), for `process_group_normalized`.

    Text between two separators is a step, unless it is blank. The model reads the prompt, and each
    step followed by the separator, tokenised apart, as the `PRMTrainer` of TRL trains it. Its score
    of a step, at the last token of the separator, is the probability of label 1 of two, or its only
    output. In the completion the score stands at the policy's token that completes the separator or
    ends the completion. If one token completes several steps, their mean stands there:
    `process_group_normalized` compares it with scores of single steps, which a sum would exceed.

    Args:
        model: a path, a Hub id or a loaded model (put in evaluation mode).
        processing_class: its tokenizer; by default the one saved beside the model.
        policy_tokenizer: the tokenizer of the completions; by default the model's.
        separator: text that separates steps.
        device: device to compute on; by default where the model is.
        trust_remote_code: run code that comes with a model that is loaded here.

    Raises:
        ValueError: no such model, more outputs than two, no tokenizer, or one that does not belong
            to the model. The message names the model.
    """

    def __init__(
        self,
        model: str | PathLike[str] | PreTrainedModel,
        processing_class: PreTrainedTokenizerBase | None = None,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        separator: str = "\n",
        device: torch.device | str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            with about(f"process reward model {name_of(model)}"):
                check_directory(model)
                model = from_pretrained(
                    AutoModelForTokenClassification,
                    model,
                    dtype="auto",
                    trust_remote_code=trust_remote_code,
                )
        self.model = model.to(device or model.device).eval()
        self.__name__ = name_of(model.name_or_path or "") or type(model).__name__
        self._who = f"process reward model {self.__name__}"
        self.processing_class = score_tokenizer(
            processing_class, model, self._who, trust_remote_code, labels=(1, 2)
        )
        self.policy_tokenizer = policy_tokenizer or self.processing_class
        self.separator = separator

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
        for row, completion in enumerate(completions):
            if not isinstance(completion, str) and len(completion) != 1:
                raise ValueError(
                    f"{self._who}: the completion in row {row} has {len(completion)} messages, of "
                    "which steps are not told apart: use it without tools and environment"
                )
        answers = [self._steps(ids) for ids in completion_ids]
        rows = [
            self._encode(row, prompt, [step for step, _ in steps])
            for row, (prompt, steps) in enumerate(zip(prompts, answers, strict=True))
        ]
        scores: list[list[float | None]] = [[None] * len(ids) for ids in completion_ids]
        for batch in micro_batches([len(ids) for ids, _ in rows]):
            said = self._score([rows[i] for i in batch])
            for i, own in zip(batch, said, strict=True):
                ends = [end for _, end in answers[i]]
                for t in set(ends):
                    here = [score for end, score in zip(ends, own, strict=True) if end == t]
                    scores[i][t] = fmean(here)
        return scores

    def _steps(self, ids: Sequence[int]) -> list[tuple[str, int]]:
        """Return the steps of a completion, and the place of the token that ends each.

        Each token is decoded together with those right before it, on which its text depends: the
        blank before a word, or the first bytes of a character.
        """
        text, through = "", list[int]()
        start = read = 0
        for t in range(len(ids)):
            new = self._text(ids[start : t + 1])[len(self._text(ids[start:read])) :]
            through += [t] * ((text + new).count(self.separator) - len(through))
            if not new.endswith(HALF) or t - read + 1 == MOST or t + 1 == len(ids):
                text, start, read = text + new, read, t + 1
        steps = [*zip(text.split(self.separator), [*through, len(ids) - 1], strict=True)]
        return [step for step in steps if step[0].strip()] or steps[-1:]

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self.policy_tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _encode(self, row: int, prompt: Any, steps: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return token ids, and the places where the steps are judged."""
        try:
            ids = encode(prompt, self.processing_class, row)
        except ValueError as error:
            raise ValueError(f"{self._who}: {error}") from error
        places = []
        for step in steps:
            for part in (step, self.separator):
                ids = ids + self.processing_class.encode(part, add_special_tokens=False)
            places.append(len(ids) - 1)
        limit = max_positions(self.model)
        if limit is not None and len(ids) > limit:
            raise ValueError(
                f"{self._who}: text in row {row} has {len(ids)} tokens, beyond its "
                f"max_position_embeddings of {limit}: lower max_completion_length, or shorten the "
                "prompts"
            )
        return ids, places

    @torch.no_grad()
    def _score(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Score each step of each row."""
        ids, mask = pad_rows([ids for ids, _ in rows], self.processing_class.pad_token_id)
        device = self.model.device
        logits = self.model(input_ids=ids.to(device), attention_mask=mask.long().to(device)).logits
        scores = _judged(widen(logits)).tolist()
        return [[own[t] for t in places] for own, (_, places) in zip(scores, rows, strict=True)]


def _judged(logits: Tensor) -> Tensor:
    """Reduce (B,T,1 or 2) to (B,T): the only output, or the probability of label 1."""
    return logits.squeeze(-1) if logits.shape[-1] == 1 else logits.softmax(-1)[..., 1]
