"""Past runs: replay a step, optionally with other settings, and compare runs."""
