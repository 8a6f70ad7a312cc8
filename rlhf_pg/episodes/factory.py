"""Make the runner of a run's episodes: of its tools, its environment or its agent."""

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.boundary import user_modules
from rlhf_pg.config import PolicyGradientConfig, rules
from rlhf_pg.episodes.runner import EpisodeRunner
from rlhf_pg.episodes.tools import EnvironmentSource, Tool, Toolbox, ToolEnvironment
from rlhf_pg.models.loading import stop_token_ids

logger = logging.getLogger(__name__)


def load_tools(args: PolicyGradientConfig) -> tuple[list[Any] | None, Any]:
    """Return the tools and the environment's factory that the config names, or None."""
    tools = [user_modules.load(name) for name in args.tools] or None
    if not args.environment_factory:
        return tools, None
    return tools, user_modules.load(args.environment_factory, user_modules.FACTORY)


def new_episode_runner(
    args: PolicyGradientConfig,
    tools: Sequence[Tool] | None,
    environments: EnvironmentSource | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    program: Any = None,
    judged: bool = True,
) -> EpisodeRunner | None:
    """Create the runner of episodes, for a run with tools, an environment or an agent's program;
    ValueError if these do not fit together, or if a run without episodes sets keys of episodes.
    """
    has_turns = bool(tools) or environments is not None
    has_agent = program is not None
    arguments = {"tools": tools, "environment_factory": environments, "agent_program": program}
    rules.refuse(
        rules.of_needs(args, [name for name, value in arguments.items() if value not in (None, ())])
    )
    if (has_turns or has_agent) and args.sampler_correction not in ("auto", "none"):
        logger.warning(
            "sampler_correction trains on the sampler's log-probabilities, whose last bits depend "
            "on which episodes are sampled together, so this run is repeated and resumed up to "
            "rounding, not bit for bit"
        )
    shared: dict[str, Any] = {
        "tokenizer": tokenizer,
        "stop_token_ids": stop_token_ids(model, tokenizer),
        "max_turns": args.max_turns,
        "skip_special_tokens": args.skip_special_tokens,
    }
    if has_agent:
        if has_turns:
            raise ValueError("agent_program brings its own tools: leave out tools and environments")
        try:
            agents = import_module("rlhf_pg.agents.runner")
        except ImportError as error:
            raise ValueError('agent_program needs pip install "rlhf-pg[agents]"') from error
        made: EpisodeRunner = agents.AgentRunner(
            program=agents.program_of(program),
            timeout=args.agent_timeout,
            call_timeout=args.agent_call_timeout,
            host=args.agent_host,
            pays=not judged,
            **shared,
        )
        return made
    if not has_turns:
        return None
    if environments is None:
        box = Toolbox.of(tools or (), tokenizer, args.environment_timeout)
        options: dict[str, Any] = {
            "environment_factory": lambda: ToolEnvironment(box),
            "timeout": None,  # each call has its own
            "tools": box.schemas,
        }
    else:
        options = environments.runner_options(tokenizer, args.environment_timeout, tools or ())
    return EpisodeRunner(**shared, **options)
