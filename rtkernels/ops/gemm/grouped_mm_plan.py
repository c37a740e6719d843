"""The products behind ``grouped_mm`` and ``grouped_wgrad``: arguments as a ``Product``, plans, plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import checks, reference
from rtkernels.ops.gemm.backend import PRODUCTS
from rtkernels.ops.gemm.checks import Matrices
from rtkernels.ops.gemm.product import INTEGERS, Groups, Product, Scales
from rtkernels.ops.gemm.scaled_mm_plan import Described, columns_of
from rtkernels.runtime.operator.declared import Argument, Exact, Meta
from rtkernels.runtime.operator.plan import Memory, Steps

TENSORS = (
    Matrices("a"),
    Matrices("b", stacked=True),
    Argument("scale_a", None, optional=True),
    Argument("scale_b", None, optional=True),
    Exact("ends", None, optional=True),
    Exact("row_groups", None, optional=True),
    Exact("sizes", None, optional=True),
)
OPTIONS = (
    "int align, int expected_m, str recipe, str b_layout, str? packed, str? act, ScalarType? out_dtype, str acc, "
    "str backend"
)
WGRAD_TENSORS = (
    Matrices("a"),
    Matrices("b"),
    Argument("scale_a", None, optional=True),
    Argument("scale_b", None, optional=True),
    Exact("ends", None),
)
WGRAD_OPTIONS = "int align, bool accumulate, str recipe, str acc, str backend"


class GroupedMm(NamedTuple):
    """Arguments of an operator. Checks and plans get metas in place of tensors."""

    a: Any
    b: Any
    scale_a: Any
    scale_b: Any
    ends: Any
    row_groups: Any
    sizes: Any
    align: int
    expected_m: int
    recipe: str
    b_layout: str
    packed: str | None
    act: str | None
    out_dtype: torch.dtype | None
    acc: str
    backend: str
    out: Any = None  # of operators that write to what the caller gave
    accumulate: bool = False

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Operands, scales and what says which rows are a group."""
        return self[: len(TENSORS)]

    @property
    def metas(self) -> GroupedMm:
        """The same with metas of tensors."""
        (out,) = checks.metas(self.out)
        return GroupedMm(*checks.metas(*self.tensors), *self[len(TENSORS) :])._replace(out=out)


