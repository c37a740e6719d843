"""Find which of our rotations a function of a modelling file computes, and compute it.

A function takes queries and keys or one tensor, and tables of cosines and sines or one complex table. It is compared
with :func:`rtkernels.rope` in every layout of its tensors, with results and gradients (``probe``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import rtkernels
from rtkernels.models.probe import (
    HALVES,
    RAISED,
    NotRecognized,
    Raised,
    Trial,
    check_globals,
    difference,
    normal,
    outcome,
    positional,
    probing,
)

ROTATIONS = ("halves", "half tables", "neighbours", "neighbour tables", "neighbour half tables", "neighbours to halves")
LAYOUTS = ("bhsd", "packed", "bshd", "bhsd shared", "bshd shared")
_HALF_TABLES = ("half tables", "neighbour half tables")


class Arguments(NamedTuple):
    """Names of a function's arguments: the rotated tensors and the tables. A single table is complex."""

    tensors: tuple[str, ...]
    tables: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return *self.tensors, *self.tables


def arguments_of(function: Callable[..., Any]) -> Arguments:
    """Return which arguments of a function are tensors and tables.

    Raises:
        NotRecognized: Its arguments are named otherwise.
    """
    names = tuple(positional(function))
    if names[:4] == ("q", "k", "cos", "sin"):
        return Arguments(names[:2], names[2:4])
    if names[1:3] in (("cos", "sin"), ("sin", "cos")):
        return Arguments(names[:1], names[1:3])
    if len(names) == 3 and names[2].startswith("freqs_ci"):
        return Arguments(names[:2], names[2:])
    raise NotRecognized(
        f"its arguments are {', '.join(names)}; expected q, k, cos, sin, or one tensor, or a complex table"
    )


