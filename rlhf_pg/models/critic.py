"""PPO's critic, which predicts the return of the rest of a completion."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import safetensors.torch as safetensors
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.boundary.quoted import about
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data.batch import Batch
from rlhf_pg.masking import widen
from rlhf_pg.models import loading
from rlhf_pg.models.adapters import add_adapter, freeze_all_but, freeze_unread, share_frozen
from rlhf_pg.models.lm_head import LOADED, trunk
from rlhf_pg.models.packing import Hidden, hidden_states, lay_out_padded, packing_window
from rlhf_pg.models.policy import (
    Policy,
    Reference,
    Teacher,
    checkpoint_activations,
    checkpoints,
    disable_dropout,
    train_as_evaluated,
)
from rlhf_pg.running_stats import RunningMoments

HEAD_FILE = "value_head.safetensors"
TRAINED_HEAD_FILE = "value_head_normalized.safetensors"
MODULE_FILE = "model.safetensors"
VALUE_MODEL = "value_model (value_model_name_or_path)"  # its name in errors about its files


class ValueHead(nn.Linear):
    """A linear layer from hidden states to values, in at least float32, initialised to 0."""

    _no_split_modules = ("ValueHead",)  # FSDP2 needs one dtype per unit

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, dtype=torch.promote_types(dtype, torch.float32))
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (N,hidden) to (N,)."""
        return super().forward(hidden.to(self.weight.dtype)).squeeze(-1)


class Critic(nn.Module):
    """A model of the value V(x, y_<t) of every state of a completion.

    The head reads the last hidden states of `model`, or of the policy if that is None. Without a
    head, `model` maps `input_ids, attention_mask, position_ids` to values (B,S) or (B,S,1).
    """

    def __init__(self, model: nn.Module | None, head: ValueHead | None) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.drops = False  # whether training has dropout
        # Longest row, in tokens, that its own trunk can pack.
        self.window = math.inf if model is None else 0.0
        if model is not None and head is not None:
            self.window = packing_window(trunk(model))

    @property
    def shares_trunk(self) -> bool:
        return self.model is None

    def train(self, mode: bool = True) -> Self:
        """Switch train mode like `Policy.train`; a module without a head really switches."""
        super().train(mode)
        if mode and not self.drops and isinstance(self.model, LOADED):
            train_as_evaluated(self.model)
        return self

    def keep_dropout(self) -> None:
        """Train with dropout, as `Policy.keep_dropout` does."""
        self.drops = True
        if self.model is not None:
            self.window = self.window and packing_window(trunk(self.model), training=True)

    def forward(self, batch: Batch, of_policy: Hidden | None = None) -> tuple[Tensor, Tensor]:
        """Return the values before each token (B,T), and of the state after the last action (B,); a
        critic that shares the policy's trunk needs the policy's `hidden_states`.
        """
        if self.head is None:  # the module computes the values itself
            assert self.model is not None
            inputs, states = lay_out_padded(batch)
            output: Tensor = self.model(**inputs)
            values = output.squeeze(-1) if output.ndim == 3 else output
            shape = inputs["input_ids"].shape
            if values.shape != shape:
                raise ValueError(
                    "value_model must give one value per token, "
                    f"{tuple(shape)}, got {tuple(output.shape)}"
                )
            values = widen(values).flatten()
        else:
            hidden, states = of_policy or hidden_states(trunk(self.model), batch, self.window)
            values = self.head(hidden)
        mask = batch.action_mask
        # Indexing by [] would sum the gradient in a random order on a CPU with several threads.
        before = values.index_select(0, states[:, :-1].flatten())
        before = before.view(mask.shape)
        ends = values.index_select(0, states[:, -1])
        return torch.where(mask, before, 0.0), ends

    def save(self, path: Path, moments: RunningMoments | None = None) -> None:
        """Save trunk or adapter as `from_pretrained` reads them, and the head beside them. With
        `moments` of returns, save the trained head for (R - mean) / std, and another that gives R.
        """
        path.mkdir(parents=True, exist_ok=True)
        if self.head is not None:
            self.save_head(path, moments, self.head.state_dict())
        if isinstance(self.model, LOADED):
            self.model.save_pretrained(path)
        elif self.model is not None:
            safetensors.save_model(self.model, str(path / MODULE_FILE))  # tied weights once

    @staticmethod
    def save_head(
        path: Path,
        moments: RunningMoments | None,
        weights: dict[str, Tensor],
    ) -> None:
        if moments is not None:
            safetensors.save_file(weights, path / TRAINED_HEAD_FILE)
            # V std + mean = (w h + b) std + mean
            weight = weights["weight"] * moments.std
            bias = moments.denormalize(weights["bias"])
            weights = {"weight": weight, "bias": bias}
        safetensors.save_file(weights, path / HEAD_FILE)

    @staticmethod
    def saved_head(path: Path) -> dict[str, Tensor]:
        trained = path / TRAINED_HEAD_FILE
        return safetensors.load_file(trained if trained.exists() else path / HEAD_FILE)

    def restore(self, path: Path) -> None:
        """Load in place the files of `save`."""
        if self.head is not None:
            self.head.load_state_dict(self.saved_head(path))
        if isinstance(self.model, LOADED):
            loading.load_weights(self.model, path)
        elif self.model is not None:
            safetensors.load_model(self.model, path / MODULE_FILE)


