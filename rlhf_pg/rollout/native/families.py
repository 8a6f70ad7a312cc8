"""The parts of the decoders of `transformers` that `rlhf_pg.rollout.native.lean_decoder` computes.

Llama, Mistral, Qwen2 and 3, Gemma, Phi, GPT-2, GPT-NeoX and OPT are one decoder: norm, attention,
norm, MLP, added to what came in. They differ in the names of these parts, in the norm, in how
positions enter, and in whether attention and MLP read the same input.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_pg.models.rotary import SETTLED

# Positions turn at speeds that do not depend on the length of a row.
STEADY = {"default", "linear", "llama3", "yarn", SETTLED}


@dataclass(frozen=True, kw_only=True)
class Family:
    """The names of a decoder's parts, as seen from the model, a layer, its attention and its MLP.

    Attributes:
        trunk, layers, last_norm: of the model, the latter two as seen from the trunk.
        rotary, places: the module that turns positions into angles, and the table of learnt
            positions, of which a family has one.
        attention_norm, attention, mlp_norm, mlp: of a layer; without an `mlp_norm` attention and
            MLP share one, and an empty name is the layer itself.
        qkv, out, head_norms: of the attention; one name for queries, keys and values together.
        rise, activation, down: of the MLP; two names are gate and up.
        norm_offset: what is added to the weight of an RMSNorm.
        interleaved: whether a head's query, key and value are neighbours in a common matrix.
        refused: values of config keys that make it another decoder.
    """

    trunk: str = "model"
    layers: str = "layers"
    last_norm: str = "norm"
    rotary: str | None = "rotary_emb"
    places: str | None = None
    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    mlp_norm: str | None = "post_attention_layernorm"
    mlp: str = "mlp"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    head_norms: tuple[str, str] | None = None
    rise: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    down: str = "down_proj"
    norm_offset: float = 0.0
    interleaved: bool = False
    refused: tuple[tuple[str, Any], ...] = ()

    def is_parallel(self, model: PreTrainedModel) -> bool:
        """Return whether attention and MLP of a layer read the same input."""
        return self.mlp_norm is None or getattr(model.config, "use_parallel_residual", False)


_LLAMA = Family()

FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": Family(head_norms=("q_norm", "k_norm")),
    "gemma": Family(norm_offset=1.0, refused=(("use_bidirectional_attention", True),)),
    "phi": Family(
        last_norm="final_layernorm",
        mlp_norm=None,
        out="dense",
        rise=("fc1",),
        activation="activation_fn",
        down="fc2",
        refused=(("qk_layernorm", True),),
    ),
    "gpt2": Family(
        trunk="transformer",
        layers="h",
        last_norm="ln_f",
        rotary=None,
        places="wpe",
        attention_norm="ln_1",
        attention="attn",
        mlp_norm="ln_2",
        qkv=("c_attn",),
        out="c_proj",
        rise=("c_fc",),
        activation="act",
        down="c_proj",
        refused=(("add_cross_attention", True), ("reorder_and_upcast_attn", True)),
    ),
    "gpt_neox": Family(
        trunk="gpt_neox",
        last_norm="final_layer_norm",
        attention="attention",
        qkv=("query_key_value",),
        out="dense",
        rise=("dense_h_to_4h",),
        activation="act",
        down="dense_4h_to_h",
        interleaved=True,
    ),
    "opt": Family(
        trunk="model.decoder",
        last_norm="final_layer_norm",
        rotary=None,
        places="embed_positions",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        mlp="",
        out="out_proj",
        rise=("fc1",),
        activation="activation_fn",
        down="fc2",
        refused=(("do_layer_norm_before", False), ("_remove_final_layer_norm", True)),
    ),
}


def family_of(model: PreTrainedModel) -> Family | None:
    """Return the description of a model, or None if it is of no known family, or changed.

    Quantized weights, adapters that are not merged, and hooks change a model.
    """
    family = FAMILIES.get(model.config.model_type)
    if family is None or not type(model).__module__.startswith("transformers.models."):
        return None
    if any(getattr(model.config, key, None) == value for key, value in family.refused):
        return None
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return None
    if any("forward" in vars(m) for m in model.modules()):
        return None
    trunk = attrgetter(family.trunk)(model)
    if getattr(trunk, "project_in", None) is not None:  # of some OPT
        return None
    if family.rotary and getattr(trunk, family.rotary).rope_type not in STEADY:
        return None
    return family if all(map(_plain, _matrices(family, model))) else None


def part(module: nn.Module, name: str) -> Any:
    """Return a part by its dotted name; an empty name is the module itself."""
    return attrgetter(name)(module) if name else module


def _matrices(family: Family, model: PreTrainedModel) -> list[nn.Module | None]:
    layers = part(part(model, family.trunk), family.layers)
    found = [model.get_output_embeddings()]
    for layer in layers:
        attention, mlp = part(layer, family.attention), part(layer, family.mlp)
        found += [part(attention, name) for name in (*family.qkv, family.out)]
        found += [part(mlp, name) for name in (*family.rise, family.down)]
    return found


def _plain(module: nn.Module | None) -> bool:
    return type(module) in (nn.Linear, Conv1D)
