"""Training of a reward model on preference pairs, with the `Trainer` of transformers."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

from rlhf_pg import models
from rlhf_pg.boundary.launcher import check_precision
from rlhf_pg.config import RewardModelConfig
from rlhf_pg.data.batch import pad_rows
from rlhf_pg.data.chat import set_template_arguments
from rlhf_pg.models.assemble import adapter_of
from rlhf_pg.rewards.reward_model import score_tokenizer, sequence_scores
from rlhf_pg.supervised.examples import load_held_out, named_data
from rlhf_pg.supervised.pairs import Pair, load_pairs
from rlhf_pg.supervised.sft import longest
from rlhf_pg.supervised.training import fingerprint, run, training_arguments

# Names of the head of a classifier, and of the weights that `transformers` adds for one.
HEADS = ("score", "classifier")
NEW_HEADS = ("score.", "classifier.", "pre_classifier.", "pooler.")


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Compute the negative log-likelihood of preferences (Bradley & Terry 1952; Christiano et al.
    2017), by (B,) scores, with the margin of Touvron et al. 2023.

        P(chosen over rejected) = sigmoid(r_chosen - r_rejected)
        L = -mean log sigmoid(r_chosen - r_rejected - m)
    """
    apart = chosen - rejected if margin is None else chosen - rejected - margin
    return -nn.functional.logsigmoid(apart).mean()


def centering_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute the mean of (r_chosen + r_rejected)^2 of (B,) scores, which the differences of the
    Bradley-Terry loss leave open (Eisenstein et al. 2023).
    """
    return (chosen + rejected).square().mean()


def calibration_error(chosen: Tensor, rejected: Tensor, bins: int = 10) -> float:
    """Compute the expected calibration error of a reward model's preferences (Guo et al. 2017).

        p = sigmoid(r_chosen - r_rejected),  confidence = max(p, 1 - p)
        error = sum_b n_b/N |share of pairs in the right order in b - mean confidence in b|

    The bins cut the confidences of the (N,) scores from 1/2 to 1 into equal parts. 0 is perfect: of
    pairs preferred with 80 %, 80 % are in the right order. A tie is half right.
    """
    apart = (chosen - rejected).double()
    confidence = torch.sigmoid(apart.abs())
    right = (apart > 0).double() + (apart == 0).double() / 2
    places = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    excess = torch.zeros(bins, dtype=torch.float64).index_add(0, places, right - confidence)
    return float(excess.abs().sum() / len(apart))


def train_reward_model(
    args: RewardModelConfig,
    model: str | PathLike[str] | PreTrainedModel | None = None,
    processing_class: PreTrainedTokenizerBase | None = None,
    train_dataset: Dataset | None = None,
    eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
    peft_config: Any = None,
) -> dict[str, float]:
    """Train a reward model, and save it with its tokenizer in `args.output_dir/final`.

    An earlier one is set aside.

    Args:
        model: a path or Hub id (a language model, or an adapter of one, gets a new head), or a
            loaded sequence classifier with `num_labels` 1; by default `args.model_name_or_path`.
        processing_class: the tokenizer; by default the one saved with the model.
        train_dataset: columns `chosen` and `rejected`, strings or chat messages; with a column
            `prompt` they continue it, without it they are whole texts or conversations. A column
            `margin` has numbers by which the chosen text should be ahead. By default as
            `args.dataset_name` says.
        eval_dataset: held-out pairs with the same columns, or several by name.
        peft_config: a `peft` config of an adapter to train, which is merged on saving; by default
            as `args.use_peft` says.

    Returns:
        On held-out pairs, `eval_accuracy` (the share with r_chosen > r_rejected), `eval_loss`
        (Bradley-Terry, with margins) and `eval_calibration_error` (see `calibration_error`); also
        in `args.output_dir/metrics.json`.

    Raises:
        ValueError: no model, a fault in a row of a dataset, or an `args.output_dir` that another
            run uses or that cannot be written to.
    """
    args = args.located()
    check_precision(args.dtype)
    set_seed(args.seed)
    adapter = adapter_of(args, peft_config)
    train_dataset, eval_dataset = named_data(args, train_dataset, eval_dataset)
    scorer = _load(
        model or args.model_name_or_path, args.trust_remote_code, models.init_options(args)
    )
    tokenizer = score_tokenizer(
        processing_class,
        scorer,
        "the reward model",
        args.trust_remote_code,
        pad_token=args.pad_token,
        revision=args.model_init_kwargs.get("revision"),
    )
    set_template_arguments(tokenizer, args.chat_template_kwargs)
    limit = longest(scorer, args.max_length)
    load = partial(load_pairs, args=args, tokenizer=tokenizer, limit=limit)
    pairs = load(train_dataset, name="train_dataset")
    held_out = load_held_out(load, eval_dataset)
    longest_text = max(max(len(pair.chosen), len(pair.rejected)) for pair in pairs)
    args = args.on("cuda" if torch.cuda.is_available() else "cpu")
    scorer.config.pad_token_id = tokenizer.pad_token_id
    trained = scorer if adapter is None else _adapted(scorer, adapter, args.dtype)
    if args.disable_dropout:
        models.disable_dropout(trained)
    if args.gradient_checkpointing:
        models.checkpoint_activations(trained, args.gradient_checkpointing == "offload")
    trainer = PairTrainer(
        model=PairScorer(scorer),
        args=training_arguments(args, 2 * longest_text),
        data_collator=partial(collate, pad=tokenizer.pad_token_id),
        train_dataset=pairs,
        eval_dataset=held_out,
        compute_metrics=_held_out,
        compute_loss_func=partial(pair_loss, center=args.center_rewards_coefficient),
    )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError("a reward model is trained by DDP: launch it without FSDP and DeepSpeed")

    def save(path: Path) -> None:
        if trainer.is_world_process_zero():
            for parameter in trained.parameters():  # merging in bfloat16 would lose small changes
                parameter.data = parameter.data.float()
            tokenizer.save_pretrained(path)
            models.merged(trained).save_pretrained(path)

    return run(trainer, args, save, fingerprint([pair._asdict() for pair in pairs]))


class PairScorer(nn.Module):
    """A module that scores pairs with a model, so that DDP sees every forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Score (B,2,T) ids and mask, chosen before rejected, as (B,2)."""
        ids, mask = input_ids.flatten(0, 1), attention_mask.flatten(0, 1)
        return sequence_scores(self.model, ids, mask).view(-1, 2)


def pair_loss(
    scores: Tensor,
    margins: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    center: float | None = None,
) -> Tensor:
    """Compute the loss of (B,2) scores, chosen before rejected, as their share of a batch of
    `num_items_in_batch` pairs over all processes (by default B); `center` weighs `centering_loss`.
    """
    chosen, rejected = scores.unbind(1)
    loss = bradley_terry_loss(chosen, rejected, margins)
    if center is not None:
        loss = loss + center * centering_loss(chosen, rejected)
    return loss if num_items_in_batch is None else loss * len(scores) / num_items_in_batch


class PairTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` of pairs, whose labels are their margins."""

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any
    ) -> tuple[None, Tensor, Tensor]:
        """Return scores (B,2) and margins (B,)."""
        inputs = self._prepare_inputs(inputs)
        margins = inputs.pop("labels")
        with torch.no_grad():
            return None, model(**inputs), margins


