"""One row per aten overload that a kernel of ours can take: what ``enable`` registers, ``report`` counts and tests
walk.

How a family contributes rows: see the package's docstring.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.measured import DEFAULT
from rtkernels.aten.selection import asked
from rtkernels.errors import ArgumentError
from rtkernels.runtime.suggest import did_you_mean

MODULES = {  # the family of their rows
    "pointwise": "ew",
    "ternary": "ew",
    "gradients": "ew",
    "copy": "copy",
    "concat": "copy",
    "reduce": "red",
    "row": "row",
    "loss": "row",
    "scan": "scan",
    "index": "idx",
    "scatter": "idx",
    "sort": "sort",
    "rng": "rng",
    "window": "win",
}
FAMILIES = tuple(dict.fromkeys(MODULES.values()))

ONLY_ON_CUDA = ("_fused_rms_norm", "_fused_rms_norm_backward")  # composites in a torch without CUDA

# Elements of the largest tensor below which a call goes to torch: there the time of the host counts, and torch's is
# shorter. By overload for the default set; by family for others, where they matter to who names them. 0: a call that is
# like one before takes about as long as torch's (docs/decisions/aten.md). Of the others some launch several kernels, or
# read a number, for which large tensors make up. Tests set all of them to 0.
MIN_ELEMENTS = {
    "ew": 0,
    "copy": 1 << 24,
    "red": 0,
    "row": 0,
    "scan": 1 << 22,
    "idx": 0,
    "sort": 1 << 16,
    "rng": 1 << 24,
    "win": 1 << 22,
    **{name: elements for name, (_, elements) in DEFAULT.items()},
}


class NotHandled:
    """What a handler returns for a call that torch's own kernel is to take, with the reason that the report shows.

    Args:
        reason: A few words, from a fixed set: reasons are counted. Make one constant for each.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"NotHandled({self.reason!r})"


INVALID, DTYPE, EMPTY = NotHandled("invalid arguments"), NotHandled("dtype"), NotHandled("empty")
NO_DIMENSIONS, RANK, STRIDES = NotHandled("no dimensions"), NotHandled("rank"), NotHandled("strides")
OPTION, CAPTURE = NotHandled("option"), NotHandled("host read while a graph is captured")
SMALL = NotHandled("small")  # all tensors are below the threshold
OVERLAP = NotHandled("overlapping memory")
OUT_OF_RANGE = NotHandled("number out of range")
SEVERAL = NotHandled("several indices")


def refused_rows(x: Tensor, dim: int, dtypes: Container[torch.dtype]) -> NotHandled | None:
    """Return why the rows of a tensor along a dimension are not taken; None if they are."""
    if x.dtype not in dtypes:
        return DTYPE
    if x.numel() == 0:
        return EMPTY
    if x.dim() == 0:
        return NO_DIMENSIONS
    return None if -x.dim() <= dim < x.dim() else INVALID


@dataclass(frozen=True)
class Overload:
    """One aten overload that can be taken.

    Attributes:
        name: As in ``torch.ops.aten``, without "aten::": ``"sum.dim_IntList"``, ``"amax"``.
        family: One of ``FAMILIES``.
        handler: Takes the arguments of the overload, returns its result or a ``NotHandled``. None: ``row_of`` has it.
        default: Part of the set that ``enable()`` takes when nothing is named: those of ``measured.DEFAULT``.
        opinfo: Names of torch's OpInfos whose samples reach it (the conformance tests run these); empty if none does.
        composite: Why a composite may be taken all the same: "no gradient".
        replays: What the handler launches follows from metadata and numbers alone, and torch's kernels compute nothing
            in between: calls like one before are repeated without it (``replay.py``). "cuda": there only, as it
            looks at values on the CPU.
        passes: Names of arguments whose floats the handler gives to ``run`` or a primitive without looking at their
            values: a replay takes others.
    """

    name: str
    family: str
    handler: Callable[..., Any] | None = field(repr=False)
    default: bool = False
    opinfo: tuple[str, ...] = ()
    composite: str = ""
    replays: bool | str = False
    passes: tuple[str, ...] = ()

    @property
    def operator(self) -> str:
        """The name without overload and in-place mark: ``sum`` of ``sum.dim_IntList``, ``add`` of ``add_.Tensor``."""
        name = self.name.partition(".")[0]
        return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@cache
def table() -> dict[str, Overload]:
    """Return every row by the name of its overload, importing all family modules."""
    found: dict[str, Overload] = {}
    for module, family in MODULES.items():
        for row in rows_of(module):
            if row.family != family or row.name in found:
                raise ArgumentError(f"{row.name} has two rows, or one of another family than {family}")
            found[row.name] = replace(row, default=True) if row.name in DEFAULT else row
    return found


def default_rows() -> dict[str, Overload]:
    """Return the default set. Handlers are imported by the first call that is large enough for them."""
    return {
        name: Overload(name, MODULES[module], None, default=True)
        for name, (module, _) in DEFAULT.items() if name not in ONLY_ON_CUDA or has_cuda_kernel(name)
    }  # fmt: skip


def has_cuda_kernel(name: str) -> bool:
    """Return True if this torch has a CUDA kernel of an overload."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")


def row_of(name: str) -> Overload:
    """Return a row, importing its module only where the default set says which that is."""
    return next(row for row in rows_of(DEFAULT[name][0]) if row.name == name) if name in DEFAULT else table()[name]


@cache
def rows_of(module: str) -> tuple[Overload, ...]:
    return tuple(importlib.import_module(f"rtkernels.aten.{module}").rows())


def overloads() -> list[str]:
    """Return the names of all aten overloads that can be taken, sorted: what ``enable(include=...)`` knows.

    Returns:
        ``["_softmax", "add.Tensor", "add_.Tensor", ...]``.
    """
    return sorted(table())


def select(include: Any, exclude: Any) -> dict[str, Overload]:
    """Return the rows that names stand for.

    Args:
        include: Overloads, operators (all their overloads, in-place and ``out=`` forms) or families, ``"all"`` for
            every row, or files of names; None: those of ``RTKERNELS_ENABLE``, else the default set.
        exclude: The same; left out of `include`.

    Raises:
        ArgumentError: A name stands for nothing.
    """
    included, excluded = asked(include, exclude)
    rows = default_rows() if included is None and excluded is None else table()
    if included is None:
        chosen = {name for name, row in rows.items() if row.default}
    else:
        chosen = set().union(*(_names(name, rows, source) for name, source in included.items()))
    if excluded is not None:
        chosen -= set().union(*(_names(name, rows, source) for name, source in excluded.items()))
    return {name: row for name, row in rows.items() if name in chosen}


def schema_of(name: str) -> Any:
    """Return the overload's schema."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")._schema


def _names(name: str, rows: dict[str, Overload], argument: str) -> set[str]:
    name = name.removeprefix("aten::").removeprefix("aten.")
    if name == "all":
        return set(rows)
    if name in FAMILIES:
        return {key for key, row in rows.items() if row.family == name}
    if name in rows and "." in name:
        return {name}
    found = {key for key, row in rows.items() if name in (row.operator, key, key.partition(".")[0])}
    if not found:
        known = {*rows, *(row.operator for row in rows.values()), *FAMILIES, "all"}
        raise ArgumentError(
            f"{argument} has {name!r}, which is no overload, operator or family that can be taken"
            f"{did_you_mean(name, known)}; rtkernels.aten.overloads() lists them"
        )
    return found
