"""The `rlhf-pg` command."""

from rlhf_pg.cli.main import main as main
