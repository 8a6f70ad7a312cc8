"""Write the pages that are made from the code, and the tables in others: `make docs`.

What is said of a function is its docstring, and what proves it are the tests with the marker
`@pytest.mark.proves("its.dotted.name")`. `PAGES` lists what is written.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import pkgutil
import re
import sys
import textwrap
import typing
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import audit
import curves
import families
import from_trl
import gpu
import referee_table
import scaling

import rlhf_pg
from rlhf_pg.config import GRPOConfig, PPOConfig, ReinforceConfig, RLOOConfig
from rlhf_pg.config.fields import help_of
from rlhf_pg.config.inputs import AdapterConfig, DataConfig, ModelConfig, RewardsConfig
from rlhf_pg.config.method import MethodConfig, SamplingConfig
from rlhf_pg.config.run import RunConfig, TrainingConfig
from rlhf_pg.config.supervised import RewardModelConfig, SFTConfig, SupervisedConfig
from tests.distributed.layouts import (
    LAYOUTS,
    SUPERVISED,
    SUPERVISED_DOUBLE,
    SUPERVISED_LAYOUTS,
    Layout,
)
from tests.faults.rows import ROWS
from tests.test_layers import FLOORS

ROOT = Path(__file__).resolve().parents[1]
PURE = (
    *("advantages", "losses", "kl", "trainers.controllers", "running_stats", "masking"),
    *("rewards.scores", "report.pass_at_k"),
)
# What formulas are made of, or what holds their state.
NOT_PURE = {"Controllers", "RatioTerms", "clamp_log_ratio", "ratio_terms"}
NOT_PURE |= {"excess", "bounds", "clip_metrics"}
NOT_PURE |= {"against_sampler"}
# The keys by which a config chooses from a module's dict.
REGISTRIES = {"ADVANTAGES": "advantage_estimator", "POLICY_LOSSES": "policy_loss"}

SHARED_KEYS = {ModelConfig: "The model", DataConfig: "The data", RewardsConfig: "The rewards"}
SHARED_KEYS |= {AdapterConfig: "LoRA"}
KEY_TITLES = SHARED_KEYS | {
    TrainingConfig: "Every training",
    RunConfig: "The run",
    SamplingConfig: "Sampling",
    MethodConfig: "The method",
}
# Every algorithm, and functions of its formulas that other libraries define differently.
SURROGATE = ("rlhf_pg.losses.clipped_surrogate", "rlhf_pg.losses.token_weights")
WITHOUT_RATIO = ("rlhf_pg.advantages.discounted_returns", "rlhf_pg.losses.vanilla")
WITH_CRITIC = ("rlhf_pg.advantages.gae", "rlhf_pg.masking.whiten", "rlhf_pg.losses.value_loss")
ALGORITHMS = {
    "grpo": (GRPOConfig, ("rlhf_pg.advantages.group_normalized", *SURROGATE)),
    "rloo": (RLOOConfig, ("rlhf_pg.advantages.leave_one_out", *SURROGATE)),
    "reinforce": (ReinforceConfig, WITHOUT_RATIO),
    "ppo": (PPOConfig, (*WITH_CRITIC, *SURROGATE)),
}
# The shared keys that their pages show too.
FORMULA = {"prompts_per_step", "num_generations", "num_iterations", "num_mini_batches"}
FORMULA |= {"learning_rate", "advantage_estimator", "policy_loss", "epsilon", "epsilon_high"}
FORMULA |= {"aggregation", "normalize_advantages", "beta", "kl_placement", "kl_estimator"}
SUPERVISED_TITLES = {
    SupervisedConfig: "Both",
    SFTConfig: "Fine-tuning",
    RewardModelConfig: "Reward models",
}
UNLISTED = {"algorithm"}  # the same word as the class, and no setting

INTRODUCTION = """\
# Algorithms: function by function

Made by `make docs` from the docstrings of the code and the tests that prove them. All are pure
functions on tensors, (B,T), rows by completion tokens, unless said otherwise.

To see a whole algorithm before its parts, read its single-file edition, which trains to the weights
of the library: [GRPO](../examples/single_file/grpo.py), [RLOO](../examples/single_file/rloo.py),
[REINFORCE](../examples/single_file/reinforce.py), [PPO](../examples/single_file/ppo.py).

