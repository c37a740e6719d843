"""Matrix products of 16-bit, 8-bit and 4-bit operands, with scales, and what follows a product in one pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import checks, reference, scaled_mm_plan, torch_backend
from rtkernels.ops.gemm.across import along_k
from rtkernels.ops.gemm.backend import PRODUCTS
from rtkernels.ops.gemm.scaled_mm_plan import OPTIONS, TENSORS, ScaledMm
from rtkernels.ops.quant import pack
from rtkernels.ops.quant.quantize_fp8 import QUANTIZE
from rtkernels.runtime.call.public import public
from rtkernels.runtime.invariance import level, refuse
from rtkernels.runtime.layout import as_rows
from rtkernels.runtime.operator.autograd import applied, once_differentiable
from rtkernels.runtime.operator.declared import InPlace, Operator
from rtkernels.runtime.operator.registry import Op

FORWARD = Operator(
    "scaled_mm", TENSORS, options=OPTIONS, results="out", outputs=scaled_mm_plan.outputs, plan=scaled_mm_plan.plan,
    reference=scaled_mm_plan.run_reference, check=scaled_mm_plan.describe,
)  # fmt: skip
IN_PLACE = Operator(
    "scaled_mm_out", (InPlace("out", None), *TENSORS), options=f"{OPTIONS}, bool accumulate", results="",
    plan=scaled_mm_plan.plan, reference=scaled_mm_plan.run_reference_out, check=scaled_mm_plan.describe,
)  # fmt: skip


def quantized_by_steps(plain: Operator, call: ScaledMm, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a product that goes through memory in fp32: what `plain` gives, quantised."""
    described, kind = scaled_mm_plan.describe(call.metas, gated), call.quantized
    p, unquantized = described.product, call._replace(out_dtype=torch.float32)
    x = plain(*unquantized[: len(plain.names)]).reshape(p.m, p.n)
    if kind == "1x16":
        codes, scale, _ = pack.quantize_nvfp4(x, torch.ones((), dtype=torch.float32, device=x.device))
    elif kind == "row":
        codes, scale = QUANTIZE(x, "row", described.dtype, False, "row")
    else:
        codes, columns = QUANTIZE(x, "group", described.dtype, False, "column")
        scale = x.new_empty_strided((p.m, columns.shape[0]), (1, -(-p.m // 4) * 4)).copy_(columns.t())
    return scaled_mm_plan.shaped(described, codes, scale)


QUANTIZED = Operator(
    "scaled_mm_quantized", TENSORS, options=f"{OPTIONS}, str quantized", results="out out_scale",
    outputs=scaled_mm_plan.quantized_outputs, plan=scaled_mm_plan.plan_quantized,
    reference=partial(quantized_by_steps, FORWARD), check=scaled_mm_plan.describe,
)  # fmt: skip


# ---- gradients ------------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """A product of two float matrices, with bias and add; the gradients are products of the same operator."""

    @staticmethod
    def forward(ctx, a, b, bias, add, b_layout, out_dtype, acc, backend):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        ctx.bias, ctx.add = (None if t is None else t.dtype for t in (bias, add))
        flipped = checks.is_flipped("b", b.shape, b.stride(), a.shape[-1], b_layout)
        ctx.flipped, ctx.acc, ctx.backend = flipped, acc, backend
        return FORWARD.call(a, b, None, None, None, bias, add, "none", b_layout, None, None, out_dtype, acc, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        if dout is None:
            return (None,) * 8
        a, b = ctx.saved_tensors
        da = db = dbias = dadd = None
        need_a, need_b, need_bias, need_add = ctx.needs_input_grad[:4]
        g, is_matrix = dout if dout.dtype == a.dtype else dout.to(a.dtype), a.dim() == 2  # reshape takes host time
        g2, a2 = (g, a) if is_matrix else (as_rows(g), as_rows(a))
        if need_a:  # [m, n] @ [n, k]: b the other way round
            da = _plain(g2, b, "nk" if ctx.flipped else "kn", ctx)
            da = da if is_matrix else da.reshape(a.shape)
        if need_b:
            db = _plain(a2.t(), g2, "kn", ctx) if ctx.flipped else _plain(g2.t(), a2, "kn", ctx)
        if need_bias:
            dbias = as_rows(dout).sum(0, dtype=torch.float32).to(ctx.bias)
        if need_add:
            dadd = dout.to(ctx.add)
        return da, db, dbias, dadd, None, None, None, None


_product = applied(_Product)


def _plain(a: Tensor, b: Tensor, b_layout: str, ctx: Any) -> Tensor:
    return FORWARD.call(
        a, b, None, None, None, None, None, "none", b_layout, None, None, a.dtype, ctx.acc, ctx.backend
    )  # fmt: skip


def differentiable_mm(a, b, bias, add, b_layout, act, out_dtype, acc, backend) -> Tensor:
    """Return a product with a gradient. An activation is then a step of its own, on sums in fp32."""
    dtype = a.dtype if out_dtype is None else out_dtype
    result = _product(a, b, bias, add, b_layout, dtype if act is None else torch.float32, acc, backend)
    return result if act is None else reference.activated(result, act).to(dtype)


def refuse_quantised_gradients(op: str, *tensors: Tensor | None) -> None:
    """Raise if a gradient is wanted through a product that has none."""
    if is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise ArgumentError(
            f"{op} has a gradient for float operands without scales, out= and quant_out=; a tensor requires grad: call "
            f"it under torch.no_grad(), or detach the tensor"
        )


@public(own_out=True)
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | float | None = None, scale_b: Tensor | float | None = None, *,
    recipe: str = "auto", bias: Tensor | None = None, add: Tensor | None = None, act: str | None = None,
    out_dtype: torch.dtype | None = None, out: Tensor | None = None, accumulate: bool = False, acc: str = "auto",
    packed: str | tuple[str | None, str | None] | None = None, nibble: str = "low",
    global_scale: Tensor | float | None = None, quant_out: str | None = None, b_layout: str = "auto",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``act(a @ b.T * scales + bias + add)``, computed in fp32 after the products and rounded once.

    ====================================  ==========================================================================
    operands                              combinations
    ====================================  ==========================================================================
    bfloat16, float16                     both the same
    float32                               both the same; on a GPU with ``backend="torch"`` only
    float8_e4m3fn, float8_e5m2            any two
    int8, uint8                           any two; sums are exact
    int4, uint4 (``packed=``)             two codes in a byte; also int8 with int4
    e2m1 (float4_e2m1fn_x2, or uint8)     two codes in a byte
    bfloat16/float16 with 8 or 4 bits     low-bit weights: `b` is converted, `a` has no scales
    ====================================  ==========================================================================

    =========================  ==========================  ===========================================================
    recipe                     scale_a                     scale_b
    =========================  ==========================  ===========================================================
    ``none``                   None                        None
    ``tensor``                 one number                  one number
    ``row``                    ``[m]``, ``[m, 1]``         ``[n]``, ``[n, 1]``, ``[1, n]``
    ``block_1x128_128x128``    ``[m, k/128]``              ``[n/128, k/128]``
    ``block_1x128_1x128``      ``[m, k/128]``              ``[n, k/128]``
    ``block_128x128_128x128``  ``[m/128, k/128]``          ``[n/128, k/128]``
    ``tile``                   ``[m/q, k/q]``              ``[n/q, k/q]``, each q from the shape
    ``mx32``                   e8m0 ``[m, k/32]``          e8m0 ``[n, k/32]``
    ``nvfp4``                  e4m3 ``[m, k/16]``          e4m3 ``[n, k/16]``
    =========================  ==========================  ===========================================================

    Divisions round up: the last scale may cover fewer elements (not for ``tile``). Scales are float32 with any strides;
    the fastest for 1x128 are ``quantize_fp8(..., scale_layout="column")[1].t()``. Scales of ``mx32`` and ``nvfp4`` are
    bytes, in rows or, with one dimension, in blocks of 128 x 4. ``auto`` chooses by dtype and shape, for each operand
    separately, and prefers 128 if several recipes fit. Differentiable once in floating-point operands without scales,
    and in bias and add.

    Args:
        a: ``[..., m, k]``; leading dimensions are rows. Any strides (copied unless k or m has unit stride). A launch of
            its own transposes fp8 and int8 operands with unit stride along m or n; 4-bit operands must be contiguous
            along k. Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        b: ``[n, k]``, or ``[k, n]`` as in torch.mm: the dimension with unit stride is k (see b_layout). The scales of a
            ``[k, n]`` b are transposed as well.
        scale_a: See above. A number is copied to the device.
        scale_b: See above.
        recipe: See above.
        bias: ``[n]``, floating-point.
        add: Floating-point tensor of the result's shape.
        act: None, "relu", "silu", "gelu_tanh" or "gelu".
        out_dtype: bfloat16, float16, float32, or int32 for integers without scales. Default: a's dtype if it is
            floating-point with at least 16 bits, int32 for integers without scales, else bfloat16.
        out: Tensor to write the result to, with unit-stride rows.
        accumulate: Add the result to `out` (floating-point), in fp32.
        acc: Accumulation: "fp32" (fp8 sums are moved to fp32 registers every 128 of k), "fast" (tensor cores accumulate
            over all of k; fp8 loses bits), "fp16" (for fp16 and fp8), "int32". "auto" is fp32, or int32 for integers.
        packed: Content of int8 and uint8 operands: "int4", "uint4" or "e2m1", two codes in a byte. A pair gives it for
            a and b separately, with None for one that is not packed.
        nibble: Which half of a byte has the first of two codes: "low", or "high" if both operands are packed.
        global_scale: One float32 factor of the sums, as in NVFP4 (the product of both tensors' scales).
        quant_out: Quantise the result and return codes and scales: "1x128" (float8, scales ``[m, n/128]`` contiguous
            along m), "row" (float8, ``[m]``) or "1x16" (e2m1 in uint8 ``[m, n/2]``, e4m3 ``[m, n/16]``), with the rules
            of quantize_fp8.
        b_layout: "nk" or "kn" states the layout of b regardless of its strides, which may be any for operands of 8
            bits or more: those of 8 bits are transposed or copied first if k does not have the unit stride.
        backend: "auto" or "rtkernels", or a specific one: "sm90", "skinny", "unpack", "pad", "mma", "cluster",
            "decode", "swapped" (sm_90a, 9 to 256 rows), or "torch" for torch.mm, torch._scaled_mm or torch._int_mm if
            they support the call. "tcgen05" (sm_100a) was compiled and emulated but never run on a GPU, so "auto" does
            not take it. ``rtkernels.explain`` shows what "auto" selects.

    Returns:
        ``[..., m, n]``, contiguous, or `out`; with `quant_out` ``(codes, scales)``.
    """
    if scale_a is not None or scale_b is not None or global_scale is not None:
        scale_a, scale_b, global_scale = (as_scale(a, t) for t in (scale_a, scale_b, global_scale))
    if packed is not None or nibble != "low":
        packed = as_packed(packed, nibble, a)
    a, b = along_k(a, b, b_layout, packed)
    tensors = (a, b, scale_a, scale_b, global_scale, bias, add)
    options = (recipe, b_layout, packed, act, out_dtype, acc, backend)
    if accumulate and out is None:
        raise ArgumentError("accumulate is True; expected out, which the result is added to")
    if backend == "torch":
        if level():
            refuse("backend 'torch'", "its kernels are chosen by the number of rows")
        refuse_quantised_gradients("scaled_mm(backend='torch')", out)
        return torch_backend.scaled_mm(*tensors, *options, out, accumulate, quant_out)
    if quant_out is not None:
        if out is not None:
            raise ArgumentError("out and quant_out are given; expected one of them")
        refuse_quantised_gradients("scaled_mm", *tensors)
        return QUANTIZED.call(*tensors, *options, quant_out)
    if out is not None:
        refuse_quantised_gradients("scaled_mm", *tensors, out)
        IN_PLACE.call(out, *tensors, *options, accumulate)
        return out
    if is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        if a.dtype not in checks.FLOATS or b.dtype != a.dtype or scale_a is not None or scale_b is not None:
            refuse_quantised_gradients("scaled_mm", *tensors)
        if global_scale is not None:
            refuse_quantised_gradients("scaled_mm with global_scale", *tensors)
        checks.check_act(act)
        return differentiable_mm(a, b, bias, add, b_layout, act, out_dtype, acc, backend)
    return FORWARD.call(*tensors, *options)


def as_scale(a: Tensor, scale: Tensor | float | None) -> Tensor | None:
    """Return scales as an operator takes them: numbers on a's device, 16-bit floats and fp64 as float32."""
    if scale is None or not isinstance(scale, Tensor | float | int):
        return scale
    if not isinstance(scale, Tensor):
        return torch.full((), scale, dtype=torch.float32, device=a.device)
    return scale.float() if scale.dtype in (torch.bfloat16, torch.float16, torch.float64) else scale


def as_packed(packed: Any, nibble: str = "low", a: Any = None) -> str | None:
    """Return `packed` as operators take it; the order of halves matters if only b has them."""
    if isinstance(packed, tuple | list):
        packed = ",".join("-" if name is None else str(name) for name in packed)
    if nibble != "low":
        if nibble != "high":
            raise ArgumentError(f"nibble is {nibble!r}; expected 'low' or 'high'")
        if isinstance(packed, str) and ("-" in packed or a.dtype in checks.FLOATS):
            raise ArgumentError(
                "nibble is 'high' and one operand is packed; expected 'low', which "
                "rtkernels.ops.quant.pack.swap_nibbles makes"
            )
    return packed


OP = Op(
    "scaled_mm", public=("scaled_mm",), kernels=PRODUCTS.kernels, torch_ops=(FORWARD, IN_PLACE, QUANTIZED),
    uses=("quantize_fp8", "decode_linear"),
)  # fmt: skip
