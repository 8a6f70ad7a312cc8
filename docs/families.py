"""The table of engines.md: how every family of `transformers` is computed."""

import json
from pathlib import Path
from typing import Any

from benchmarks.families import MOST

LAYERS = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunks",
    "linear_attention": "recurrent",
    "conv": "convolution",
    "hybrid": "full and recurrent",
    "indexed_attention": "indexed",
}


def table(path: Path) -> str:
    """The counts, and a row for each family."""
    measured = json.loads(path.read_text())
    families: dict[str, dict[str, Any]] = measured["families"]
    built = {name: found for name, found in families.items() if "rows" in found}
    refused = {name for name, found in built.items() if is_refused(found)}
    packed = sum(found["rows"] == "packed" for name, found in built.items() if name not in refused)
    fast = sum(
        found.get("sampling") == "fast" for name, found in built.items() if name not in refused
    )
    lines = [
        f"Of {len(families)} families of causal language models in transformers "
        f"{measured['transformers']}, {len(built)} can be built small: {packed} are packed, "
        f"{fast} sampled fast, {len(refused)} refused.",
        "",
        "| Family | Layers | Rows | Sampling | Log-probability, gradient | In float64 | "
        "`cu_seqlens` |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in sorted(built.items()):
        kinds = ", ".join(LAYERS.get(kind, kind.replace("_", " ")) for kind in found["layers"])
        rows, sampling = found["rows"], found.get("sampling", "")
        if name in refused:
            rows, sampling = "refused", ""
        cells = [
            name,
            kinds,
            rows,
            sampling.replace("generate", "`generate`"),
            _pair(found.get("float32")),
            _pair(found.get("float64")),
            found.get("cu_seqlens", "").replace("leaks", "**leaks**"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    others = sorted(set(families) - set(built))
    lines += ["", f"Not built: {', '.join(others)}."]
    return "\n".join(lines)


def is_refused(found: dict[str, Any]) -> bool:
    """Whether a run with this family ends in its first step, or earlier."""
    if "fails" in found:
        return True
    return not max(*found["float32"], found["sampled"]) <= MOST


def _pair(numbers: list[float] | None) -> str:
    return "" if numbers is None else ", ".join(f"{number:.0e}" for number in numbers)
