"""What the documentation says of the code is true: made from it, up to date, and proved."""

import importlib.util
import json
import pkgutil
import re
from pathlib import Path

import pytest

from rlhf_pg.report.metrics import KEYS

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/mutants/README.md")
    ),
]
# What has to stay short enough to be read.
MOST_WORDS = {"README.md": 760, "docs/correctness.md": 620, "docs/guide.md": 960}

# `docs` is no package.
_spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)

ENTRIES = [entry for module in generate.modules() for entry in generate.entries(module)]

# Dtypes, and 0: no formula, so nothing to prove.
NO_FORMULA = {"rlhf_pg.masking.float_dtype", "rlhf_pg.masking.widen", "rlhf_pg.losses.none"}
# Arithmetic that is in no paper.
NO_SOURCE = NO_FORMULA | {
    "rlhf_pg.advantages.group_stats",
    "rlhf_pg.advantages.total_scores",
    "rlhf_pg.losses.weight_count",
    "rlhf_pg.masking.completion_mask",
    "rlhf_pg.masking.masked_mean",
    "rlhf_pg.masking.masked_var",
    "rlhf_pg.masking.whiten",
    "rlhf_pg.rewards.scores.at_end",
    "rlhf_pg.rewards.scores.last_true",
    "rlhf_pg.rewards.sum_step_scores",
}


@pytest.mark.parametrize("name", sorted(generate.PAGES))
def test_pages_are_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text() == generate.PAGES[name](), "run `make docs`"


