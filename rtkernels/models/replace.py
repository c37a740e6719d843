"""Give a module our forward by changing the class of the instance.

The new class is a subclass of the old one with the same name and module, so ``isinstance``, output recorders,
``state_dict``, ``deepcopy`` and pickling work as before. A pickle names the old class and the replacement.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models.merged import has_watched_child, is_plain
from rtkernels.models.probe import NotRecognized, Recognized, positional
from rtkernels.models.recognize import Projections, autocasts, norm_weight
from rtkernels.models.reuse import glu, may_hand_on, norm_and_input, project

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
Forward = Callable[..., Any]


def replaced(module: nn.Module) -> Recognized | None:
    """Return the replacement of a module, None if it was not replaced."""
    return getattr(type(module), "_rtkernels_kind", None)


def check_own_forward(module: nn.Module) -> None:
    """Refuse a module with a forward on the instance, which would hide the forward of its class.

    Hooks of accelerate (``device_map``) are accepted: the forward that they call is replaced.

    Raises:
        NotRecognized: The instance has a forward of its own.
    """
    if "forward" in module.__dict__ and not _is_hooked(module):
        raise NotRecognized("its forward was replaced on the instance (tensor parallelism, offloading): patch first")


_HOOKED = "_old_forward"  # the forward that accelerate's hook calls


def _is_hooked(module: nn.Module) -> bool:
    """Return True if the instance's forward is an accelerate hook around the forward of its class."""
    inner = module.__dict__.get(_HOOKED)
    return "_hf_hook" in module.__dict__ and getattr(inner, "__func__", None) is type(module).forward


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of a module, and the forward that an accelerate hook calls or left behind."""
    own = type(module).forward
    module.__class__ = cls
    if getattr(module.__dict__.get(_HOOKED), "__func__", None) is own:
        module.__dict__[_HOOKED] = MethodType(cls.forward, module)
    if getattr(module.__dict__.get("forward"), "__func__", None) is own:  # left behind by a removed hook
        del module.__dict__["forward"]


_PROVED_WITH = "_rtkernels_proved_with"


def _names(module: nn.Module) -> frozenset[str]:
    """Return the names of attributes and children that a module had when its forward was replaced."""
    return frozenset(name for name in (*module.__dict__, *module._modules) if not name.startswith("_"))


def replace(module: nn.Module, kind: Recognized) -> None:
    """Give a module our forward."""
    module.__dict__[_PROVED_WITH] = _names(module)
    _set_class(module, subclass(type(module), kind))


def change(module: nn.Module, kind: Recognized) -> None:
    """Give a module another of our forwards, in place of its own or of an earlier replacement.

    Raises:
        NotRecognized: The instance has a forward of its own.
    """
    check_own_forward(module)
    if replaced(module) is None:
        module.__dict__[_PROVED_WITH] = _names(module)
    _set_class(module, subclass(original_of(type(module)), kind))


def restore(module: nn.Module) -> None:
    """Restore the original forward of a module."""
    module.__dict__.pop(_PROVED_WITH, None)
    if replaced(module) is not None:
        _set_class(module, original_of(type(module)))


@cache
def original_of(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module had before it was replaced; `cls` if it was not replaced.

    FSDP2 creates a subclass of the module's class. If that base class is ours, it is exchanged for the original.
    """
    if "_rtkernels_original" in cls.__dict__ or not hasattr(cls, "_rtkernels_original"):
        return cls.__dict__.get("_rtkernels_original", cls)
    members = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
    if inspect.unwrap(cls.forward) is inspect.unwrap(super(cls, cls).forward):  # our forward, wrapped by transformers
        members.pop("forward", None)
    return type(cls.__name__, tuple(map(original_of, cls.__bases__)), members)


@cache
def subclass(original: type[nn.Module], kind: Recognized) -> type[nn.Module]:
    """Return the class of replaced modules, one per original class and replacement."""
    options = dict(kind.options)
    members = {
        "forward": _FORWARDS[kind.kind](original, **options),
        **({"__setattr__": _set_attribute(original, _live(options))} if kind.kind in _PROVED else {}),
        "__reduce_ex__": _reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_rtkernels_kind": kind,
        "_rtkernels_original": original,
    }
    bases = _BASES.get(kind.kind, ())
    before = tuple(base for base in bases if "__call__" in vars(base))  # of their calls, the module's own is part
    return type(original.__name__, (*before, original, *(b for b in bases if b not in before)), members)


