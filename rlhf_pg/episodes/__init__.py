"""Episodes: completions in turns, which an environment or tools answer."""

from rlhf_pg.episodes.environment import (
    Environment as Environment,
    EnvironmentFactory as EnvironmentFactory,
    Observation as Observation,
)
from rlhf_pg.episodes.runner import Episode as Episode, EpisodeRunner as EpisodeRunner
from rlhf_pg.episodes.tools import (
    EnvironmentSource as EnvironmentSource,
    Tool as Tool,
    Toolbox as Toolbox,
    ToolEnvironment as ToolEnvironment,
    source_of as source_of,
)
