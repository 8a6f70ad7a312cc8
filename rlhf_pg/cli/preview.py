"""`rlhf-pg preview`: what the model will see of a recipe's data, before anything is trained."""

import io
import logging
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import groupby
from logging.handlers import BufferingHandler
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from peft import PeftConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from rlhf_pg import models
from rlhf_pg.boundary.quoted import visible
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import CONFIGS, config_type_of, split_recipe
from rlhf_pg.config.fields import parameters
from rlhf_pg.config.parse import fail, parse
from rlhf_pg.data.inputs import load_task, settle_data, with_date
from rlhf_pg.data.prompts import load_prompts
from rlhf_pg.data.rendering import special_tokens, warn_of_turn_end
from rlhf_pg.rewards.named import check_arguments, settle_rewards
from rlhf_pg.supervised import examples
from rlhf_pg.supervised.bradley_terry import load_pairs
from rlhf_pg.tasks import warm_start

# Columns with a meaning here, of which a run may read a part.
KNOWN = ("prompt", "completion", "answer", "messages", "text", "chosen", "rejected", "margin")
# Styles of a token, by whether it is special and whether it is learnt.
STYLES = {
    (False, False): "",
    (False, True): "green",
    (True, False): "black on bright_black",
    (True, True): "black on green",
}


class Shown(NamedTuple):
    """A text of a row."""

    title: str
    ids: list[int]
    learnt: list[bool]


@dataclass
class Preview:
    """What is shown of a run's data."""

    tokenizer: PreTrainedTokenizerBase
    data: Dataset
    columns: Mapping[str, str]  # what each column is for
    rows: Sequence[Shown]
    lengths: list[int]  # tokens of all texts
    stops: list[int]  # tokens that end a completion
    warnings: list[str] = field(default_factory=list)


def preview(flags: Sequence[str]) -> None:
    """Show rows as the model will see them, columns, lengths and stop tokens; no weights load."""
    recipes, flags = split_recipe(flags)
    options, keys = parser_of("preview").parse_known_args(flags)
    kind = config_type_of(recipes, keys, CONFIGS)
    args = parse(kind, ["--config", *map(str, recipes), *keys], "rlhf-pg preview")
    logger = logging.getLogger("rlhf_pg")
    handler = BufferingHandler(10_000)
    logger.addHandler(handler)
    logger.propagate = False  # what it says is shown below
    try:
        made = preview_of(args)
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    lines = [record.getMessage() for record in handler.buffer] + made.warnings
    show(made, lines, options.rows, Console(soft_wrap=True, highlight=False))
    if options.out is not None:
        page = Console(
            record=True, file=io.StringIO(), force_terminal=True, width=100, highlight=False
        )
        show(made, lines, options.rows, page)
        page.save_html(options.out)
        print(f"wrote {options.out}")


def preview_of(args: Any) -> Preview:
    """Read the data of a config, as its run will."""
    task = None if args.task is None else load_task(args.task, args.task_options, args.seed)
    tokenizer = tokenizer_without_weights(args, task)
    args = with_date(args, tokenizer, date.today().isoformat())
    stops = stops_without_weights(args, tokenizer)
    if args.algorithm == "reward_model":
        return of_pairs(args, task, tokenizer, stops)
    if args.algorithm == "sft":
        return of_examples(args, task, tokenizer, stops)
    return of_prompts(args, task, tokenizer, stops)


