"""`rlhf-pg audit`: the expected gradient of a recipe against the true one, and why they differ."""

import logging
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rlhf_pg.audit import causes, expectation, world
from rlhf_pg.boundary import user_modules
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import config_of, split_recipe
from rlhf_pg.config.files import locate_reward


def audit(flags: Sequence[str]) -> None:
    """Print the table of a recipe or preset, on a model that can be listed."""
    recipes, flags = split_recipe(flags)
    options, keys = parser_of("audit").parse_known_args(flags)
    args = config_of(recipes, keys, "audit")
    foreign = None
    if options.loss is not None:
        function = user_modules.load(locate_reward(options.loss, None))
        foreign = causes.adapt(function, options.micro_batches)
    table = Table("", "cosine", "scale", "bias", "variance", box=None)
    effects = []
    logging.disable(logging.WARNING)  # of configs without one of the choices
    try:
        rows = list(causes.audit(args, foreign))
    finally:
        logging.disable(logging.NOTSET)
    for name, measured, effect in rows:
        numbers = [measured.cosine, measured.scale, measured.bias, measured.variance]
        table.add_row(name, *(f"{number:.4g}" for number in numbers))
        if effect:
            effects.append(f"{name}: {effect}")
    step = "prompts {}, completions {}, tokens {}; updates after the first: after SGD at rate {}"
    print(step.format(*measured.step, world.MAX_LENGTH, expectation.RATE))
    Console().print(table)
    print(*effects, sep="\n")
