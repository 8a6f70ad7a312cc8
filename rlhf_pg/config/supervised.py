"""Keys of the runs that prepare for RL: the supervised warm start and the reward model."""

from dataclasses import dataclass
from typing import Literal

from rlhf_pg.config.fields import Checked, number


@dataclass(kw_only=True)
class SFTConfig(Checked):
    """Supervised warm start of the embedded task (`recipes/sft.py`)."""

    algorithm: Literal["sft"] = "sft"
    """Which algorithm a recipe file is for."""
    task: Literal["arithmetic", "preference", "guess", "calculator"] = "arithmetic"
    """The embedded task: its training split gives prompts and answers, or whole episodes."""
    output_dir: str = "runs/sft_arithmetic"
    """Where the model goes, in `final/`."""
    seed: int = number(42, minimum=0, maximum=2**32 - 1)
    """Seed of the initial weights and of the order of examples."""
    max_steps: int = number(600, minimum=1)
    """Optimizer steps."""
    label_smoothing: float = number(0.2, minimum=0, below=1)
    """Mass spread over the vocabulary: the model knows more answers than it will say."""
    batch_size: int = number(128, minimum=1)
    """Examples per step."""
    learning_rate: float = number(3e-3, above=0)
    """Peak learning rate of AdamW; it falls as a cosine."""


@dataclass(kw_only=True)
class RewardModelConfig(Checked):
    """A reward model from preference pairs (`recipes/reward_model.py`)."""

    algorithm: Literal["reward_model"] = "reward_model"
    """Which algorithm a recipe file is for."""
    model_name_or_path: str | None = None
    """Path or Hub id of the model to start from; without one, the task's own tiny model."""
    trust_remote_code: bool = False
    """Run code that comes with a model or tokenizer; otherwise one that needs it is
    refused."""
    task: Literal["arithmetic", "preference"] = "preference"
    """The embedded task that a recipe takes its pairs from."""
    output_dir: str = "runs/reward_model_preference"
    """Where the model goes, in `final/`, and its held-out accuracy, in `metrics.json`."""
    seed: int = number(42, minimum=0, maximum=2**32 - 1)
    """Seed of the new head and of the order of pairs."""
    max_steps: int = number(400, minimum=1)
    """Optimizer steps."""
    batch_size: int = number(64, minimum=1)
    """Pairs per step, over all processes."""
    max_length: int | None = number(None, minimum=1)
    """Longest text in tokens; None allows as many as the model has positions."""
    append_eos: bool = True
    """Put the EOS behind texts that are strings, as a policy ends them (reward_model_sees_eos)."""
    learning_rate: float = number(1e-5, above=0)
    """Peak learning rate of AdamW, after a tenth of the steps; then it falls as a cosine."""
