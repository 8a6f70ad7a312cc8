"""The audit of every preset: `python docs/audit.py` writes docs/audit.json, of which
docs/correctness.md has a table.
"""

import json
from pathlib import Path
from typing import Any

# What a preset has that the listed world lacks.
UNLISTED = {"echo": ", without its term: nothing answers the policy here"}
PLACE = Path(__file__).with_name("audit.json")


def main() -> None:
    from rlhf_pg.audit.causes import audit
    from rlhf_pg.cli.recipes import config_of, presets

    found = {
        name: {
            row: {"cosine": one.cosine, "scale": one.scale, "bias": one.bias}
            | {"variance": one.variance, "step": one.step}
            for row, one, _ in audit(config_of([file], [], "audit"))
        }
        for name, file in presets().items()
    }
    PLACE.write_text(json.dumps(found, indent=1) + "\n")


def table() -> str:
    rows = ["| preset | cosine | scale | variance | bias | bias with one other choice | with all |"]
    rows += ["|---" * 7 + "|"]
    for name, found in json.loads(PLACE.read_text()).items():
        own = found.pop("this config")
        last = found.pop("all of these", own)
        causes = [f"`{row}` {_share(one)}" for row, one in found.items()]
        numbers = [f"{own['cosine']:.3f}", f"{own['scale']:.2f}", f"{own['variance']:.1f}"]
        cells = [f"`{name}`{UNLISTED.get(name, '')}", *numbers, _share(own)]
        rows.append(f"| {' | '.join([*cells, ', '.join(causes), _share(last)])} |")
    return "\n".join(rows)


def _share(found: dict[str, Any]) -> str:
    return f"{100 * found['bias']:.1f} %" if found["bias"] > 1e-8 else "0"


if __name__ == "__main__":
    main()
