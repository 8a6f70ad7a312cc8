"""Supervised fine-tuning on completions, conversations or plain text."""

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from rlhf_pg.boundary.launcher import check_precision
from rlhf_pg.boundary.terminal import say
from rlhf_pg.config import SFTConfig
from rlhf_pg.data.batch import pad_rows
from rlhf_pg.data.rendering import special_tokens
from rlhf_pg.models.attention import max_positions
from rlhf_pg.models.lm_head import evaluating
from rlhf_pg.models.loading import adapter_of, add_stop_tokens, policy_of, stop_token_ids
from rlhf_pg.runtime import Runtime
from rlhf_pg.supervised.examples import (
    UNLABELLED,
    Example,
    Rows,
    ends_of,
    load_all,
    load_examples,
    settle_data,
)
from rlhf_pg.supervised.training import Inputs, LossModule, Metrics, SupervisedTrainer, weight_dtype


def train_sft(
    args: SFTConfig,
    model: str | PathLike[str] | PreTrainedModel | None = None,
    processing_class: PreTrainedTokenizerBase | None = None,
    train_dataset: Rows | None = None,
    eval_dataset: Rows | Mapping[str, Rows] | None = None,
    peft_config: Any = None,
) -> Metrics:
    """Fine-tune a language model, and save it with its tokenizer in `args.output_dir/final`.

    An earlier run there is set aside.

    Args:
        model: a path or Hub id of a model or an adapter, or a loaded model; by default
            `args.model_name_or_path`.
        processing_class: the tokenizer; by default the one saved with the model.
        train_dataset: columns `prompt` and `completion` (or `answer`), as text or chat messages;
            or `messages`, conversations; or `text`. By default the dataset `args.dataset_name`.
        eval_dataset: held-out data of the same kind, or several by name.
        peft_config: a `peft` config of the adapter to train; by default from `args.use_peft`.

    Returns:
        `eval_loss` (nats per trained token) and `eval_mean_token_accuracy` (the share of trained
        tokens that are the likeliest), if there is held-out data; also in
        `args.output_dir/metrics.json`.

    Raises:
        ValueError: no model or data, an invalid row, or an `args.output_dir` that another run uses
            or that cannot be written to.
    """
    args = args.locate()
    check_precision(args.dtype)
    runtime = Runtime()
    set_seed(args.seed)
    data = settle_data(args, train_dataset, eval_dataset)
    peft_config = adapter_of(args, peft_config)
    model = model or args.model_name_or_path
    if model is None:
        raise ValueError("no model: give model=... or the key model_name_or_path")
    policy = policy_of(
        model,
        args,
        runtime.loading_device,
        peft_config,
        dtype=weight_dtype(args) if peft_config is None else None,  # frozen weights do not change
    )
    args, tokenizer, examples, held_out = load_all(
        load_examples,
        args,
        policy,
        processing_class,
        data,
        runtime.today(),
    )
    lasts = ends_of(examples, args, max_positions(policy))
    ends = learn_stops(policy, tokenizer, lasts)
    if ends and runtime.is_main:
        names = ", ".join(repr(tokenizer.decode([end])) for end in ends)
        say(f"{names} ends what is learnt: from now on it ends completions of this model too")
    return fit(args, policy, tokenizer, examples, held_out, runtime)


def learn_stops(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lasts: Sequence[int]
) -> list[int]:
    """Make the special tokens with which examples end stop tokens of the model, as it is saved too;
    return those that were not, for the tokenizer either.
    """
    ends = sorted({*lasts} & special_tokens(tokenizer).ids)
    known = stop_token_ids(model, tokenizer)
    add_stop_tokens(model, ends)
    return [end for end in ends if end not in known]


