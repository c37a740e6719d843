"""Replace rotary embeddings without changing globals.

The forward of an attention module calls ``apply_rotary_pos_emb`` as a global of its modelling file. Our forward has the
same code and other globals: those of a *view*, a module with all names of the file except the rotation, which is ours.
Dynamo looks up globals by the module's name, so the view is in ``sys.modules``.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rtkernels.models.probe import NotRecognized, Recognized
from rtkernels.models.recognize import autocasts
from rtkernels.models.rotations import LAYOUTS, apply_rope, arguments_of, columns_per_angle, rope

_NAME = re.compile(r"apply\w*(rotary|rope)")
# Dimensions of the tensors and of the tables in each layout.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_DIMENSIONS = {"bhsd": (4, 3), "bshd": (4, 3), "packed": (3, 2), "bhsd shared": (4, 2), "bshd shared": (4, 2)}
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


def viewed(
    forward: types.FunctionType, names: dict[str, tuple[str, ...]], make: Callable[..., Any] | None = None
) -> types.FunctionType:
    """Return a function with the code of `forward` in which the named globals are our rotations.

    `make`, if given, makes another function of a global and what belongs to its name.
    """
    view = _view(forward.__globals__, names, make or _rotation)
    copy = types.FunctionType(
        forward.__code__, view.__dict__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__qualname__, copy.__doc__, copy.__module__ = forward.__qualname__, forward.__doc__, view.__name__
    return copy


def replaced_global(
    forward: types.FunctionType, names: tuple[tuple[str, tuple[str, ...]], ...], name: str
) -> Callable[..., Any]:
    """Return our rotation for a global that `forward` calls if it is among `names`, else the global itself."""
    original, forms = forward.__globals__[name], dict(names).get(name)
    return original if forms is None else _rotation(original, forms)


def _view(
    names_of_file: dict[str, Any], names: dict[str, tuple[str, ...]], make: Callable[..., Any]
) -> types.ModuleType:
    file, key = names_of_file["__name__"], (make, *sorted(names.items()))
    if (file, key) not in _views:
        view = types.ModuleType(f"rtkernels_view_{len(_views)}_{file.replace('.', '_')}")
        kept = {"__name__": view.__name__, "__loader__": None, "__spec__": None}
        view.__dict__.update({**names_of_file, **kept})
        for name, forms in names.items():
            setattr(view, name, make(names_of_file[name], forms))
        sys.modules[view.__name__] = view
        _views[file, key] = view
    return _views[file, key]


def _rotation(original: Callable[..., Any], forms: tuple[str, ...]) -> Callable[..., Any]:
    form, arguments = forms[0], arguments_of(original)
    names, tensors = arguments.names, len(arguments.tensors)
    factor, options = columns_per_angle(form), {"inverse": "inverse" in forms}
    partial, last, mixed, prefix = (name in forms for name in ("partial", "last", "mixed", "prefix"))
    layouts = {_DIMENSIONS[name]: name[:4] for name in reversed(LAYOUTS) if name in forms}
    default = inspect.signature(original).parameters.get("unsqueeze_dim")
    usual = 1 if default is None else default.default

    def apply_rotary_pos_emb(*args, **kwargs):
        # Takes every call that the original takes, positional or by keyword; unsupported ones go to the original.
        given = dict(zip(names, args, strict=False))  # the original may take more or fewer arguments
        given.update((name, value) for name, value in kwargs.items() if name in names)
        more = {name: value for name, value in kwargs.items() if name not in names}
        if len(args) > len(names) or any(name != "unsqueeze_dim" for name in more):
            return original(*args, **kwargs)
        *heads, cos, sin = _tensors(given)
        layout = None if cos is None else _layout(heads, cos, more.get("unsqueeze_dim", usual))
        if layout is None or not _fits(heads, cos, sin, layout):
            return original(*args, **kwargs)
        rotate = functools.partial(apply_rope, cos=cos, sin=sin, form=form, **options)
        if last:
            rotate = functools.partial(rotate, last=True)
        heads = heads if tensors == 2 else [*heads, None]
        if layout == "bhsd" and heads[0].stride(1) < heads[0].stride(2):  # views of [batch, tokens, heads, size]
            found = rotate(*(None if t is None else t.transpose(1, 2) for t in heads), layout="bshd")
            return tuple(t.transpose(1, 2) for t in found) if tensors == 2 else found.transpose(1, 2)
        return rotate(*heads, layout=layout)

    def _tensors(given) -> list[Any]:
        """Return the tensors, and cosines and sines; None for these if something is missing."""
        values = [given.get(name) for name in names]
        if not all(isinstance(t, torch.Tensor) for t in values):
            return [None, None]
        if len(values) == tensors + 1:
            whole = values.pop()
            return [*values, whole.real, whole.imag] if whole.dtype == torch.complex64 else [None, None]
        return values if names[-1] == "sin" else [*values[:-2], values[-1], values[-2]]

    def _layout(heads, cos, dim) -> str | None:
        if any(t.dim() != heads[0].dim() for t in heads):
            return None
        key = heads[0].dim(), cos.dim()
        if dim == usual:
            return layouts.get(key)
        return "bshd" if dim == 2 and key == (4, 3) and "tokens first" in forms else None

    def _fits(heads, cos, sin, layout) -> bool:
        q, rotary = heads[0], factor * cos.shape[-1]
        if q.dtype not in _FLOATS:
            return False
        axis = {"bhsd": -2, "bshd": -3, "pack": 0}[layout]
        tokens = q.shape[axis]
        return (
            cos.shape == sin.shape
            and heads[-1].shape[axis] == tokens
            and (cos.shape[-2] == tokens or (prefix and cos.shape[-2] < tokens))
            and (cos.dim() == 2 or cos.shape[0] in (1, q.shape[0]))
            and not (cos.requires_grad or sin.requires_grad)
            and (cos.dtype == q.dtype or (cos.dtype == torch.float32 and (mixed or autocasts(q))))
            and (rotary == q.shape[-1] or ((partial or last) and rotary < q.shape[-1]))
        )

    return apply_rotary_pos_emb
