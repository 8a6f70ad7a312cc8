"""`rlhf-pg audit`: the expected gradient of a recipe against the true one, and why they differ."""

import logging
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rlhf_pg.audit.causes import adapt
from rlhf_pg.audit.causes import audit as audit_config
from rlhf_pg.audit.expectation import LATER_KL
from rlhf_pg.audit.world import MAX_LENGTH
from rlhf_pg.boundary import user_modules
from rlhf_pg.cli.options import parser_of
from rlhf_pg.cli.recipes import config_of, config_type_of, split_recipe
from rlhf_pg.config.fields import parameters
from rlhf_pg.config.files import locate_reward
from rlhf_pg.config.parse import load, read_flags


def audit(flags: Sequence[str]) -> None:
    """Print the table of a recipe or preset, on a model that can be listed."""
    recipes, flags = split_recipe(flags)
    options, keys = parser_of("audit").parse_known_args(flags)
    values = {k: v for file in recipes for k, v in load(file).items()} | read_flags(keys)
    name, foreign = options.loss or str(values.get("policy_loss")), None
    if ":" in name:
        name = locate_reward(name, recipes[0].parent if recipes else None)
        function = user_modules.load(name)
        if not {"logprobs", "old_logprobs"} <= parameters(function):
            foreign = adapt(function, options.micro_batches)
            name = config_type_of(recipes, keys).policy_loss
        keys += ["--policy_loss", name]
    args = config_of(recipes, keys, "audit")
    logging.disable(logging.WARNING)  # of configs without one of the choices
    notes, several = list[str](), args.updates_per_step > 1
    later = f", updates after the first at a KL of {LATER_KL}" * several
    table = Table("", "cosine", "scale", "bias", "variance", box=None, pad_edge=False)
    for name, found, effect in audit_config(args, foreign):
        if not table.rows:
            longest, size = args.max_completion_length, found.rows // found.prompts
            print(
                f"Prompts {found.prompts} of {args.prompts_per_step}, completions {size} of "
                f"{args.num_generations}, tokens {min(MAX_LENGTH, longest)} of {longest}{later}; "
                "before max_grad_norm and the optimizer"
            )
        numbers = (f"{found.cosine:.6f}", f"{found.scale:.4f}", f"{found.bias:.1e}")
        table.add_row(name, *numbers, f"{found.variance:.3g}")
        notes += [f"{name.removeprefix('without ')}: {effect}"] * bool(effect)
    Console().print(table)
    print(*notes, sep="\n")
