"""Note in tests/last_green.json that a suite outside of CI has passed: `make test-distributed` and
its like call this last.
"""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

FILE = Path(__file__).with_name("last_green.json")


def git(*words: str) -> str:
    return subprocess.run(
        ("git", *words), capture_output=True, text=True, check=True
    ).stdout.strip()


def note(suite: str) -> None:
    """Write the date, and the commit or, where files have changed since, that they have."""
    changed = bool(git("status", "--porcelain", "--untracked-files=no"))
    green = json.loads(FILE.read_text())
    green[suite] = {
        "commit": git("rev-parse", "--short=10", "HEAD") + " and changes" * changed,
        "date": datetime.now(UTC).date().isoformat(),
    }
    FILE.write_text(json.dumps(green, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    note(sys.argv[1])
