"""`rlhf-pg preview`: what the model will see of a recipe's data, before anything is trained."""

import io
import logging
import string
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import partial
from itertools import groupby
from logging.handlers import BufferingHandler
from pathlib import Path
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

from rlhf_pg.boundary.output_files import write_file
from rlhf_pg.boundary.quoted import visible
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import CONFIGS, config_type_of, split_recipe
from rlhf_pg.config.fields import parameters
from rlhf_pg.config.parse import fail, parse
from rlhf_pg.data.inputs import load_task, resolve_data, with_date
from rlhf_pg.data.prompts import load_prompts
from rlhf_pg.data.rendering import special_tokens, warn_of_turn_end
from rlhf_pg.episodes.factory import load_tools
from rlhf_pg.models.attention import max_positions
from rlhf_pg.models.loading import (
    check_directory,
    has_tokenizer,
    is_adapter,
    stop_token_ids,
    tokenizer_from_pretrained,
    tokenizer_of,
)
from rlhf_pg.rewards.named import check_arguments, resolve_rewards
from rlhf_pg.supervised import examples
from rlhf_pg.supervised.bradley_terry import load_pairs
from rlhf_pg.tasks import warm_start

logger = logging.getLogger(__name__)

# Columns with a meaning here, of which a run may read a part.
KNOWN = (
    "prompt",
    "completion",
    "answer",
    "messages",
    "text",
    "chosen",
    "rejected",
    "margin",
)
# Styles of a token, by whether it is special and whether it is learnt.
STYLES = {
    (False, False): "",
    (False, True): "green",
    (True, False): "black on bright_black",
    (True, True): "black on green",
}


class ShownText(NamedTuple):
    """A text of a row."""

    title: str
    ids: list[int]
    learnt: list[bool]


class Preview(NamedTuple):
    """What is shown of a run's data."""

    data: Dataset
    columns: Mapping[str, str]  # what each column is for
    rows: Sequence[ShownText]
    ends: Sequence[int] = ()  # the last token that is learnt of each row that is not cut


def preview(flags: Sequence[str]) -> None:
    """Show rows as the model will see them, columns, lengths and stop tokens; no weights load."""
    recipes, flags = split_recipe(flags)
    options, keys = parser_of("preview").parse_known_args(flags)
    kind = config_type_of(recipes, keys, CONFIGS)
    args = parse(kind, ["--config", *map(str, recipes), *keys], "rlhf-pg preview")
    handler = BufferingHandler(10_000)
    package = logging.getLogger("rlhf_pg")
    package.addHandler(handler)
    package.propagate = False  # its warnings are shown below
    try:
        task = None if args.task is None else load_task(args.task, args.task_options, args.seed)
        tokenizer = tokenizer_without_weights(args, task)
        args = with_date(args, tokenizer, date.today().isoformat())
        stops = stops_without_weights(args, tokenizer)
        positions = positions_without_weights(args)
        of_algorithm = {"sft": of_examples, "reward_model": of_pairs}
        made = of_algorithm.get(args.algorithm, of_prompts)(args, task, tokenizer, positions)
        warn(made, args, tokenizer, stops)
    finally:
        package.removeHandler(handler)
        package.propagate = True
    lines = [record.getMessage() for record in handler.buffer]
    show = partial(print_preview, made, tokenizer, stops, lines, options.rows)
    show(Console(soft_wrap=True, highlight=False))
    if options.out is not None:
        file = io.StringIO()
        page = Console(record=True, file=file, force_terminal=True, width=100, highlight=False)
        show(page)
        write_file(Path(options.out), [page.export_html().encode()])
        print(f"wrote {options.out}")


