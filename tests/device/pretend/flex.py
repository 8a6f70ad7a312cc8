"""`torch.compile` on the pretend device: it traces, counts, generates no code, and refuses of
FlexAttention what inductor (torch 2.13) refuses to compile for a GPU.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

compilations: Counter[str] = Counter()  # by the line that asked for them
_decoding: set[Any] = set()  # kinds of call whose short kernel was chosen


def install(place: Callable[[], str]) -> None:
    """Exchange `torch.compile`; `place` says who is calling."""
    real = torch.compile

    def traced(model: Any = None, **options: Any) -> Any:
        if options.get("backend", "inductor") == "inductor":

            def backend(graph_module: Any, inputs: Any) -> Any:
                compilations[place()] += 1
                return graph_module.forward

            options = {**options, "backend": backend}
            options.pop("mode", None)
        return real(model, **options)

    def compile_(model: Any = None, **options: Any) -> Any:
        if getattr(model, "__name__", "") != "flex_attention":
            return traced(model, **options)
        inner = traced(model, **options)

        def checked(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            _refuse(query, key, value, kwargs.get("kernel_options") or {})
            return inner(query, key, value, *args, **kwargs)

        return checked

    torch.compile = compile_  # type: ignore[assignment]


def _refuse(query: Any, key: Any, value: Any, options: dict[str, Any]) -> None:
    for x in (query, key, value):
        if x.shape[-1] < 16:
            raise NotImplementedError(
                "NYI: embedding dimension of the query, key, and value must be at least 16 but got "
                f"E={x.shape[-1]} (pretend inductor)"
            )
        if x.dtype == torch.float64:
            raise RuntimeError(
                "CompilationError: Loop-carried variable acc has initial type fp32 but is "
                "re-assigned to fp64 (pretend inductor)"
            )
    heads, tokens = query.shape[1] // key.shape[1], query.shape[2]
    kind = (query.shape[1], key.shape[1], query.shape[-1], query.dtype, torch.is_grad_enabled())
    forced = options.get("FORCE_USE_FLEX_ATTENTION") or options.get("BACKEND") == "TRITON"
    if tokens >= 128 or heads & (heads - 1) or kind in _decoding or forced:
        return
    # The kernel for short queries: one block of all of them, which must divide the mask's 128.
    if max(16, 1 << (tokens * heads - 1).bit_length()) > 128:
        raise RuntimeError(
            f"NoValidChoicesError: No choices to select, {tokens} tokens, {heads} heads per key "
            "head (pretend inductor)"
        )
    _decoding.add(kind)