class ActorCritic(nn.Module):
    """A policy and its critic as one module, wrapped once and trained by one optimizer.

    `recompute` recomputes a separate critic's activations in the backward pass, which comes after
    the policy's are freed: the peak is the same as without a critic.
    """

    def __init__(self, policy: Policy, critic: Critic, recompute: bool = False) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic
        self.recompute = recompute

    def forward(self, batch: Batch, values_alone: bool = False) -> Any:
        """Return the output of `Policy.forward` with values, or only the critic's output. (FSDP2
        needs every call to begin with the wrapped module.)
        """
        shared = self.policy.hidden_states(batch) if self.critic.shares_trunk else None
        if values_alone:
            return self.critic(batch, shared)
        if shared is None and self.recompute and torch.is_grad_enabled():
            values, end = checkpoint(self.critic, batch, use_reentrant=False)
        else:
            values, end = self.critic(batch, shared)
        output = self.policy(batch) if shared is None else self.policy.apply_head(batch, shared)
        return output._replace(values=values, end_values=end)


class Models(NamedTuple):
    """The models of a run."""

    policy: Policy
    critic: Critic | None
    reference: Reference | None
    module: nn.Module  # the trained module: the policy, or policy and critic
    teacher: Teacher | None = None


def assemble(
    model: PreTrainedModel,
    args: PolicyGradientConfig,
    critic: Critic | None,
    most_tokens: int,
    chunk_size: int,
) -> tuple[Policy, nn.Module]:
    """Return the policy, and the trained module: the policy, or policy and critic."""
    policy = Policy(model, args.temperature, args.has_entropy_bonus, most_tokens, chunk_size)
    module: nn.Module = policy
    if critic is not None:
        # With adapters, activations take most of the memory. Checkpointing recomputes them already.
        recompute = isinstance(critic.model, PeftModel) and not args.gradient_checkpointing
        module = ActorCritic(policy, critic, recompute)
    if args.disable_dropout:
        disable_dropout(module)
    else:
        policy.keep_dropout()
        if critic is not None:
            critic.keep_dropout()
    for part in (model, None if critic is None else critic.model):
        # The user may have turned it on in the model itself; ours replaces it.
        if part is not None and (args.gradient_checkpointing or checkpoints(part)):
            checkpoint_activations(part, args.gradient_checkpointing == "offload")
    return policy, module


