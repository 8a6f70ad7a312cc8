"""Keys of sampling: the engine, the distribution and the length of completions."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from rlhf_pg.boundary.quoted import quoted
from rlhf_pg.config.fields import number
from rlhf_pg.config.run import RunConfig


@dataclass(kw_only=True)
class SamplingConfig(RunConfig):
    """Config of sampling: the engine, the distribution and the length of completions."""

    rollout_engine: Literal["auto", "native", "vllm", "vllm_server"] = "auto"
    """Engine that samples: the policy itself (native), vLLM in this process, or a `vllm serve`.
    auto takes vLLM in this process, asleep between rollouts, on a GPU where it is installed and
    supports the run; otherwise the policy."""
    rollout_cache_tokens: int | None = number(None, minimum=1)
    """Most tokens whose keys and values the native engine keeps at a time; other completions wait.
    None takes half of a GPU's free memory, or 4 GiB of a CPU's. It changes the
    result by ties within rounding alone."""
    vllm_gpu_memory_utilization: float = number(0.3, above=0, maximum=1)
    """Share of the GPU's memory that vLLM takes for weights, keys and values; lower it if training
    runs out of memory."""
    vllm_enable_sleep_mode: bool = False
    """Give vLLM's memory back while it does not sample."""
    vllm_max_model_length: int | None = number(None, minimum=1)
    """Most tokens of a prompt and its completion together, for which vLLM must have room. None
    takes what the model allows, or what fits into vLLM's memory."""
    vllm_server_base_url: str = "http://localhost:8000"
    """Base URL of the vLLM server, without user, password or query."""
    vllm_server_timeout: float = number(300.0, above=0)
    """Seconds that the vLLM server may take over one answer; every request is tried three times."""
    vllm_sync_directory: str | None = None
    """Directory through which the vLLM server gets new weights, under a path that the server sees
    too; they are put into a private directory of the run in it. None is sync/ in output_dir."""
    max_completion_length: int = number(512, minimum=1)
    """Longest completion in tokens, EOS included; raise it if too many completions are cut off."""
    max_turns: int | None = number(None, minimum=1)
    """Most turns of the policy in an episode with an environment or tools. None allows as many as
    max_completion_length, which counts all turns and answers together."""
    environment_timeout: float = number(60.0, above=0)
    """Seconds that an environment or a tool may take for each answer."""
    temperature: float = number(1.0, above=0, because="training needs the sampled distribution")
    """Temperature of the policy, which divides every logit, in sampling, scoring and training
    alike."""
    top_k: int = number(0, minimum=0)
    """Number of likeliest tokens to sample from; 0 samples from all."""
    top_p: float = number(1.0, above=0, maximum=1)
    """Probability that the smallest set of likeliest tokens to sample from must reach; 1 samples
    from all."""
    min_p: float = number(0.0, minimum=0, maximum=1)
    """Lowest probability of a token to sample, as a fraction of the likeliest token's; 0 samples
    from all."""
    truncated_sampling: Literal["refuse", "ignore"] = "refuse"
    """Refuse top_k, top_p and min_p in training, since they sample from another distribution than
    the policy's; or sample from it and train as if it were the policy's, which is biased (ignore).
    """
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
        for key, truncates in cuts.items():
            if truncates and self.truncated_sampling == "refuse":
                raise ValueError(
                    f"{key} {getattr(self, key)} leaves tokens out of what is sampled, and the "
                    f"gradient would be biased: leave {key} out, or set truncated_sampling to "
                    '"ignore"'
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
    """Refuse a URL that is no address or holds a secret, which the error does not repeat."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(
            f"vllm_server_base_url must begin with http:// or https://, got {quoted(url)!r}"
        )
    if "@" in url or "?" in url or "#" in url:
        raise ValueError(
            "vllm_server_base_url holds a user, a password or a query, which would be saved with "
            "the config: leave it out, and let a proxy on this machine add it"
        )
