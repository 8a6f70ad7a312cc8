"""Train a reward model on preference pairs."""

import copy
import dataclasses
import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from rlhf_pg.boundary.quoted import about, show
from rlhf_pg.boundary.user_code import LARGEST, finite
from rlhf_pg.checkpoint import atomic
from rlhf_pg.config import RewardModelConfig
from rlhf_pg.data import Batch, Row
from rlhf_pg.data.chat import encode
from rlhf_pg.data.messages import read_tools
from rlhf_pg.data.prompts import as_dataset
from rlhf_pg.data.sources import SHARE, refuse_columns_of_chats, system_of, with_system
from rlhf_pg.losses import Loss
from rlhf_pg.masking import widen
from rlhf_pg.models.adapters import add_adapter, merge
from rlhf_pg.models.attention import fix_longrope
from rlhf_pg.models.loading import (
    adapter_of,
    check_directory,
    check_options,
    from_pretrained,
    has_tokenizer,
    init_options,
    is_adapter,
    load_model,
    opening,
    set_options,
)
from rlhf_pg.models.packing import lay_out_padded
from rlhf_pg.models.policy import checkpoint_activations, train_as_evaluated
from rlhf_pg.rewards.reward_model import check_head, encode_whole, sequence_scores, with_eos
from rlhf_pg.rewards.scores import at_end
from rlhf_pg.run.device import auto_dtype
from rlhf_pg.run.learner import Outputs
from rlhf_pg.run.loop import Callback, check_callbacks
from rlhf_pg.run.objective import Term
from rlhf_pg.runtime import Runtime
from rlhf_pg.supervised.examples import (
    left_over,
    load_all,
    repeat_prompts,
    resolve_data,
    split_repeated,
    without_prompt,
)
from rlhf_pg.supervised.trainer import Metrics, SupervisedTrainer, token_budget

logger = logging.getLogger(__name__)

# Names of a classifier's head, whose weights `transformers` adds.
HEADS = ("score", "classifier")
NEW_HEADS = ("score.", "classifier.", "pre_classifier.", "pooler.")


READ = {"chosen", "rejected", "margin", "system", "tools"}  # columns beside the prompt


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Compute the negative log-likelihood of preferences (Bradley & Terry 1952; Christiano et al.
    2017), by (B,) scores, with the margin of Touvron et al. 2023.

        P(chosen over rejected) = sigmoid(r_chosen - r_rejected)
        L = -mean log sigmoid(r_chosen - r_rejected - m)
    """
    return pair_losses(chosen, rejected, margin).mean()


def pair_losses(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Compute the loss of each pair, (B,), whose mean is `bradley_terry_loss`."""
    apart = chosen - rejected if margin is None else chosen - rejected - margin
    return -nn.functional.logsigmoid(apart)


def centering_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute the mean of (r_chosen + r_rejected)^2 of (B,) scores. The Bradley-Terry loss depends
    on differences alone, and leaves the sums open (Eisenstein et al. 2023).
    """
    return pair_centerings(chosen, rejected).mean()


def pair_centerings(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute the square of each pair, (B,), whose mean is `centering_loss`."""
    return (chosen + rejected).square()


def calibration_error(chosen: Tensor, rejected: Tensor, bins: int = 10) -> float:
    """Compute the expected calibration error of a reward model's preferences (Guo et al. 2017).

        p = sigmoid(r_chosen - r_rejected),  confidence = max(p, 1 - p)
        error = sum_b n_b/N |share of pairs in the right order in b - mean confidence in b|

    The bins divide the confidences of the (N,) scores from 1/2 to 1 into equal parts. 0 is perfect:
    80 % of the pairs with confidence 80 % are in the right order. A tie is half right. NaN if a
    score is.
    """
    apart = (chosen - rejected).double()
    if apart.isnan().any():
        return math.nan
    confidence = torch.sigmoid(apart.abs())
    right = (apart > 0).double() + (apart == 0).double() / 2
    bin_numbers = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    excess = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_numbers, right - confidence)
    return float(excess.abs().sum() / len(apart))


