"""Make token ids and labels from completions of prompts, conversations or plain text."""

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypedDict, TypeVar

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import about, show
from rlhf_pg.boundary.terminal import say
from rlhf_pg.config import SFTConfig
from rlhf_pg.config.supervised import SupervisedConfig
from rlhf_pg.data.chat import continues, encode, last_text
from rlhf_pg.data.inputs import load_data, make_sets, with_date
from rlhf_pg.data.messages import normalise, read_tools
from rlhf_pg.data.prompts import as_dataset
from rlhf_pg.data.sources import make_prompts, refuse_columns_of_chats, system_of, with_system
from rlhf_pg.data.turns import encode_turns
from rlhf_pg.models.attention import max_positions
from rlhf_pg.models.loading import tokenizer_of

logger = logging.getLogger(__name__)

CHATS = {"messages", "conversations"}  # columns with whole chats: OpenAI's name, and ShareGPT's
UNLABELLED = -100  # the label that losses of transformers ignore

Made = TypeVar("Made")
S = TypeVar("S", bound=SupervisedConfig)
DataRow: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Dataset | Sequence[DataRow]
Marked = tuple[list[int], list[bool]]  # token ids, and the mask of those to train on


class Example(TypedDict):
    """Token ids and labels: the id where it is trained on, else `UNLABELLED`."""

    input_ids: Sequence[int]
    labels: Sequence[int]


def completion_column(columns: Sequence[str]) -> str | None:
    """Return the column with completions of prompts; None if conversations or texts are whole."""
    if "prompt" not in columns:
        return None
    if "completion" in columns:
        return "completion"
    if "answer" in columns and CHATS.isdisjoint(columns):
        return "answer"
    return None


