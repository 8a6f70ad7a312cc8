"""Policy-gradient RL for language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_pg.config import GRPOConfig, PPOConfig, ReinforceConfig, RLOOConfig
    from rlhf_pg.episodes import Environment, Observation
    from rlhf_pg.trainers import Callback, GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Environment",
    "GRPOConfig",
    "GRPOTrainer",
    "Observation",
    "PPOConfig",
    "PPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "ReinforceConfig",
    "ReinforceTrainer",
]

# Names that scripts for TRL import, and what to write here.
NAMES_OF_TRL = {
    "TrlParser": "rlhf_pg.config.parse(GRPOConfig) reads --config FILE and flags",
    "ScriptArguments": "dataset_name and dataset_train_split are keys of GRPOConfig",
    "ModelConfig": "model_name_or_path, dtype, use_peft and lora_r are keys of GRPOConfig",
    "get_peft_config": "set use_peft in GRPOConfig, or give peft_config=LoraConfig(...)",
    "get_quantization_config": "set load_in_4bit in GRPOConfig, or give quantization_config=...",
    "AutoModelForCausalLMWithValueHead": "give PPOTrainer the model; critic: shared makes the head",
    "create_reference_model": "leave it out: the trainer keeps the model as it was",
    "DPOTrainer": "use TRL's",
    "SFTConfig": "it is rlhf_pg.config.SFTConfig",
    "SFTTrainer": "rlhf_pg.supervised.train_sft(SFTConfig(...), model=..., train_dataset=...)",
    "RewardConfig": "it is rlhf_pg.config.RewardModelConfig",
    "RewardTrainer": "rlhf_pg.supervised.train_reward_model(RewardModelConfig(...), model=...)",
}

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used: torch and transformers take seconds."""
        if name in NAMES_OF_TRL:
            raise ImportError(f"rlhf_pg has no {name}: {NAMES_OF_TRL[name]}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from rlhf_pg import config

        if hasattr(config, name):
            return getattr(config, name)
        from rlhf_pg import episodes, trainers

        return getattr(trainers if hasattr(trainers, name) else episodes, name)

    def __dir__() -> list[str]:
        return [*globals(), *__all__]