# Kinds that do not read what the module's own forward reads: activations, flags, numbers that are attributes.
_PROVED = {
    "rms_norm", "layer_norm", "fp8_norm", "served_norm", "gated_norm", "group_norm", "modulated", "mlp", "named_mlp",
    "fused_mlp", "fp8_mlp", "activation", "experts", "limited_experts", "plain_experts", "fp8_experts", "router",
}  # fmt: skip


def _live(options: dict[str, Any]) -> frozenset[str]:
    """Return the names of attributes that a replacement reads in every call."""
    names = {value for value in options.values() if isinstance(value, str)}
    if isinstance(options.get("projections"), Projections):
        names |= {name for name in options["projections"] if isinstance(name, str)}
    if "separate" in options:
        names |= {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}
    return frozenset({*names, "training", "forward", "linear"})  # a hook's forward; what scales a modulated norm


def _set_attribute(original: type[nn.Module], live: frozenset[str]) -> Callable[..., None]:
    """Return a ``__setattr__`` that restores the forward of a module if something changes that it was proved with.

    Adapters, parametrizations and new weights change only what the replacement reads in every call; what a hook counts
    or a library marks was not there then.
    """

    def __setattr__(self, name, value):
        if name not in live and not name.startswith("_") and _changes(self, name, value):
            restore(self)
        original.__setattr__(self, name, value)

    return __setattr__


def _changes(module: nn.Module, name: str, value: Any) -> bool:
    if name not in module.__dict__.get(_PROVED_WITH, ()):
        return False
    for table in (module.__dict__, module._modules):
        if name in table:
            before = table[name]
            alike = type(before) is type(value) and isinstance(value, _PLAIN) and before == value
            return before is not value and not alike
    return False


_PLAIN = (int, float, str, tuple, torch.dtype, torch.Size)  # that == compares


def _reduce(self: nn.Module, protocol: int) -> Any:
    return _rebuilt, (self._rtkernels_original, self._rtkernels_kind), self.__getstate__()


def _rebuilt(original: type[nn.Module], kind: Recognized) -> nn.Module:
    cls = subclass(original, kind)
    return cls.__new__(cls)


# ---- forwards -------------------------------------------------------------------------------------------------------


def _fits(x: Any, weight: Tensor | None) -> bool:
    """Return True if our norm supports the dtypes and gives the same result dtype as the module's own."""
    if not isinstance(x, Tensor) or x.dtype not in _FLOATS:
        return False
    return weight is None or x.dtype == weight.dtype or autocasts(x)


def _input_name(original: type[nn.Module]) -> str:
    """Return the name of a forward's input, for callers that pass it by keyword."""
    return positional(original.forward)[1]


def _input_of(x: Any, named: dict[str, Any], name: str) -> Any:
    """Return the input of a forward that was passed by keyword."""
    if x is not None or set(named) != {name}:
        raise TypeError(f"forward() got {', '.join(named)}; expected {name}")
    return named[name]


def _rms_norm(original: type[nn.Module], eps: str, offset: float, weighted: bool = True) -> Forward:
    own, name = original.forward, _input_name(original)

    def forward(self, hidden_states=None, residual=None, with_input=False, **named):
        if named:
            hidden_states = _input_of(hidden_states, named, name)
        weight = norm_weight(self, weighted)
        if not _fits(hidden_states, weight):
            total = hidden_states if residual is None else residual + hidden_states
            return own(self, total) if residual is None and not with_input else (own(self, total), total)
        if with_input and may_hand_on(hidden_states, weight):
            return norm_and_input(hidden_states, weight, getattr(self, eps), offset, True)
        options = {"eps": getattr(self, eps), "offset": offset}
        normed = rtkernels.rms_norm(hidden_states, weight, residual=residual, **options)
        return (normed, hidden_states) if with_input else normed

    return forward


