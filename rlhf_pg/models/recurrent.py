"""Recurrent layers, whose modules of `transformers` carry a state along each row.

Such a mixer (linear attention, a state space, a short convolution) has no place for several rows
after one another: some drop the boundaries of a packed row in silence. So it gets rows, and the
state that each continues: a prompt is computed once, and its completions start from its state. What
is a mixer is found by what reads and writes the recurrent layers of `DynamicCache`.

Shapes: N tokens of a forward pass; R rows of L tokens that a mixer computes together.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

MARK = "_recurrent"  # attribute of a module that is a mixer
Key = tuple[str, int]  # conv or recurrent, and the number of the state in its layer
States = dict[Key, Tensor]


class Recurrent(NamedTuple):
    """What a module needs to be run as a mixer."""

    layer: int
    cache: str  # the argument that receives the cache
    states: int  # conv and recurrent states of the layer, each
    continues: bool  # whether several tokens can follow a state
    in_one_call: bool = False  # see `mix_in_one_call`


class RowStates(LinearAttentionLayer):  # type: ignore[misc]
    """The states of R rows in one layer. They are replaced, not overwritten: the backward pass
    needs what a row started from.

    Args:
        states: what the rows continue, (R,...) each; none for rows that begin.
    """

    def __init__(self, count: int, states: Mapping[Key, Tensor]) -> None:
        super().__init__(number_of_states=count)
        for (kind, number), state in states.items():
            getattr(self, kind)[number] = state
            self.has_previous_state[number] = True

    @property
    def states(self) -> States:
        """The states after the tokens so far."""
        states = States()
        for kind in ("conv_states", "recurrent_states"):
            for number, state in getattr(self, kind).items():
                if state is not None:
                    states[kind, number] = state
        return states

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the columns before `conv_states` (R,channels,L) and these, and keep the last."""
        before = self.conv_states[state_idx]
        if before is None:
            length = conv_states.shape[-1]
            size = conv_kernel_size or length
            missing = max(size - length, 0)
            columns = nn.functional.pad(conv_states, (missing, 0))
        else:
            size = before.shape[-1]
            columns = torch.cat([before, conv_states], dim=-1)
        self.conv_states[state_idx] = columns[..., -size:]
        self.has_previous_state[state_idx] = True
        return columns

    def update_recurrent_state(
        self,
        recurrent_states: Tensor,
        state_idx: int = 0,
        **options: Any,
    ) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


@dataclass(frozen=True)
class Mixer:
    """One call of a mixer for all tokens of a pass, to be run on rows of them.

    Args:
        forward: the module's own.
        arguments: positional and named; tensors (1,N,...) among them have a value for each token.
        tokens: N.
    """

    recurrent: Recurrent
    forward: Callable[..., Tensor]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    tokens: int

    def __call__(
        self,
        rows: Tensor,
        states: Mapping[Key, Tensor] | None = None,
    ) -> tuple[Tensor, States]:
        """Return (R,L,width) for the tokens with the indices `rows` (R,L), which continue `states`
        or, if these are empty, begin; and the states after them, unless `states` is None.
        """

        def of_rows(x: Tensor) -> Tensor:
            if x.shape[:2] != (1, self.tokens):
                return x
            of_tokens = x[0].index_select(0, rows.flatten())
            return of_tokens.view(*rows.shape, *of_tokens.shape[1:])

        args, named = tree_map_only(Tensor, of_rows, self.arguments)
        recurrent = self.recurrent
        if states is None:
            named[recurrent.cache] = None
            return self.forward(*args, **named), {}
        layer = RowStates(recurrent.states, states)
        named[recurrent.cache] = Cache(layers=[layer] * (recurrent.layer + 1))
        output = self.forward(*args, **named)
        return output, layer.states


