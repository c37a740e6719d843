"""From the tensors of a call to a ``Product``: how operands lie in memory, and what fits together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm.product import BYTES, FLOAT16, FP8, INTEGERS, Groups, Matrix, Product
from rtkernels.ops.gemm.recipes import BLOCK_FORMATS, collapsed, kinds_of, scales_of
from rtkernels.runtime.invariance import refuse, starts_from_result
from rtkernels.runtime.layout import check_same
from rtkernels.runtime.operator.declared import Argument, Meta

TOKENS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "int32",
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8", torch.uint8: "uint8",
    torch.float4_e2m1fn_x2: "e2m1",
}  # fmt: skip
OPERANDS = tuple(dtype for dtype in TOKENS if dtype != torch.int32)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
OUTPUTS = (*FLOATS, torch.int32)
PACKED = ("int4", "uint4", "e2m1")
ACTIVATIONS = ("relu", "silu", "gelu_tanh", "gelu")
ACCUMULATORS = ("auto", "fp32", "fast", "fp16", "int32")
QUANTIZED = {"1x128": FP8, "row": FP8, "1x16": ("e2m1",)}
_UNSCALED = (*FLOAT16, "fp32")


def metas(*tensors: Tensor | None) -> list[Meta | None]:
    """Return the metadata of tensors, as if they were aligned."""
    return [None if t is None else Meta(t.dtype, t.shape, t.stride(), t.get_device(), 0) for t in tensors]


def check_devices(**metas: Meta | None) -> None:
    """Raise an ArgumentError unless all tensors are on the device of the first one."""
    given = [(name, meta) for name, meta in metas.items() if meta is not None]
    for name, meta in given:
        check_same(name, meta.device, given[0][1].device, "device index", of=given[0][0])


# ---- operands -------------------------------------------------------------------------------------------------------


class Operand(NamedTuple):
    """A matrix ``[rows, k]`` of a call."""

    matrix: Matrix
    rows: int
    k: int
    flipped: bool = False  # it came as [k, rows]


class Matrices(Argument):
    """Matrices with unit stride along one of the last two dimensions, evenly spaced; others are copied."""

    def __init__(self, name: str, stacked: bool = False, **options: Any) -> None:
        super().__init__(name, None, **options)
        self.stacked = stacked  # dimensions before the last two are those of groups, not of rows

    def fits(self, meta: Meta) -> bool:
        return lies(meta.shape, meta.stride, self.stacked) is not None


def lies(shape: Sequence[int], stride: Sequence[int], stacked: bool = False) -> tuple[bool, int] | None:
    """Return ``(across, pitch)`` of matrices ``[..., rows, k]``: whether k is not the unit stride; None if none is."""
    outer, steps = (shape[-2:-1], stride[-2:-1]) if stacked else (shape[:-1], stride[:-1])
    rows, k = 1, shape[-1]
    for size in outer:
        rows *= size
    if rows == 0 or k == 0:
        return False, k
    pitch = collapsed(outer, steps)
    if pitch is None:
        return None
    if k == 1 or stride[-1] == 1:
        if rows == 1:
            return False, k
        if pitch >= k:
            return False, pitch
    if rows == 1 or pitch == 1:
        return (True, stride[-1]) if stride[-1] >= rows else None
    return None


def token_of(name: str, meta: Meta, packed: str | None, format_kind: str | None) -> str:
    """Return the element type of an operand."""
    if meta.dtype not in OPERANDS:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in OPERANDS)
        raise ArgumentError(f"{name} has dtype {str(meta.dtype).removeprefix('torch.')}; expected one of {wanted}")
    if meta.dtype in (torch.int8, torch.uint8):
        if packed is not None:
            return packed
        if format_kind in BLOCK_FORMATS and meta.dtype == torch.uint8:
            return "e2m1"
    return TOKENS[meta.dtype]


def packed_types(packed: str | None) -> tuple[str | None, str | None]:
    """Return what bytes of a and of b hold: "int4" for both, or "int4,uint4", "-,int4"."""
    if packed is None:
        return None, None
    names = packed.split(",") if isinstance(packed, str) else [packed]
    names = names * 2 if len(names) == 1 else names
    if len(names) != 2 or any(name not in (*PACKED, "-") for name in names):
        raise ArgumentError(f"packed is {packed!r}; expected 'int4', 'uint4', 'e2m1', None, or a pair of these")
    return tuple(None if name == "-" else name for name in names)


def is_flipped(name: str, shape: Sequence[int], stride: Sequence[int], columns: int, layout: str) -> bool:
    """Return True if b came as ``[k, n]``. By itself, that is where k has the unit stride."""
    if layout in ("nk", "kn"):
        return layout == "kn"
    if layout != "auto":
        raise ArgumentError(f"b_layout is {layout!r}; expected 'auto', 'nk' or 'kn'")
    if shape[-1] == 1 or shape[-2] == 1:
        return shape[-1] != columns
    if stride[-1] == 1:
        return False
    if stride[-2] == 1:
        return True
    raise ArgumentError(
        f"{name} has strides {tuple(stride)}; expected 1 along k, or say b_layout='nk' ([n, k]) or 'kn' ([k, n])"
    )


def read_operand(name: str, meta: Meta, token: str, flipped: bool = False, groups: int = 0) -> Operand:
    """Return an operand as it lies; 8-bit and 4-bit ones must have k as their unit stride."""
    shape, stride = list(meta.shape), list(meta.stride)
    if len(shape) < 2:
        raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected at least two dimensions")
    if flipped:
        shape[-2:], stride[-2:] = shape[:-3:-1], stride[:-3:-1]
    found = lies(shape, stride, stacked=groups > 0)
    across, pitch = found or (False, shape[-1])  # to be copied
    per = 1 if BYTES[token] >= 1 else 2
    if across and token not in FLOAT16 and token != "fp32" and 0 not in shape:
        other = "m" if name == "a" else "n"
        raise ArgumentError(
            f"{name} ({token}) has strides {tuple(meta.stride)}, contiguous along {other}; expected 1 along k"
        )
    rows, k, size = 1, shape[-1] * per, BYTES[token]
    for extent in shape[-2:-1] if groups else shape[:-1]:
        rows *= extent
    pitch *= per
    group_pitch = stride[0] * per if groups else 0
    step = 0 if rows == 1 and not (groups or across) else pitch  # a single row may have any pitch
    aligned = not (meta.misaligned or step * size % 16 or group_pitch * size % 16)
    halves = not (aligned or groups or meta.misaligned or step * size % 8)
    return Operand(Matrix(token, pitch, across, aligned, group_pitch, halves), rows, k, flipped)


def operands_of(
    a: Meta, b: Meta, scale_a: Meta | None, scale_b: Meta | None, recipe: str, layout: str, packed: str | None,
    groups: int = 0, a_groups: int = 0,
) -> tuple[Operand, Operand, Any, Any]:  # fmt: skip
    """Return a, b and their scales as they lie, or raise an ArgumentError."""
    for name, meta, dims in (("a", a, 3 if a_groups else 2), ("b", b, 3 if groups else 2)):
        if meta.dim() < dims or (name == "b" and meta.dim() > dims):
            raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected {dims} dimensions")
    kinds, types = kinds_of(recipe, scale_a, scale_b), packed_types(packed)
    tokens = [token_of(*given) for given in zip("ab", (a, b), types, kinds, strict=True)]
    check_pair(*tokens)
    left = read_operand("a", a, tokens[0], groups=a_groups)
    columns = left.k if BYTES[tokens[1]] >= 1 else left.k // 2
    flipped = is_flipped("b", b.shape, b.stride, columns, layout)
    right = read_operand("b", b, tokens[1], flipped, groups)
    if right.k != left.k:
        form = ("[k, n]" if flipped else "[n, k]") if not groups else ("[g, k, n]" if flipped else "[g, n, k]")
        hint = ""
        if layout == "auto" and b.shape[-1 if flipped else -2] == columns:
            other = "nk" if flipped else "kn"
            hint = f" (b_layout='{other}' takes b as [{', '.join(other)}], with the unit stride along n)"
        raise ArgumentError(
            f"b has shape {tuple(b.shape)}, {form} with k = {right.k}; expected k = {left.k}, as a{hint}"
        )
    scales = []
    for name, meta, kind, side, lead, count in (
        ("scale_a", scale_a, kinds[0], left, a.shape[:-1], a_groups),
        ("scale_b", scale_b, kinds[1], right, (), groups),
    ):
        if meta is None:
            if kind not in (None, "auto") and side.matrix.token not in _UNSCALED:
                raise ArgumentError(f"{name} is None; expected scales for recipe {recipe!r}")
            scales.append(None)
            continue
        lead = lead[1:] if count else lead
        flip = side.flipped and kind not in ("tensor", "row")
        scales.append(scales_of(name, meta, kind, side.rows, side.k, lead=lead, flipped=flip, groups=count))
    return left, right, *scales


def check_pair(a: str, b: str) -> None:
    """Raise an ArgumentError unless elements of these types can be multiplied."""
    if a == b or (a in FP8 and b in FP8) or (a in INTEGERS and b in INTEGERS):
        return
    if (a in FLOAT16 and b not in _UNSCALED) or (a in FP8 and b == "e2m1"):
        return
    raise ArgumentError(f"b has elements of {b}; expected elements that match {a}, those of a")


# ---- the rest of a product ------------------------------------------------------------------------------------------


def default_dtype(a: torch.dtype, integers: bool, scaled: bool) -> torch.dtype:
    """Return the default output dtype."""
    if a in FLOATS:
        return a
    return torch.int32 if integers and not scaled else torch.bfloat16


def result_dtype(a: Meta, b: Meta, scaled: bool, packed: str | None, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return `out_dtype`, or the default for the operands."""
    if out_dtype is not None:
        return out_dtype
    bytes_ = (torch.int8, torch.uint8)
    integers = a.dtype in bytes_ and b.dtype in bytes_ and "e2m1" not in (packed or "")
    return default_dtype(a.dtype, integers, scaled)


