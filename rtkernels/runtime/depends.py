"""Everything that a call may depend on, in one place: keys and guards of recent calls are made from this list.

===================  ================================================  ============================================
item                 in a key                                          in the guard of a replay
===================  ================================================  ============================================
tensors              dtype, shape, strides, device, address modulo 16  one comparison in C++, then addresses
lazy negatives       such calls are not recorded; yes in aten copies   dispatch keys, compared in C++
aliasing             which arguments are one tensor                    ``is``; pairs found apart are compared again
other arguments      type and value, the sign of a zero                likewise
gradients            calls that record one are not recorded            ``requires_grad`` in C++; grad mode
inference mode       yes                                               dispatch keys, compared in C++
autocast             whether, and to which dtype                       dispatch keys in C++; the dtype
default dtype        yes                                               where torch computes a part of the call
deterministic mode   yes                                               where torch computes a part of the call
batch invariance     the level, also in keys of plans                  the level; aten overrides are not replayed
environment          nothing                                           RTKERNELS_DEBUG, if the call asked for it
emulation            changing the target forgets all calls             likewise
dispatch modes       such calls are neither recorded nor replayed      asked before anything else
stream               nothing: launches go to the current stream        likewise
capture              nothing: a graph gets scratch of its own          likewise
threads              nothing: kept scratch belongs to a thread         likewise
plans                forgetting plans forgets all calls                likewise
===================  ================================================  ============================================

Other arguments: floats that only a launch takes are passed to it in aten overrides that say so; keys hold their type.
Dispatch modes: also functorch transforms, forward-mode differentiation, tracing and Dynamo.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rtkernels.runtime.invariance import level
from rtkernels.runtime.torch_private import TENSOR_TYPES, deterministic

MISS = object()  # returned by a replay for a call that is not like the recorded one
# Tests change each of these between two calls (``tests/contracts/test_depends.py``).
ITEMS = (
    "tensors", "lazy negatives", "aliasing", "other arguments", "gradients", "inference mode", "autocast",
    "default dtype", "deterministic mode", "batch invariance", "environment", "emulation", "dispatch modes", "stream",
    "capture", "threads", "plans",
)  # fmt: skip
MAX_PARTS = 16  # elements of a list among the arguments
_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))


def meta_code(x: str, address: str | None = None) -> str:
    """Return the expression of what a key holds of a tensor, in the order of ``kinds.Meta``."""
    return f"{x}.dtype, {x}.shape, {x}.stride(), {x}.get_device(), {address or f'{x}.data_ptr()'} & 15"


def option_code(x: str, kind: str) -> str:
    """Return the expression of what tells options of a schema's type apart that are equal: 0.0 and -0.0, 3 and 3.0."""
    if "float" in kind:
        return f"{x} or str({x})"
    return f"{x}, {x}.__class__" if kind in ("int", "SymInt") else x


def lazy_code(x: str) -> str:
    """Return the expression of whether the memory of a tensor holds other values: for calls that may be given such."""
    return f"{x}.is_neg(), {x}.is_conj()"


def number_code(x: str, *, passed: bool = False) -> str:
    """Return the expression of what a key holds of a number: ``plain_key``, or the type of a float that is `passed`."""
    key = f"type({x}), {x} if {x} and {x} == {x} else str({x})"
    return f"(float,) if type({x}) is float else ({key})" if passed else key


def same_number_code(x: str, kept: str, *, passed: bool = False) -> str:
    """Return the comparison of a number with one of a recent call, but for zeros, whose signs are not compared."""
    equal = f"({x} == {kept} or type({x}) is float)" if passed else f"{x} == {kept}"
    return f"type({x}) is type({kept}) and {equal}"


def alias_code(names: Sequence[str]) -> list[str]:
    """Return expressions of which arguments are one tensor."""
    return [f"{y} is {x}" for i, x in enumerate(names) for y in names[i + 1 :]]


def plain_key(value: Any) -> tuple[Any, ...]:
    """Return what a key holds of an argument that is not a tensor: 1 is not 1.0, 0.0 not -0.0, and all NaN are one."""
    return type(value), value if value and value == value else str(value)


def call_key(values: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return the key of a public call, its device first; None if it cannot be recorded."""
    key: list[Any] = [None]
    tensors: list[int] = []
    if not _add_values(key, values, torch.is_grad_enabled(), tensors) or key[0] is None:
        return None
    if len({*tensors}) < len(tensors):  # which of them are one
        key.append(tuple(map(tensors.index, tensors)))
    kind = "cpu" if key[0] < 0 else "cuda"
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    key += [torch.is_inference_mode_enabled(), autocast, torch.get_default_dtype()]
    key += [deterministic(), level()]
    return tuple(key)


def _add_values(key: list[Any], values: Iterable[Any], grads: bool, tensors: list[int]) -> bool:
    for value in values:
        kind = type(value)
        if kind in TENSOR_TYPES:
            if value.layout is not torch.strided or value.is_meta or (value.requires_grad and grads):
                return False
            device = key[0] = value.get_device()
            key.append((value.dtype, value.shape, value.stride(), device, value.data_ptr() & 15))
            tensors.append(id(value))
        elif kind in _PLAIN:
            key.append(plain_key(value))
        elif isinstance(value, (tuple, list)) and len(value) <= MAX_PARTS:
            key.append((kind, len(value)))
            if not _add_values(key, value, grads, tensors):
                return False
        else:
            return False
    return True
