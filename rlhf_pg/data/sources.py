"""Load datasets by name from files, folders and the Hub; split, mix and rename them."""

import glob
import logging
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from datasets import Dataset, DatasetDict
from datasets.data_files import DataFilesDict, get_data_patterns

from rlhf_pg.boundary.quoted import about, tell
from rlhf_pg.config.files import names_function
from rlhf_pg.config.inputs import DataConfig
from rlhf_pg.data import readers
from rlhf_pg.data.messages import read_tools, storable
from rlhf_pg.data.prompts import as_dataset, from_rows, permutation, refuse_unread

logger = logging.getLogger(__name__)

# The builder of `datasets` for each kind of file.
KINDS = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".text": "text",
    ".arrow": "arrow",
}
PLAIN = {"name", "data_dir", "data_files", "sep"}  # what our readers know of a builder
SHARE = 0.05  # held out by default
PRIVILEGED = "privileged_prompt"  # the key, and the column
PACKED = (".gz", ".bz2", ".xz", ".zst")


class Loaded(NamedTuple):
    """The datasets that a config names, with renamed columns."""

    train: Dataset | None
    eval: dict[str, Dataset]  # by name; a single one has the name ""


def load_datasets(args: DataConfig, seed: int, train: bool = True) -> Loaded:
    """Load a config's training data, unless `train` is False, and evaluation data.

    The seed decides which share is split off, and the order of a mixture. ValueError if a dataset,
    split or column does not exist; the message has the key and the existing names.
    """
    names = list(args.dataset_name)
    share = args.dataset_test_split
    if share == "test" and not args.eval_dataset_name:
        opened = [{*open_splits(name, args.dataset_config)} for name in names]
        if all(len(splits) == 1 and "test" not in splits for splits in opened):
            logger.warning(
                "dataset_test_split: %s has no split test, so a share of %g is held out instead",
                ", ".join(names),
                SHARE,
            )
            share = SHARE
    parts: list[Dataset] = []
    held_out: dict[str, Dataset] = {}
    for name in names if train or isinstance(share, float) else []:
        part = open_dataset(name, args.dataset_config, args.dataset_train_split)
        if isinstance(share, float):
            part, held_out[name] = _split_off(part, share, seed)
        parts.append(part)
    split = share if isinstance(share, str) else None
    if split is not None or args.eval_dataset_name:
        for name in args.eval_dataset_name or names:
            held_out[name] = open_dataset(name, args.dataset_config, split)
    parts = [rename_columns(part, args) for part in parts]
    mixed = _mix(parts, args.dataset_weights, seed)
    evaluated: dict[str, Dataset] = {}
    for name, data in held_out.items():
        short = Path(name).name.partition(".")[0] if len(held_out) > 1 else ""
        if short in evaluated:
            short = name
        evaluated[short] = rename_columns(data, args)
    return Loaded(mixed if train else None, evaluated)


def open_splits(name: str, config: str | None) -> Mapping[str, Dataset]:
    """Open a file, a folder, or a configuration of a Hub id; ValueError if it cannot be read."""
    path = Path(name).expanduser().absolute()
    suffix = _suffix(path)
    kind = KINDS.get(suffix)
    if not path.exists() and (kind or name.startswith(("/", "~", "."))):
        raise ValueError(f"dataset_name: there is no file or folder {name!r} ({path})")
    if path.is_file() and kind is None:
        raise ValueError(
            f"dataset_name {str(path)!r} has an unknown file type: use one of {', '.join(KINDS)}"
        )
    files: Any = glob.escape(str(path))  # a pattern, for `datasets`
    try:
        if path.is_file():
            options = {"sep": "\t"} if suffix == ".tsv" else {}
            builder = datasets.load_dataset_builder(kind, data_files=files, **options)
        elif (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            saved: Any = datasets.load_from_disk(str(path))  # from `save_to_disk`
            return saved if isinstance(saved, DatasetDict) else {"train": saved}
        elif path.is_dir() and glob.has_magic(str(path.resolve())):
            files = DataFilesDict.from_patterns(get_data_patterns(files), files, [*KINDS])
            builder = datasets.load_dataset_builder(str(path), config, data_files=files)
        else:
            builder = datasets.load_dataset_builder(name, config)
        return _read(builder)
    except Exception as error:  # from `datasets`, the Hub or a parser
        raise ValueError(f"dataset_name {name!r} cannot be loaded: {tell(error)}") from error


def _suffix(path: Path) -> str:
    """Return the suffix of a file before it was packed."""
    if path.suffix in PACKED:
        return Path(path.stem).suffix
    return path.suffix


def _read(builder: datasets.DatasetBuilder) -> Mapping[str, Dataset]:
    """Read files by our readers, if they are of one kind and no card has options for them."""
    config = builder.config
    files = builder.config.data_files or {}
    kinds = {KINDS.get(_suffix(Path(file))) for paths in files.values() for file in paths}
    options = {key for key, value in vars(config).items() if value != getattr(type(config), key)}
    if kinds == {builder.name} <= readers.KINDS and options <= PLAIN:
        download = datasets.DownloadManager().download
        local = {str(split): download(list(paths)) for split, paths in files.items()}
        return readers.read(local, builder.name, getattr(config, "sep", ","))
    builder.download_and_prepare()
    return builder.as_dataset()  # type: ignore[no-any-return]


def open_dataset(name: str, config: str | None, split: str | None) -> Dataset:
    """Open splits, in the syntax of `datasets`; by default the only one, or else "test"."""
    opened = open_splits(name, config)
    if not split:
        split = next(iter(opened)) if len(opened) == 1 else "test"
    elif split == "all":
        split = "+".join(opened)
    sizes = {key: len(data) for key, data in opened.items()}
    try:
        ranges = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"dataset_name {name!r} has no split {split!r}, but {', '.join(opened)}: name one; "
            "for held-out data dataset_test_split may also be a share such as 0.05"
        ) from error
    parts = []
    for span in ranges:
        rows = range(span.from_, span.to)
        parts.append(opened[span.splitname].select(rows))
    return datasets.concatenate_datasets(parts)