def sums_of(acc: str, a: str, b: str, scale_depth: int) -> str:
    """Return how a product is accumulated, from the user's option."""
    if acc not in ACCUMULATORS:
        raise ArgumentError(f"acc is {acc!r}; expected one of {', '.join(ACCUMULATORS)}")
    integers = a in INTEGERS and b in INTEGERS
    if acc == "auto":
        return "int32" if integers else "fp32"
    if (acc == "int32") != integers:
        raise ArgumentError(f"acc is {acc!r}; expected {'int32' if integers else 'fp32, fast or fp16'} for {a} and {b}")
    if acc == "fp16" and not (a == b == "fp16" or (a in FP8 and b in FP8)):
        raise ArgumentError(f"acc is 'fp16'; expected operands of fp16 or fp8, not {a} and {b}")
    if acc in ("fast", "fp16") and scale_depth:
        raise ArgumentError(f"acc is {acc!r}; expected 'fp32' with scales along k, which are applied between sums")
    return acc


def check_vector(name: str, meta: Meta | None, n: int) -> str | None:
    """Return the element type of a vector along n, None if it is absent."""
    if meta is None:
        return None
    if meta.dtype not in FLOATS:
        raise ArgumentError(
            f"{name} has dtype {str(meta.dtype).removeprefix('torch.')}; expected bfloat16, float16 or float32"
        )
    if tuple(meta.shape) != (n,):
        raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected {(n,)}")
    return TOKENS[meta.dtype]


