"""The product behind ``scaled_mm`` and ``gated_mm``: their arguments as a ``Product``, plans, plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import checks, reference
from rtkernels.ops.gemm.backend import PRODUCTS
from rtkernels.ops.gemm.checks import TOKENS, Matrices, Operand
from rtkernels.ops.gemm.product import BYTES, Matrix, Product
from rtkernels.ops.shared.backend import NoBackendError
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import row_stride
from rtkernels.runtime.operator.declared import Argument, Dense, Exact, Meta, Rows
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Steps

TENSORS = (
    Matrices("a"),
    Matrices("b"),
    Argument("scale_a", None, optional=True),
    Argument("scale_b", None, optional=True),
    Exact("global_scale", None, optional=True),
    Dense("bias", None, optional=True),
    Rows("add", None, optional=True),
)
OPTIONS = "str recipe, str b_layout, str? packed, str? act, ScalarType? out_dtype, str acc, str backend"


class Described(NamedTuple):
    """A call: its product, how operands were read, and shape and dtype of the result."""

    product: Product
    left: Operand
    right: Operand
    shape: tuple[int, ...]
    dtype: torch.dtype


class ScaledMm(NamedTuple):
    """Arguments of an operator. Checks and plans get metas in place of tensors."""

    a: Any
    b: Any
    scale_a: Any
    scale_b: Any
    global_scale: Any
    bias: Any
    add: Any
    recipe: str
    b_layout: str
    packed: str | None
    act: str | None
    out_dtype: torch.dtype | None
    acc: str
    backend: str
    out: Any = None  # of operators that write to what the caller gave
    accumulate: bool = False
    quantized: str | None = None  # of operators with quantised results: their kind

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Operands, scales, and tensors that are added."""
        return self[: len(TENSORS)]

    @property
    def metas(self) -> ScaledMm:
        """The same with metas of tensors."""
        (out,) = checks.metas(self.out)
        return ScaledMm(*checks.metas(*self.tensors), *self[len(TENSORS) :])._replace(out=out)