def _split_off(data: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split off a random share of the rows, in order; ValueError if no row is left."""
    count = max(1, round(share * len(data)))
    if count >= len(data):
        raise ValueError(
            f"dataset_test_split {share} of {len(data)} rows leaves none to train on: give more "
            "rows, or name a split"
        )
    chosen = set(permutation(len(data), seed)[:count])
    kept = [row for row in range(len(data)) if row not in chosen]
    return data.select(kept), data.select(sorted(chosen))


def _mix(parts: Sequence[Dataset], weights: Sequence[float] | None, seed: int) -> Dataset | None:
    """Concatenate datasets, or sample from them by weight until each was used up once."""
    if len(parts) < 2:
        return parts[0] if parts else None
    try:
        parts = _aligned(parts)
        if weights is None:
            return datasets.concatenate_datasets(parts)
        return datasets.interleave_datasets(
            parts,
            probabilities=[weight / sum(weights) for weight in weights],
            seed=seed,
            stopping_strategy="all_exhausted",
        )
    except Exception as error:  # columns of different types
        raise ValueError(
            f"the datasets of dataset_name cannot be mixed: {tell(error)}. Give their columns the "
            "same names and types"
        ) from error


def _aligned(parts: Sequence[Dataset]) -> list[Dataset]:
    """Return datasets whose columns have the same types, with numbers beside texts as texts."""
    with suppress(ValueError):
        datasets.concatenate_datasets(list(parts))
        return list(parts)
    table = from_rows([row for part in parts for row in part], _as_texts)
    ends = accumulate(map(len, parts), initial=0)
    return [table.select(range(start, end)) for start, end in pairwise(ends)]


def _as_texts(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values} - {type(None)}
    if str in kinds and kinds <= {str, int, float}:
        return [None if value is None else str(value) for value in values]
    return values


def rename_columns(data: Dataset, args: DataConfig) -> Dataset:
    """Rename columns by `dataset_columns`; ValueError if that is impossible."""
    wanted = {theirs: ours for ours, theirs in args.dataset_columns.items()}
    if len(wanted) < len(args.dataset_columns):
        raise ValueError("dataset_columns gives two names to one column: name each only once")
    names = data.column_names
    for theirs in wanted:
        if theirs not in names:
            raise ValueError(
                f"dataset_columns: the dataset has no column {theirs!r}; it has {', '.join(names)}"
            )
    changed = {theirs: ours for theirs, ours in wanted.items() if theirs != ours}
    if not changed:
        return data
    hidden = [ours for ours in changed.values() if ours in names and ours not in changed]
    return data.remove_columns(hidden).rename_columns(changed)


def with_prompts(
    data: Dataset,
    args: DataConfig,
    of_texts: bool = True,
    key: str = "prompt_template",
) -> Dataset:
    """Make the column `prompt` from each row: by a template, with a system message, as a chat.

    If the only column is `text` (a text file), it has the prompts, unless a template names it or
    `of_texts` is False. ValueError if the template names a missing column, or does not fit a row.
    """
    template = getattr(args, key)
    columns = data.column_names
    try:
        parts = list(string.Formatter().parse(template or ""))
    except ValueError as error:
        raise ValueError(f"{key} cannot be read: {error}") from error
    names = [name for _, name, _, _ in parts if name is not None]
    if of_texts and columns == ["text"] and "text" not in names:
        data = data.rename_column("text", "prompt")
        columns = ["prompt"]
    for name in names:
        if name not in columns:
            raise ValueError(
                f"{key} names {{{name}}}, but the dataset has the columns "
                f"{', '.join(columns)}; double the braces of plain text"
            )
    changes = args.system_prompt is not None or args.apply_chat_template
    if "prompt" in columns and not changes:
        first = next((prompt for prompt in data["prompt"] if isinstance(prompt, list)), None)
        changes = "system" in columns or bool(first and first[0].get("from"))
    if template is None and not (changes and "prompt" in columns):
        return data
    prompts = [_prompt(row, number, names, args, key) for number, row in enumerate(data)]
    others = [name for name in columns if name != "prompt"]
    if not others:
        return Dataset.from_dict({"prompt": prompts})
    return data.select_columns(others).add_column("prompt", prompts)


def _prompt(
    row: Mapping[str, Any],
    number: int,
    names: Sequence[str],
    args: DataConfig,
    key: str,
) -> Any:
    prompt = row.get("prompt")
    template = getattr(args, key)
    where = f"the prompt in row {number}"
    if isinstance(prompt, list):
        prompt = storable(prompt, where)
    system = system_of(row, args) if "system" not in names else args.system_prompt
    if template is not None:
        for name in names:
            if row.get(name) is None:
                raise ValueError(f"{key} names {{{name}}}, which row {number} lacks")
        try:
            if key == PRIVILEGED and isinstance(prompt, list):  # a chat, with another last message
                *before, last = prompt
                text = template.format(**{**row, "prompt": last["content"]})
                prompt = [*before, {**last, "content": text}]
            else:
                prompt = template.format(**row)
        except Exception as error:  # from a conversion or format after the name
            raise ValueError(
                f"{key} cannot be filled with row {number}: {tell(error)}. Double the "
                "braces of plain text"
            ) from error
    if isinstance(prompt, str) and (args.apply_chat_template or args.system_prompt is not None):
        if not prompt.strip():
            raise ValueError(f"{where} is empty: drop the row")
        prompt = [{"role": "user", "content": prompt}]
    if system is None or not isinstance(prompt, list):
        return prompt
    return with_system(prompt, system, where)


def make_prompts(data: Any, args: DataConfig, what: str, of_texts: bool = True) -> Dataset:
    """Make prompts by `with_prompts`, and those that a teacher alone sees; a ValueError begins with
    `what`.
    """
    template = getattr(args, PRIVILEGED, None) or ""
    with about(what):
        data = _functions_as_tools(as_dataset(data))
        refuse_unread(data)
        made = with_prompts(data, args, of_texts)
        if of_texts and {"prompt", "system"} <= {*made.column_names}:
            for number, row in enumerate(made):
                if isinstance(row["prompt"], str):
                    refuse_columns_of_chats(row, args, number)
        has_column = PRIVILEGED in data.column_names and hasattr(args, PRIVILEGED)
        if what != "train_dataset" or names_function(template) or not (template or has_column):
            return made
        if template and "{" not in template:
            raise ValueError(f"{PRIVILEGED} must be FILE.py:FUNCTION, or have columns in braces")
        if not template:
            data = data.select_columns([PRIVILEGED]).rename_column(PRIVILEGED, "prompt")
            of_texts = False
        hidden = with_prompts(data, args, of_texts, PRIVILEGED)["prompt"]
        if has_column:
            made = made.remove_columns(PRIVILEGED)
        return made.add_column(PRIVILEGED, hidden)


def _functions_as_tools(data: Dataset) -> Dataset:
    """Rename OpenAI's older column `functions`, if it has schemas, as `tools`."""
    if "functions" not in data.column_names or "tools" in data.column_names:
        return data
    first = next(filter(None, data["functions"]), None)
    with suppress(ValueError):  # it may be anything else, for rewards
        if read_tools(first, "functions"):
            return data.rename_column("functions", "tools")
    return data


def refuse_columns_of_chats(row: Mapping[str, Any], args: DataConfig, number: int) -> None:
    """Refuse columns of a text that only a chat can obey (ValueError)."""
    for column in ("system", "tools"):
        is_in_prompt = f"{{{column}" in (args.prompt_template or "")
        if row.get(column) and not is_in_prompt:
            raise ValueError(
                f"row {number} is text, but its column {column} is for chats: give messages, set "
                "apply_chat_template, or take the column out"
            )


def system_of(row: Mapping[str, Any], args: DataConfig) -> str | None:
    """Return the system message of a row's chat: its column `system`, or else `system_prompt`;
    ValueError if there are both.
    """
    column = row.get("system") or None
    if column is not None and args.system_prompt is not None:
        raise ValueError("system_prompt: the data have a column system: leave out one of them")
    return args.system_prompt if column is None else column


def with_system(messages: list[Any], system: str, where: str) -> list[Any]:
    """Put a system message before a conversation; ValueError if it has one already."""
    for message in messages:
        if isinstance(message, Mapping) and "system" in (message.get("role"), message.get("from")):
            raise ValueError(
                f"system_prompt: {where} has a system message already: leave system_prompt out"
            )
    return [{"role": "system", "content": system}, *messages]