def check_result(
    name: str, meta: Meta, shape: Sequence[int], dtypes: Sequence[torch.dtype], *, grouped: bool = False
) -> Matrix:
    """Return a result that the caller gave (or a residual) as it lies: rows with unit stride, evenly spaced.

    Args:
        name: For messages.
        meta: What came.
        shape: What it must have.
        dtypes: One of them.
        grouped: The first of three dimensions is that of groups, which may lie anywhere; else it is one of rows, all
            of which are evenly spaced.
    """
    if tuple(meta.shape) != tuple(shape):
        raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected {tuple(shape)}, that of the result")
    if meta.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ArgumentError(f"{name} has dtype {str(meta.dtype).removeprefix('torch.')}; expected one of {wanted}")
    stacked = grouped and len(shape) == 3
    found = lies(meta.shape, meta.stride, stacked and collapsed(meta.shape[:-1], meta.stride[:-1]) is None)
    if found is None or (found[0] and meta.shape[-1] != 1):
        raise ArgumentError(f"{name} has strides {tuple(meta.stride)}; expected unit-stride rows, evenly spaced")
    pitch, size = found[1], meta.dtype.itemsize
    group_pitch = meta.stride[0] if stacked else 0
    aligned = not (meta.misaligned or pitch * size % 16 or group_pitch * size % 16)
    return Matrix(TOKENS[meta.dtype], pitch, aligned=aligned, group_pitch=group_pitch)


def dense_result(dtype: torch.dtype, rows: int, n: int, groups: int = 0) -> Matrix:
    """Return a result that an operator allocates."""
    size = dtype.itemsize
    return Matrix(TOKENS[dtype], n, aligned=n * size % 16 == 0, group_pitch=rows * n if groups else 0)


def check_act(act: str | None) -> None:
    """Raise an ArgumentError unless there is such an activation."""
    if act is not None and act not in ACTIVATIONS:
        raise ArgumentError(f"act is {act!r}; expected None, {', '.join(ACTIVATIONS)}")


def _check_start(product: Product) -> None:
    """Raise an ArgumentError unless the sums of a product can start from the result so far."""
    if product.out.token != "fp32":
        refuse(f"accumulate to an out of {product.out.token}", "sums so far must be float32")
    if product.bias or product.add or product.act or product.global_scale:
        refuse("accumulate with bias, add, act or global_scale", "these follow the sum of one call")
    if any(scales is not None and not 0 < scales.depth <= 128 for scales in (product.scale_a, product.scale_b)):
        refuse("accumulate with scales of all of k", "rows of one call share them")


def check_product(product: Product) -> Product:
    """Return the product, or raise an ArgumentError for parts that exclude each other."""
    check_act(product.act)
    if product.out.token == "int32":
        if product.sums != "int32" or product.scale_a or product.scale_b or product.bias or product.add or product.act:
            raise ArgumentError(
                "out_dtype is int32; expected a float, or integer operands without scales, bias, add, act"
            )
        if product.accumulate or product.gate:
            raise ArgumentError("out_dtype is int32; expected a float for accumulate and gated products")
    elif product.accumulate and product.out.token not in ("fp32", "bf16", "fp16"):
        raise ArgumentError(f"out has elements of {product.out.token}; expected a float for accumulate=True")
    if product.accumulate and starts_from_result():
        _check_start(product)
    groups: Groups | None = product.groups
    if groups is not None and groups.count > 512:
        raise ArgumentError(f"b has {groups.count} groups; expected at most 512")
    return product
