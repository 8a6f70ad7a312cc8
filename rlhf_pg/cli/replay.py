"""`rlhf-pg replay`: re-run a step of a run, or show it with other keys."""

from collections.abc import Sequence

from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import check_found
from rlhf_pg.config.parse import fail
from rlhf_pg.replay.replay import Replay, rebuild
from rlhf_pg.replay.tables import show_step, show_what_if
from rlhf_pg.replay.what_if import what_if
from rlhf_pg.report.run_files import run_of


def replay(flags: Sequence[str]) -> None:
    """Re-run a step of a run and show it, with its own or with other keys."""
    options, keys = parser_of("replay").parse_known_args(flags)
    run = run_of(options.run)
    if keys and options.resample:
        fail("--resample is for an unchanged step: leave it out, or the other keys")
    if run.config:
        check_found(run.directory / "config.yaml", keys, options.trust_run)
    other = rebuild(run, keys) if keys else None  # first, since it may be refused
    again = Replay(rebuild(run), run)
    if other is not None:
        show_what_if(what_if(again, other, options.step), options.rows)
    elif (made := again.make(options.step, options.resample)) and again.trainer.runtime.is_main:
        show_step(made, options.rows)