@dataclass(frozen=True, kw_only=True)
class ExampleMaker:
    """Makes examples from the rows of a dataset."""

    tokenizer: PreTrainedTokenizerBase
    args: SFTConfig
    columns: Sequence[str]
    completion: str | None  # from `completion_column`
    limit: int | None  # most tokens of an example
    repeats_prompt: bool = False  # every completion begins with its prompt, which is not learnt

    def __call__(self, row: DataRow, number: int) -> Example | None:
        """Make the example of a row; None if it is dropped, ValueError if it is invalid."""
        if self.completion is not None:
            ids, mask = self._complete(row, row[self.completion], number)
        elif not CHATS.isdisjoint(self.columns):
            messages = row.get("messages") or row.get("conversations")
            ids, mask = self._chat(row, messages, 0, f"messages in row {number}")
        else:
            refuse_columns_of_chats(row, self.args, number)
            ids, mask = self._text("", row["text"], number)
        if not any(mask[1:]):  # nothing predicts the first token
            raise ValueError(
                f"row {number} has nothing to train on: it has a single token, or no words of the "
                "assistant that the template shows (assistant_only_loss)"
            )
        if self.limit is not None and len(ids) > self.limit:
            if self.args.long_examples == "error":
                raise ValueError(
                    f"row {number} has {len(ids)} tokens, more than the {self.limit} of max_length "
                    "or the model: set long_examples to drop or truncate, or shorten them"
                )
            ids = ids[: self.limit]
            mask = mask[: self.limit]
            if self.args.long_examples == "drop" or not any(mask[1:]):
                return None
        labels = [id_ if on else UNLABELLED for id_, on in zip(ids, mask, strict=True)]
        return {"input_ids": array("i", ids), "labels": array("i", labels)}

    def _complete(self, row: DataRow, completion: Any, number: int) -> Marked:
        prompt = row["prompt"]
        if not completion:
            raise ValueError(f"the {self.completion} in row {number} is empty: drop the row")
        if self.repeats_prompt:
            completion = without_prompt(prompt, completion)
        if isinstance(prompt, str) and isinstance(completion, str):
            refuse_columns_of_chats(row, self.args, number)
            return self._text(prompt, completion, number)
        if isinstance(prompt, list) and isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if not isinstance(prompt, list) or not isinstance(completion, list):
            raise ValueError(
                f"row {number}: a prompt must be text or a list of messages, and its "
                f"{self.completion} too, or text after messages; got {show(prompt)} and "
                f"{show(completion)}"
            )
        where = f"prompt and {self.completion} in row {number}"
        prompt, completion = split_repeated(prompt, completion, number, str(self.completion))
        read = 0 if self.args.completion_only_loss is False else len(prompt)
        return self._chat(row, [*prompt, *completion], read, where)

    def _chat(self, row: DataRow, messages: Any, read: int, where: str) -> Marked:
        if not (isinstance(messages, list) and messages and isinstance(messages[0], Mapping)):
            raise ValueError(f"{where} must be a list of messages, got {show(messages)}")
        system = system_of(row, self.args)
        if self.completion is None and system is not None:
            messages = with_system(messages, system, where)
        return encode_turns(
            messages,
            self.tokenizer,
            where,
            read,
            self.args.assistant_only_loss,
            read_tools(row.get("tools"), f"{where}: tools"),
            self.args.append_eos,
        )

    def _text(self, prompt: str, text: Any, number: int) -> Marked:
        """Encode text after a prompt, tokenized together if that keeps the prompt's tokens."""
        if self.args.assistant_only_loss:
            raise ValueError(
                f"row {number} is text, but assistant_only_loss is for chats: leave it out"
            )
        if not isinstance(text, str) or not text:
            raise ValueError(f"the text in row {number} must be text, got {show(text)}")
        asked = encode(prompt, self.tokenizer, number) if prompt else []
        ids = encode(prompt + text, self.tokenizer, number, "text")
        if ids[: len(asked)] != asked:
            ids = [*asked, *self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        eos = self.tokenizer.eos_token_id
        if self.args.append_eos and eos is not None and ids[-1] != eos:
            ids = [*ids, eos]
        read = 0 if self.args.completion_only_loss is False else len(asked)
        return ids, [index >= read for index in range(len(ids))]


def load_examples(
    data: Rows,
    args: SFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    name: str,
) -> list[Example]:
    """Make the examples of a dataset, of at most `limit` tokens; ValueError, with its name, if a
    column is missing, a row is invalid, or none is left.
    """
    with about(name):
        data = as_dataset(data)
        columns = data.column_names
        completion = completion_column(columns)
        repeats_prompt = False
        if completion is not None:
            repeats_prompt = repeat_prompts(data, completion)
        elif CHATS.isdisjoint(columns) and "text" not in columns:
            raise ValueError(
                "the dataset has no columns prompt and completion (or answer), messages, or text: "
                f"it has {', '.join(columns)}. Rename columns by dataset_columns"
            )
        elif args.completion_only_loss:
            raise ValueError(
                f"completion_only_loss needs columns prompt and completion; it has "
                f"{', '.join(columns)}"
            )
        maker = ExampleMaker(
            tokenizer=tokenizer,
            args=args,
            columns=columns,
            completion=completion,
            limit=limit,
            repeats_prompt=repeats_prompt,
        )
        made = [maker(row, number) for number, row in enumerate(data)]
    return left_over(made, name)


def repeat_prompts(data: Dataset, *columns: str) -> bool:
    """Return whether every text of these columns begins with its prompt, and say so."""

    def repeats(prompt: Any, text: Any) -> bool:
        asked = last_text(prompt)
        return isinstance(text, str) and bool(asked) and text != asked and text.startswith(asked)

    if not len(data):
        return False
    for name in columns:
        if not all(map(repeats, data["prompt"], data[name])):
            return False
    logger.warning("every %s begins with its prompt: the copy is dropped", " and ".join(columns))
    return True


def without_prompt(prompt: Any, text: str) -> str:
    """Return the rest of a text that begins with its prompt, in a chat without leading spaces."""
    text = text.removeprefix(last_text(prompt))
    if isinstance(prompt, str):
        return text
    return text.lstrip()


def split_repeated(prompt: Any, text: Any, row: int, column: str) -> tuple[list[Any], list[Any]]:
    """Return the messages of a prompt and those after it. As in many public datasets, `text` may be
    a whole conversation, which begins with the prompt.
    """
    prompt = normalise(prompt, f"prompt in row {row}")
    text = normalise(text, f"{column} in row {row}")
    if continues(prompt) and text[0]["role"] == "assistant":
        raise ValueError(
            f"the prompt in row {row} ends with words of the assistant, which {column} continues: "
            "move them there, or put a message of the user between"
        )
    bare = [message for message in prompt if message["role"] != "system"]
    length = len(bare)
    if text[0]["role"] == "system" and text[1 : length + 1] == bare:
        return text[: length + 1], text[length + 1 :]
    if text[:length] == bare:
        text = text[length:]
    return prompt, text


def left_over(made: Sequence[Made | None], name: str, what: str = "rows") -> list[Made]:
    """Return what is not None, and print how many were too long; ValueError if nothing is left."""
    kept = [row for row in made if row is not None]
    if not made:
        raise ValueError(f"{name}: it has no rows: give some")
    if not kept:
        raise ValueError(
            f"{name}: each of its {len(made)} {what} is too long: raise max_length, or shorten them"
        )
    if len(kept) < len(made):
        say(f"{name}: {len(made) - len(kept)} of {len(made)} {what} are too long: left out")
    return kept


def limit_of(args: SupervisedConfig, positions: int | None) -> int | None:
    """Return how many tokens an example may have."""
    limits = [n for n in (args.max_length, positions) if n is not None]
    return min(limits, default=None)


def ends_of(examples: Sequence[Example], args: SFTConfig, positions: int | None) -> list[int]:
    """Return the last trained token of each example, except those that were truncated."""
    limit = limit_of(args, positions) if args.long_examples == "truncate" else None
    ends = []
    for example in examples:
        labels = example["labels"]
        if len(labels) != limit:
            ends.append(next(i for i in reversed(labels) if i != UNLABELLED))
    return ends


def resolve_data(
    args: SupervisedConfig, train_dataset: Any, eval_dataset: Any
) -> tuple[Dataset, dict[str, Dataset]]:
    """Return training rows and held-out sets by name; ValueError if there are none."""
    train, held_out = load_data(args, train_dataset, eval_dataset)
    train = make_prompts(train, args, "train_dataset", of_texts=False)
    return train, make_sets(held_out, args, of_texts=False)


def load_all(
    load: Callable[..., Any],
    args: S,
    model: PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | None,
    data: tuple[Dataset, Mapping[str, Dataset]],
    today: str,
    needs_eos: bool = True,
) -> tuple[S, PreTrainedTokenizerBase, Any, dict[str, Any]]:
    """Return the config with the date that the chat template prints, the tokenizer, and what `load`
    makes of the training data and of the held-out sets.
    """
    train, held_out = data
    tokenizer = tokenizer_of(args, model, processing_class, needs_eos)
    args = with_date(args, tokenizer, today)
    limit = limit_of(args, max_positions(model))
    make = partial(load, args=args, tokenizer=tokenizer, limit=limit)
    examples = make(train, name="train_dataset")
    sets = {}
    for name, dataset in held_out.items():
        sets[name] = make(dataset, name=f"eval_dataset {name}".rstrip())
    return args, tokenizer, examples, sets