@probing()
def rope(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return how a function rotates its tensors.

    The first item is one of:

    - "halves": elements i and i + size / 2 are a pair; tables have each angle twice, in two halves.
    - "half tables": the same pairs; tables have each angle once.
    - "neighbours": elements 2i and 2i + 1 are a pair; tables have each angle twice, in two halves.
    - "neighbour tables": the same pairs; tables have each angle in two neighbouring columns.
    - "neighbour half tables": the same pairs; tables have each angle once.
    - "neighbours to halves": as "neighbours", but the results have the pairs of "halves" (DeepSeek-V3).

    Further items:

    - layouts that work: "bhsd" and "bshd" for tensors of four dimensions with tables ``[batch, tokens, n]``, the same
      with " shared" for tables ``[tokens, n]``, "packed" for ``[tokens, heads, size]`` with tables ``[tokens, n]``;
    - "tokens first" if ``unsqueeze_dim=2`` takes ``[batch, tokens, heads, size]``;
    - "partial" or "last" if tables narrower than a head leave the rest, or the first elements, of the head alone;
    - "mixed" if 16-bit heads stay in 16 bits with fp32 tables;
    - "inverse" if it rotates by the negative angles;
    - "prefix" if tables shorter than the tokens leave the first tokens alone.

    Raises:
        NotRecognized: The rotation is none of these.
    """
    given = arguments_of(function)
    check_globals(function)
    layout, (form, *inverse) = _screened(function, given)
    differs = partial(_differs, function, given, layout, form, *inverse)
    for setting in ({}, {"size": 32}, {"size": 24, "tokens": 67}, *({"dtype": dtype} for dtype in HALVES)):
        if found := differs(**setting):
            raise NotRecognized(f"it rotates in no way of ours: like {form}, but with {found}")
    optional: dict[str, dict[str, Any]] = {
        "partial": {"rotary": 8},
        "last": {"rotary": 8, "last": True},
        "mixed": {"dtype": torch.bfloat16, "table": torch.float32},
        "prefix": {"prefix": 2},
    }
    may_differ = partial(_may_differ, function, given)
    more = [name for name, setting in optional.items() if not may_differ(layout, form, *inverse, **setting)]
    if "unsqueeze_dim" in positional(function):
        first = may_differ("bshd", form, *inverse, options={"unsqueeze_dim": 2})
        more += [] if first else ["tokens first"]
    others = [other for other in LAYOUTS if other != layout and not may_differ(other, form, *inverse)]
    return form, layout, *others, *inverse, *more


def _screened(function: Callable[..., Any], given: Arguments) -> tuple[str, tuple[str, ...]]:
    """Return the first layout in which a function gives the results of one of our rotations, and that rotation.

    Raises:
        NotRecognized: There is none, or more than one.
    """
    forms = ("neighbour half tables",) if len(given.tables) == 1 else ROTATIONS
    reasons = []
    for more, layout in product(((), ("inverse",)), LAYOUTS):  # negative angles are rare
        ways = [(form, *more) for form in forms]
        found = {way: _may_differ(function, given, layout, *way, gradients=False) for way in ways}
        alike = [way for way, reason in found.items() if not reason]
        if len(alike) == 1:
            return layout, alike[0]
        if alike:
            raise NotRecognized("it rotates in more than one way")
        reasons += found.values()
    raise NotRecognized(reasons[0] if all(r.startswith(RAISED) for r in reasons) else "it rotates in no way of ours")


def _may_differ(*args: Any, **setting: Any) -> str:
    try:
        return _differs(*args, **setting)
    except Raised as error:
        return str(error)


def _differs(
    function: Callable[..., Any], given: Arguments, layout: str, form: str, *inverse: str, size: int = 16,
    rotary: int | None = None, last: bool = False, tokens: int = 5, prefix: int = 0,
    dtype: torch.dtype = torch.float32, table: torch.dtype | None = None, options: dict[str, Any] | None = None,
    gradients: bool = True,
) -> str:  # fmt: skip
    """Return how a function differs from our rotation, "" if it does not."""
    half = normal(2, tokens, (rotary or size) // 2, seed=5) * 3
    angles = half if form in _HALF_TABLES else torch.cat([half, half], -1)
    angles = half.repeat_interleave(2, -1) if form == "neighbour tables" else angles
    if layout == "packed":
        angles = angles.flatten(0, 1)
    elif layout.endswith("shared"):
        angles = angles[0]
    tables = {name: getattr(angles, name)().to(table or dtype) for name in ("cos", "sin")}
    theirs = partial(function, **options) if options else function
    if len(given.tables) == 1:
        tables = {name: t.float() for name, t in tables.items()}
        theirs = partial(theirs, **{given.tables[0]: torch.complex(tables["cos"], tables["sin"])})
    else:
        theirs = partial(theirs, **tables)
    shapes = [(2, tokens + prefix, heads, size) for heads in (3, 1)][: len(given.tensors)]
    leaves = tuple(normal(*shape, seed=3 + i, dtype=dtype) * 3 for i, shape in enumerate(shapes))

    def arguments(*leaves: Tensor) -> tuple[Tensor, ...]:
        if layout == "packed":
            return tuple(t.flatten(0, 1) for t in leaves)
        return tuple(t.transpose(1, 2) for t in leaves) if layout.startswith("bhsd") else leaves

    ours = partial(apply_rope, form=form, layout=layout[:4], inverse=bool(inverse), last=last, **tables)

    def of_one(x: Tensor) -> Tensor:
        return ours(x, None)

    where = f"for heads of {size}" if dtype == torch.float32 else f"in {str(dtype)[6:]}"
    trial = Trial(where, leaves, arguments, gradients)
    if found := difference(ours if len(leaves) == 2 else of_one, theirs, trial):
        return found
    plain = trial._replace(gradients=False)
    with torch.no_grad():
        without = outcome(theirs, plain, ())
    same = all(torch.equal(a, b) for a, b in zip(without, outcome(theirs, plain, ()), strict=True))
    return "" if same else "other results without gradients"


def apply_rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, form: str, layout: str = "bhsd", last: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """Rotate q and k with our op, in a form returned by :func:`rope`. `options` are passed to the op.

    Tables that are shorter than the tokens belong to the last ones.
    """
    if layout in ("bhsd", "bshd"):
        prefix = q.shape[2 if layout == "bhsd" else 1] - cos.shape[-2]
        if prefix > 0:
            cos, sin = F.pad(cos, (0, 0, prefix, 0), value=1.0), F.pad(sin, (0, 0, prefix, 0))
    else:
        layout = "bshd"  # packed tokens have no layout
    cos, sin, pairs = rope_tables(q.shape[-1], cos, sin, form)
    if last:
        pairs |= {"rotary_start": q.shape[-1] - (pairs["rotary"] or q.shape[-1])}
    return rtkernels.rope(q, cos, sin, k=k, layout=layout, **pairs, **options)


def rope_tables(size: int, cos: Tensor, sin: Tensor, form: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return the tables that our ops take for heads of a size, with `rotary` and the order of pairs."""
    rotary = 2 * cos.shape[-1] if form in _HALF_TABLES else cos.shape[-1]
    if form in ("neighbours", "neighbours to halves"):
        cos, sin = cos[..., : rotary // 2], sin[..., : rotary // 2]
    whole = None if rotary == size else rotary
    pairs: dict[str, Any] = {"rotary": whole, "interleaved": form.startswith("neighbour")}
    if form == "neighbours to halves":
        pairs["output_interleaved"] = False
    return cos, sin, pairs


def columns_per_angle(form: str) -> int:
    """Return how many rotated elements a column of the tables has."""
    return 2 if form in _HALF_TABLES else 1
