"""How completions are sampled: by what, from which distribution, how long."""

from dataclasses import dataclass
from typing import Literal

from rlhf_pg.config.run import RunConfig
from rlhf_pg.fields import number


@dataclass(kw_only=True)
class SamplingConfig(RunConfig):
    """One step is one rollout batch and every update on it."""

    rollout_engine: Literal["native"] = "native"
    """What samples: the policy itself, in this process."""
    max_completion_length: int = number(512, minimum=1)
    """Longest completion in tokens, EOS included."""
    temperature: float = number(1.0, above=0, because="training needs the sampled distribution")
    """Of the policy: it divides every logit, in sampling, scoring and training alike."""