def train_reward_model(
    args: RewardModelConfig,
    model: str | PathLike[str] | PreTrainedModel | None = None,
    processing_class: PreTrainedTokenizerBase | None = None,
    train_dataset: Dataset | None = None,
    eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
    peft_config: Any = None,
    callbacks: Sequence[Callback] = (),
) -> Metrics:
    """Train a reward model, and save it with its tokenizer in `args.output_dir/final`.

    The arguments are those of `train_sft`, except:

    Args:
        model: a path or Hub id (a language model, or an adapter of one, gets a new head), or a
            loaded sequence classifier with `num_labels` 1; by default `args.model_name_or_path`.
        train_dataset: columns `chosen` and `rejected`, strings or chat messages; with a column
            `prompt` they continue it, without it they are whole texts or conversations. A column
            `margin` has numbers by which the chosen text should be ahead. By default the dataset
            `args.dataset_name`.
        peft_config: a `peft` config of an adapter, which is merged on saving.

    Returns:
        On held-out pairs, `eval_accuracy` (the share with r_chosen > r_rejected), `eval_loss`
        (Bradley-Terry, with margins) and `eval_calibration_error` (see `calibration_error`); also
        in `args.output_dir/metrics.json`.
    """
    check_callbacks(callbacks)
    args = args.locate()
    runtime = Runtime(args.ddp_timeout, deterministic=args.deterministic)
    args = args.on(runtime.device.type, auto_dtype(args, runtime))
    set_seed(args.seed)
    adapter = adapter_of(args, peft_config)
    names_held_out = args.eval_dataset_name or args.dataset_test_split
    if args.dataset_name and eval_dataset is None and not names_held_out:
        logger.warning(
            "no dataset_test_split is set: a share of %g of the pairs is held out", SHARE
        )
        args = dataclasses.replace(args, dataset_test_split=SHARE)
    data = resolve_data(args, train_dataset, eval_dataset)
    scorer = _load(model or args.model_name_or_path, args)
    check_head(scorer, "the reward model")
    args, tokenizer, pairs, held_out = load_all(
        load_pairs, args, scorer, processing_class, data, runtime.today(), needs_eos=False
    )
    scorer.config.pad_token_id = tokenizer.pad_token_id
    trained = scorer if adapter is None else _adapt(scorer, adapter)
    if args.gradient_checkpointing:
        checkpoint_activations(trained, args.gradient_checkpointing == "offload")
    sizes = [(len(x.chosen), len(x.rejected)) for x in chain(pairs, *held_out.values())]
    fix_longrope(scorer, max(map(max, sizes)))  # the same for rows of all lengths
    longest = max(map(sum, sizes))
    trainer = RewardModelTrainer(
        PairScorer(scorer, not args.disable_dropout),
        trained,
        tokenizer,
        pairs,
        held_out,
        args,
        runtime,
        token_budget(args, longest, runtime),
        callbacks,
    )
    trainer.train()
    return trainer.measured


class Pair(NamedTuple):
    """Two texts as token ids, and the margin by which the first should be ahead."""

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
    """Tokenize both texts of every pair; strings end with the EOS if `args.append_eos`.

    ValueError, with the name of the dataset, if there are no rows, a column is missing, or a pair
    is invalid: equal texts, a text of more than `limit` tokens, chats without a chat template.
    """
    with about(name):
        dataset = as_dataset(dataset)
        missing = {"chosen", "rejected"} - set(dataset.column_names)
        if missing:
            raise ValueError(
                f"the dataset has no column {min(missing)!r} (it has "
                f"{', '.join(dataset.column_names)}): rename one by dataset_columns"
            )
        has_prompt = "prompt" in dataset.column_names
        repeated = has_prompt and repeat_prompts(dataset, "chosen", "rejected")
        others = {*dataset.column_names} - READ
        if not has_prompt and others and isinstance(dataset[0]["chosen"], str):
            logger.warning(
                "there is no column prompt, so chosen and rejected are whole texts: %s goes unread",
                ", ".join(sorted(others)),
            )
        pairs: list[Pair | None] = []
        for row, texts in enumerate(dataset):
            pair = _tokenize_pair(texts, args, tokenizer, row, repeated)
            size = max(len(pair.chosen), len(pair.rejected))
            if limit is None or size <= limit:
                pairs.append(pair)
                continue
            pairs.append(None)
            if args.long_examples == "error":
                raise ValueError(
                    f"a text in row {row} has {size} tokens, more than the {limit} of max_length "
                    "or the model: set long_examples to drop, or shorten them"
                )
    return left_over(pairs, name, "pairs")


