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
from rlhf_pg.masking import widen
from rlhf_pg.models import about
from rlhf_pg.rewards.reward_model import Classifier, micro_batches

HALF = "\N{REPLACEMENT CHARACTER}"  # decoded from an incomplete character
MOST = 4  # most tokens of one character, byte by byte


class ProcessRewardModel(Classifier):
    """A scorer of a completion's steps (Lightman et al. 2023), for `process_group_normalized`.

    Text between two separators is a step, unless it is blank. The model reads the prompt, and each
    step followed by the separator, tokenised apart, as the `PRMTrainer` of TRL trains it. Its score
    of a step, at the last token of the separator, is the probability of label 1 of two, or its only
    output. In the completion the score stands at the policy's token that completes the separator or
    ends the completion. If one token completes several steps, their mean stands there:
    `process_group_normalized` compares it with scores of single steps, which a sum would exceed.

    Args:
        policy_tokenizer: the tokenizer of the completions; by default the model's.
        separator: text that separates steps. The others: see `Classifier`.
    """

    kind, head, labels = "process reward model", AutoModelForTokenClassification, (1, 2)

    def __init__(
        self,
        model: str | PathLike[str] | PreTrainedModel,
        processing_class: PreTrainedTokenizerBase | None = None,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        separator: str = "\n",
        device: torch.device | str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(model, processing_class, device, trust_remote_code)
        self.policy_tokenizer = policy_tokenizer or self.processing_class
        self.separator = separator

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
        for row, completion in enumerate(completions):
            if not isinstance(completion, str) and len(completion) != 1:
                raise ValueError(
                    f"{self.who}: the completion in row {row} has {len(completion)} messages, of "
                    "which steps are not told apart: use it without tools and environment"
                )
        scores: list[list[float | None]] = [[None] * len(ids) for ids in completion_ids]
        answers = [self._steps(ids) for ids in completion_ids]
        rows, places = [], []  # token ids, and where the steps are judged
        for i, (prompt, steps) in enumerate(zip(prompts, answers, strict=True)):
            with about(self.who):
                ids = encode(prompt, self.processing_class, i)
                ends = []
                for step, _ in steps:
                    for part in (step, self.separator):
                        ids += self.processing_class.encode(part, add_special_tokens=False)
                    ends.append(len(ids) - 1)
                self.check_length(ids, i)
            rows.append(ids)
            places.append(ends)
        for batch in micro_batches([len(ids) for ids in rows]):
            tokens, mask = self.padded([rows[i] for i in batch])
            said = self.model(input_ids=tokens, attention_mask=mask.long())
            for i, own in zip(batch, _judged(widen(said.logits)).tolist(), strict=True):
                for t in {end for _, end in answers[i]}:
                    ends = [
                        at for at, (_, end) in zip(places[i], answers[i], strict=True) if end == t
                    ]
                    scores[i][t] = fmean(own[at] for at in ends)
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


def _judged(logits: Tensor) -> Tensor:
    """Reduce (B,T,1 or 2) to (B,T): the only output, or the probability of label 1."""
    return logits.squeeze(-1) if logits.shape[-1] == 1 else logits.softmax(-1)[..., 1]