def _layer_norm(original: type[nn.Module], eps: str | float, offset: float, weighted: bool = True) -> Forward:
    own, name = original.forward, _input_name(original)
    number = eps if isinstance(eps, float) else None  # written into the model's code

    def forward(self, hidden_states=None, **named):
        if named:
            hidden_states = _input_of(hidden_states, named, name)
        weight, bias = norm_weight(self, weighted), getattr(self, "bias", None)
        if not _fits(hidden_states, weight):
            return own(self, hidden_states)
        small = getattr(self, eps) if number is None else number
        return rtkernels.layer_norm(hidden_states, weight, bias, eps=small, offset=offset)

    return forward


def _mlp(original: type[nn.Module], act: str, separate: bool) -> Forward:
    first = ("gate_proj", "up_proj") if separate else ("gate_up_proj", None)
    return _named_mlp(original, act, Projections(*first, "down_proj"))


def _named_mlp(original: type[nn.Module], act: str, projections: Projections, limit: str | None = None) -> Forward:
    own, name, names, dropout = original.forward, _input_name(original), projections.names, projections.dropout
    first = names if projections.down is None else names[:-1]
    called = names if dropout is None else (*names, dropout)

    def forward(self, x=None, *args, **named):
        if args or (named and (x is not None or set(named) != {name})):
            return own(self, *(() if x is None else (x,)), *args, **named)
        x = named.get(name, x)
        if isinstance(x, Tensor) and x.dtype not in _FLOATS:
            return own(self, x)
        if has_watched_child(self, called):
            return own(self, x)
        linears = [self._modules[child] for child in first]
        down = None if projections.down is None else self._modules[projections.down]
        if _is_cast(x, down):
            return own(self, x)
        inputs = [linear(x) for linear in linears]
        options = {"act": act, "limit": None if limit is None else getattr(self, limit)}
        if projections.up_first:
            inputs = list(reversed(inputs[0].chunk(2, -1)))
        if down is None:
            return rtkernels.glu(*inputs, **options)
        if not all(is_plain(linear) for linear in linears) or dropout is not None:
            gated = rtkernels.glu(*inputs, **options)
            if dropout is None:
                return down(gated)
            drop = self._modules[dropout]
            return drop(down(gated)) if projections.behind else down(drop(gated))
        return project(down, glu(*inputs, **options))

    return forward


def _activation(original: type[nn.Module], act: str) -> Forward:
    own, name = original.forward, _input_name(original)

    def forward(self, x=None, **named):
        if named:
            x = _input_of(x, named, name)
        if not _fits(x, None):
            return own(self, x)
        return rtkernels.act(x, act)

    return forward


def _is_cast(x: Any, down: nn.Module | None) -> bool:
    """Return True if a 16-bit model keeps the last projection in fp32, as T5 does, and converts what it reads.

    Also for a parametrization, which may compute another weight at every look.
    """
    if down is not None and "parametrizations" in down._modules:
        return True
    weight = getattr(down, "weight", None)
    both = isinstance(x, Tensor) and isinstance(weight, Tensor)
    return both and weight.dtype == torch.float32 and x.dtype != torch.float32 and not autocasts(x)


def _attention(original: type[nn.Module], names: tuple[tuple[str, tuple[str, ...]], ...]) -> Forward:
    from rtkernels.models.rope_view import viewed

    return viewed(original.forward, dict(names))


_FORWARDS: dict[str, Callable[..., Forward]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "mlp": _mlp,
    "named_mlp": _named_mlp,
    "activation": _activation,
    "rope": _attention,
}


_BASES: dict[str, tuple[type, ...]] = {}


def register(kind: str, make: Callable[..., Forward], *bases: type) -> None:
    """Add a kind of replacement: ``make(original class, **options)`` returns its forward; `bases` extend its class."""
    _FORWARDS[kind], _BASES[kind] = make, bases


def forward_of(kind: str, original: type[nn.Module], **options: Any) -> Forward:
    """Return the forward that a kind of replacement gives to modules of a class."""
    return _FORWARDS[kind](original, **options)
