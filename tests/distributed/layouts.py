"""What is compared with what: runs of every kind, and the ways in which they are distributed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# 5 prompts are shared unevenly by 2 and by 4 processes, in minibatches of 3 and 2.
JOBS: dict[str, dict[str, Any]] = {
    # The reference follows the policy. Evaluation has several completions of each prompt.
    "grpo": {
        "algorithm": "grpo",
        "num_generations_eval": 3,
        "eval_success_threshold": 0.5,
        "num_generations": 4,
        "prompts_per_step": 5,
        "num_mini_batches": 2,
        "positive_nll_coef": 0.1,
        "beta": 0.05,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
    },
    # Groups of two are often equal: each process alone would draw again for others.
    "rloo": {
        "algorithm": "rloo",
        "num_generations": 2,
        "prompts_per_step": 6,
        "dynamic_sampling_rounds": 2,
        "gradient_checkpointing": True,
        "beta": 0.0,
        "normalize_rewards": True,
    },
    # One prompt: other processes have none.
    "reinforce": {
        "algorithm": "reinforce",
        "num_generations": 4,
        "prompts_per_step": 1,
        "advantage_estimator": "returns_minus_greedy",
        "reward_squash": "min_max",
    },
    # Several updates per step, and a step that stops before the last; a critic that begins alone,
    # in units that all processes share.
    "ppo": {
        "algorithm": "ppo",
        "prompts_per_step": 5,
        "num_mini_batches": 2,
        "num_iterations": 3,
        "target_kl": 1e-3,
        "beta": 0.05,
        "missing_eos_penalty": 0.5,
        "overlong_buffer": 3,
        "whiten_rewards": True,
        "vf_coef": 0.5,
        "normalize_values": True,
        "value_pretraining_steps": 1,
        "ptx_coef": 0.1,
        "ptx_dataset_name": str(Path(__file__).parents[1] / "trainers" / "texts.txt"),
        "ptx_batch_size": 3,
    },
    "ppo, shared critic": {
        "algorithm": "ppo",
        "prompts_per_step": 5,
        "num_mini_batches": 2,
        "critic": "shared",
        # Where a gradient is rounding alone, Adam makes it as long as any other, but for this.
        "adam_epsilon": 1e-6,
    },
    # The policy of earlier steps teaches, with a prompt of its own.
    "rloo, taught": {
        "algorithm": "rloo",
        "num_generations": 2,
        "prompts_per_step": 5,
        "num_mini_batches": 2,
        "beta": 0.0,
        "teacher_model_name_or_path": "policy",
        "teacher_mixup_alpha": 0.5,
        "privileged_prompt": "7{prompt}",
    },
    # Weights that policy and reference (and critic) share are split up once for each. Here the
    # gradient is clipped, and the rate rises and falls.
    "grpo, LoRA": {
        "algorithm": "grpo",
        "lora": "fresh",
        "num_generations": 4,
        "prompts_per_step": 5,
        "beta": 0.05,
        "max_grad_norm": 0.05,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
    },
    "rloo, LoRA": {
        "algorithm": "rloo",
        "lora": "fresh",
        "num_generations": 4,
        "prompts_per_step": 5,
    },
    "reinforce, LoRA": {
        "algorithm": "reinforce",
        "lora": "random",
        "prompts_per_step": 5,
        "teacher_model_name_or_path": "policy",
        "teacher_placement": "reward",
        "teacher_coef": 0.1,
        "privileged_prompt": "7{prompt}",
    },
    "ppo, LoRA": {
        "algorithm": "ppo",
        "lora": "random",
        "prompts_per_step": 5,
        "num_mini_batches": 2,
        "beta": 0.05,
    },
    # Layers that carry a state along the row, and windows, sinks and experts.
    "grpo, recurrent": {
        "algorithm": "grpo",
        "arch": "qwen3_5_text",
        "num_generations": 4,
        "prompts_per_step": 5,
        "gradient_checkpointing": True,
    },
    "ppo, sinks, LoRA": {
        "algorithm": "ppo",
        "arch": "gpt_oss",
        "lora": "random",
        "prompts_per_step": 5,
        "beta": 0.05,
    },
}
# On GPT-2, which computes in float64 throughout; DeepSpeed does not.
DOUBLE = {
    f"{name}, float64": JOBS[name]
    | {"dtype": "float64", "arch": "gpt2", "top_entropy_quantile": 0.5}
    for name in ("grpo", "ppo")
}
# The micro-batches that the five steps are taken with.
TRAINED_WITH = {
    "grpo": "two",
    "rloo": "one",
    "reinforce": "two",
    "ppo": "all",
    "ppo, shared critic": "two",
    "rloo, taught": "two",
    "grpo, LoRA": "one",
    "rloo, LoRA": "two",
    "reinforce, LoRA": "one",
    "ppo, LoRA": "all",
    "grpo, recurrent": "two",
    "ppo, sinks, LoRA": "one",
    "grpo, float64": "one",
    "ppo, float64": "two",
}


NAMES = {
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zero2_offload": "ZeRO-2, offloaded",
    "zero3_offload": "ZeRO-3, offloaded",
}


@dataclass(frozen=True)
class Layout:
    backend: str
    processes: int

    def __str__(self) -> str:
        return f"{self.backend}-{self.processes}"

    def describe(self) -> str:
        """For example "ZeRO-3, offloaded, 2 processes"."""
        return f"{NAMES[self.backend]}, {self.processes} processes"

    @property
    def jobs(self) -> list[str]:
        """All of them in two processes, the four algorithms in four."""
        if self.processes == 4:
            return ["grpo", "rloo", "reinforce", "ppo"]
        if self.backend == "zero1" or self.backend.endswith("offload"):
            return ["grpo", "ppo", "ppo, LoRA"]
        return [job for job in JOBS | DOUBLE if not self.refuses(job)]

    def refuses(self, job: str) -> bool:
        return job in DOUBLE and self.backend.startswith("zero")


ONE = Layout("ddp", 1)
LAYOUTS = [
    Layout("ddp", 2),
    Layout("ddp", 4),
    Layout("fsdp2", 2),
    Layout("fsdp2", 4),
    Layout("zero1", 2),
    Layout("zero2", 2),
    Layout("zero2", 4),
    Layout("zero3", 2),
    Layout("zero3", 4),
    Layout("zero2_offload", 2),
    Layout("zero3_offload", 2),
]

# Supervised runs on 11 rows in batches of 4: the last of an epoch has three.
SUPERVISED: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": "sft"},
    "sft, one by one": {"algorithm": "sft", "micro_batch_tokens": 1},
    "sft, smoothed": {"algorithm": "sft", "label_smoothing": 0.1},
    "sft, LoRA": {"algorithm": "sft", "use_peft": True, "lora_r": 2},
    "reward model": {"algorithm": "reward_model"},
    "reward model, one by one": {"algorithm": "reward_model", "micro_batch_tokens": 1},
    "reward model, LoRA": {"algorithm": "reward_model", "use_peft": True, "lora_r": 2},
}
SUPERVISED_DOUBLE = {
    f"{name}, float64": SUPERVISED[name] | {"dtype": "float64", "arch": "gpt2"}
    for name in ("sft, one by one", "reward model")
}
SUPERVISED_LAYOUTS = [Layout("ddp", 2), Layout("ddp", 4), Layout("fsdp2", 2), Layout("zero3", 2)]
