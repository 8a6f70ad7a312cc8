"""Table of docs/from-trl.md: the keys of other libraries, and what to use here."""

from rlhf_pg.config.foreign_keys import FOREIGN_ARGUMENTS, FOREIGN_KEYS, LEFT_OUT


def table() -> str:
    """Return the table of keys, then of trainers' arguments."""
    hints = FOREIGN_KEYS | {key: f"leave it out: {why}" for key, why in LEFT_OUT.items()}
    rows = ["| Key or argument | Here |\n|---|---|"]
    rows += [f"| `{key}` | {hint} |" for key, hint in (hints | FOREIGN_ARGUMENTS).items()]
    return "\n".join(rows)
