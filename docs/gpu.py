"""What docs/benchmarks.md says of GPUs: the report of tests/gpu/run.sh in docs/gpu.json, if any."""

import json
from pathlib import Path
from typing import Any

VERDICTS = {True: "ok", False: "**failed**", None: "not checked"}

NOT_YET = """\
No GPU has run any of this yet. It has been rehearsed on a pretend accelerator (`tests/device`),
which computes on CPUs and refuses what a GPU would refuse: that shows crashes, waits and leaks, and
no times. This measures on one, within an hour, and leaves a report from which this section is made:

```
tests/gpu/run.sh --json docs/gpu.json; make docs
```"""


def section(path: Path) -> str:
    """The report as Markdown, or that there is none."""
    return rendered(json.loads(path.read_text())) if path.exists() else NOT_YET


def rendered(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    counts = f"{report['passed']} passed, {report['failed']} failed"
    unfinished = "" if report["done"] else "; it was broken off"
    lines = [
        f"{report['device']} ({report['gpus']} of them, {report['memory']}), driver "
        f"{report['driver']}, CUDA {report['cuda']}, Python {report['python']}, {versions}; commit "
        f"`{report['commit']}`, {report['date']}. `tests/gpu/run.sh` took "
        f"{report['seconds'] / 60:.0f} minutes: {counts}, {report['not_checked']} not "
        f"checked{unfinished}.",
        "",
        "| Group | Check | Figure | |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(check) for check in report["checks"])])


def _row(check: dict[str, Any]) -> str:
    verdict = VERDICTS[check["passed"]]
    texts = (check["group"], check["what"], check["figure"], verdict)
    cells = [" ".join(text.split()).replace("|", r"\|") for text in texts]
    return f"| {' | '.join(cells)} |"
