"""torch itself: rows carry the functions, so these adapters come from the row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.peers.base import Absent, Call, Prepare, absent

if TYPE_CHECKING:
    import torch

# Inductor writes one program per list of tensors: minutes of compilation, and out of the question for 5000.
MAX_COMPILED = 64


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, tuples and dicts, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def _eager(function: Callable[..., Any], **inputs: Any) -> Call:
    return lambda: function(**inputs)


def _backward(function: Callable[..., Any], dy: Any, **inputs: Any) -> Call:
    """Autograd's backward of ``function`` alone: the graph is built here and kept.

    Of several outputs each takes its gradient from the tuple ``dy``; a single ``dy`` belongs to the first.
    """
    import torch

    # Also of a compiled function: signature() follows __wrapped__.
    accepted = inspect.signature(function).parameters.values()
    names = {p.name for p in accepted}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted)
    given = {k: v for k, v in inputs.items() if takes_all or k in names}
    leaves = {
        k: v.detach().clone().requires_grad_()
        for k, v in given.items()
        if isinstance(v, torch.Tensor) and v.is_floating_point()
    }
    out, grads = tensors_in(function(**{**given, **leaves})), tensors_in(dy)
    if len(out) < len(grads):
        raise ValueError(f"{len(grads)} incoming gradients for {len(out)} outputs")
    out = out[: len(grads)]
    grads = [g.to(o.dtype) for g, o in zip(grads, out, strict=True)]
    return lambda: torch.autograd.grad(out, list(leaves.values()), grads, retain_graph=True)


def _compiled(prepare: Prepare, function: Callable[..., Any]) -> Prepare:
    """``prepare`` of the function compiled by inductor, compiled once for all copies of the inputs."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        import torch

        return torch.compile(function, dynamic=False)

    def checked(**inputs: Any) -> Call:
        count = len(tensors_in(inputs))
        if count > MAX_COMPILED:
            raise Absent(f"not compiled for {count} tensors: inductor would take minutes")
        return prepare(compiled(), **inputs)

    return checked


def torch_peers(row: Any, forward: Any | None) -> dict[str, Prepare]:
    """torch's own competitors of a row: eager, its fused op, the row's other backends, and inductor.

    With ``forward`` (the matching forward row) the backward is autograd's, timed alone: ``inductor`` is
    then the backward of the compiled forward and ``inductor_math`` the compiled formula of the row.
    """
    if forward is None:
        found = {"torch": functools.partial(_eager, row.torch), "inductor": _compiled(_eager, row.torch)}
    else:
        found = {
            "torch": functools.partial(_backward, forward.torch),
            "inductor": _compiled(_backward, forward.torch),
            "inductor_math": _compiled(_eager, row.torch),
        }
    if row.no_graph:
        found = dict.fromkeys(found, absent(row.no_graph))
    if row.fused:
        found["torch_fused"] = functools.partial(_eager, row.fused)
    elif forward is not None and forward.fused:
        found["torch_fused"] = functools.partial(_backward, forward.fused)
    return {**found, **{f"torch_{name}": prepare for name, prepare in row.backends.items()}}
