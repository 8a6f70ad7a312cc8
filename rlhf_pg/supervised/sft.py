"""Supervised fine-tuning on completions, conversations or plain text."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    DataCollatorWithFlattening,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

from rlhf_pg import models
from rlhf_pg.boundary.launcher import check_precision
from rlhf_pg.config import SFTConfig
from rlhf_pg.data.batch import pad_rows
from rlhf_pg.data.chat import set_template_arguments
from rlhf_pg.supervised.examples import (
    UNLABELLED,
    Example,
    Rows,
    load_examples,
    load_sets,
    settle_data,
)
from rlhf_pg.supervised.training import run, training_arguments

# Largest change of packed logits by rounding, in units of their standard deviation.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.05}


def train_sft(
    args: SFTConfig,
    model: str | os.PathLike[str] | PreTrainedModel | None = None,
    processing_class: PreTrainedTokenizerBase | None = None,
    train_dataset: Rows | None = None,
    eval_dataset: Rows | Mapping[str, Rows] | None = None,
    peft_config: Any = None,
) -> dict[str, float]:
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
    args = args.located()
    check_precision(args.dtype)
    set_seed(args.seed)
    rows, sets = settle_data(args, train_dataset, eval_dataset)
    peft_config, model = models.adapter_of(args, peft_config), model or args.model_name_or_path
    if model is None:
        raise ValueError("no model: give model=... or the key model_name_or_path")
    frozen = peft_config is not None
    computes: torch.dtype = getattr(torch, args.dtype)
    if args.save_merged and (not frozen or args.load_in_4bit):
        raise ValueError("save_merged is for a model with an adapter on unquantized weights")
    device = torch.device("cpu")
    if args.load_in_4bit and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    policy = models.load_policy(
        model,
        computes if frozen else torch.float32,  # bfloat16 would lose small updates
        device,
        peft_config,
        models.quantization(computes) if args.load_in_4bit else None,
        args.trust_remote_code,
        models.init_options(args),
    )
    revision = args.model_init_kwargs.get("revision")
    tokenizer = models.load_tokenizer(
        processing_class, policy, args.pad_token, args.trust_remote_code, revision
    )
    set_template_arguments(tokenizer, args.chat_template_kwargs)
    limit = longest(policy, args.max_length)
    load = partial(load_examples, args=args, tokenizer=tokenizer, limit=limit)
    examples = load(rows, name="train_dataset")
    return fit(args, policy, tokenizer, examples, load_sets(load, sets))


def longest(model: PreTrainedModel, max_length: int | None) -> int | None:
    """Return the most tokens of a text; None if there is no limit."""
    limits = [limit for limit in (max_length, models.max_positions(model)) if limit is not None]
    return min(limits, default=None)


def fit(
    args: SFTConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[Example],
    held_out: dict[str, list[Example]] | list[Example] | None = None,
    use_cpu: bool = False,
) -> dict[str, float]:
    """Train a loaded model on examples, and save it; see `train_sft`."""
    args = args.on("cuda" if torch.cuda.is_available() and not use_cpu else "cpu")
    if args.disable_dropout:
        models.disable_dropout(model)
    if args.gradient_checkpointing:
        models.checkpoint_activations(model, args.gradient_checkpointing == "offload")
    if args.packing:
        check_packing(model, examples)
    most_tokens = max(len(row["input_ids"]) for row in examples)
    vocabulary = model.config.get_text_config().vocab_size
    padded = partial(pad_examples, pad=tokenizer.pad_token_id)
    trainer = SFTTrainer(
        model=model,
        args=training_arguments(
            args, most_tokens, use_cpu, vocabulary, label_smoothing_factor=args.label_smoothing
        ),
        train_dataset=examples,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=DataCollatorWithFlattening() if args.packing else padded,
        compute_metrics=_token_means,
    )
    trainer.held_out_collator = padded
    if args.save_merged and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        raise ValueError(
            "save_merged needs whole weights, which FSDP and DeepSpeed split: leave it out, and "
            "merge the adapter of final/ in one process"
        )

    def save(path: Path) -> None:
        trainer.save_model(str(path))
        if trainer.is_world_process_zero():
            (path / "training_args.bin").unlink(missing_ok=True)
            if args.save_merged:
                models.merged(model).save_pretrained(path / "merged")
                tokenizer.save_pretrained(path / "merged")

    return run(trainer, args, save)


class SFTTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` whose held-out loss is a mean over all tokens, not over batches."""

    data_collator: Any
    held_out_collator: Any = None  # pads, since packed rows cannot be counted one by one

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return batches of held-out examples, padded."""
        packs, self.data_collator = self.data_collator, self.held_out_collator
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = packs

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any
    ) -> tuple[None, Tensor, Tensor]:
        """Return the loss, the correct tokens and the trained tokens of each row, (B,3)."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.pop("labels")
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits
        sums = token_sums(logits, labels)
        return None, sums, torch.zeros_like(sums[:, 0])


def token_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood, the correct tokens and the trained tokens of each row,
    (B,3), from logits (B,T,V), each for the next token, and labels (B,T), `UNLABELLED` for tokens
    that are not trained on.
    """
    logits, labels = logits[:, :-1].float(), labels[:, 1:]
    learnt = labels != UNLABELLED
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    right = (logits.argmax(-1) == labels) & learnt
    return torch.stack([losses.sum(1), right.sum(1), learnt.sum(1)], dim=1)


def _token_means(evaluation: EvalPrediction) -> dict[str, float]:
    """Compute loss and accuracy as means over all trained tokens."""
    loss, right, learnt = evaluation.predictions.astype(np.float64).sum(0)
    return {"loss": loss / learnt, "mean_token_accuracy": right / learnt}


def pad_examples(rows: Sequence[Example], pad: int) -> dict[str, Tensor]:
    """Pad examples on the right to (B,T) ids, labels and mask."""
    ids, mask = pad_rows([row["input_ids"] for row in rows], pad)
    labels, _ = pad_rows([row["labels"] for row in rows], UNLABELLED)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask.long()}


@torch.no_grad()
def check_packing(model: PreTrainedModel, examples: Sequence[Example]) -> None:
    """Refuse to pack if an example changes the logits of the next one in its row (ValueError)."""
    short = [list(row["input_ids"][:16]) for row in examples[:2]]
    first, second = short[0], short[-1]
    rows = model.get_input_embeddings().weight.shape[0]
    other = [(token + 1) % rows for token in first]
    collate = DataCollatorWithFlattening()
    logits = []
    with models.evaluating(model):
        for before in (first, other):
            batch = collate([{"input_ids": before}, {"input_ids": second}])
            del batch["labels"]
            inputs = {name: value.to(model.device) for name, value in batch.items()}
            logits.append(model(**inputs, use_cache=False).logits[0, len(first) :].float())
    change = (logits[0] - logits[1]).abs().max() / logits[0].std()
    if not change <= ROUNDING.get(model.dtype, 1e-3):
        raise ValueError(
            f"packing: the attention of {type(model).__name__} mixes the examples that are packed "
            "into a row: leave packing out"
        )