def mixers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that `mark_mixers` has marked."""
    return [module for module in model.modules() if hasattr(module, MARK)]


def mix_in_one_call(model: nn.Module) -> None:
    """Let each mixer compute all rows of a pass in one call, which takes longer: under ZeRO-3 each
    call of its layers gathers weights, so that all processes must make the same number of them.
    """
    for module in mixers(model):
        recurrent = getattr(module, MARK)
        setattr(module, MARK, recurrent._replace(in_one_call=True))


@contextmanager
def mix_rows(model: nn.Module, layout: Any) -> Iterator[None]:
    """Let the mixers of a model compute the rows of a `Layout` inside the block."""

    def forward(
        module: nn.Module,
        before: Callable[..., Tensor],
        *args: Any,
        **named: Any,
    ) -> Tensor:
        named.pop("layout", None)
        mixer = Mixer(
            getattr(module, MARK),
            before,
            (args, named),
            layout.size,
        )
        return layout.mix(mixer)[None]  # type: ignore[no-any-return]

    with forwards({module: partial(forward, module, module.forward) for module in mixers(model)}):
        yield


@contextmanager
def forwards(functions: dict[nn.Module, Any]) -> Iterator[None]:
    """Give modules these `forward` functions inside the block, then their own again."""
    before = {module: vars(module).get("forward") for module in functions}
    try:
        for module, function in functions.items():
            module.forward = function
        yield
    finally:
        for module, function in before.items():
            if function is None:
                del module.forward
            else:
                module.forward = function


def replaced_forwards(model: nn.Module) -> dict[nn.Module, Any]:
    """Return what `mix_rows` has given to the mixers of a model, if they are in such a block."""
    replaced = dict[nn.Module, Any]()
    for module in mixers(model):
        if "forward" in vars(module):
            replaced[module] = module.forward
    return replaced


class _Call(NamedTuple):
    """A call of a module with the cache."""

    module: nn.Module
    args: tuple[Any, ...]
    named: dict[str, Any]


def mark_mixers(
    model: nn.Module,
    cache: Cache,
    pass_token: Callable[[], Any],
) -> list[int]:
    """Mark the modules that use the recurrent layers of a cache, and return these layers, given a
    function that passes one token with this cache.

    NotImplementedError if a layer keeps its state elsewhere, a module takes the cache in another
    way than as a named argument, or lets a token see a later one.
    """
    layers = {
        number: layer
        for number, layer in enumerate(cache.layers)
        if isinstance(layer, LinearAttentionCacheLayerMixin)
    }
    users = _users(model, layers, pass_token)
    if set(layers) - {layer for _, layer in users.values()}:
        raise NotImplementedError("a recurrent layer that keeps its state elsewhere")
    inner = set[nn.Module]()
    for module in users:
        _, *parts = module.modules()
        inner.update(parts)
    continues = dict[type[nn.Module], bool]()
    for module, (call, number) in users.items():
        if module in inner or hasattr(module, MARK):
            continue
        names = [name for name, value in call.named.items() if value is cache]
        kind = type(module)
        if len(names) != 1:
            raise NotImplementedError(f"{kind.__name__} without a cache among its arguments")
        recurrent = Recurrent(
            number,
            names[0],
            len(layers[number].conv_states),
            continues=True,
        )
        if kind not in continues:
            continues[kind] = _continues(recurrent, call)
        setattr(module, MARK, recurrent._replace(continues=continues[kind]))
    return list(layers)


def _users(
    model: nn.Module,
    layers: dict[int, Any],
    pass_token: Callable[[], Any],
) -> dict[nn.Module, tuple[_Call, int]]:
    """Return the modules that use these layers of a cache when a token passes, and how."""
    active = list[_Call]()
    users = dict[nn.Module, tuple[_Call, int]]()

    def noting(layer: int, update: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            users[active[-1].module] = active[-1], layer
            return update(*args, **named)

        return noted

    for number, layer in layers.items():
        for name in ("update_conv_state", "update_recurrent_state"):
            update = getattr(layer, name)
            setattr(layer, name, noting(number, update))

    def enter(*call: Any) -> None:
        active.append(_Call(*call))

    def leave(*arguments: Any) -> None:
        active.pop()

    hooks = list[Any]()
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave))
    try:
        pass_token()
    finally:
        for hook in hooks:
            hook.remove()
    return users


def _continues(recurrent: Recurrent, call: _Call) -> bool:
    """Compute a row in one piece and in two, with random weights, and return whether they agree,
    given a call for one token; NotImplementedError if a token depends on later ones.
    """
    generator = torch.Generator().manual_seed(0)
    module = copy.deepcopy(call.module)
    if any(parameter.is_meta for parameter in module.parameters()):
        module = module.to_empty(device="cpu")
    device = next(module.parameters()).device

    def random(like: Tensor, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device="cpu")
        return values.to(device, like.dtype)

    def lengthen(x: Tensor) -> Tensor:
        shape = (1, 5, *x.shape[2:])
        if x.shape[:2] != (1, 1):
            return x
        if x.is_floating_point():
            return random(x, *shape)
        return torch.ones(shape, dtype=x.dtype, device=device)

    with torch.device("cpu"):  # if need be instead of "meta"
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                values = random(tensor, *tensor.shape)
                tensor.copy_(0.2 * values)
        named = dict(call.named)
        named.pop("layout", None)
        arguments = tree_map_only(Tensor, lengthen, (call.args, named))
        mixer = Mixer(recurrent, module.forward, arguments, 5)
        row = torch.arange(5, device=device)[None]
        expected, _ = mixer(row)
        with_other_end, _ = mixer(row * (row < 3))
        start, states = mixer(row[:, :3], {})
        end, _ = mixer(row[:, 3:], states)
    in_16_bits = expected.element_size() < 4
    tolerance = (0.1 if in_16_bits else 1e-3) * float(expected.abs().max())
    of_start = (with_other_end - expected)[:, :3]
    if not of_start.abs().max() <= tolerance:
        raise NotImplementedError(f"{type(module).__name__} lets a token see later ones")
    difference = torch.cat([start, end], dim=1) - expected
    return bool(difference.abs().max() <= tolerance)