class Wgrad(NamedTuple):
    """The same of ``grouped_wgrad``."""

    out: Any
    a: Any
    b: Any
    scale_a: Any
    scale_b: Any
    ends: Any
    align: int
    accumulate: bool
    recipe: str
    acc: str
    backend: str

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Operands, scales and where groups end."""
        return self.a, self.b, self.scale_a, self.scale_b, self.ends

    @property
    def metas(self) -> Wgrad:
        """The same with metas of tensors."""
        return Wgrad(*checks.metas(self.out, *self.tensors), *self[1 + len(WGRAD_TENSORS) :])


def outputs(call: GroupedMm) -> tuple[Memory]:
    """Return the shape and dtype of a result."""
    n = columns_of(*call.tensors[:4], call.recipe, call.b_layout, call.packed)
    scaled = call.scale_a is not None or call.scale_b is not None
    dtype = checks.result_dtype(call.a, call.b, scaled, call.packed, call.out_dtype)
    return (Memory((*call.a.shape[:-1], n), dtype),)


def _integers(name: str, meta: Meta, wanted: tuple[int, ...]) -> None:
    if meta.dtype != torch.int32 or tuple(meta.shape) != wanted:
        raise ArgumentError(
            f"{name} has dtype {str(meta.dtype).removeprefix('torch.')} and shape {tuple(meta.shape)}; expected int32 "
            f"of shape {wanted}"
        )


def describe(call: GroupedMm) -> Described:
    """Return what a call of ``grouped_mm`` or ``grouped_mm_masked`` multiplies, or raise an ArgumentError."""
    a, b, scale_a, scale_b, ends, row_groups, sizes = call.tensors
    align, packed, out = call.align, call.packed, call.out
    checks.check_devices(
        a=a, b=b, scale_a=scale_a, scale_b=scale_b, offs=ends, m_indices=row_groups, masked_m=sizes, out=out
    )  # fmt: skip
    if sum(meta is not None for meta in (ends, row_groups, sizes)) != 1:
        got = "both None" if ends is None else "both given"
        raise ArgumentError(f"offs and m_indices are {got}; expected one of them")
    if b.dim() != 3 or a.dim() != (2 if sizes is None else 3):
        raise ArgumentError(
            f"a and b have shapes {tuple(a.shape)} and {tuple(b.shape)}; expected "
            f"{'[rows, k]' if sizes is None else '[groups, m, k]'} and [groups, n, k]"
        )
    count = b.shape[0]
    if sizes is not None:
        if a.shape[0] != count:
            raise ArgumentError(f"a has {a.shape[0]} groups; expected {count}, as b")
        _integers("masked_m", sizes, (count,))
    elif ends is not None:
        _integers("offs", ends, (count,))
    else:
        _integers("m_indices", row_groups, (a.shape[0],))
    PRODUCTS.check(call.backend)
    _check_align(align)
    kind = "masked" if sizes is not None else "labels" if ends is None else "rows"
    left, right, scales_a, scales_b = checks.operands_of(
        a, b, scale_a, scale_b, call.recipe, call.b_layout, packed, groups=count,
        a_groups=count if kind == "masked" else 0,
    )  # fmt: skip
    if kind != "masked" and scales_a is not None and scales_a.rows > 1 and align % scales_a.rows:
        raise ArgumentError(f"align is {align}; expected a multiple of {scales_a.rows}, the rows of a scale of a")
    m, n, k = left.rows, right.rows, left.k
    shape = (*a.shape[:-1], n)
    if out is not None:
        dtype, result = out.dtype, checks.check_result("out", out, shape, checks.OUTPUTS, grouped=True)
    else:
        dtype = checks.result_dtype(a, b, scale_a is not None or scale_b is not None, packed, call.out_dtype)
        if dtype not in checks.OUTPUTS:
            wanted = ", ".join(str(each).removeprefix("torch.") for each in checks.OUTPUTS)
            raise ArgumentError(f"out_dtype is {str(dtype).removeprefix('torch.')}; expected one of {wanted}")
        result = checks.dense_result(dtype, m, n, count if kind == "masked" else 0)
    product = Product(
        m, n, k, left.matrix, right.matrix, result, scales_a, scales_b, act=call.act, accumulate=call.accumulate,
        sums=checks.sums_of(call.acc, left.matrix.token, right.matrix.token, _depth(scales_a, scales_b)),
        groups=Groups(kind, count, align, call.expected_m),
    )  # fmt: skip
    return Described(checks.check_product(product), left, right, shape, dtype)


def _check_align(align: int) -> None:
    if align < 1 or align & (align - 1):
        raise ArgumentError(f"align is {align}; expected a power of two")


def _depth(*scales: Scales | None) -> int:
    return max((each.depth for each in scales if each is not None), default=0)


def describe_wgrad(call: Wgrad) -> Described:
    """Return what a call of ``grouped_wgrad`` multiplies: a ``[m, rows]`` and b ``[n, rows]``, cut along rows."""
    a, b, scale_a, scale_b, ends = call.tensors
    align, out = call.align, call.out
    checks.check_devices(dy=a, x=b, scale_dy=scale_a, scale_x=scale_b, offs=ends, out=out)
    for name, meta in (("dy", a), ("x", b)):
        if meta.dim() != 2:
            raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected 2 dimensions")
    if ends.dim() != 1:
        raise ArgumentError(f"offs has shape {tuple(ends.shape)}; expected one dimension")
    if a.shape[1] != b.shape[1]:
        raise ArgumentError(f"dy and x have {a.shape[1]} and {b.shape[1]} rows; expected the same number")
    count = ends.shape[0]
    _integers("offs", ends, (count,))
    PRODUCTS.check(call.backend)
    _check_align(align)
    left, right, scales_a, scales_b = checks.operands_of(a, b, scale_a, scale_b, call.recipe, "nk", None)
    depth = _depth(scales_a, scales_b)
    if depth and align % depth:
        raise ArgumentError(f"align is {align}; expected a multiple of {depth}, the rows that share a scale")
    shape = (count, left.rows, right.rows)
    result = checks.check_result("out", out, shape, checks.FLOATS, grouped=True)
    product = Product(
        left.rows, right.rows, left.k, left.matrix, right.matrix, result, scales_a, scales_b,
        accumulate=call.accumulate, sums=checks.sums_of(call.acc, left.matrix.token, right.matrix.token, depth),
        groups=Groups("depth", count, align),
    )  # fmt: skip
    return Described(checks.check_product(product), left, right, shape, out.dtype)


def plan(call: GroupedMm, device: int) -> Steps:
    """Return the launches of ``grouped_mm`` and ``grouped_mm_out``."""
    return PRODUCTS.steps(describe(call).product, device, call.backend)


def plan_wgrad(call: Wgrad, device: int) -> Steps:
    """Return the launches of ``grouped_wgrad``."""
    return PRODUCTS.steps(describe_wgrad(call).product, device, call.backend)


def _product(call: GroupedMm) -> Product:
    return describe(call).product


def _product_wgrad(call: Wgrad) -> Product:
    return describe_wgrad(call).product


PRODUCTS.describe(grouped_mm=_product, grouped_mm_out=_product, grouped_wgrad=_product_wgrad)


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _members(rows: int, ends: Tensor | None, row_groups: Tensor | None, count: int) -> list[Tensor]:
    """Return the rows of each group."""
    if ends is None:
        labels = row_groups.long()
        return [(labels == group).nonzero().flatten() for group in range(count)]
    edges = [0, *(min(end, rows) for end in ends.tolist())]
    return [
        torch.arange(edges[g], max(edges[g], edges[g + 1]), dtype=torch.int64, device=ends.device) for g in range(count)
    ]


def _grids(described: Described, scale_a, scale_b, k: int, stacked: bool) -> tuple[Tensor | None, Tensor | None]:
    p, left, right = described[:3]
    count = p.groups.count
    a = None if scale_a is None else reference.scale_grid(scale_a, p.scale_a, left.rows, k, count if stacked else 0)
    groups = 0 if p.groups.kind == "depth" else count
    b = None if scale_b is None else reference.scale_grid(scale_b, p.scale_b, right.rows, k, groups)
    return a, b


def computed(
    described: Described, a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, ends: Tensor | None,
    row_groups: Tensor | None, sizes: Tensor | None, dtype: torch.dtype = torch.float32, base: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return a grouped product in fp32 or fp64, not rounded yet; rows of no group are those of `base`, or 0."""
    p, left, right, shape, _ = described
    count, masked = p.groups.count, p.groups.kind == "masked"
    exact = left.matrix.token in INTEGERS and right.matrix.token in INTEGERS
    grid_a, grid_b = _grids(described, scale_a, scale_b, left.k, masked)
    result = torch.zeros(shape, dtype=torch.float64 if exact else dtype, device=a.device)
    if base is not None:
        result.copy_(base)
    lengths = sizes.tolist() if masked else ()
    members = () if masked else _members(left.rows, ends, row_groups, count)
    whole = None if masked else reference.values(a, left, dtype)
    for g in range(count):
        if masked:
            rows = slice(0, min(lengths[g], left.rows))
            one, scale, place = reference.values(a[g], left, dtype)[rows], grid_a, result[g]
            scale = None if scale is None else scale[g] if scale.dim() == 3 else scale
        else:
            rows = members[g]
            one, scale, place = whole[rows], grid_a, result
        scale = scale if scale is None or scale.shape[-2] == 1 else scale[rows]
        other = None if grid_b is None else grid_b[g]
        sums = reference.multiply(one, reference.values(b[g], right, dtype), scale, other, exact, dtype)
        sums = reference.activated(sums, p.act).to(result.dtype)
        place[rows] = sums + place[rows] if p.accumulate else sums
    return result


