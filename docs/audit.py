"""The audit of presets: `python docs/audit.py [NAME ...]` writes docs/audit.json, of which
docs/correctness.md has a table.
"""

import json
import sys
from pathlib import Path
from typing import Any

# What the audit of a preset lacks, or has instead.
NOTES = {
    "echo": ", without its term: nothing answers the policy here",
    "maxrl": ", with scores of 0 and 1, which it is for",
}
PLACE = Path(__file__).with_name("audit.json")


def main(names: list[str]) -> None:
    from rlhf_pg.audit import world
    from rlhf_pg.audit.causes import audit
    from rlhf_pg.cli.recipes import config_of, presets

    known, scores = json.loads(PLACE.read_text()), world.SCORES
    ones = {p: {y: float(x > 0.5) for y, x in own.items()} for p, own in scores.items()}
    for name in names or presets():
        world.SCORES = ones if name == "maxrl" else scores
        known[name] = {
            row: {"cosine": one.cosine, "scale": one.scale, "bias": one.bias}
            | {"variance": one.variance, "step": one.step}
            for row, one, _ in audit(config_of([presets()[name]], [], "audit"))
        }
    PLACE.write_text(json.dumps({name: known[name] for name in presets()}, indent=1) + "\n")


def table() -> str:
    rows = ["| preset | cosine | scale | variance | bias | bias with one other choice | with all |"]
    rows += ["|---" * 7 + "|"]
    for name, found in json.loads(PLACE.read_text()).items():
        own = found.pop("this config")
        last = found.pop("all of these", own)
        causes = [f"`{row}` {_share(one)}" for row, one in found.items()]
        numbers = [f"{own['cosine']:.3f}", f"{own['scale']:.2f}", f"{own['variance']:.1f}"]
        cells = [f"`{name}`{NOTES.get(name, '')}", *numbers, _share(own)]
        rows.append(f"| {' | '.join([*cells, ', '.join(causes), _share(last)])} |")
    return "\n".join(rows)


def _share(found: dict[str, Any]) -> str:
    return f"{100 * found['bias']:.1f} %" if found["bias"] > 1e-8 else "0"


if __name__ == "__main__":
    main(sys.argv[1:])
