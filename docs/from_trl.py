"""Table of docs/from-trl.md: the keys of other libraries, and what to use here."""

from rlhf_pg.config.foreign_keys import FOREIGN_ARGUMENTS, HINTS, REASONS


def table() -> str:
    """Return the table of keys, then of trainers' arguments."""
    hints = HINTS | {key: f"leave it out: {why}" for key, why in REASONS.items()}
    rows = ["| Key or argument | Here |\n|---|---|"]
    rows += [f"| `{key}` | {hint} |" for key, hint in (hints | FOREIGN_ARGUMENTS).items()]
    return "\n".join(rows)