def fit(
    args: SFTConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[Example],
    held_out: Mapping[str, list[Example]],
    runtime: Runtime,
) -> Metrics:
    """Train a loaded model on examples, and save it; see `train_sft`."""
    if args.packing:
        check_packing(model, examples)
    likelihood = Likelihood(model, tokenizer.pad_token_id, args)
    trainer = SupervisedTrainer(likelihood, model, tokenizer, examples, held_out, args, runtime)
    return trainer.train(partial(trainer.checkpointer.save_models, final=True))


class Likelihood(LossModule):
    """The negative log-likelihood of trained tokens.

        L = -sum_t [(1 - s) log p(y_t) + s/V sum_v log p(v)]

    with the label smoothing s (Szegedy et al. 2016) over a vocabulary of V tokens, in training.
    """

    def __init__(self, model: PreTrainedModel, pad: int, args: SFTConfig) -> None:
        super().__init__(model, args)
        self.vocabulary = model.config.get_text_config().vocab_size
        self.pad = pad
        self.smoothing = args.label_smoothing
        self.packs = DataCollatorWithFlattening() if args.packing else None

    def count(self, row: Example) -> int:
        return int((np.asarray(row["labels"][1:]) != UNLABELLED).sum())

    def size(self, row: Example) -> int:
        return len(row["input_ids"])

    def collate(self, rows: Sequence[Example]) -> Inputs:
        """Pad examples on the right to (B,T) ids, labels and mask, or pack them."""
        if self.packs is not None and self.training:  # held-out rows are counted one by one
            return dict(self.packs(rows))
        ids, mask = pad_rows([row["input_ids"] for row in rows], self.pad)
        labels, _ = pad_rows([row["labels"] for row in rows], UNLABELLED)
        return {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": mask.long(),
        }

    def forward(self, inputs: Inputs) -> Tensor:
        """Return loss, correct tokens and trained tokens of each row, (B,3)."""
        inputs = inputs.copy()
        labels = inputs.pop("labels")
        with self.autocast(inputs):
            logits = self.model(**inputs, use_cache=False).logits
            return token_sums(logits, labels, self.smoothing * self.training)

    def loss(self, numbers: Tensor) -> Tensor:
        return numbers[:, 0].sum()

    def summarize(self, numbers: Tensor) -> Metrics:
        loss, right, learnt = numbers.sum(0).tolist()
        return {"loss": loss / learnt, "mean_token_accuracy": right / learnt}


def token_sums(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the loss, the correct tokens and the trained tokens of each row, (B,3), from logits
    (B,T,V), each for the next token, and labels (B,T), `UNLABELLED` for tokens not trained on.
    """
    logits = logits[:, :-1]
    labels = labels[:, 1:]
    learnt = labels != UNLABELLED
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1),
        labels.flatten(),
        reduction="none",
        label_smoothing=smoothing,
    )
    losses = losses.view(labels.shape)
    right = (logits.argmax(-1) == labels) & learnt
    return torch.stack([losses.sum(1), right.sum(1), learnt.sum(1)], dim=1)


@torch.no_grad()
def check_packing(model: PreTrainedModel, examples: Sequence[Example]) -> None:
    """Refuse to pack if an example changes the logits of the next one in its row (ValueError)."""
    short = [list(row["input_ids"][:16]) for row in examples[:2]]
    first = short[0]
    second = short[-1]
    rows = model.get_input_embeddings().weight.shape[0]
    other = [(token + 1) % rows for token in first]
    collate = DataCollatorWithFlattening()
    logits = []
    with evaluating(model):
        for before in (first, other):
            batch = collate([{"input_ids": before}, {"input_ids": second}])
            del batch["labels"]
            inputs = {name: value.to(model.device) for name, value in batch.items()}
            logits.append(model(**inputs, use_cache=False).logits[0, len(first) :].float())
    change = (logits[0] - logits[1]).abs().max() / logits[0].std()
    rounding = 0.05 if model.dtype == torch.bfloat16 else 1e-3  # in deviations
    if not change <= rounding:
        raise ValueError(
            f"packing: the attention of {type(model).__name__} mixes packed examples: leave it out"
        )