## From the papers to the code

"Elsewhere" marks functions that other libraries or well-known texts define differently; the
function's section says how.

"""


@dataclass
class Entry:
    """A function or a class, and what is known of it."""

    name: str  # dotted
    object: Any
    keys: list[str] = field(default_factory=list)  # by which a config chooses it

    @property
    def paragraphs(self) -> list[str]:
        return re.split(r"\n{2,}", inspect.getdoc(self.object) or "")

    @property
    def source(self) -> str | None:
        """The last parentheses of the docstring's first paragraph with a year or a name in them;
        of `estimate_gae`, say, those of `gae`, which has the formula.
        """
        found = re.findall(r"\(((?:[^()]|\([^()]*\))*)\)", " ".join(self.paragraphs[0].split()))
        sources = [text for text in found if re.search(r"(19|20)\d\d|[A-Z]\w{2,}", text)]
        package = sys.modules[_package(self.object)]
        formula = getattr(package, self.object.__name__.removeprefix("estimate_"), self.object)
        if not sources and formula is not self.object:
            return Entry(self.name, formula).source
        return sources[-1] if sources else None

    @property
    def differs(self) -> bool:
        return any(paragraph.startswith("Elsewhere:") for paragraph in self.paragraphs)


def modules() -> Iterator[Any]:
    """The pure modules there are; of a package, the modules in it."""
    for name in PURE:
        if not importlib.util.find_spec(f"rlhf_pg.{name}"):
            continue
        module = importlib.import_module(f"rlhf_pg.{name}")
        inner = pkgutil.iter_modules(getattr(module, "__path__", ()), f"{module.__name__}.")
        yield from [importlib.import_module(m.name) for m in inner] or [module]


def entries(module: Any) -> list[Entry]:
    """The functions and classes of a module that its package hands on or a registry names, less
    the frozen records.
    """
    keys = chosen()
    own = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    own = [x for x in own if inspect.isfunction(x) or inspect.isclass(x)]
    return [Entry(_dotted(x), x, keys[x]) for x in own if x in keys or _is_public(x)]


def chosen() -> dict[Any, list[str]]:
    """The keys by which a config chooses each function, from the registries of all modules."""
    keys = defaultdict(list)
    for module, registry in itertools.product(list(modules()), REGISTRIES):
        for key, function in getattr(module, registry, {}).items():
            keys[function].append(key)
    return keys


def _is_public(x: Any) -> bool:
    package = sys.modules[x.__module__.rpartition(".")[0]]
    inner = package.__name__ in (f"rlhf_pg.{name}" for name in PURE)
    handed_on = vars(package).get(x.__name__) is x if inner else not x.__name__.startswith("_")
    return handed_on and not _is_record(x) and x.__name__ not in NOT_PURE


def _is_record(x: Any) -> bool:
    frozen = getattr(getattr(x, "__dataclass_params__", None), "frozen", False)
    return frozen or (inspect.isclass(x) and issubclass(x, tuple))


def _dotted(x: Any) -> str:
    """The shortest name: that in the package, if the package passes it on."""
    short = getattr(sys.modules[_package(x)], x.__name__, None) is x
    return f"{_package(x) if short else x.__module__}.{x.__name__}"


def _package(x: Any) -> str:
    return ".".join(x.__module__.split(".")[:2])


def proofs() -> dict[Any, list[tuple[str, str]]]:
    """For every object that a test proves: the tests, as (path, name). A method counts for its
    class.
    """
    found: dict[Any, list[tuple[str, str]]] = defaultdict(list)
    for name, path, test in proof_names():
        owner = pkgutil.resolve_name(name.rpartition(".")[0])
        proved = owner if inspect.isclass(owner) else pkgutil.resolve_name(name)
        if (path, test) not in found[proved]:
            found[proved].append((path, test))
    return found


def proof_names() -> Iterator[tuple[str, str, str]]:
    """(dotted name, path of the test, its name) for every name that a marker `proves` has.

    Read off the functions and not off their text, where a name may be made by an f-string.
    """
    for path, name, marks in marked("proves"):
        for proved in _proved(marks):
            yield proved, path, name


def marked(marker: str) -> Iterator[tuple[str, str, Any]]:
    """(path, name, all its markers) of the tests in files with this marker."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if f"mark.{marker}(" not in path.read_text():
            continue
        place = path.relative_to(ROOT)
        module = importlib.import_module(".".join(place.with_suffix("").parts))
        for name, function in vars(module).items():
            if name.startswith("test_") and function.__module__ == module.__name__:
                yield str(place), name, getattr(function, "pytestmark", [])


def _proved(marks: Any) -> Iterator[str]:
    """The names in the markers of a test, and in those of its parameters."""
    for mark in marks:
        if mark.name == "proves":
            yield from mark.args
        elif mark.name == "parametrize":
            for values in mark.args[1]:
                yield from _proved(getattr(values, "marks", ()))


def algorithms() -> str:
    """The text of algorithms.md."""
    proved, table, sections = proofs(), [], []
    for module in modules():
        title = (module.__doc__ or "").partition("\n")[0]
        sections.append(f"## `{module.__name__}`\n\n{title}\n")
        for name, key in REGISTRIES.items():
            if hasattr(module, name):
                sections.append(f"`{name}`, chosen by the key `{key}`.\n")
        for entry in entries(module):
            tests = proved.get(entry.object, [])
            table.append(_row(entry, tests))
            sections.append(_section(entry, tests))
    head = ["| Source | Function | Proved by | Elsewhere |", "|---|---|---|---|"]
    text = INTRODUCTION + "\n".join([*head, *table]) + "\n\n" + "\n".join(sections)
    return text.rstrip("\n") + "\n"


def _row(entry: Entry, tests: list[tuple[str, str]]) -> str:
    link = f"[`{entry.name}`](#{_anchor(entry.name)})"
    count = f"[{len(tests)} tests](#{_anchor(entry.name)})" if len(tests) > 1 else _links(tests)
    cells = [entry.source or "", link, count, "yes" if entry.differs else ""]
    return f"| {' | '.join(_cell(text) for text in cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _anchor(name: str) -> str:
    return name.lower().replace(".", "")


def _links(tests: list[tuple[str, str]], page: str = "docs/algorithms.md") -> str:
    return ", ".join(f"[{name}]({_relative(path, page)})" for path, name in tests)


def _relative(path: str, page: str) -> str:
    """A path from the root of the repository, as a link on a page has it."""
    return os.path.relpath(path, Path(page).parent)


def _section(entry: Entry, tests: list[tuple[str, str]]) -> str:
    lines = [f"### `{entry.name}`\n"]
    if entry.keys:
        lines.append(f"By the name {', '.join(f'`{key}`' for key in entry.keys)}.\n")
    # Not marked as Python, which ruff would format.
    lines.append(f"```text\n{entry.object.__name__}{_signature(entry.object)}\n```\n")
    lines += [rendered(paragraph) for paragraph in entry.paragraphs]
    lines.append(f"Proved by: {_links(tests) or 'no test of its own'}.\n")
    return "\n".join(lines)


def _signature(x: Any) -> str:
    """Names and defaults; types stand in the docstring, as shapes."""
    signature = inspect.signature(x)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def rendered(paragraph: str) -> str:
    """A paragraph of a docstring in Markdown: equations as code, arguments as a list."""
    head, _, rest = paragraph.partition("\n")
    rest = textwrap.dedent(rest)
    if head.startswith("    "):
        return f"```text\n{textwrap.dedent(paragraph)}\n```\n"
    if head in ("Args:", "Raises:"):
        items = [" ".join(item.split()) for item in re.split(r"\n(?=\S)", rest)]
        pairs = [item.partition(": ") for item in items]
        return "\n".join([f"**{head}**\n", *(f"- `{name}`: {text}" for name, _, text in pairs), ""])
    if head == "Returns:":
        return f"**{head}** {rest}\n"
    if head.startswith("Elsewhere:"):
        return f"**Elsewhere:**{paragraph.removeprefix('Elsewhere:')}\n"
    return f"{paragraph}\n"


def of_algorithm(name: str) -> str:
    """The text of an algorithm's page: its equations, keys, presets, results, and who differs."""
    kind, functions = ALGORITHMS[name]
    text = filled((ROOT / "docs" / f"{name}.md").read_text(), "equations", _equations(kind))
    return filled(text, "tables", "\n".join(_tables(kind, functions)))


def _equations(kind: Any) -> str:
    """The docstrings of a trainer and of its formulas, with links to what algorithms.md has."""
    trainer = getattr(rlhf_pg, kind.__name__.replace("Config", "Trainer"))
    own = {name: x for name, x in vars(trainer).items() if name in ("returns", "terms")}
    paragraphs = Entry("", trainer).paragraphs
    for name, x in own.items():
        paragraphs += [f"**`{trainer.__name__}.{name}`**", *Entry("", x).paragraphs]
    text = "\n".join(rendered(p) for p in paragraphs if not re.match(r"Args:| +\w+Trainer\(", p))
    known = (re.escape(f"`{entry.name}`") for module in modules() for entry in entries(module))
    text = re.sub("|".join(known), lambda found: _function(found[0][1:-1]), text)
    file = f"examples/single_file/{kind.algorithm}.py"
    return f"{text}\n[{file}](../{file}) has the whole algorithm and trains to the same weights."


def _function(name: str) -> str:
    return f"[`{name}`](algorithms.md#{_anchor(name)})"


def _tables(kind: Any, functions: tuple[str, ...]) -> Iterator[str]:
    yield "## Where other libraries differ\n"
    for name in functions:
        said = Entry(name, pkgutil.resolve_name(name)).paragraphs
        (text,) = (p.removeprefix("Elsewhere: ") for p in said if p.startswith("Elsewhere"))
        yield f"- {_function(name)}: {' '.join(text.split())}"
    yield "\n## Defaults\n\n| Key | Default | Meaning |\n|---|---|---|"
    shown = (FORMULA | kind.__annotations__.keys()) - UNLISTED
    yield from (_key_row(key, kind) for name, key in fields_of(kind).items() if name in shown)
    yield "\n## Presets\n\n| Recipe | What it is |\n|---|---|"
    for path in sorted((ROOT / "recipes" / "presets").glob("*.yaml")):
        lines = path.read_text().splitlines()
        if f"algorithm: {kind.algorithm}" in lines:
            comment = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
            yield f"| [{path.stem}](../recipes/presets/{path.name}) | {_cell(comment)} |"
    yield "\n## Results\n\n![Held-out reward by completions and by seconds](results/happy.svg)\n"
    title = next(name for key, name in curves.NAMES.items() if key.startswith(kind.algorithm))
    first, line, *rows = curves.table().splitlines()
    yield "\n".join([first, line, *(row for row in rows if f"| {title} (" in row)])


def contributing() -> str:
    """The text of CONTRIBUTING.md, with the table of floors that tests/test_layers.py checks."""
    rows = ["| floor | what it is about | files and folders |", "|---|---|---|"]
    for number, (about, parts) in enumerate(FLOORS.items()):
        names = ", ".join(f"`{_path_of(part)}`" for part in parts)
        rows.append(f"| {number} | {about} | {names} |")
    return filled((ROOT / "CONTRIBUTING.md").read_text(), "floors", "\n".join(rows))


def _path_of(part: str) -> str:
    """A file or folder of the package as a path in it: "rewards/scores.py", "losses/"."""
    path = part.replace(".", "/")
    return f"{path}/" if (ROOT / "rlhf_pg" / path).is_dir() else f"{path}.py"


def options() -> str:
    """The text of options.md, with a table of every key."""
    text = (ROOT / "docs" / "options.md").read_text()
    return filled(text, "keys", "\n".join(_key_tables()).rstrip("\n"))


def _key_tables() -> Iterator[str]:
    """For each config class, the keys that it adds or to which it gives another default."""
    inherited: dict[str, Any] = {}
    for config, title in KEY_TITLES.items():
        fields = fields_of(config)
        new = [x for x in fields if x not in inherited or _default(fields[x]) != inherited[x]]
        yield f"### {title}\n"
        yield f"{config.__doc__.partition(chr(10))[0]}\n"
        yield "| Key | Default | Meaning |\n|---|---|---|"
        yield from (_key_row(fields[name], config) for name in new if name not in UNLISTED)
        yield ""
        inherited |= {name: _default(field) for name, field in fields.items()}


def usage() -> str:
    """The text of usage.md, with the methods of callbacks."""
    rows = ["| Method | When it is called |", "|---|---|"]
    for name, method in vars(rlhf_pg.Callback).items():
        if name.startswith("on_"):
            signature = _signature(method).replace("self, ", "")
            when = method.__doc__.removeprefix("Called ").rstrip(".")
            rows.append(f"| `{name}{signature}` | {when} |")
    return filled((ROOT / "docs" / "usage.md").read_text(), "callbacks", "\n".join(rows))


def supervised() -> str:
    """The text of supervised.md, with a table of the keys."""
    shared = {name for config in SHARED_KEYS for name in fields_of(config)}
    own = [field.name for field in dataclasses.fields(SupervisedConfig)]
    rows = []
    for config, title in SUPERVISED_TITLES.items():
        fields = fields_of(config)
        base = fields_of(SupervisedConfig)
        names = own if config is SupervisedConfig else fields
        rows += [f"### {title}\n", "| Key | Default | Meaning |", "|---|---|---|"]
        rows += [
            _key_row(fields[name], config)
            for name in names
            if name not in shared | UNLISTED
            and (
                config is SupervisedConfig
                or name not in base
                or _default(fields[name]) != _default(base[name])
            )
        ]
        rows.append("")
    text = (ROOT / "docs" / "supervised.md").read_text()
    return filled(text, "keys", "\n".join(rows).rstrip("\n"))


def fields_of(config: type) -> dict[str, dataclasses.Field[Any]]:
    """The keys of a config, by name."""
    return {field.name: field for field in dataclasses.fields(config)}


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _key_row(field: dataclasses.Field[Any], config: type) -> str:
    value = _default(field)
    default = value if isinstance(value, str) else json.dumps(value)
    meaning = help_of(field.metadata)
    choices = ", ".join(f"`{value}`" for value in _choices(config, field.name))
    if choices:
        meaning += f" One of {choices}."
    return f"| `{field.name}` | `{default}` | {_cell(meaning)} |"


def _choices(config: type, name: str) -> tuple[Any, ...]:
    """The words that a key may have, if it has a list of them."""
    hint = typing.get_type_hints(config)[name]
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def scaled() -> str:
    """The text of distributed.md, with new tables in it."""
    text = (ROOT / "docs" / "distributed.md").read_text()
    for name, make in scaling.TABLES.items():
        text = filled(text, name, make())
    return text


def benchmarks() -> str:
    """The text of benchmarks.md, with what a GPU has shown."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    return filled(text, "gpu", gpu.section(ROOT / "docs" / "gpu.json"))


def reliability() -> str:
    """The text of reliability.md, with what the distributed tests have measured, and the faults."""
    found = json.loads((ROOT / "docs" / "invariance.json").read_text())
    jobs = list(dict.fromkeys(job for layout in LAYOUTS for job in layout.jobs))
    rows = [f"| | {' | '.join(jobs)} |", "|---" * (len(jobs) + 1) + "|"]
    for layout in LAYOUTS:
        cells = [_distances(found, layout, job) for job in jobs]
        rows.append(f"| {layout.describe()} | {' | '.join(cells)} |")
    text = filled((ROOT / "docs" / "reliability.md").read_text(), "invariance", "\n".join(rows))
    supervised = list(SUPERVISED | SUPERVISED_DOUBLE)
    rows = [f"| | {' | '.join(supervised)} |", "|---" * (len(supervised) + 1) + "|"]
    for layout in SUPERVISED_LAYOUTS:
        of = found.get(str(layout), {})
        cells = [f"{of[job]['weights']:.0e}" if job in of else "" for job in supervised]
        rows.append(f"| {layout.describe()} | {' | '.join(cells)} |")
    text = filled(text, "supervised", "\n".join(rows))
    return filled(text, "faults", faults())


def _distances(found: dict[str, Any], layout: Layout, job: str) -> str:
    """Empty where nothing is compared; failed where only some of the tests came to their end."""
    if job not in layout.jobs:
        return "refused" if layout.refuses(job) else ""
    cell = found.get(str(layout), {}).get(job, {})
    if not cell:
        return "not run"
    if cell.keys() != {"sampled", "gradient", "weights", "metrics"}:
        return "failed"
    return f"{cell['gradient']:.0e}, {cell['weights']:.0e}"


def fault_tests() -> Iterator[tuple[int, str, str, str]]:
    """(number, outcome, path of the test, its name) for every marker `fault`."""
    for path, name, marks in marked("fault"):
        for mark in marks:
            if mark.name == "fault":
                number, outcome = mark.args
                yield number, outcome, path, name


def faults() -> str:
    """What happens in every fault, and the test that shows it or the reason why none does."""
    shown = defaultdict(list)
    for number, outcome, path, name in fault_tests():
        shown[number].append(f"{outcome} ({_links([(path, name)])})")
    rows = ["| | Fault | What happens |", "|---|---|---|"]
    rows += [
        f"| {number} | {_cell(fault)} | {_cell('; '.join(shown[number]))} |"
        for number, fault in ROWS.items()
    ]
    return "\n".join(rows)


def correctness() -> str:
    """The text of correctness.md, with the audit of every preset."""
    return filled((ROOT / "docs" / "correctness.md").read_text(), "audit", audit.table())


def coming_from_trl() -> str:
    """The text of from-trl.md, with our hints."""
    return filled((ROOT / "docs" / "from-trl.md").read_text(), "keys", from_trl.table())


def ppo_2026() -> str:
    """The text of ppo-2026.md, with the keys of TRL's PPO."""
    return filled((ROOT / "docs" / "ppo-2026.md").read_text(), "ppo-keys", from_trl.ppo_table())


def distillation() -> str:
    """The text of distillation.md, with what comparing fewer tokens costs."""
    table = json.loads((ROOT / "docs" / "teacher.json").read_text())
    rows = ["| Compared | Bias | Variance |", "|---|---|---|"]
    rows += [f"| {way} | {bias:.1g} | {spread:.2g} |" for way, (bias, spread) in table.items()]
    text = (ROOT / "docs" / "distillation.md").read_text()
    return filled(text, "teacher", "\n".join(rows))


def engines() -> str:
    """The text of engines.md, with what corrections make of older samples, and all families."""
    table = json.loads((ROOT / "docs" / "staleness.json").read_text())
    rows = ["| `sampler_correction` | bias, 1 step | variance | bias, 2 steps | variance |"]
    rows += ["|---" * 5 + "|"]
    for way, found in table.items():
        cells = [
            f"{bias:.2g} | {spread:.1f}" if bias > 1e-9 else f"0 | {spread:.1f}"
            for bias, spread in found
        ]
        rows.append(f"| {way} | {' | '.join(cells)} |")
    text = filled((ROOT / "docs" / "engines.md").read_text(), "staleness", "\n".join(rows))
    return filled(text, "families", families.table(ROOT / "docs" / "families.json"))


def results() -> str:
    """The text of results-tables.md, with the tables of the runs that are there."""
    text = filled((ROOT / "docs" / "results-tables.md").read_text(), "runs", curves.table())
    return filled(filled(text, "race", curves.race()), "students", curves.students())


def referee() -> str:
    """The text of referee.md, with the answers of other libraries."""
    path = ROOT / "docs" / "referee.json"
    text = (ROOT / "docs" / "referee.md").read_text()
    text = filled(text, "referee", referee_table.table(path, referee_table.LOSS))
    return filled(text, "referee kl", referee_table.table(path, referee_table.KL))


def filled(text: str, name: str, table: str) -> str:
    """The text with this table in the place that has its name.

    Raises:
        ValueError: there is no such place, or more than one.
    """
    place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, count = place.subn(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text)
    if count != 1:
        raise ValueError(f"a page needs one place <!-- {name} --> ... <!-- end -->, not {count}")
    return text


# Every page that is made, from the root of the repository, and how.
PAGES = {
    "docs/algorithms.md": algorithms,
    "docs/benchmarks.md": benchmarks,
    "docs/correctness.md": correctness,
    "docs/from-trl.md": coming_from_trl,
    "docs/options.md": options,
    "docs/ppo-2026.md": ppo_2026,
    "docs/referee.md": referee,
    "docs/reliability.md": reliability,
    "docs/results-tables.md": results,
    "docs/distillation.md": distillation,
    "docs/engines.md": engines,
    "docs/distributed.md": scaled,
    "docs/supervised.md": supervised,
    "docs/usage.md": usage,
    "CONTRIBUTING.md": contributing,
    **{f"docs/{name}.md": partial(of_algorithm, name) for name in ALGORITHMS},
}


def main() -> None:
    for name, text in PAGES.items():
        (ROOT / name).write_text(text())


if __name__ == "__main__":
    main()