def _held_out(evaluation: EvalPrediction) -> dict[str, float]:
    """Compute loss, the share of pairs in the right order (a tie is wrong), and calibration."""
    chosen, rejected = torch.tensor(evaluation.predictions, dtype=torch.float64).unbind(1)
    margins = torch.tensor(evaluation.label_ids, dtype=torch.float64)
    return {
        "accuracy": float((chosen > rejected).double().mean()),
        "calibration_error": calibration_error(chosen, rejected),
        "loss": float(bradley_terry_loss(chosen, rejected, margins)),
    }


def collate(rows: Sequence[Pair], pad: int) -> dict[str, Tensor]:
    """Pad pairs to (B,2,T) ids and mask, chosen before rejected; their margins are labels (B,)."""
    ids, mask = pad_rows([ids for row in rows for ids in (row.chosen, row.rejected)], pad)
    shape = (len(rows), 2, -1)
    margins = torch.tensor([row.margin for row in rows], dtype=torch.float32)
    return {"input_ids": ids.view(shape), "attention_mask": mask.view(shape), "labels": margins}


def _adapted(model: PreTrainedModel, config: Any, dtype: str) -> PeftModel:
    """Freeze a classifier and add an adapter to it, in place; its head is trained as a whole."""
    config = copy.deepcopy(config)
    config.task_type = "SEQ_CLS"
    head = next(name for name in HEADS if hasattr(model, name))
    config.modules_to_save = sorted({*(config.modules_to_save or ()), head})
    for name, parameter in model.named_parameters():
        if not name.startswith(head):  # what is trained as a whole stays in float32
            parameter.data = parameter.data.to(getattr(torch, dtype))
    return models.add_adapter(model, config)


def _load(
    model: str | PathLike[str] | PreTrainedModel | None, code: bool, options: Mapping[str, Any]
) -> PreTrainedModel:
    """Load a classifier, or a language model with its adapter, whose sum gets a new head."""
    if model is None:
        raise ValueError("no model: give model=... or the key model_name_or_path")
    if not isinstance(model, str | PathLike):
        models.set_options(model, options)
        return model
    with models.about("model_name_or_path"):
        models.check_directory(model)
        if not models.is_adapter(model):
            return _load_classifier(model, code, options)
        path = str(model)
        with models.opening("adapter", path):
            config = PeftConfig.from_pretrained(path)
        base = config.base_model_name_or_path
        if config.task_type != "CAUSAL_LM" or not base:
            raise ValueError(
                f"the adapter {path} is of kind {config.task_type}, on {base}: give one of a "
                "language model that says what its base model is, or merge it first"
            )
        whole = models.merged(
            models.load_model(path, torch.float32, trust_remote_code=code, options=options)
        )
        classifier = _load_classifier(base, code, options)
        classifier.base_model.load_state_dict(whole.base_model.state_dict())
        if models.has_tokenizer(path):
            classifier.name_or_path = path
        return classifier


def _load_classifier(
    model: str | PathLike[str], trust_remote_code: bool, options: Mapping[str, Any]
) -> PreTrainedModel:
    models.check_options(str(model), options, trust_remote_code)
    # The checkpoint's dtype may be bfloat16, which would lose small updates.
    return models.from_pretrained(
        AutoModelForSequenceClassification,
        model,
        NEW_HEADS,
        trust_remote_code=trust_remote_code,
        num_labels=1,
        dtype=torch.float32,
        **options,
    )