def columns_of(
    a: Meta, b: Meta, scale_a: Meta | None, scale_b: Meta | None, recipe: str, b_layout: str, packed: str | None
) -> int:
    """Return n, the rows of b, without looking at sizes that tracing may leave open."""
    kinds, types = checks.kinds_of(recipe, scale_a, scale_b), checks.packed_types(packed)
    tokens = [checks.token_of(*given) for given in zip("ab", (a, b), types, kinds, strict=True)]
    per = [1 if BYTES[token] >= 1 else 2 for token in tokens]
    if len(b.shape) < 2:
        raise ArgumentError(f"b has shape {tuple(b.shape)}; expected 2 dimensions")
    flipped = checks.is_flipped("b", b.shape, b.stride, a.shape[-1] * per[0] // per[1], b_layout)
    return b.shape[-1] if flipped else b.shape[-2]


def outputs(call: ScaledMm, halves: int = 1) -> tuple[Memory]:
    """Return the shape and dtype of a result."""
    n = columns_of(*call.tensors[:4], call.recipe, call.b_layout, call.packed) // halves
    scaled = call.scale_a is not None or call.scale_b is not None
    dtype = checks.result_dtype(call.a, call.b, scaled, call.packed, call.out_dtype)
    return (Memory((*call.a.shape[:-1], n), dtype),)


def quantized_outputs(call: ScaledMm, halves: int = 1) -> tuple[Memory, Memory]:
    """Return the shapes of codes and scales."""
    *lead, n = outputs(call, halves)[0].shape
    if call.quantized == "1x16":
        scale = Memory((*lead, -(-n // 16)), torch.float8_e4m3fn)
        return Memory((*lead, n // 2), torch.uint8), scale
    rows = 1
    for size in lead:
        rows *= size
    codes = Memory((*lead, n), call.out_dtype or torch.float8_e4m3fn)
    if call.quantized == "row":
        return codes, Memory(tuple(lead), torch.float32)
    return codes, Memory((rows, -(-n // 128)), torch.float32, (1, -(-rows // 4) * 4))


def describe(call: ScaledMm, gated: bool = False) -> Described:
    """Return the product of a call, or raise an ArgumentError that names the wrong argument."""
    PRODUCTS.check(call.backend)
    a, b, scale_a, scale_b, global_scale, bias, add = call.tensors
    packed, act = call.packed, call.act
    checks.check_devices(
        a=a, b=b, scale_a=scale_a, scale_b=scale_b, global_scale=global_scale, bias=bias, add=add, out=call.out
    )  # fmt: skip
    left, right, scales_a, scales_b = checks.operands_of(a, b, scale_a, scale_b, call.recipe, call.b_layout, packed)
    m, n, k = left.rows, right.rows, left.k
    if gated:
        if n % 2:
            raise ArgumentError(f"b has {n} rows; expected a multiple of 2: those of the gate, then the others")
        if act is None or add is not None:
            raise ArgumentError("gated_mm takes an act and no add")
        n //= 2
    shape = (*a.shape[:-1], n)
    dtype, result = _result(call, shape, m, n)
    depths = [scales.depth for scales in (scales_a, scales_b) if scales is not None]
    if global_scale is not None:
        if global_scale.dtype != torch.float32 or global_scale.numel() not in ((1, 2) if gated else (1,)):
            wanted = "one or two numbers (of the gate, of the other half)" if gated else "one number"
            raise ArgumentError(
                f"global_scale has dtype {str(global_scale.dtype).removeprefix('torch.')} and shape "
                f"{tuple(global_scale.shape)}; expected {wanted} of float32"
            )
    add_pitch = 0
    if add is not None:
        checks.check_result(
            "add", Meta(add.dtype, add.shape, dense_strides(add.shape), add.device, 0), shape, checks.FLOATS
        )
        add_pitch = row_stride(add.shape, add.stride)  # 0 if rows are expanded; None if it is to be copied first
        add_pitch = n if add_pitch is None else add_pitch
    if act is not None:
        checks.check_act(act)
    product = Product(
        m, n, k, left.matrix, right.matrix, result, scales_a, scales_b,
        sums=checks.sums_of(call.acc, left.matrix.token, right.matrix.token, max(depths, default=0)),
        bias=checks.check_vector("bias", bias, right.rows), add=None if add is None else TOKENS[add.dtype],
        add_pitch=add_pitch, act=None if gated else act, accumulate=call.accumulate, gate=act if gated else None,
        quantized=call.quantized, global_scale=0 if global_scale is None else global_scale.numel(),
    )  # fmt: skip
    return Described(checks.check_product(product), left, right, shape, dtype)


def _result(call: ScaledMm, shape: tuple[int, ...], m: int, n: int) -> tuple[torch.dtype, Matrix]:
    out, out_dtype, quantized = call.out, call.out_dtype, call.quantized
    if quantized is not None:
        if quantized not in checks.QUANTIZED:
            raise ArgumentError(f"quant_out is {quantized!r}; expected {', '.join(map(repr, checks.QUANTIZED))}")
        if quantized == "1x16":
            if out_dtype is not None:
                raise ArgumentError("out_dtype goes with quant_out '1x128' and 'row'; '1x16' gives e2m1 codes")
            if n % 16:
                raise ArgumentError(f"the result has {n} columns; expected a multiple of 16 for quant_out '1x16'")
            return torch.uint8, Matrix("e2m1", n, aligned=n % 32 == 0)
        dtype = out_dtype or torch.float8_e4m3fn
        if TOKENS.get(dtype) not in checks.QUANTIZED[quantized]:
            raise ArgumentError(
                f"out_dtype is {str(dtype).removeprefix('torch.')}; expected float8_e4m3fn or float8_e5m2 for quant_out"
            )
        return dtype, Matrix(TOKENS[dtype], n, aligned=n % 16 == 0)
    if out is not None:
        if out_dtype is not None and out_dtype != out.dtype:
            raise ArgumentError(f"out_dtype is {out_dtype}; expected {out.dtype}, that of out, or None")
        return out.dtype, checks.check_result("out", out, shape, checks.OUTPUTS)
    scaled = call.scale_a is not None or call.scale_b is not None
    dtype = checks.result_dtype(call.a, call.b, scaled, call.packed, out_dtype)
    if dtype not in checks.OUTPUTS:
        wanted = ", ".join(str(each).removeprefix("torch.") for each in checks.OUTPUTS)
        raise ArgumentError(f"out_dtype is {str(dtype).removeprefix('torch.')}; expected one of {wanted}")
    return dtype, checks.dense_result(dtype, m, n)


def plan(call: ScaledMm, device: int, gated: bool = False) -> Steps:
    """Return the launches of ``scaled_mm`` and ``scaled_mm_out``."""
    return PRODUCTS.steps(describe(call, gated).product, device, call.backend)


def plan_quantized(call: ScaledMm, device: int, gated: bool = False) -> Steps:
    """Return the launches of ``scaled_mm_quantized``, if a backend has them."""
    try:
        return plan(call, device, gated)
    except NoBackendError:
        if not PRODUCTS.is_automatic(call.backend):  # the caller asked for one by name
            raise
        return IN_TORCH


def _product(call: ScaledMm) -> Product:
    return describe(call).product


def _gated_product(call: ScaledMm) -> Product:
    return describe(call, gated=True).product


PRODUCTS.describe(
    scaled_mm=_product, scaled_mm_out=_product, scaled_mm_quantized=_product, gated_mm=_gated_product,
    gated_mm_quantized=_gated_product,
)  # fmt: skip


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def computed(described: Described, tensors: tuple[Tensor | None, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a product ``[m, n]`` in fp32 or fp64, not rounded yet."""
    return reference.product(described.product, described.left, described.right, *tensors, dtype=dtype)


def run_reference(call: ScaledMm, gated: bool = False) -> Tensor:
    """``scaled_mm`` in plain torch."""
    described = describe(call.metas, gated)
    return reference.rounded(computed(described, call.tensors), described.dtype).reshape(described.shape)


def run_reference_out(call: ScaledMm) -> None:
    """``scaled_mm_out`` in plain torch."""
    described = describe(call.metas)
    result = computed(described, call.tensors).reshape(described.shape)
    if described.product.accumulate:
        result = result + call.out.float()
    call.out.copy_(reference.rounded(result, call.out.dtype))


def shaped(described: Described, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a matrix in the shape of the result."""
    lead, kind = described.shape[:-1], described.product.quantized
    scale = scale if kind == "1x128" else scale.reshape(lead if kind == "row" else (*lead, scale.shape[-1]))
    return codes.reshape(*lead, codes.shape[-1]), scale
