"""On-policy distillation: the model that teaches, and the prompts that only it sees."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import about, frames, tell
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.batch import Batch, pad_rows
from rlhf_pg.data.chat import encode
from rlhf_pg.data.prompts import Prompts, Tools, tools_of_row
from rlhf_pg.data.sources import PRIVILEGED
from rlhf_pg.kl import divergence
from rlhf_pg.models import loading
from rlhf_pg.models.adapters import share_frozen
from rlhf_pg.models.attention import fix_longrope, max_positions
from rlhf_pg.models.loading import load_model
from rlhf_pg.models.policy import Policy, Teacher
from rlhf_pg.rewards.functions import CallResult, RewardInputs, Source

KEY = "teacher_model_name_or_path"


def load_teacher(
    args: PolicyGradientConfig,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    most_tokens: int,
) -> Teacher | None:
    """Load the teacher that a config names, if any; ValueError if its tokens differ from the
    policy's. A teacher that adapts the same model as a LoRA policy shares its frozen weights.
    """
    name = args.teacher_model_name_or_path
    if name is None:
        return None
    adapted = policy.model
    kind = args.teacher_divergence
    top_k = args.teacher_top_k
    compare = partial(divergence, kind=kind, mixture=args.teacher_mixture, top_k=top_k)
    module = policy
    moves = args.teacher_mixup_alpha > 0
    if name != "policy":
        dtype = getattr(torch, args.dtype)
        code = args.trust_remote_code
        with about(KEY):
            adapts = PeftConfig.from_pretrained(name) if loading.is_adapter(name) else None
            base = adapts.base_model_name_or_path if adapts else ""
            if (
                base
                and isinstance(adapted, PeftModel)
                and base == adapted.get_base_model().name_or_path
            ):
                model = PeftModel.from_pretrained(share_frozen(adapted).unload(), name)
            else:
                options = dict(loading.init_options(args))
                for key in loading.LOCATION_KEYS - {loading.ATTENTION}:
                    options.pop(key, None)
                model = load_model(name, dtype, trust_remote_code=code, options=options)
            path = name if loading.has_tokenizer(name) else base
            if known := bool(path and loading.has_tokenizer(path)):
                loading.check_same_tokens(str(path), tokenizer, code)
        # Models of one family may have different numbers of embedding rows without a token.
        rows, theirs = (x.get_output_embeddings().weight.shape[0] for x in (adapted, model))
        if theirs < rows or (theirs > rows and not known):
            raise ValueError(f"{KEY}: {name} has {theirs} rows of embeddings, the policy {rows}")
        if theirs > rows:
            model.resize_token_embeddings(rows)
        model.to(device).requires_grad_(False)
        module = Policy(model, args.temperature, False, most_tokens, policy.chunk_size)
        moves = False
    teacher = Teacher(module, moves, compare if args.compares_distributions else None)
    if teacher.divergence is not None and (policy.head is None or teacher.layer == [None]):
        raise ValueError(
            "teacher_divergence: the head of policy or teacher is not a linear layer after the "
            "hidden states, so only log-probabilities of tokens can be compared: set sampled"
        )
    return teacher


def check_privileged(
    teacher: Teacher,
    args: PolicyGradientConfig,
    prompts: Prompts,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools,
    has_function: bool,
) -> int | None:
    """Return the most tokens of a prompt that leaves the teacher room for a completion, None for no
    limit; ValueError if a prompt is longer, or the teacher knows no more than the policy.
    """
    positions = max_positions(teacher.policy.model)
    room = None if positions is None else positions - args.max_completion_length
    rows = prompts.rows
    longest = prompts.longest
    hidden: list[Any] = list(rows[PRIVILEGED]) if PRIVILEGED in rows.column_names else []
    if room is not None and longest > room and not (hidden or has_function):
        raise ValueError(f"{KEY}: the teacher has room for prompts of {room} tokens, not {longest}")
    for i, prompt in enumerate(hidden):
        if prompt is not None:
            schemas = tools_of_row(tools, rows[i])
            ids = encode(prompt, tokenizer, i, PRIVILEGED, tools=schemas, most=room)
            longest = max(longest, len(ids))
    fix_longrope(teacher.policy.model, longest + args.max_completion_length)
    teaches_itself = args.teacher_model_name_or_path == "policy" and (
        args.teacher_mixup_alpha == 1 or args.policy_loss == "none"
    )
    if teaches_itself and not hidden and not has_function:
        raise ValueError(
            f"{KEY}: the policy cannot teach itself what it knows: give a privileged_prompt"
        )
    return room


def privileged_batch(
    batch: Batch,
    function: Callable[..., Any] | None,
    rewards: Sequence[float],
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools,
    most: int | None,
) -> Batch | None:
    """Return the batch with the prompts that the teacher sees; None if they are the policy's.

    They come from the column `privileged_prompt`, or from a function that returns a list with one
    for each completion of a prompt. A row with None is not taught, and has no action tokens. The
    function is called like a reward function, and also gets the total `rewards`. A prompt has at
    most `most` tokens.

    Raises:
        ValueError: the function failed, a prompt cannot be used, or rows are trees.
    """
    prompts: Sequence[Any] = batch.columns.get(PRIVILEGED, ())
    if function is not None:
        columns = {**batch.columns, "rewards": rewards}
        inputs = RewardInputs(batch.prompts, batch.completions, batch.token_lists(), columns)
        source = Source.of(PRIVILEGED, function)
        groups = batch.groups.tolist()
        prompts = []
        for _, run in groupby(range(len(groups)), key=lambda i: groups[i]):
            rows = list(run)
            try:
                of_group = function(**inputs.select(rows).arguments(source, CallResult(len(rows))))
            except (Exception, SystemExit) as error:
                raise ValueError(f"{PRIVILEGED} raised {tell(error)}{frames(error)}") from error
            if not isinstance(of_group, list) or len(of_group) != len(rows):
                raise ValueError(f"{PRIVILEGED} must return a list with one prompt per completion")
            prompts += of_group
    if not prompts:
        return None
    if batch.parent_offsets is not None:
        raise ValueError(f"{PRIVILEGED} does not support an agent's branches: leave it out")
    tokens = []
    for i, (prompt, row) in enumerate(zip(prompts, batch.rows, strict=True)):
        schemas = tools_of_row(tools, {**row.columns, "prompt": row.prompt})
        ids = [0]
        if prompt is not None:
            ids = encode(prompt, tokenizer, i, PRIVILEGED, tools=schemas, most=most)
        tokens.append(ids)
    padded, mask = (x.to(batch.groups.device) for x in pad_rows(tokens, 0, left=True))
    taught = torch.tensor([x is not None for x in prompts], device=batch.groups.device)
    return batch.with_columns(
        prompt_ids=padded, prompt_mask=mask, action_mask=batch.action_mask & taught[:, None]
    )