def _tokenize_pair(
    pair: Mapping[str, Any],
    args: RewardModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    row: int,
    repeated: bool,
) -> Pair:
    has_prompt = "prompt" in pair
    prompt = pair.get("prompt")
    tools = read_tools(pair.get("tools"), f"tools in row {row}")
    both = []
    for key in ("chosen", "rejected"):
        where = f"{key} in row {row}"
        text = without_prompt(prompt, pair[key]) if repeated else pair[key]
        asked = prompt
        if isinstance(text, str) and isinstance(prompt, list):
            text = [{"role": "assistant", "content": text}]
        if isinstance(text, list) and isinstance(prompt, str):
            asked = [{"role": "user", "content": prompt}]
        if isinstance(text, list) and isinstance(asked, list):
            asked, text = split_repeated(asked, text, row, key)
        if isinstance(text, str):
            refuse_columns_of_chats(pair, args, row)
        system = system_of(pair, args)
        if isinstance(prompt, str) and isinstance(asked, list) and system is not None:
            asked = with_system(asked, system, where)
        if has_prompt:
            ids = encode_whole(asked, text, tokenizer, row, args.append_eos, tools=tools)
        else:
            if system is not None and isinstance(text, list):
                text = with_system(text, system, where)
            ids = encode(text, tokenizer, row, key, open_turn=False, tools=tools)
            if args.append_eos and isinstance(text, str):
                ids = with_eos(ids, tokenizer)
        both.append(ids)
    if both[0] == both[1]:
        raise ValueError(
            f"chosen and rejected have the same tokens in row {row}: drop the row, or look at what "
            "the chat template leaves out"
        )
    value = pair.get("margin", 0.0)
    with suppress(TypeError, ValueError):  # a column of CSV may be text
        value = float(value)
    margin = finite(value)
    if margin is None or abs(margin) > LARGEST:
        raise ValueError(
            f"the margin in row {row} must be a finite number, up to {LARGEST:g}, got {show(value)}"
        )
    return Pair(array("i", both[0]), array("i", both[1]), margin)


class PairScores(NamedTuple):
    """The scores of the texts of each pair, (B,), in at least float32."""

    chosen: Tensor
    rejected: Tensor


class PairScorer(nn.Module):
    """A classifier that scores pairs; it trains with dropout if it `drops`."""

    window = 0.0  # no row is packed

    def __init__(self, model: PreTrainedModel, drops: bool = False) -> None:
        super().__init__()
        self.model = model
        self.drops = drops

    def train(self, mode: bool = True) -> Self:
        """Switch train mode; without dropout the model trains in evaluation mode."""
        super().train(mode)
        if mode and not self.drops:
            train_as_evaluated(self.model)
        return self

    def forward(self, batch: Batch) -> PairScores:
        """Score the texts of each pair: the first and the last path of its row. Paths come row by
        row, in order of creation; a blank row has one.
        """
        inputs = lay_out_padded(batch).inputs
        scores = sequence_scores(self.model, inputs["input_ids"], inputs["attention_mask"])
        paths = torch.tensor([row.paths for row in batch.with_counts().host_rows or ()])
        ends = paths.cumsum(0).to(scores.device)
        starts = ends - paths.to(scores.device)
        return PairScores(scores[starts], scores[ends - 1])


def row_of(pair: Pair, group: int = 0) -> Row:
    """Return a pair as a tree: two branches, chosen before rejected, after their common prefix. The
    loss of the pair is at the last token.

        >>> row = row_of(Pair([5, 6, 7], [5, 8]))
        >>> row.prompt_ids, row.ids, row.offsets, row.actions
        ([5], [6, 7, 8], [1, 1, 3], [False, False, True])
    """
    shared = 0
    while shared < min(len(pair.chosen), len(pair.rejected)) - 1:
        if pair.chosen[shared] != pair.rejected[shared]:
            break
        shared += 1
    chosen = list(pair.chosen[shared:])
    rejected = list(pair.rejected[shared:])
    ids = chosen + rejected
    offsets = [1] * len(ids)
    offsets[len(chosen)] = len(chosen) + 1
    if not shared:  # two texts that begin differently
        offsets[0] = offsets[len(chosen)] = 0
    return Row(
        prompt_ids=list(pair.chosen[:shared]),
        ids=ids,
        logprobs=[0.0] * len(ids),
        actions=[False] * (len(ids) - 1) + [True],
        offsets=offsets,
        group=group,
    )


