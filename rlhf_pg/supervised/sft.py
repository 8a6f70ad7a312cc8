"""Supervised fine-tuning on completions, conversations or plain text."""

from collections.abc import Mapping, Sequence
from itertools import chain
from os import PathLike
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from rlhf_pg.boundary.terminal import say
from rlhf_pg.config import SFTConfig
from rlhf_pg.data import Batch, Row
from rlhf_pg.data.rendering import special_tokens
from rlhf_pg.models.attention import fix_longrope, max_positions
from rlhf_pg.models.loading import adapter_of, add_stop_tokens, policy_of, stop_token_ids
from rlhf_pg.models.policy import (
    Policy,
    PolicyOutput,
    checkpoint_activations,
    disable_dropout,
)
from rlhf_pg.run.device import auto_dtype
from rlhf_pg.run.learner import Outputs
from rlhf_pg.run.loop import Callback, check_callbacks
from rlhf_pg.run.objective import Term, action_tokens, likelihood
from rlhf_pg.run.token_budget import chunk_size
from rlhf_pg.runtime import Runtime
from rlhf_pg.supervised.examples import (
    UNLABELLED,
    Example,
    Rows,
    ends_of,
    load_all,
    load_examples,
    resolve_data,
)
from rlhf_pg.supervised.trainer import Metrics, SupervisedTrainer, token_budget


def train_sft(
    args: SFTConfig,
    model: str | PathLike[str] | PreTrainedModel | None = None,
    processing_class: PreTrainedTokenizerBase | None = None,
    train_dataset: Rows | None = None,
    eval_dataset: Rows | Mapping[str, Rows] | None = None,
    peft_config: Any = None,
    callbacks: Sequence[Callback] = (),
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
        callbacks: see `Callback`.

    Returns:
        `eval_loss` (nats per trained token) and `eval_mean_token_accuracy` (the share of trained
        tokens that are the likeliest), if there is held-out data; also in
        `args.output_dir/metrics.json`.

    Raises:
        ValueError: no model or data, an invalid row, or an `args.output_dir` that another run uses
            or that cannot be written to.
    """
    check_callbacks(callbacks)
    args = args.locate()
    runtime = Runtime(args.ddp_timeout, deterministic=args.deterministic)
    args = args.on(runtime.device.type, auto_dtype(args, runtime))
    set_seed(args.seed)
    data = resolve_data(args, train_dataset, eval_dataset)
    peft_config = adapter_of(args, peft_config)
    model = model or args.model_name_or_path
    if model is None:
        raise ValueError("no model: give model=... or the key model_name_or_path")
    policy = policy_of(
        model,
        args,
        runtime.loading_device,
        peft_config,
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
    return fit(args, policy, tokenizer, examples, held_out, runtime, callbacks)


def learn_stops(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lasts: Sequence[int]
) -> list[int]:
    """Add the special tokens that end examples to the model's stop tokens, which are saved with it;
    return those that neither the model nor the tokenizer had.
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
    callbacks: Sequence[Callback] = (),
) -> Metrics:
    """Train a loaded model on examples, and save it; see `train_sft`."""
    longest = max(len(row["input_ids"]) for row in chain(examples, *held_out.values()))
    fix_longrope(model, longest)  # the same for rows of all lengths
    tokens = token_budget(args, longest, runtime)
    policy = Policy(
        model,
        most_tokens=tokens,
        chunk_size=chunk_size(runtime),
        label_smoothing=args.label_smoothing,
    )
    if args.disable_dropout:
        disable_dropout(policy)
    else:
        policy.keep_dropout()
    if args.gradient_checkpointing:
        checkpoint_activations(model, args.gradient_checkpointing == "offload")
    trainer = SFTTrainer(
        policy,
        model,
        tokenizer,
        examples,
        held_out,
        args,
        runtime,
        tokens,
        callbacks,
    )
    trainer.train()
    return trainer.measured


class SFTTrainer(SupervisedTrainer[Example]):
    """Trains a policy on the likelihood of labelled tokens."""

    def terms(self) -> list[Term]:
        """Return the negative log-likelihood, smoothed by the head (`TokenDistribution`)."""
        return [likelihood("nll", action_tokens, 1.0)]

    def batch_of(self, examples: Sequence[Example]) -> Batch:
        """Return the rows of examples: the first token is the prompt, since nothing predicts it."""
        rows = []
        for number, example in enumerate(examples):
            ids = example["input_ids"][1:]
            row = Row(
                prompt_ids=example["input_ids"][:1],
                ids=ids,
                logprobs=[0.0] * len(ids),
                actions=[label != UNLABELLED for label in example["labels"][1:]],
                group=number,
            )
            rows.append(row)
        return Batch.of(rows, self.runtime.device)

    def measure(self, batch: Batch) -> Outputs:
        """Return loss, right tokens and learnt tokens of each row, (B,) each."""
        output: PolicyOutput = self.learner.backend(batch, compares=True)
        assert output.right is not None
        return {
            "loss": -output.logprobs.double().sum(1),
            "right": output.right.double().sum(1),
            "learnt": batch.action_mask.double().sum(1),
        }

    def summarize(self, numbers: Tensor) -> Metrics:
        loss, right, learnt = numbers.sum(0).tolist()
        return {"loss": loss / learnt, "mean_token_accuracy": right / learnt}