def test_readme_example_trains_by_ppo(tmp_path: Path, monkeypatch) -> None:
    """With what the README says to add; tests/test_code_blocks.py runs the example as it stands."""
    text = (ROOT / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    added = re.search(r"and add `(.*?)`", text)
    assert added is not None
    short = code.replace("GRPO", "PPO").replace("max_steps=150", f"{added[1]}, max_steps=1")
    monkeypatch.chdir(tmp_path)
    exec(compile(short, "README.md", "exec"), {})
    (line,) = (tmp_path / "runs/ppo/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["rewards/repeats_last_digit/mean"] > 0


def test_usage_explains_every_key_of_metrics_line() -> None:
    text = (ROOT / "docs/usage.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in text] == []


def test_readme_and_usage_have_the_numbers_of_results() -> None:
    """Of the demo by all its runs, and of each algorithm by its five."""
    results = (ROOT / "docs/results-tables.md").read_text()
    demo = re.findall(r"^\| .* \| \d+ \| (0\.\d+) \| (0\.\d+) \| \d+ \|$", results, re.M)
    before, after = ([float(x) for x in column] for column in zip(*demo, strict=True))
    low, high = f"{min(after):.2f}", f"{max(after):.2f}"
    readme, usage = ((ROOT / name).read_text() for name in ("README.md", "docs/usage.md"))
    begins = re.search(r"rises from (0\.\d+) to \[(0\.\d+) to (0\.\d+)", readme)
    assert begins is not None
    assert begins.groups() == (f"{sum(before) / len(before):.2f}", low, high)
    assert f"between {low} and {high}" in usage
    shown = re.search(r"before: held-out reward (\S+) .*\nafter:  held-out reward (\S+) ", usage)
    assert shown is not None
    assert shown.groups() in demo
    row = r"^\| arithmetic \| (\w+)[^|]*\| 5 \| 0.42 \| \*\*(0\.\d+)\*\*.*\| (\S+) \.\. (\S+) \| "
    for method, *numbers in re.findall(row, results, re.M):
        line = next(x for x in readme.splitlines() if x.startswith(f"| [**{method}**]"))
        assert line.endswith("| {} ({} to {}) |".format(*numbers)), method


@pytest.mark.parametrize("name", MOST_WORDS)
def test_page_is_within_word_limit(name: str) -> None:
    by_hand = re.sub(r"<!-- \w+ -->.*?<!-- end -->", "", (ROOT / name).read_text(), flags=re.S)
    assert len(by_hand.split()) <= MOST_WORDS[name]


def test_every_page_is_linked_from_readme_or_another_page() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", (ROOT / "README.md").read_text()))
    for page in (ROOT / "docs").glob("*.md"):
        linked |= set(re.findall(r"\]\(([\w-]+\.md)", page.read_text())) - {page.name}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= linked


def test_site_lists_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r"(?<= )[a-z][\w-]+\.md", nav)) - {"index.md"}
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_and_links_on_page_exist(page: Path) -> None:
    text = page.read_text()
    for name in set(re.findall(r"\brlhf_pg(?:\.[A-Za-z_]\w*)+", text)):
        pkgutil.resolve_name(name)
    for link, anchor in set(re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", text)):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target.read_text()), f"{link}#{anchor}"
    for path, test in set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", text)):
        assert f"def {test}" in (ROOT / path).read_text()


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall("^#+ (.*)$", text, re.M)
    }


def test_proved_functions_exist() -> None:
    for name, path, test in generate.proof_names():
        assert callable(pkgutil.resolve_name(name)), f"{path}::{test} proves {name}"


def test_every_function_has_proof() -> None:
    proved = generate.proofs()
    unproved = [entry.name for entry in ENTRIES if not proved.get(entry.object)]
    lacking = [name for name in unproved if name not in NO_FORMULA]
    assert not lacking, f"no test with the marker `proves`: {', '.join(lacking)}"


def test_every_formula_has_source() -> None:
    lacking = [e.name for e in ENTRIES if e.source is None and e.name not in NO_SOURCE]
    assert not lacking, f"no (source) in the first sentence: {', '.join(lacking)}"


def test_functions_without_source_exist() -> None:
    assert {entry.name for entry in ENTRIES} >= NO_SOURCE


REPORT = {
    "device": "NVIDIA H100 80GB HBM3",
    "gpus": 1,
    "memory": "81559 MiB",
    "driver": "580.65",
    "cuda": "13.0",
    "python": "3.12.3",
    "versions": {"torch": "2.13.0", "trl": "1.16.0"},
    "commit": "abc",
    "date": "2026-12-01",
    "done": True,
    "seconds": 3000.4,
    "passed": 1,
    "failed": 1,
    "not_checked": 1,
    "checks": [
        {"group": "flex", "what": "a|b", "figure": "1.0e-06", "passed": True},
        {"group": "flex", "what": "c", "figure": "Error: one\ntwo", "passed": False},
        {"group": "vllm", "what": "d", "figure": "not installed", "passed": None},
    ],
}


def test_gpu_report_becomes_table(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert generate.gpu.section(path).startswith("No GPU has run any of this yet.")
    assert "tests/gpu/run.sh" in generate.gpu.section(path)
    path.write_text(json.dumps(REPORT))
    head, _, table = generate.gpu.section(path).partition("\n\n")
    assert head == (
        "NVIDIA H100 80GB HBM3 (1 of them, 81559 MiB), driver 580.65, CUDA 13.0, Python 3.12.3, "
        "torch 2.13.0, trl 1.16.0; commit `abc`, 2026-12-01. `tests/gpu/run.sh` took 50 minutes: "
        "1 passed, 1 failed, 1 not checked."
    )
    assert table.splitlines() == [
        "| Group | Check | Figure | |",
        "|---|---|---|---|",
        r"| flex | a\|b | 1.0e-06 | ok |",
        "| flex | c | Error: one two | **failed** |",
        "| vllm | d | not installed | not checked |",
    ]
    path.write_text(json.dumps(REPORT | {"done": False}))
    assert "1 not checked; it was broken off." in generate.gpu.section(path)


def test_filled_requires_exactly_one_place() -> None:
    place = "<!-- a -->\nold\n<!-- end -->\n"
    both = f"{place}<!-- b -->\nkept\n<!-- end -->\n"
    expected = both.replace("old\n", "\nnew\n\n")
    assert generate.filled(both, "a", "new") == expected
    assert generate.filled(expected, "a", "new") == expected
    for text in ("", place + place):
        with pytest.raises(ValueError, match="one place <!-- a -->"):
            generate.filled(text, "a", "new")
