"""Keys that runs of every kind share: the model, and its adapter."""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from rlhf_pg.config.fields import Checked, found, number
from rlhf_pg.config.mappings import Mapping

logger = logging.getLogger(__name__)

# Arguments of from_pretrained that are keys or arguments of their own, or that would break a run.
_DEVICES = "leave it out, since the launcher chooses devices"
OWN_KEYS = {
    "attn_implementation": "set attn_implementation",
    "trust_remote_code": "set trust_remote_code",
    "dtype": "set dtype",
    "torch_dtype": "set dtype",
    "quantization_config": "give quantization_config to the trainer, or set load_in_4bit",
    "load_in_4bit": "set load_in_4bit",
    "load_in_8bit": "set load_in_4bit",
    "token": "set HF_TOKEN, since config.yaml would keep a token",
    "use_auth_token": "set HF_TOKEN, since config.yaml would keep a token",
    **dict.fromkeys(("device_map", "max_memory", "tp_plan", "device_mesh"), _DEVICES),
    "output_loading_info": "leave it out",
    "config": "name the fields of the config that are to change",
    "state_dict": "give the trainer the model itself",
    "weights_only": "leave it out, since weights are never unpickled",
    **dict.fromkeys(("allow_all_kernels", "kernel_config"), "leave it out, and set use_kernels"),
}


@dataclass(kw_only=True)
class ModelConfig(Checked):
    """Keys of the model to start from."""

    model_name_or_path: str | None = None
    """Path or Hub id of the model to train; None trains the task's own tiny model."""
    trust_remote_code: bool = False
    """Run code that comes with a model, tokenizer or reward model; otherwise one that needs it is
    refused."""
    attn_implementation: str | None = None
    """Attention of policy, reference and critic where a pass is not packed: eager, sdpa,
    flash_attention_2, flex_attention, or a kernel of the Hub. None leaves it to the model."""
    model_init_kwargs: Mapping = field(default_factory=dict)
    """Arguments of from_pretrained for the policy, and for a critic that is loaded, such as
    {"revision": "main"} or fields of the model's config."""
    gradient_checkpointing: bool | Literal["offload"] = False
    """Recompute activations in the backward pass, which saves memory and costs time. offload keeps
    the inputs of the layers, all that is left of them, in the host's memory meanwhile: for long
    rows on a GPU."""

    def __post_init__(self) -> None:
        self.model_init_kwargs = self.model_init_kwargs or {}
        super().__post_init__()
        for key in self.model_init_kwargs:
            if key in OWN_KEYS:
                raise ValueError(f"model_init_kwargs must not have {key!r}: {OWN_KEYS[key]}")
        self._check_kernels()

    def locate(self, beside: Path | None) -> None:
        """Make the names of files absolute: beside the recipe, or else in the working directory."""
        super().locate(beside)
        for key, name in vars(self).items():
            if key.endswith("model_name_or_path") and (path := found(name or "", beside)):
                setattr(self, key, path)

    def on(self, device: str) -> Self:
        """Return the config for a kind of device; on a CPU activations are in the host already."""
        if self.gradient_checkpointing != "offload" or device != "cpu":
            return self
        logger.warning("gradient_checkpointing: offload is for GPUs; on a CPU it is as true")
        return replace(self, gradient_checkpointing=True)

    def _check_kernels(self) -> None:
        """Refuse kernels of the Hub, which are code, unless code is trusted."""
        asked = {
            "attn_implementation": "/" in (self.attn_implementation or ""),
            "use_kernels, of model_init_kwargs,": bool(self.model_init_kwargs.get("use_kernels")),
        }
        for key, runs_code in asked.items():
            if runs_code and not self.trust_remote_code:
                raise ValueError(
                    f"{key} runs kernels of the Hub, which are code: set trust_remote_code to "
                    "true, or leave it out"
                )


@dataclass(kw_only=True)
class AdapterConfig(Checked):
    """Keys of a LoRA adapter on frozen weights."""

    use_peft: bool = False
    """Train a LoRA adapter on frozen weights; `final/` then holds the adapter."""
    lora_r: int = number(16, minimum=1)
    """Rank of the LoRA adapter; a higher one learns more and takes more memory."""
    lora_alpha: float = number(32.0, above=0)
    """Scale of the LoRA adapter: its output is multiplied by lora_alpha / lora_r."""
    lora_dropout: float = number(0.0, minimum=0, below=1)
    """Dropout rate on the input of the LoRA adapter; it needs disable_dropout: false."""
    lora_target_modules: tuple[str, ...] | None = None
    """Names of the modules that get an adapter; None adapts every linear layer but the head."""
    load_in_4bit: bool = False
    """Load the frozen weights in 4 bits (QLoRA, NF4); it needs bitsandbytes and an adapter."""
    save_merged: bool = False
    """Save the model with its adapter merged in as well, in `final/merged/`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        lora = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
        self.refuse_idle(lora, self.use_peft, "is for LoRA: set use_peft to true, or leave it out")
