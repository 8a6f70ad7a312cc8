"""How completions are sampled: by what, from which distribution, how long."""

import dataclasses
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from rlhf_pg.boundary.quoted import quoted
from rlhf_pg.config.fields import number
from rlhf_pg.config.run import RunConfig


@dataclass(kw_only=True)
class SamplingConfig(RunConfig):
    """One step is one rollout batch and every update on it."""

    rollout_engine: Literal["auto", "native", "vllm", "vllm_server"] = "auto"
    """What samples: the policy itself, vLLM in this process, or a `vllm serve`. auto: on a GPU vLLM
    in this process, asleep between rollouts, where it is installed and suits; else the policy."""
    rollout_cache_tokens: int | None = number(None, minimum=1)
    """Tokens whose keys and values the native engine keeps at a time; other completions wait. None:
    what half of a GPU's free memory holds, or 4 GiB of a CPU's. It never changes the result."""
    vllm_gpu_memory_utilization: float = number(0.3, above=0, maximum=1)
    """Share of the GPU's memory that vLLM takes for weights, keys and values."""
    vllm_enable_sleep_mode: bool = False
    """Give that memory back while vLLM does not sample."""
    vllm_max_model_length: int | None = number(None, minimum=1)
    """Longest prompt and completion together, which need room at once; None: what the model can, or
    the memory that vLLM takes."""
    vllm_server_base_url: str = "http://localhost:8000"
    """Where the server is."""
    vllm_server_timeout: float = number(300.0, above=0)
    """Seconds that it may take over one answer; it is asked three times."""
    vllm_sync_directory: str | None = None
    """Where weights are put for it, in a directory of the run's own that only this user can read,
    under a path that it sees too; None: sync/ in output_dir."""
    max_completion_length: int = number(512, minimum=1)
    """Longest completion in tokens, EOS included."""
    max_turns: int | None = number(None, minimum=1)
    """Turns of the policy in an episode with an environment or tools; None: as many as
    max_completion_length allows, which counts all turns and answers together."""
    environment_timeout: float = number(60.0, above=0)
    """Seconds for each answer of an environment or a tool."""
    temperature: float = number(1.0, above=0, because="training needs the sampled distribution")
    """Of the policy: it divides every logit, in sampling, scoring and training alike."""
    top_k: int = number(0, minimum=0)
    """Sample from the k likeliest tokens; 0 from all."""
    top_p: float = number(1.0, above=0, maximum=1)
    """Sample from the smallest set of likeliest tokens whose mass reaches this; 1 from all."""
    min_p: float = number(0.0, minimum=0, maximum=1)
    """Sample from tokens at least this fraction as likely as the likeliest; 0 from all."""
    truncated_sampling: Literal["refuse", "saved_support"] = "refuse"
    """What to do with top_k, top_p and min_p, which sample from another distribution than the
    policy's: refuse them, or save which tokens were kept and renormalise the policy (new and old),
    the reference and the entropy on them."""
    stop: tuple[str, ...] | None = None
    """Strings that end a completion, as an EOS does; their tokens stay in it."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = (self.stop,)
        super().__post_init__()
        if "" in (self.stop or ()):
            raise ValueError(
                "stop must not hold an empty string, which would end every completion at once"
            )
        self._check_truncation()
        self._check_engine()

    def _check_truncation(self) -> None:
        """Refuse to compare the policy with a truncation of itself."""
        cuts = {"top_k": self.top_k > 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
        saved = self.truncated_sampling == "saved_support"
        for key, truncates in cuts.items():
            if truncates and not saved:
                raise ValueError(
                    f"{key} {getattr(self, key)} leaves tokens out of what is sampled, and the "
                    "ratio would compare the policy with that: set truncated_sampling to "
                    f'"saved_support", or leave {key} out'
                )
        self.refuse_idle(
            ("truncated_sampling",),
            any(cuts.values()),
            "has no effect without top_k, top_p or min_p: set one of them, or leave it out",
        )
        if saved and self.rollout_engine not in ("auto", "native"):
            raise ValueError(
                'truncated_sampling "saved_support" needs to know which tokens were kept, and '
                f"rollout_engine {self.rollout_engine!r} does not tell: set rollout_engine to "
                '"native", or leave out top_k, top_p and min_p'
            )

    def _check_engine(self) -> None:
        keys = [field.name for field in dataclasses.fields(self)]
        of_server = {"vllm_sync_directory", *(k for k in keys if k.startswith("vllm_server_"))}
        in_process = {key for key in keys if key.startswith("vllm_")} - of_server
        native = {"rollout_cache_tokens"}
        of_engines = {"native": native, "vllm": in_process, "vllm_server": of_server}
        for engine, own in of_engines.items():
            why = f"has no effect without rollout_engine {engine}: set that, or leave it out"
            may_be = self.rollout_engine == "auto" and engine != "vllm_server"
            self.refuse_idle(tuple(sorted(own)), may_be or self.rollout_engine == engine, why)
        _check_url(self.vllm_server_base_url)


def _check_url(url: str) -> None:
    """Refuse what is no address, or holds what is secret; that is not repeated in the error."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(
            f"vllm_server_base_url must begin with http:// or https://, got {quoted(url)!r}"
        )
    if "@" in url or "?" in url or "#" in url:
        raise ValueError(
            "vllm_server_base_url holds a user, a password or a query, which would be saved with "
            "the config: leave it out, and let a proxy on this machine add it"
        )
    try:
        parts = urlsplit(url)
        fits = bool(parts.hostname) and parts.port != 0 and url.isascii() and url.isprintable()
    except ValueError:
        fits = False
    if not fits or " " in url:
        raise ValueError(
            "vllm_server_base_url must be http://host or http://host:port (or https), got "
            f"{quoted(url)!r}"
        )
