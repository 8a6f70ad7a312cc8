"""The policy, its frozen reference, recomputation of activations, and dropout."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlhf_pg.data.batch import Batch
from rlhf_pg.models import lm_head
from rlhf_pg.models.adapters import adds_nothing, share_frozen
from rlhf_pg.models.attention import configs_of, replace_attention
from rlhf_pg.models.loading import load_weights
from rlhf_pg.models.packing import Hidden, hidden_states, lay_out_padded, packing_window
from rlhf_pg.models.recurrent import forwards, replaced_forwards
from rlhf_pg.models.streaming import bytes_of, stored_value


class PolicyOutput(NamedTuple):
    """Numbers of the predicted tokens, (B,T), in at least float32; 0 in masked slots."""

    logprobs: Tensor  # of the sampled tokens
    entropy: Tensor  # of each token's distribution; detached but for `keep_entropy_gradient`
    values: Any = None  # V of the state before each token, where there is a critic
    end_values: Tensor | None = None  # (B,) V of the state after the last action token
    divergence: Tensor | None = None  # (B,T) from the teacher, during updates
    right: Tensor | None = None  # (B,T) bool; whether the token is the likeliest, if asked for


class Policy(nn.Module):
    """A causal language model, with adapters or without, that predicts completions.

    Args:
        temperature: divides every logit, as in sampling.
        entropy_gradient: whether the entropy is part of the loss; otherwise it is detached.
        label_smoothing: of log-probabilities in training; see `TokenDistribution`.
        most_tokens: the most tokens of a batch on any process.
        chunk_size: logits in memory at a time, the same on every process (`chunk_size_for`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        most_tokens: int = 1,
        chunk_size: int = lm_head.CHUNK_SIZE,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient
        self.chunk_size = chunk_size
        self.head: lm_head.ChunkedLMHead | None = None
        self.drops = False  # whether training has dropout
        self.window = 0.0  # longest packed row, in tokens
        self.teacher: lm_head.TeacherHead | None = None  # for batches with `teacher_hidden`
        transform = lm_head.logit_transform_of(model)
        if transform is not None:
            vocabulary = model.config.get_text_config().vocab_size
            self.head = lm_head.ChunkedLMHead(
                model,
                temperature,
                entropy_gradient,
                lm_head.num_chunks(most_tokens, vocabulary, chunk_size),
                transform,
            )
            self.window = packing_window(lm_head.trunk(model))

    def train(self, mode: bool = True) -> Self:
        """Switch train mode; without dropout the model trains in evaluation mode."""
        super().train(mode)
        if mode and not self.drops:
            train_as_evaluated(self.model)
        return self

    def keep_entropy_gradient(self) -> None:
        """Make the entropy part of the loss."""
        self.entropy_gradient = True
        if self.head is not None:
            self.head = replace(self.head, entropy_gradient=True)

    def keep_dropout(self) -> None:
        """Train with dropout; rows are not packed if attention has it: ours cannot apply it."""
        self.drops = True
        if self.window:
            self.window = packing_window(lm_head.trunk(self.model), training=True)

    def forward(self, batch: Batch, compares: bool = False) -> PolicyOutput:
        """Return log pi(y_t | x, y_<t) and H(pi(. | x, y_<t)) for every predicted token, and if it
        `compares` whether the token is the likeliest.
        """
        if self.head is not None:
            return self.apply_head(batch, self.hidden_states(batch), compares)
        slots = batch.predicted_slots()
        logits = self.logits(batch).flatten(0, 1)[slots]
        tokens = batch.completion_ids.flatten()[slots]
        right = [logits.argmax(-1) == tokens] if compares else []
        statistics = lm_head.token_statistics(
            logits,
            tokens,
            self.temperature,
            self.entropy_gradient,
            smoothing=self.label_smoothing * self.training,
        )
        return _spread(batch, slots, statistics, right)

    def hidden_states(self, batch: Batch) -> Hidden:
        """Run the trunk over a batch, as in `rlhf_pg.models.packing`."""
        return hidden_states(lm_head.trunk(self.model), batch, self.window)

    def apply_head(self, batch: Batch, trunk: Hidden, compares: bool = False) -> PolicyOutput:
        """Apply the head to the completions, given the `hidden_states` of the batch."""
        assert self.head is not None
        slots = batch.predicted_slots()
        # Indexing by [] would sum the gradient in a random order on a CPU with several threads.
        before = trunk.hidden.index_select(0, _before(trunk, slots))
        teacher = None
        if self.teacher is not None and batch.teacher_hidden is not None:
            teacher = self.teacher, batch.teacher_hidden.flatten(0, 1)[slots]
        tokens = batch.completion_ids.flatten()[slots]
        statistics = self.head(before, tokens, teacher, self.label_smoothing * self.training)
        right = [self.head.likeliest(before) == tokens] if compares else []
        return _spread(batch, slots, statistics, right)

    def logits(self, batch: Batch) -> Tensor:
        """Return the model's logits for all tokens of the completions, (B,T,V), not of trees."""
        if batch.parent_offsets is not None:
            name = type(self.model).__name__
            raise ValueError(f"{name} has no linear head, which branches need: use another model")
        columns = batch.completion_ids.shape[1] + 1
        output = self.model(
            **lay_out_padded(batch).inputs,
            use_cache=False,
            logits_to_keep=columns,
        )
        # The logits in column t are for token t+1; those of the last column are not needed.
        logits: Tensor = output.logits[:, -columns:-1]
        return logits


def train_as_evaluated(model: nn.Module) -> None:
    """Train a model in evaluation mode, so that training and sampling have the same distribution:
    train mode is more than dropout (jitter in routers, clipped coefficients). Only parts that
    recompute their activations are in train mode, without their children.
    """
    model.eval()
    for part in model.modules():
        part.training = bool(getattr(part, "gradient_checkpointing", False))


def _before(trunk: Hidden, slots: Tensor) -> Tensor:
    """Return the indices of the hidden states that precede the tokens in `slots`."""
    return trunk.states[:, :-1].flatten()[slots]


def _spread(
    batch: Batch,
    slots: Tensor,
    statistics: lm_head.TokenStatistics,
    right: Sequence[Tensor],
) -> PolicyOutput:
    """Put numbers of the predicted tokens into their slots, with 0 elsewhere; (B,T) each."""
    mask = batch.action_mask

    def spread(x: Tensor) -> Tensor:
        zeros = x.new_zeros(mask.numel())
        return zeros.scatter(0, slots, x).view(mask.shape)

    logprobs, entropy, *divergence = map(spread, statistics)
    return PolicyOutput(
        logprobs,
        entropy,
        divergence=divergence[0] if divergence else None,
        right=spread(right[0]) if right else None,
    )


class Reference(nn.Module):
    """A frozen copy of a policy; `moves` if it will `follow` the policy.

    It is copied from memory, so it is exactly the initial policy. Frozen weights are shared with
    the policy: with LoRA it costs at most an adapter, and nothing if that was new and the reference
    does not move.
    """

    def __init__(self, policy: Policy, moves: bool = False) -> None:
        super().__init__()
        self.policy = share_frozen(policy).eval().requires_grad_(False)
        self.moves = moves
        if adds_nothing(policy.model) and not moves:
            self.policy.model = self.policy.model.unload()

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Return the log-probabilities of the action tokens, (B,T)."""
        logprobs: Tensor = self.policy(batch).logprobs
        return logprobs

    @torch.no_grad()
    def follow(
        self,
        policy: Policy,
        alpha: float,
        gathered: Callable[..., AbstractContextManager[Any]] = lambda *_, write: nullcontext(),
    ) -> None:
        """Move towards the policy, in place (TR-DPO; Gorbatovski et al. 2024).

            ref <- alpha policy + (1 - alpha) ref

        Buffers move too; with `alpha` 1 the reference becomes an exact copy. In bfloat16, moves
        below the last bit of a weight are lost. For LoRA the factors A and B are averaged, not
        their product. `gathered(target, source, write=True)` is entered around each move, for
        sharded tensors.
        """
        pairs = zip(policy.parameters(), self.policy.parameters(), strict=True)
        buffers = zip(policy.buffers(), self.policy.buffers(), strict=True)
        for source, target in (*pairs, *buffers):
            if target is source:  # frozen and shared
                continue
            with gathered(target, source, write=True):
                if target.is_floating_point():
                    target.lerp_(source, alpha)
                else:
                    target.copy_(source)

    def save(self, path: Path) -> None:
        """Save the weights or the adapter as `from_pretrained` reads them."""
        self.policy.model.save_pretrained(path)

    def restore(self, path: Path) -> None:
        """Load in place the files of `save`."""
        load_weights(self.policy.model, path)

    def train(self, mode: bool = True) -> "Reference":
        """Stay in evaluation mode."""
        return super().train(False)


class Teacher(Reference):
    """A frozen policy whose distribution the trained policy is pulled towards; `divergence` is of
    whole distributions, or None.
    """

    def __init__(
        self,
        policy: Policy,
        moves: bool,
        divergence: lm_head.Divergence | None,
    ) -> None:
        super().__init__(policy, moves)
        self.divergence = divergence
        # Looked up before sharding, and in a list, so that it is not a second child.
        self.layer: list[nn.Linear | None] = [None]
        layer = lm_head.output_layer(self.policy.model)
        if self.policy.head is not None and layer is not None:
            self.layer = [lm_head.plain(layer)]

    @torch.no_grad()
    def forward(self, batch: Batch) -> Any:
        """Return log-probabilities of the action tokens, (B,T), and the hidden states before them,
        (B,T,H), if whole distributions are compared.
        """
        if self.divergence is None:
            return super().forward(batch), None
        trunk = self.policy.hidden_states(batch)
        slots = batch.predicted_slots()
        before = trunk.hidden[_before(trunk, slots)]
        mask = batch.action_mask
        hidden = before.new_zeros(mask.numel(), before.shape[1])
        hidden[slots] = before
        logprobs = self.policy.apply_head(batch, trunk).logprobs
        return logprobs, hidden.view(*mask.shape, -1)

    def head(self, gather: Callable[[Tensor], Tensor]) -> lm_head.TeacherHead | None:
        """Return the head for a policy to compare with; `gather` collects a sharded weight."""
        [layer] = self.layer
        head = self.policy.head
        if self.divergence is None or layer is None or head is None:
            return None
        bias = None if layer.bias is None else gather(layer.bias)
        return lm_head.TeacherHead(
            gather(layer.weight),
            bias,
            lm_head.TokenDistribution(head.temperature, head.transform, False),
            self.divergence,
        )


def fingerprint(module: nn.Module) -> str:
    """Hash the names and shapes of all tensors, and the values of frozen parameters except those of
    a moving reference (SHA-256). A resumed run compares it, since these weights are not saved.
    """
    digest = hashlib.sha256()
    stays = not (isinstance(module, Reference) and module.moves)
    for name, tensor in sorted(module.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        if stays and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            if tensor.is_meta:
                tensor = stored_value(module, name)
            digest.update(bytes_of(tensor))
    return digest.hexdigest()


def has_experts(model: nn.Module) -> bool:
    """Return whether the model is a mixture of experts."""
    return any(".experts." in name for name, _ in model.named_parameters())


def checkpoint_activations(model: nn.Module, offload: bool = False) -> None:
    """Recompute activations in the backward pass; `offload` keeps layer inputs on the host."""
    if not isinstance(model, lm_head.LOADED):
        return
    configs = configs_of(model)

    def contexts(part: nn.Module) -> tuple[Any, Any]:
        names = [config._attn_implementation for config in configs]  # for the recomputation too
        mixing = replaced_forwards(part)
        as_forward = partial(_as_forward, part, configs, names, mixing)
        return as_forward(), as_forward()

    model.gradient_checkpointing_enable({"use_reentrant": False})
    for part in model.modules():
        if getattr(part, "gradient_checkpointing", False):
            part._gradient_checkpointing_func = partial(
                _offload if offload else checkpoint,
                use_reentrant=False,
                context_fn=partial(contexts, part),
            )


@contextmanager
def _as_forward(
    part: nn.Module,
    configs: list[Any],
    names: list[str],
    mixing: dict[nn.Module, Any],
) -> Iterator[None]:
    """Use the same attention and mixers in the forward pass and its recomputation, and the train
    mode of the children, since a part's own mode only switches recomputation on.
    """
    mode = part.training
    part.training = all(child.training for child in part.children())
    try:
        with replace_attention(configs, names), forwards(mixing):
            yield
    finally:
        part.training = mode


def _offload(layer: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Recompute a layer like `checkpoint`, from inputs kept on the host."""
    kept: Any = save_on_cpu(pin_memory=True)
    if any(isinstance(x, FakeTensor) for x in inputs):
        # Fake tensors only measure the device's memory, so they are not kept on the host.
        kept = saved_tensors_hooks(
            lambda x: (x.new_empty(0), x.shape),
            lambda saved: saved[0].new_empty(saved[1]),
        )
    with kept:
        return checkpoint(layer, *inputs, **options)


def checkpoints(model: nn.Module) -> bool:
    """Return whether any part of the model recomputes its activations."""
    return any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def offloads(model: nn.Module) -> bool:
    """Return whether recomputation starts from inputs in the host's memory."""
    for part in model.modules():
        function = getattr(part, "_gradient_checkpointing_func", None)
        if getattr(function, "func", None) is _offload:
            return True
    return False


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0, in modules and in rates that attention functions read."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
