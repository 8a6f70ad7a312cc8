"""Training of a reward model on preference pairs, with the `Trainer` of transformers."""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from rlhf_pg.boundary.streams import outliving_readers
from rlhf_pg.checkpoint.run_dir import begun
from rlhf_pg.config import RewardModelConfig
from rlhf_pg.data.chat import encode
from rlhf_pg.data.records import pad_rows
from rlhf_pg.models import about, check_directory, disable_dropout, from_pretrained, max_positions
from rlhf_pg.rewards.reward_model import encode_whole, score_tokenizer, sequence_scores, with_eos

# Names of the weights that `transformers` adds to a checkpoint that was not a classifier.
NEW_HEADS = ("score.", "classifier.", "pre_classifier.", "pooler.")

Pairs = list[dict[str, list[int]]]


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute the negative log-likelihood of preferences (Bradley & Terry 1952; Christiano et al.
    2017).

        P(chosen over rejected) = sigmoid(r_chosen - r_rejected)
        L = -mean log sigmoid(r_chosen - r_rejected)

    Args:
        chosen, rejected: (B,) scores.
    """
    return -nn.functional.logsigmoid(chosen - rejected).mean()


@outliving_readers()
def train_reward_model(
    args: RewardModelConfig,
    model: str | PathLike[str] | PreTrainedModel | None = None,
    processing_class: PreTrainedTokenizerBase | None = None,
    train_dataset: Dataset | None = None,
    eval_dataset: Dataset | None = None,
) -> dict[str, float]:
    """Train a reward model, and save it with its tokenizer in `args.output_dir/final`.

    An earlier one is set aside.

    Args:
        model: a path or Hub id (a language model gets a new head), or a loaded sequence classifier
            with `num_labels` 1; by default `args.model_name_or_path`. Dropout is set to 0.
        processing_class: the tokenizer; by default the one saved with the model.
        train_dataset: columns `chosen` and `rejected`, strings or chat messages; with a column
            `prompt` they continue it, without it they are whole texts or conversations.
        eval_dataset: held-out pairs with the same columns.

    Returns:
        `eval_accuracy` (the share of held-out pairs with r_chosen > r_rejected) and `eval_loss`,
        also in `args.output_dir/metrics.json`.

    Raises:
        ValueError: no model, a fault in a row of a dataset, or an `args.output_dir` that another
            run uses or that cannot be written to.
    """
    set_seed(args.seed)
    scorer = _load(model or args.model_name_or_path, args.trust_remote_code)
    tokenizer = score_tokenizer(
        processing_class, scorer, "the reward model", args.trust_remote_code
    )
    limit = _longest(scorer, args.max_length)
    datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    pairs = {
        name: tokenize_pairs(data, tokenizer, limit, name, args.append_eos)
        for name, data in datasets.items()
    }
    scorer.config.pad_token_id = tokenizer.pad_token_id
    disable_dropout(scorer)
    trainer = PairTrainer(
        model=PairScorer(scorer),
        args=_training_arguments(args),
        data_collator=lambda rows: collate(rows, tokenizer.pad_token_id),
        compute_metrics=_accuracy,
        **pairs,
    )
    final, is_main = Path(args.output_dir) / "final", trainer.is_world_process_zero()
    with begun(final.parent) if is_main else nullcontext():
        trainer.train()
        metrics = trainer.evaluate()
        metrics = {name: metrics[name] for name in ("eval_accuracy", "eval_loss")}
        if is_main:
            tokenizer.save_pretrained(final)
            scorer.save_pretrained(final)
            (final.parent / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
            print(f"held-out accuracy {metrics['eval_accuracy']:.3f}; saved {final}", flush=True)
    return metrics


class PairScorer(nn.Module):
    """A module that scores pairs with a model, so that DDP sees every forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Score (B,2,T) ids and mask, chosen before rejected, as (B,2)."""
        ids, mask = input_ids.flatten(0, 1), attention_mask.flatten(0, 1)
        return sequence_scores(self.model, ids, mask).view(-1, 2)


class PairTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` with the Bradley-Terry loss of pairs."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Any:
        scores = model(**inputs)
        loss = bradley_terry_loss(scores[:, 0], scores[:, 1])
        return (loss, scores) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, scores (B,2), and the column of the chosen text."""
        with torch.no_grad():
            loss, scores = self.compute_loss(model, self._prepare_inputs(inputs), True)
        return loss, scores, torch.zeros_like(scores[:, 0], dtype=torch.long)


