"""The prompts of a run: training data, evaluation sets, and the order of drawing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data import Prompts, PromptSampler
from rlhf_pg.data.prompts import Tools, fitting_prompts


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
    ) -> tuple[Prompts, PromptSampler, int]:
        """Return the training prompts, their order, and the number of steps of the run.

        Args:
            known: its prompts, where they have been made: an evaluation takes its own.

        Raises:
            ValueError: a prompt cannot be used, or they are not those of `dataset_fingerprint`.
        """
        args = self.args
        prompts = self.load(dataset, "train_dataset") if known is None else known
        wanted = args.dataset_fingerprint
        if wanted is not None and wanted != prompts.fingerprint:
            raise ValueError(
                f"the training data have the fingerprint {prompts.fingerprint}, and "
                f"dataset_fingerprint is {wanted}: they are not the data of that run, or its "
                "tokenizer or prompt keys have changed; leave dataset_fingerprint out to train on "
                "them"
            )
        order = PromptSampler(len(prompts), args.seed, args.shuffle_dataset)
        return prompts, order, args.total_steps(len(prompts))

    def load(self, dataset: Any, name: str) -> Prompts:
        """Return the prompts of a dataset.

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
            name: self.load(data, f"eval_dataset {name}".rstrip())
            for name, data in datasets.items()
        }
