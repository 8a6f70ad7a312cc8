"""The prompts of a run: training data or a stream, evaluation sets, and the order of drawing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasets import IterableDataset
from transformers import PreTrainedTokenizerBase

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data import Prompts, PromptSampler
from rlhf_pg.data.chat import encode
from rlhf_pg.data.prompts import (
    PromptOrder,
    PromptSource,
    Tools,
    check_fit,
    fitting_prompts,
    offered,
)
from rlhf_pg.data.stream import PromptStream, StreamOrder


@dataclass(frozen=True, kw_only=True)
class PromptLoader:
    """Make prompts of datasets by the rules of a config.

    Attributes:
        tools: see `fitting_prompts`.
        positions: of the model; None: any number.
    """

    args: PolicyGradientConfig
    tokenizer: PreTrainedTokenizerBase
    tools: Tools = ()
    positions: int | None = None

    def train(
        self, dataset: Any, known: Prompts | None = None
    ) -> tuple[PromptSource, PromptOrder, int]:
        """Return the training prompts, their order, and the number of steps of the run.

        Args:
            known: its prompts, where they have been made: an evaluation takes its own.

        Raises:
            ValueError: a prompt cannot be used, they are not those of `dataset_fingerprint`, or a
                stream lacks a key that it needs.
        """
        args = self.args
        source: PromptSource
        order: PromptOrder
        if isinstance(dataset, IterableDataset):
            source, order, steps = self._stream(dataset), StreamOrder(), args.max_steps
        else:
            source = self.finite(dataset, "train_dataset") if known is None else known
            order = PromptSampler(len(source), args.seed, args.shuffle_dataset)
            steps = args.total_steps(len(source))
        wanted = args.dataset_fingerprint
        if wanted is not None and wanted != source.fingerprint:
            raise ValueError(
                f"the training data have the fingerprint {source.fingerprint}, and "
                f"dataset_fingerprint is {wanted}: they are not the data of that run, or its "
                "tokenizer or prompt keys have changed; leave dataset_fingerprint out to train on "
                "them"
            )
        return source, order, steps

    def finite(self, dataset: Any, name: str) -> Prompts:
        """Return the prompts of a dataset that is there as a whole.

        Raises:
            ValueError: a prompt cannot be used; `name` and the row are named.
        """
        args = self.args
        return fitting_prompts(
            dataset,
            name,
            self.tokenizer,
            max_prompt_length=args.max_prompt_length,
            long_prompts=args.long_prompts,
            max_completion_length=args.max_completion_length,
            positions=self.positions,
            micro_batch_tokens=args.micro_batch_tokens,
            tools=self.tools,
        )

    def evaluated(self, datasets: Mapping[str, Any]) -> dict[str, Prompts]:
        """Return the prompts of every evaluation set, by its name."""
        return {
            name: self.finite(data, f"eval_dataset {name}".rstrip())
            for name, data in datasets.items()
        }

    def _stream(self, dataset: IterableDataset) -> PromptStream:
        args = self.args
        if args.max_steps < 1 or args.max_prompt_length is None:
            raise ValueError(
                "a stream has no known length and no known longest prompt: set max_steps and "
                "max_prompt_length"
            )
        longest = args.max_prompt_length

        def tokens(example: Mapping[str, Any], row: int) -> list[int]:
            prompt = example["prompt"]
            if self.tools and isinstance(prompt, str):
                raise ValueError(
                    f"the prompt in row {row} is a string, and tools are called in a chat: make it "
                    "a list of messages"
                )
            tools = offered(self.tools, example, row)
            return encode(prompt, self.tokenizer, row, tools=tools, most=longest)

        buffer = args.shuffle_buffer_size if args.shuffle_dataset else 0
        drop = args.long_prompts == "drop"
        stream = PromptStream(dataset, tokens, longest, drop, args.seed, buffer)
        check_fit(stream, args.max_completion_length, self.positions, args.micro_batch_tokens)
        return stream
