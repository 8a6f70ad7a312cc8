"""Configs of the runs that prepare for RL: the supervised warm start and the reward model."""

from dataclasses import dataclass
from typing import Literal

from rlhf_pg.config.fields import Checked, number


@dataclass(kw_only=True)
class SFTConfig(Checked):
    """Config of the supervised warm start of the embedded task (`recipes/sft.py`)."""

    algorithm: Literal["sft"] = "sft"
    """Algorithm of the recipe file; `rlhf-pg train` chooses the trainer by it."""
    task: Literal["arithmetic", "preference", "guess", "calculator"] = "arithmetic"
    """Embedded task whose training split gives prompts and answers, or whole episodes."""
    output_dir: str = "runs/sft_arithmetic"
    """Directory in which the model is saved, in `final/`."""
    seed: int = number(42, minimum=0, maximum=2**32 - 1)
    """Seed of the initial weights and of the order of examples."""
    max_steps: int = number(600, minimum=1)
    """Number of optimizer steps."""
    label_smoothing: float = number(0.2, minimum=0, below=1)
    """Probability spread over the vocabulary, so that the model leaves RL answers to explore."""
    batch_size: int = number(128, minimum=1)
    """Number of examples per step."""
    learning_rate: float = number(3e-3, above=0)
    """Peak learning rate of AdamW, which falls as a cosine."""


@dataclass(kw_only=True)
class RewardModelConfig(Checked):
    """Config of a reward model trained on preference pairs (`recipes/reward_model.py`)."""

    algorithm: Literal["reward_model"] = "reward_model"
    """Algorithm of the recipe file; `rlhf-pg train` chooses the trainer by it."""
    model_name_or_path: str | None = None
    """Path or Hub id of the model to start from; None takes the task's own tiny model."""
    trust_remote_code: bool = False
    """Run code that comes with a model or tokenizer; otherwise one that needs it is refused."""
    task: Literal["arithmetic", "preference"] = "preference"
    """Embedded task whose preference pairs the recipe trains on."""
    output_dir: str = "runs/reward_model_preference"
    """Directory for the model, in `final/`, and its held-out accuracy, in `metrics.json`."""
    seed: int = number(42, minimum=0, maximum=2**32 - 1)
    """Seed of the new head and of the order of pairs."""
    max_steps: int = number(400, minimum=1)
    """Number of optimizer steps."""
    batch_size: int = number(64, minimum=1)
    """Preference pairs per step, over all processes."""
    max_length: int | None = number(None, minimum=1)
    """Longest text in tokens; None allows as many as the model has positions."""
    append_eos: bool = True
    """Append the EOS to texts that are strings, as a policy ends them (see
    reward_model_sees_eos)."""
    learning_rate: float = number(1e-5, above=0)
    """Peak learning rate of AdamW, which rises over a tenth of the steps and falls as a cosine."""
