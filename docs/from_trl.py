"""Tables of docs/from-trl.md and ppo-2026.md: keys of other libraries, and what to use here."""

from rlhf_pg.config.foreign_keys import FOREIGN_ARGUMENTS, HINTS, REASONS
from tests.config.test_foreign_keys import PPO_OF_TRL


def table() -> str:
    """Return the table of keys, then of trainers' arguments."""
    foreign = {key: why for key, why in REASONS.items() if "removed in" not in why}
    hints = HINTS | {key: f"leave it out: {why}" for key, why in foreign.items()}
    rows = ["| Key or argument | Here |\n|---|---|"]
    rows += [f"| `{key}` | {hint} |" for key, hint in (hints | FOREIGN_ARGUMENTS).items()]
    return "\n".join(rows)


def ppo_table() -> str:
    """Return the table of every key of TRL's PPOConfig, with the versions that have it."""
    rows = ["| Key | TRL | Here |\n|---|---|---|"]
    for key in sorted(set().union(*PPO_OF_TRL.values())):
        versions = ", ".join(version for version, keys in PPO_OF_TRL.items() if key in keys)
        here = HINTS.get(key) or (f"not needed: {REASONS[key]}" if key in REASONS else "the same")
        rows.append(f"| `{key}` | {versions} | {here} |")
    return "\n".join(rows)
