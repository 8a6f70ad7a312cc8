"""Preference pairs as token ids: the better of two texts, the other one, and a margin."""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import shown
from rlhf_pg.config import RewardModelConfig
from rlhf_pg.data.chat import encode
from rlhf_pg.data.prompts import as_dataset
from rlhf_pg.data.sources import with_system
from rlhf_pg.models import about
from rlhf_pg.rewards.reward_model import encode_whole, with_eos


class Pair(NamedTuple):
    """Two texts as token ids, and by how much the first should be ahead."""

    chosen: Sequence[int]
    rejected: Sequence[int]
    margin: float = 0.0


def load_pairs(
    dataset: Any,
    args: RewardModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    name: str,
) -> list[Pair]:
    """Tokenize both texts of every pair; strings end with the EOS, if `args.append_eos` says so.

    The columns are `chosen` and `rejected`, and maybe `prompt` and `margin`. ValueError, with the
    name of the dataset, if there are no rows, a column is missing, or a pair is none: equal texts,
    a text of more than `limit` tokens, chats without a chat template.
    """
    with about(name):
        if isinstance(dataset, list) and dataset:
            dataset = as_dataset(dataset)
        if not isinstance(dataset, Dataset):
            raise ValueError(
                "give a datasets.Dataset with columns chosen and rejected, or name data by "
                "dataset_name, and held-out pairs by dataset_test_split or eval_dataset_name"
            )
        if not len(dataset):
            raise ValueError("it has no rows: give some")
        if missing := {"chosen", "rejected"} - set(dataset.column_names):
            raise ValueError(
                f"the dataset has no column {min(missing)!r} (it has "
                f"{', '.join(dataset.column_names)}): rename the one that holds these texts, as "
                "with dataset_columns"
            )
        pairs = []
        for row, texts in enumerate(dataset):
            pair = _tokenize_pair(texts, args, tokenizer, row)
            longest = max(len(pair.chosen), len(pair.rejected))
            if limit is None or longest <= limit:
                pairs.append(pair)
            elif args.long_examples == "error":
                raise ValueError(
                    f"a text in row {row} has {longest} tokens, more than the {limit} that "
                    "max_length or the model's positions allow: set long_examples to drop, or "
                    "shorten them"
                )
        if not pairs:
            raise ValueError(
                f"each of its {len(dataset)} pairs is too long: raise max_length, or shorten them"
            )
    if len(pairs) < len(dataset):
        print(f"{name}: {len(dataset) - len(pairs)} of {len(dataset)} pairs are too long: left out")
    return pairs


def _tokenize_pair(
    pair: Mapping[str, Any], args: RewardModelConfig, tokenizer: PreTrainedTokenizerBase, row: int
) -> Pair:
    if pair["chosen"] == pair["rejected"]:
        raise ValueError(f"chosen and rejected are the same in row {row}: drop the row")
    chosen, rejected = (_whole(pair, key, tokenizer, row, args) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise ValueError(
            f"chosen and rejected have the same tokens in row {row}: drop the row, or look at what "
            "the chat template leaves out"
        )
    margin = pair.get("margin", 0.0)
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin):
        raise ValueError(f"the margin in row {row} must be a finite number, got {shown(margin)}")
    return Pair(array("i", chosen), array("i", rejected), float(margin))


def _whole(
    pair: Mapping[str, Any],
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    row: int,
    args: RewardModelConfig,
) -> list[int]:
    """Encode a text of a pair, behind its prompt if there is one."""
    text = pair[key]
    if "prompt" in pair:
        prompt, text = _alike(pair["prompt"], text)
        return encode_whole(prompt, text, tokenizer, row, args.append_eos)
    if args.system_prompt is not None and isinstance(text, list):
        text = with_system(text, args.system_prompt, f"{key} in row {row}")
    ids = encode(text, tokenizer, row, key, open_turn=False)
    return with_eos(ids, tokenizer) if args.append_eos and isinstance(text, str) else ids


def _alike(prompt: Any, text: Any) -> tuple[Any, Any]:
    """Return prompt and text as messages if either is, without what stands in both.

    Public datasets have the prompt once more as text beside whole conversations.
    """
    if isinstance(text, str) and isinstance(prompt, list):
        return prompt, [{"role": "assistant", "content": text}]
    if not isinstance(text, list):
        return prompt, text
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        return prompt, text
    asked = [_said(message) for message in prompt if _said(message)[0] != "system"]
    repeats = [_said(message) for message in text[: len(asked)]] == asked
    return prompt, text[len(asked) :] if repeats else text


def _said(message: Any) -> tuple[Any, Any]:
    is_message = isinstance(message, Mapping)
    return (message.get("role"), message.get("content")) if is_message else (None, message)