def run_reference(call: GroupedMm) -> Tensor:
    """``grouped_mm`` in plain torch."""
    described = describe(call.metas)
    return reference.rounded(computed(described, *call.tensors), described.dtype)


def run_reference_out(call: GroupedMm) -> None:
    """``grouped_mm_out`` in plain torch."""
    sums = computed(describe(call.metas), *call.tensors, base=call.out)
    call.out.copy_(reference.rounded(sums, call.out.dtype))


def run_reference_wgrad(call: Wgrad) -> None:
    """``grouped_wgrad`` in plain torch."""
    sums = computed_wgrad(describe_wgrad(call.metas), *call.tensors, base=call.out)
    call.out.copy_(reference.rounded(sums, call.out.dtype))


def computed_wgrad(
    described: Described, a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, ends: Tensor,
    dtype: torch.dtype = torch.float32, base: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return products of groups of rows in fp32 or fp64, added to `base` if the product says so."""
    p, left, right, shape, _ = described
    grids = _grids(described, scale_a, scale_b, left.k, False)
    left_values, right_values = reference.values(a, left, dtype), reference.values(b, right, dtype)
    edges = [0, *ends.tolist()]
    result = torch.zeros(shape, dtype=dtype, device=a.device)
    for g in range(p.groups.count):
        cut = slice(edges[g], max(edges[g], edges[g + 1]))
        scales = [s if s is None or s.shape[-1] == 1 else s[:, cut] for s in grids]
        result[g] = reference.multiply(left_values[:, cut], right_values[:, cut], *scales, False, dtype)
    return result + base.to(dtype) if p.accumulate and base is not None else result