def tokenizer_without_weights(args: Any, task: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the run's model, with the tokens and template of the config."""
    path = args.model_name_or_path
    if path is None and (task is None or task.make_tokenizer is None):
        fail("no model: give the key model_name_or_path")
    if path is None:
        tokenizer = task.make_tokenizer()
    else:
        models.check_directory(path)
        if not models.has_tokenizer(path) and models.is_adapter(path):
            path = PeftConfig.from_pretrained(path).base_model_name_or_path
        tokenizer = models.tokenizer_from_pretrained(path, trust_remote_code=args.trust_remote_code)
    needs_eos = args.algorithm != "reward_model"
    return models.tokenizer_of(args, None, tokenizer, needs_eos)


def stops_without_weights(args: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a completion of the run's model, by its files."""
    path, remote = args.model_name_or_path, args.trust_remote_code
    generation = None
    if path is not None:
        try:
            generation = GenerationConfig.from_pretrained(path, trust_remote_code=remote)
        except OSError:  # then transformers makes it of the model's
            config = AutoConfig.from_pretrained(path, trust_remote_code=remote)
            generation = GenerationConfig.from_model_config(config)
    model: Any = SimpleNamespace(generation_config=generation)
    return models.stop_token_ids(model, tokenizer)


def of_prompts(args: Any, task: Any, tokenizer: PreTrainedTokenizerBase, stops: Any) -> Preview:
    _, data, _ = settle_data(args)
    tools = [get_json_schema(tool) for tool in task.tools] if task is not None else []
    prompts = load_prompts(data, tokenizer, args.max_prompt_length, args.long_prompts, tools=tools)
    rewards, _, _ = settle_rewards((), args, None if task is None else task.reward)
    check_arguments(rewards, {"train_dataset": prompts.rows})
    read = [parameters(x) | {*getattr(x, "columns", ())} for x in filter(callable, rewards)]
    columns = {}
    for name in data.column_names:
        if name in ("prompt", "tools", "system", "privileged_prompt"):
            columns[name] = "the model"
        elif name in of_template(args):
            columns[name] = "the prompt"
        else:
            is_read = any(name in names for names in read)
            columns[name] = "the rewards" if is_read else "ignored: no reward names it"
    made = Preview(
        tokenizer,
        data,
        columns,
        [read_only(f"prompt of row {n}", ids) for n, ids in enumerate(prompts.tokens)],
        [len(ids) for ids in prompts.tokens],
        stops,
    )
    is_chat = not isinstance(prompts.rows[0]["prompt"], str)
    if is_chat:
        warn_of_turn_end(tokenizer, stops)
    elif tokenizer.chat_template:
        made.warnings.append(
            "prompts are plain text, but the tokenizer has a chat template: set "
            "apply_chat_template if the model was trained with it"
        )
    if len(prompts) < len(data):
        made.warnings.append(f"{len(data) - len(prompts)} of {len(data)} prompts are too long")
    return made


def of_examples(args: Any, task: Any, tokenizer: PreTrainedTokenizerBase, stops: Any) -> Preview:
    if task is None:
        data, _ = examples.settle_data(args, None, None)
        made = examples.load_examples(data, args, tokenizer, args.max_length, "train_dataset")
    else:
        data = task.train_dataset
        tools = [get_json_schema(tool) for tool in task.tools]
        made = warm_start.examples(task.demonstrations(), tokenizer, tools)
    maker = examples.ExampleMaker(
        tokenizer=tokenizer, args=args, columns=data.column_names, limit=None
    )
    whole = next((x for x in ("messages", "conversations", "text") if x in data.column_names), "")
    used = {whole} if maker.completion is None else {"prompt", maker.completion}
    rows = []
    endless = 0
    for number, example in enumerate(made):
        learnt = [label != examples.UNLABELLED for label in example["labels"]]
        row = Shown(f"row {number}", list(example["input_ids"]), learnt)
        rows.append(row)
        last = [id_ for id_, on in zip(row.ids, learnt, strict=True) if on][-1]
        endless += last not in special_tokens(tokenizer).ids
    result = Preview(
        tokenizer,
        data,
        of_columns(data.column_names, used, args),
        rows,
        [len(row.ids) for row in rows],
        stops,
    )
    if endless:
        result.warnings.append(
            f"{endless} of {len(rows)} rows end without a special token: the model does not learn "
            "to stop there"
        )
    if task is None and len(rows) < len(data):
        result.warnings.append(f"{len(data) - len(rows)} of {len(data)} rows are too long")
    return result


def of_pairs(args: Any, task: Any, tokenizer: PreTrainedTokenizerBase, stops: Any) -> Preview:
    if task is None:
        data, _ = examples.settle_data(args, None, None)
    else:
        data, _ = task.pairs()
    pairs = load_pairs(data, args, tokenizer, args.max_length, "train_dataset")
    rows = []
    for number, pair in enumerate(pairs):
        for name, ids in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            rows.append(read_only(f"{name} of row {number}", ids))
    columns = of_columns(data.column_names, {"prompt", "chosen", "rejected", "margin"}, args)
    lengths = [len(row.ids) for row in rows]
    return Preview(tokenizer, data, columns, rows, lengths, stops)


def read_only(title: str, ids: Sequence[int]) -> Shown:
    return Shown(title, list(ids), [False] * len(ids))


def of_template(args: Any) -> set[str]:
    """Return the columns that `prompt_template` names."""
    fields = string.Formatter().parse(args.prompt_template or "")
    return {name for _, name, _, _ in fields if name}


def of_columns(names: Iterable[str], used: set[str], args: Any) -> dict[str, str]:
    """Return what a supervised run does with each column."""
    columns = {}
    for name in names:
        if name in used or name in ("tools", "system"):
            columns[name] = "the model"
        elif name in of_template(args):
            columns[name] = "the prompt"
        elif name in KNOWN:
            columns[name] = "ignored: another column is read"
        else:
            columns[name] = "ignored: unknown"
    return columns


def show(made: Preview, warnings: Sequence[str], count: int, console: Console) -> None:
    """Print a preview."""
    tokenizer = made.tokenizer
    has_colours = console.color_system is not None
    for row in made.rows[:count]:
        console.rule(Text(row.title), align="left")
        console.print(as_text(row, tokenizer, has_colours))
    table = Table("column", "goes to")
    for name, use in made.columns.items():
        table.add_row(Text(visible(name)), use)
    console.rule()
    console.print(table)
    middle, high = np.percentile(made.lengths, [50, 99], method="higher")
    console.print(
        f"{len(made.data)} rows; tokens: median {middle}, 99 % {high}, longest {max(made.lengths)}"
    )
    stops = ", ".join(visible(tokenizer.decode([stop])) for stop in made.stops)
    console.print(Text(f"a completion ends at {stops}"))
    different = len({tuple(row.ids) for row in made.rows})
    if 2 * different <= len(made.rows):
        warnings = [*warnings, f"of {len(made.rows)} rows only {different} are different"]
    for warning in warnings:
        console.print(Text(f"warning: {visible(warning)}", style="yellow"))
    if has_colours:
        legend = Text("special token", STYLES[True, False])
        console.print(Text.assemble(legend, " ", ("learnt", STYLES[False, True])))
    else:
        console.print(Text("«learnt»"))


def as_text(row: Shown, tokenizer: PreTrainedTokenizerBase, has_colours: bool) -> Text:
    """Return tokens as text, with special ones marked and learnt ones coloured, or in brackets."""
    special = special_tokens(tokenizer).ids
    text = Text()
    for learnt, tokens in groupby(zip(row.ids, row.learnt, strict=True), key=lambda x: x[1]):
        brackets = learnt and not has_colours
        text.append("«" if brackets else "")
        for is_special, group in groupby(tokens, key=lambda x: x[0] in special):
            piece = visible(tokenizer.decode([id_ for id_, _ in group]))
            text.append(piece, STYLES[is_special, learnt] if has_colours else "")
        text.append("»" if brackets else "")
    return text
