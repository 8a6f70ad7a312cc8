"""The audit of every preset: `python docs/audit.py` writes docs/audit.json, of which
docs/correctness.md has a table.
"""

import json
from pathlib import Path
from typing import Any

PLACE = Path(__file__).with_name("audit.json")


def main() -> None:
    from rlhf_pg.audit.causes import audit
    from rlhf_pg.cli.recipes import config_of, presets

    found = {
        name: {
            row: {"cosine": one.cosine, "scale": one.scale, "bias": one.bias}
            | {"variance": one.variance, "completions": one.rows}
            for row, one, _ in audit(config_of([file], [], "audit"))
        }
        for name, file in presets().items()
    }
    PLACE.write_text(json.dumps(found, indent=1) + "\n")


def table() -> str:
    rows = [
        "| preset | cosine | scale | variance | bias | without one of its choices | without all |"
    ]
    rows += ["|---" * 7 + "|"]
    for name, found in json.loads(PLACE.read_text()).items():
        own = found.pop("this config")
        last = found.pop("without all", own)
        causes = [f"{row.removeprefix('without ')} {_share(one)}" for row, one in found.items()]
        numbers = (
            f"{own['cosine']:.3f} | {own['scale']:.2f} | {own['variance']:.1f} | {_share(own)}"
        )
        rows.append(f"| `{name}` | {numbers} | {', '.join(causes)} | {_share(last)} |")
    return "\n".join(rows)


def _share(found: dict[str, Any]) -> str:
    return f"{100 * found['bias']:.1f} %" if found["bias"] > 1e-8 else "0"


if __name__ == "__main__":
    main()
