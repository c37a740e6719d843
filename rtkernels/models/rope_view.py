"""Replace rotary embeddings without changing globals.

The forward of an attention module calls ``apply_rotary_pos_emb`` as a global of its modelling file. Our forward has the
same code and other globals: those of a *view*, a module with all names of the file except the rotation, which is ours.
Dynamo looks up globals by the module's name, so the view is in ``sys.modules``.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rtkernels.models.probe import NotRecognized, Recognized
from rtkernels.models.recognize import apply_rope, autocasts, positional, rope

_NAME = re.compile(r"apply\w*(rotary|rope)")
_views: dict[tuple[str, tuple[Any, ...]], types.ModuleType] = {}


def is_attention(module: nn.Module) -> bool:
    """Return True if the forward of a module calls a rotation that we may replace."""
    forward = type(module).forward
    names = _names(forward)
    return bool(names) and all(name in forward.__globals__ for name in names)


def rotates(module: nn.Module) -> bool:
    """Return True if a module calls a rotation in any way: as a function, a method, or in a diffusers processor."""
    if _names(inspect.unwrap(type(module).forward)):
        return True
    code = getattr(vars(type(module.__dict__.get("processor"))).get("__call__"), "__code__", None)
    return code is not None and any(map(_NAME.search, (*code.co_names, *code.co_varnames)))


def _names(forward: Callable[..., Any]) -> list[str]:
    code = getattr(forward, "__code__", None)
    return [] if code is None else [name for name in code.co_names if _NAME.search(name)]


def recognize(module: nn.Module) -> Recognized:
    """Return which rotations the forward of a module calls.

    Raises:
        NotRecognized: One of them is none of ours.
    """
    forward = type(module).forward
    if not _names(inspect.unwrap(forward)):
        raise NotRecognized(f"its rotation is called by a {type(module.processor).__name__}, no module")
    if hasattr(forward, "__wrapped__"):
        raise NotRecognized("its forward is wrapped by a decorator")
    names = []
    for name in _names(forward):
        function = forward.__globals__.get(name)
        if function is None:
            raise NotRecognized(f"{name} is no global of its file")
        names.append((name, rope(function)))
    return Recognized("rope", (("names", tuple(names)),))


def viewed(forward: types.FunctionType, names: dict[str, tuple[str, ...]]) -> types.FunctionType:
    """Return a function with the code of `forward` in which the named globals are our rotations."""
    view = _view(forward.__globals__, names)
    copy = types.FunctionType(
        forward.__code__, view.__dict__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__qualname__, copy.__doc__, copy.__module__ = forward.__qualname__, forward.__doc__, view.__name__
    return copy


def _view(names_of_file: dict[str, Any], names: dict[str, tuple[str, ...]]) -> types.ModuleType:
    file, key = names_of_file["__name__"], tuple(sorted(names.items()))
    if (file, key) not in _views:
        view = types.ModuleType(f"rtkernels_view_{len(_views)}_{file.replace('.', '_')}")
        kept = {"__name__": view.__name__, "__loader__": None, "__spec__": None}
        view.__dict__.update({**names_of_file, **kept})
        for name, forms in names.items():
            setattr(view, name, _rotation(names_of_file[name], forms))
        sys.modules[view.__name__] = view
        _views[file, key] = view
    return _views[file, key]


def _rotation(original: Callable[..., Any], forms: tuple[str, ...]) -> Callable[..., Any]:
    form, partial, mixed, tokens_first = forms[0], *(name in forms for name in ("partial", "mixed", "tokens first"))
    factor = 2 if form == "half tables" else 1

    names = positional(original)[:4]
    default = inspect.signature(original).parameters.get("unsqueeze_dim")
    usual = 1 if default is None else default.default

    def apply_rotary_pos_emb(*args, **kwargs):
        # Takes every call that the original takes, positional or by keyword; unsupported ones go to the original.
        given = dict(zip(names, args, strict=False))  # the original may take more or fewer arguments
        given.update((name, value) for name, value in kwargs.items() if name in names)
        more = {name: value for name, value in kwargs.items() if name not in names}
        if not _fits(args, given, more):
            return original(*args, **kwargs)
        q, k, cos, sin = [given[name] for name in names]
        if more.get("unsqueeze_dim", usual) == 2:
            return apply_rope(q, k, cos, sin, form, layout="bshd")
        if q.stride(1) < q.stride(2):  # views of [batch, tokens, heads, size]: keep their layout
            q, k = apply_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, form, layout="bshd")
            return q.transpose(1, 2), k.transpose(1, 2)
        return apply_rope(q, k, cos, sin, form)

    def _fits(args, given, more) -> bool:
        if len(args) > 4 or len(given) != 4:
            return False
        q, k, cos, sin = [given[name] for name in names]
        if not all(isinstance(t, torch.Tensor) for t in (q, k, cos, sin)):
            return False
        rotary = factor * cos.shape[-1]
        dim = more.get("unsqueeze_dim", usual)
        return (
            q.dim() == 4
            and k.dim() == 4
            and all(name == "unsqueeze_dim" for name in more)
            and (dim == 1 or (tokens_first and dim == 2))
            and cos.dim() == 3
            and not (cos.requires_grad or sin.requires_grad)
            and (cos.dtype == q.dtype or (cos.dtype == torch.float32 and (mixed or autocasts(q))))
            and (rotary == q.shape[-1] or (partial and rotary < q.shape[-1]))
        )

    return apply_rotary_pos_emb