def new_critic(
    policy_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    shared: bool = False,
    value_model: loading.Location | nn.Module | None = None,
    peft_config: Any = None,
    random_seed: int | None = None,
    trust_remote_code: bool = False,
    model_options: Mapping[str, Any] | None = None,
) -> Critic:
    """Create the critic of a policy: a copy of its trunk with a new head, or as the arguments say.

    Args:
        shared: put a head on the policy's own trunk.
        value_model: a path, a Hub id or an object. A `transformers` model lends its trunk (an
            object is copied); an earlier run's `critic/` brings its head too. Any other module
            computes the values itself (see `Critic`), and is trained in place.
        peft_config: an adapter to train on the trunk of `value_model`; by default one like the
            policy's own, if it has one.
        random_seed: start from random weights with this seed, in the policy's architecture.
        model_options: as in `load_model`, except those about the location of the policy's files.

    Raises:
        ValueError: there is no such model, it has another vocabulary, it is the policy itself, or
            an adapter would be on random weights.
    """
    if shared:
        return Critic(None, _head(policy_model, dtype))
    if random_seed is not None:
        if isinstance(policy_model, PeftModel):
            raise ValueError("value_init random cannot be used with an adapter: leave it out")
        bare = trunk(policy_model)
        with torch.random.fork_rng(devices=[]):  # leaves other random numbers unchanged
            torch.manual_seed(random_seed)
            fresh = type(bare)(copy.deepcopy(bare.config))
        return Critic(loading.load_model(fresh, dtype), _head(policy_model, dtype))
    if value_model is None:
        # An adapter is saved for the whole model; all but the adapter is shared with the policy.
        if isinstance(policy_model, PeftModel):
            copied = _without_head(share_frozen(policy_model))
        else:
            copied = share_frozen(trunk(policy_model))
        return Critic(copied, _head(policy_model, dtype))
    path = None if isinstance(value_model, nn.Module) else value_model
    if isinstance(value_model, nn.Module):
        trained = {id(p) for p in policy_model.parameters() if p.requires_grad}
        if any(id(p) in trained for p in value_model.parameters()):
            raise ValueError(
                "value_model is the policy, or shares trained weights with it: leave it out for a "
                'copy of the policy, or set critic to "shared" for a head on its trunk'
            )
        if not isinstance(value_model, LOADED):
            return Critic(value_model, None)
        value_model = copy.deepcopy(value_model)  # the object may be the reward model as well
    given = (model_options or {}).items()
    options = {
        k: v
        for k, v in given
        if k == loading.ATTENTION or (path and k not in loading.LOCATION_KEYS)
    }
    with about(VALUE_MODEL):
        model = loading.load_model(value_model, dtype, AutoModel, None, trust_remote_code, options)
    loading.check_vocabulary(tokenizer, model, "value_model")
    if path is not None and loading.has_tokenizer(path):
        with about(VALUE_MODEL):
            loading.check_same_tokens(str(path), tokenizer, trust_remote_code)
    model = model if isinstance(model, PeftModel) else model.base_model
    head = _head(model, dtype)
    if path is not None and (file := Path(path) / HEAD_FILE).exists():
        with about(VALUE_MODEL), loading.opening("value head", path):
            head.load_state_dict(safetensors.load_file(file))
    peft_config = peft_config or getattr(policy_model, "active_peft_config", None)
    if peft_config is not None and not isinstance(model, PeftModel):
        config = copy.deepcopy(peft_config)
        config.task_type = "FEATURE_EXTRACTION"
        config.modules_to_save = None
        config.base_model_name_or_path = None
        if isinstance(config.target_modules, set):
            # A loaded adapter has module paths in the policy, which may differ from the critic's.
            config.target_modules = {name.rsplit(".", 1)[-1] for name in config.target_modules}
        model = add_adapter(model, config)
    return Critic(_without_head(model), head)


def _without_head(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze the weights that the critic does not use, which never have a gradient."""
    freeze_unread(model)
    freeze_all_but(model, trunk(model))
    return model


def _head(model: PreTrainedModel, dtype: torch.dtype) -> ValueHead:
    config = model.config.get_text_config()
    # OPT may project its hidden states to another width.
    return ValueHead(getattr(config, "word_embed_proj_dim", config.hidden_size), dtype)
