"""Table of docs/from-trl.md: the keys of other libraries, and what to use here."""

from rlhf_pg.config.foreign_keys import FOREIGN_ARGUMENTS, FOREIGN_KEYS, GONE, NO_MEANING


def table() -> str:
    """Return the table of keys, then of trainers' arguments."""
    hints = FOREIGN_KEYS | {key: f"leave it out: {why}" for key, why in NO_MEANING.items()} | GONE
    rows = ["| Key or argument | Here |\n|---|---|"]
    rows += [f"| `{key}` | {hint} |" for key, hint in (hints | FOREIGN_ARGUMENTS).items()]
    return "\n".join(rows)