def tokenizer_without_weights(args: Any, task: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the run's model, with the tokens and template of the config."""
    path = args.model_name_or_path
    if path is None and (task is None or task.make_tokenizer is None):
        fail("no model: give the key model_name_or_path")
    if path is None:
        tokenizer = task.make_tokenizer()
    else:
        check_directory(path)
        if not has_tokenizer(path) and is_adapter(path):
            path = PeftConfig.from_pretrained(path).base_model_name_or_path
        tokenizer = tokenizer_from_pretrained(path, trust_remote_code=args.trust_remote_code)
    needs_eos = args.algorithm != "reward_model"
    return tokenizer_of(args, None, tokenizer, needs_eos)


def stops_without_weights(args: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a completion of the run's model, by its files."""
    path = args.model_name_or_path
    remote = args.trust_remote_code
    generation = None
    if path is not None:
        try:
            generation = GenerationConfig.from_pretrained(path, trust_remote_code=remote)
        except OSError:  # then transformers makes it of the model's
            config = AutoConfig.from_pretrained(path, trust_remote_code=remote)
            generation = GenerationConfig.from_model_config(config)
    model: Any = SimpleNamespace(generation_config=generation)
    return stop_token_ids(model, tokenizer)


def positions_without_weights(args: Any) -> int | None:
    path = args.model_name_or_path
    remote = args.trust_remote_code
    if path is None or is_adapter(path):
        return None
    model: Any = SimpleNamespace(config=AutoConfig.from_pretrained(path, trust_remote_code=remote))
    return max_positions(model)


def of_prompts(
    args: Any, task: Any, tokenizer: PreTrainedTokenizerBase, positions: int | None
) -> Preview:
    _, data, _ = resolve_data(args)
    named, _ = load_tools(args)
    if named is None and task is not None:
        named = task.tools
    tools = [get_json_schema(tool) for tool in named or ()]
    prompts = load_prompts(
        data,
        tokenizer,
        args.max_prompt_length,
        args.long_prompts,
        tools=tools,
        max_completion_length=args.max_completion_length,
        positions=None if args.agent_program else positions,
    )
    rewards, _, _ = resolve_rewards((), args, None if task is None else task.reward)
    check_arguments(rewards, {"train_dataset": prompts.rows})
    functions = [reward for reward in rewards if callable(reward)]
    read = {name for function in functions for name in parameters(function)}
    read |= {name for function in functions for name in getattr(function, "columns", ())}
    columns = columns_of(data, {"prompt", "privileged_prompt"}, args)
    columns |= dict.fromkeys(read & {*data.column_names}, "the rewards")
    rows = [read_only(f"prompt {number}", ids) for number, ids in enumerate(prompts.tokens)]
    return Preview(prompts.rows, columns, rows)


def of_examples(
    args: Any, task: Any, tokenizer: PreTrainedTokenizerBase, positions: int | None
) -> Preview:
    limit = examples.limit_of(args, positions)
    if task is None:
        data, _ = examples.resolve_data(args, None, None)
        made = examples.load_examples(data, args, tokenizer, limit, "train_dataset")
    else:
        data = task.train_dataset
        tools = [get_json_schema(tool) for tool in task.tools]
        made = warm_start.examples(task.demonstrations(), tokenizer, tools)
    names = data.column_names
    completion = examples.completion_column(names)
    whole = next((name for name in ("messages", "conversations", "text") if name in names), "")
    used = {whole} if completion is None else {"prompt", completion}
    rows = []
    for number, example in enumerate(made):
        learnt = [label != examples.UNLABELLED for label in example["labels"]]
        rows.append(ShownText(f"example {number}", list(example["input_ids"]), learnt))
    return Preview(
        data, columns_of(data, used, args), rows, examples.ends_of(made, args, positions)
    )


def of_pairs(
    args: Any, task: Any, tokenizer: PreTrainedTokenizerBase, positions: int | None
) -> Preview:
    data, _ = examples.resolve_data(args, None, None) if task is None else task.pairs()
    rows = []
    limit = examples.limit_of(args, positions)
    pairs = load_pairs(data, args, tokenizer, limit, "train_dataset")
    for number, pair in enumerate(pairs):
        rows.append(read_only(f"pair {number}, chosen", pair.chosen))
        rows.append(read_only(f"pair {number}, rejected", pair.rejected))
    used = {"prompt", "chosen", "rejected", "margin"}
    return Preview(data, columns_of(data, used, args), rows)


def read_only(title: str, ids: Sequence[int]) -> ShownText:
    return ShownText(title, list(ids), [False] * len(ids))


def columns_of(data: Dataset, used: set[str], args: Any) -> dict[str, str]:
    """Return what a run does with each column."""
    fields = string.Formatter().parse(args.prompt_template or "")
    in_prompt = {name for _, name, _, _ in fields if name}
    columns = {}
    for name in data.column_names:
        if name in in_prompt:
            columns[name] = "the prompt"
        elif name in used or name in ("tools", "system"):
            columns[name] = "the model"
        elif name in KNOWN:
            columns[name] = "ignored: another column is read"
        else:
            columns[name] = "ignored: unknown"
    return columns


def warn(made: Preview, args: Any, tokenizer: PreTrainedTokenizerBase, stops: list[int]) -> None:
    """Warn of what is odd in the data."""
    different = len({tuple(row.ids) for row in made.rows})
    if 2 * different <= len(made.rows):
        logger.warning("of %d texts only %d are different", len(made.rows), different)
    if args.algorithm == "sft":
        special = special_tokens(tokenizer).ids
        endless = sum(end not in special for end in made.ends)
        if endless:
            text = "%d of %d examples end without a special token: no end is learnt there"
            logger.warning(text, endless, len(made.ends))
        for end in {*made.ends} & special - {*stops}:
            text = "%r ends what is learnt: training makes it a stop token of final/"
            logger.warning(text, tokenizer.decode([end]))
    elif args.algorithm != "reward_model":
        if not isinstance(made.data[0]["prompt"], str):
            warn_of_turn_end(tokenizer, stops)
        elif tokenizer.chat_template:
            logger.warning(
                "prompts are plain text, but the tokenizer has a chat template: set "
                "apply_chat_template if the model was trained with it"
            )


def print_preview(
    made: Preview,
    tokenizer: PreTrainedTokenizerBase,
    stops: Sequence[int],
    warnings: Iterable[str],
    count: int,
    console: Console,
) -> None:
    has_colours = console.color_system is not None
    for row in made.rows[:count]:
        console.rule(Text(row.title), align="left")
        console.print(as_text(row, tokenizer, has_colours))
    table = Table("column", "goes to")
    for name, use in made.columns.items():
        table.add_row(Text(visible(name)), use)
    console.rule()
    console.print(table)
    lengths = [len(row.ids) for row in made.rows]
    middle, high = np.percentile(lengths, [50, 99], method="higher")
    console.print(
        f"{len(made.data)} rows; tokens: median {middle}, 99 % {high}, longest {max(lengths)}"
    )
    names = ", ".join(visible(tokenizer.decode([stop])) for stop in stops)
    console.print(Text(f"a completion ends at {names}"))
    for warning in warnings:
        console.print(Text(f"warning: {visible(warning)}", style="yellow"))
    if has_colours:
        legend = Text("special token", STYLES[True, False])
        console.print(Text.assemble(legend, " ", ("learnt", STYLES[False, True])))
    else:
        console.print(Text("«learnt»"))


def as_text(row: ShownText, tokenizer: PreTrainedTokenizerBase, has_colours: bool) -> Text:
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