def _accuracy(evaluation: EvalPrediction) -> dict[str, float]:
    """Compute the share of pairs in the right order; a tie counts as wrong."""
    scores = evaluation.predictions
    return {"accuracy": float((scores[:, 0] > scores[:, 1]).mean())}


def tokenize_pairs(
    dataset: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    name: str,
    eos: bool = False,
) -> Pairs:
    """Tokenize both texts of every pair; strings end with the EOS, if `eos` says so.

    Raises:
        ValueError: no dataset or rows, a missing column, or a pair that is not one: equal texts, a
            text of more than `limit` tokens, chats without a chat template. Dataset and row are
            named.
    """
    if not isinstance(dataset, Dataset) or not len(dataset):
        raise ValueError(f"{name}: give a datasets.Dataset with columns chosen and rejected")
    missing = {"chosen", "rejected"} - set(dataset.column_names)
    if missing:
        raise ValueError(
            f"{name}: the dataset has no column {sorted(missing)[0]!r} (it has "
            f"{', '.join(dataset.column_names)}): rename the one that holds these texts"
        )
    return [_tokenize_pair(pair, tokenizer, limit, name, i, eos) for i, pair in enumerate(dataset)]


def _tokenize_pair(
    pair: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    name: str,
    row: int,
    eos: bool,
) -> dict[str, list[int]]:
    if pair["chosen"] == pair["rejected"]:
        raise ValueError(f"{name}: chosen and rejected are the same in row {row}: drop the row")
    try:
        ids = {key: _whole(pair, key, tokenizer, row, eos) for key in ("chosen", "rejected")}
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    longest = max(map(len, ids.values()))
    if limit is not None and longest > limit:
        raise ValueError(
            f"{name}: a text in row {row} has {longest} tokens, more than the {limit} that "
            "max_length or the model's positions allow: drop such pairs, or shorten them"
        )
    return ids


def _whole(
    pair: dict[str, Any], key: str, tokenizer: PreTrainedTokenizerBase, row: int, eos: bool
) -> list[int]:
    if "prompt" in pair:
        return encode_whole(pair["prompt"], pair[key], tokenizer, row, eos)
    ids = encode(pair[key], tokenizer, row, key, open_turn=False)
    return with_eos(ids, tokenizer) if eos and isinstance(pair[key], str) else ids


def collate(rows: Pairs, pad: int) -> dict[str, Tensor]:
    """Pad pairs to (B,2,T) ids and mask, chosen before rejected."""
    texts: Sequence[Sequence[int]] = [row[key] for row in rows for key in ("chosen", "rejected")]
    ids, mask = pad_rows(texts, pad)
    shape = (len(rows), 2, -1)
    return {"input_ids": ids.view(shape), "attention_mask": mask.view(shape)}


def _load(
    model: str | PathLike[str] | PreTrainedModel | None, trust_remote_code: bool
) -> PreTrainedModel:
    if model is None:
        raise ValueError("no model: give model=... or the key model_name_or_path")
    if not isinstance(model, str | PathLike):
        return model
    with about("model_name_or_path"):
        check_directory(model)
        # The checkpoint's dtype may be bfloat16, which would lose small updates.
        return from_pretrained(
            AutoModelForSequenceClassification,
            model,
            NEW_HEADS,
            trust_remote_code=trust_remote_code,
            num_labels=1,
            dtype=torch.float32,
        )


def _longest(model: PreTrainedModel, max_length: int | None) -> int | None:
    limits = [limit for limit in (max_length, max_positions(model)) if limit is not None]
    return min(limits, default=None)


def _training_arguments(args: RewardModelConfig) -> TrainingArguments:
    return TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        accelerator_config={"split_batches": True},  # batch_size is global
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.max_steps // 10,
        seed=args.seed,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        logging_steps=max(1, args.max_steps // 10),
        disable_tqdm=not sys.stdout.isatty(),
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
