"""The tables of referee.md, of what `make referee` measured."""

import json
from pathlib import Path
from typing import Any

NAMES = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF"}
# Questions, and the heads of their columns.
LOSS = {
    "micro-batches": "smaller micro-batches",
    "masked micro-batches": "and masked rows",
    "padding": "more padding",
    "order": "other micro-batches",
    "processes": "two processes",
    "truncated": "masked rows left out",
}
KL = {"KL": "new rows", "KL of rows before": "rows of the policy before"}


def table(path: Path, questions: dict[str, str]) -> str:
    """A row for each setting that was asked these questions."""
    rows = [f"| Library | Setting | {' | '.join(questions.values())} |"]
    rows.append("|---" * (2 + len(questions)) + "|")
    libraries: dict[str, dict[str, Any]] = json.loads(path.read_text())
    for library, answers in libraries.items():
        version = answers.pop("version")
        asked = {name: found for name, found in answers.items() if found.keys() & questions.keys()}
        for setting, found in asked.items():
            cells = [share(found.get(name)) for name in questions]
            default = " (default)" if setting == next(iter(asked)) else ""
            rows.append(
                f"| {NAMES[library]} {version} | `{setting}`{default} | {' | '.join(cells)} |"
            )
    return "\n".join(rows)


def share(difference: float | None) -> str:
    if difference is None:
        return "-"
    return "same" if difference < 1e-3 else f"{100 * difference:.0f} %"