class RewardModelTrainer(SupervisedTrainer[Pair]):
    """Trains a classifier on the Bradley-Terry loss of pairs."""

    args: RewardModelConfig

    def terms(self) -> list[Term]:
        """Return the loss, and `center_rewards_coefficient` times the centring."""
        terms = [Term(name="bradley_terry", loss=pair_loss)]
        if self.args.center_rewards_coefficient is not None:
            coef = self.args.center_rewards_coefficient
            terms.append(Term(name="centering", loss=pair_centering, coef=coef))
        return terms

    def write_model(self, save: atomic.Save, path: Path) -> None:
        """Write the classifier, with its adapter merged, and the tokenizer."""
        weights = self.learner.parts["model"]
        with weights.gathered(self.runtime.main_host), save.step():
            if self.runtime.is_main:
                final = weights.module
                for parameter in final.parameters():  # a merge in bfloat16 would lose small changes
                    parameter.data = widen(parameter.data)
                merge(final).save_pretrained(path)
                self.processing_class.save_pretrained(path)

    def batch_of(self, examples: Sequence[Pair]) -> Batch:
        """Return the rows of pairs, with the margins as rewards at their last tokens."""
        batch = Batch.of([row_of(pair, i) for i, pair in enumerate(examples)], self.runtime.device)
        margins = torch.tensor([pair.margin for pair in examples], device=self.runtime.device)
        return batch.with_columns(rewards=at_end(margins, batch.action_mask))

    def measure(self, batch: Batch) -> Outputs:
        """Return the scores of each pair, and its margin, (B,) each."""
        scores: PairScores = self.learner.backend(batch)
        return {**scores._asdict(), "margin": batch.rewards.nansum(1)}

    def summarize(self, numbers: Tensor) -> Metrics:
        """Compute the share of pairs in the right order (a tie is wrong), calibration and loss."""
        chosen, rejected, margins = numbers.unbind(1)
        return {
            "accuracy": float((chosen > rejected).double().mean()),
            "calibration_error": calibration_error(chosen, rejected),
            "loss": float(bradley_terry_loss(chosen, rejected, margins)),
        }


def pair_loss(new: PairScores, batch: Batch) -> Loss:
    """Return the Bradley-Terry loss of each pair, (B,1)."""
    margins = batch.rewards.nansum(1)
    return pair_losses(new.chosen, new.rejected, margins)[:, None], {}


def pair_centering(new: PairScores, batch: Batch) -> Loss:
    """Return the centring of each pair, (B,1)."""
    return pair_centerings(new.chosen, new.rejected)[:, None], {}


def _adapt(model: PreTrainedModel, config: Any) -> PeftModel:
    """Freeze a classifier and add an adapter, in place; its head is trained in full."""
    config = copy.deepcopy(config)
    config.task_type = "SEQ_CLS"
    head = next(name for name in HEADS if hasattr(model, name))
    config.modules_to_save = sorted({*(config.modules_to_save or ()), head})
    return add_adapter(model, config)


def _load(
    model: str | PathLike[str] | PreTrainedModel | None, args: RewardModelConfig
) -> PreTrainedModel:
    """Load a classifier, or a language model with its adapter merged, which gets a new head."""
    if model is None:
        raise ValueError("no model: give model=... or the key model_name_or_path")
    options = init_options(args)
    if not isinstance(model, str | PathLike):
        set_options(model, options)
        return model.to(getattr(torch, args.dtype))

    def classifier_of(path: str) -> PreTrainedModel:
        check_options(path, options, args.trust_remote_code)
        return from_pretrained(
            AutoModelForSequenceClassification,
            path,
            NEW_HEADS,
            trust_remote_code=args.trust_remote_code,
            **{"num_labels": 1, "dtype": getattr(torch, args.dtype), **options},
        )

    path = str(model)
    with about("model_name_or_path"):
        check_directory(path)
        if not is_adapter(path):
            return classifier_of(path)
        with opening("adapter", path):
            config = PeftConfig.from_pretrained(path)
        base = config.base_model_name_or_path
        if config.task_type != "CAUSAL_LM" or not base:
            raise ValueError(
                f"the adapter {path} is of kind {config.task_type}, on {base}: give one that is "
                "of a language model and names its base model, or merge it first"
            )
        adapted = load_model(
            path,
            getattr(torch, args.dtype),
            trust_remote_code=args.trust_remote_code,
            options=options,
        )
        classifier = classifier_of(base)
        classifier.base_model.load_state_dict(merge(adapted).base_model.state_dict())
        if has_tokenizer(path):
            classifier.name_or_path = path
        return classifier
