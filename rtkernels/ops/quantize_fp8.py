"""fp8 codes and scales of a tensor, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rtkernels import interop
from rtkernels._layout import metadata
from rtkernels._registry import Op, TorchOp
from rtkernels.errors import ArgumentError
from rtkernels.ops._fp8_plans import (
    DEQUANTIZE_PLANS,
    GROUP,
    KERNELS,
    QUANTIZE_PLANS,
    STATIC_PLANS,
    check_dequantize,
    check_options,
    check_quantize,
    check_static_scale,
    empty_scale,
    q_shape,
    scale_shape,
)
from rtkernels.testing.rows import Row

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_NAN_CODE = 0x7F


# ---- launchers ------------------------------------------------------------------------------------------------------


def _launch_quantize(x: Tensor, granularity: str, dtype: torch.dtype, pow2_scale: bool, scale_layout: str):
    address = x.data_ptr()
    key = (x.dtype, x.shape, x.stride(), x.get_device())
    plan = QUANTIZE_PLANS[key, granularity, dtype, pow2_scale, scale_layout, address & 15]
    if plan is None:
        return _launch_quantize(x.contiguous(), granularity, dtype, pow2_scale, scale_layout)
    return plan.run(x, address)


def _launch_static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    address = x.data_ptr()
    plan = STATIC_PLANS[metadata(x), metadata(scale), dtype, address & 15]
    if plan is None:
        return _launch_static(x.contiguous(), scale, dtype)
    launch, args = plan
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    if launch is not None:
        launch(address, scale.data_ptr(), 0, q.data_ptr(), *args)
    return q


def _launch_dequantize(
    q: Tensor, scale: Tensor, granularity: str, code_dtype: torch.dtype, dtype: torch.dtype, scale_layout: str
) -> Tensor:
    address = q.data_ptr()
    plan = DEQUANTIZE_PLANS[metadata(q), metadata(scale), granularity, code_dtype, dtype, scale_layout, address & 15]
    if plan is None:
        return _launch_dequantize(q.contiguous(), scale, granularity, code_dtype, dtype, scale_layout)
    launch, args, shape = plan
    y = torch.empty(shape, dtype=dtype, device=q.device)
    if launch is not None:
        scale = scale.contiguous()
        launch(address, scale.data_ptr(), y.data_ptr(), *args)
    return y


# ---- the same in plain torch, bit for bit ---------------------------------------------------------------------------


def _codes(v: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes of ``v * inverse``: nearest even, saturating, NaN without sign (a plain cast has neither)."""
    scaled = v * inverse
    codes = scaled.clamp(-_LARGEST[dtype], _LARGEST[dtype]).to(dtype).view(torch.uint8)
    return codes.masked_fill(scaled.isnan(), _NAN_CODE).view(dtype)


def _scale_of(amax: Tensor, dtype: torch.dtype, pow2: bool) -> Tensor:
    scale = (amax / _LARGEST[dtype]).clamp(min=1e-30)
    if pow2:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    return scale


def _blocked(v: Tensor, down: int, across: int) -> Tensor:
    """Return a matrix padded with zeros as ``[row blocks, down, column blocks, across]``."""
    rows, cols = v.shape
    padded = F.pad(v, (0, -cols % across, 0, -rows % down))
    return padded.view(padded.shape[0] // down, down, padded.shape[1] // across, across)


def _spread(scale: Tensor, down: int, across: int, shape: torch.Size) -> Tensor:
    """Return the scale of every element of a matrix of `shape` from those of its blocks."""
    spread = scale.repeat_interleave(down, 0).repeat_interleave(across, 1)
    return spread[: shape[0], : shape[1]]


def _block_of(granularity: str, rows: int, cols: int) -> tuple[int, int]:
    """Return the rows and columns that share a scale; the matrix is the transposed one for "group_t"."""
    return {
        "tensor": (rows, cols),
        "row": (1, cols),
        "group": (1, GROUP),
        "group_t": (1, GROUP),
        "block": (GROUP, GROUP),
    }[granularity]


def _transposed_scale(granularity: str, layout: str) -> bool:
    return granularity == "group_t" or layout == "column"


def _reference_quantize(x: Tensor, granularity: str, dtype: torch.dtype, pow2_scale: bool, scale_layout: str):
    check_quantize(metadata(x), granularity, dtype, scale_layout)
    shapes = q_shape(x.shape, granularity), scale_shape(x.shape, granularity, scale_layout)
    if x.numel() == 0:
        q = torch.empty(shapes[0], dtype=dtype, device=x.device)
        return q, torch.full(shapes[1], empty_scale(pow2_scale), dtype=torch.float32, device=x.device)
    v = x.float().reshape(-1, x.shape[-1])
    if granularity == "group_t":
        v = v.t()
    block = _block_of(granularity, *v.shape)
    finite = torch.where(v.isfinite(), v.abs(), 0.0)
    scale = _scale_of(_blocked(finite, *block).amax((1, 3)), dtype, pow2_scale)
    q = _codes(v, _spread(1.0 / scale, *block, v.shape), dtype)
    if _transposed_scale(granularity, scale_layout):
        scale = scale.t()
    return q.reshape(shapes[0]).contiguous(), scale.reshape(shapes[1]).contiguous()


def _reference_static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    check_quantize(metadata(x), "tensor", dtype, "row")
    check_static_scale(metadata(scale), x.get_device())
    return _codes(x.float(), 1.0 / scale.reshape(()), dtype).contiguous()


def _reference_dequantize(
    q: Tensor, scale: Tensor, granularity: str, code_dtype: torch.dtype, dtype: torch.dtype, scale_layout: str
) -> Tensor:
    check_dequantize(metadata(q), metadata(scale), granularity, code_dtype, dtype, scale_layout)
    shape = q.shape[::-1] if granularity == "group_t" else q.shape
    if q.numel() == 0:
        return torch.empty(shape, dtype=dtype, device=q.device)
    v = q.view(code_dtype).float().reshape(-1, q.shape[-1])
    down, across = _block_of(granularity, *v.shape)
    blocks = -(-v.shape[0] // down), -(-v.shape[1] // across)
    if _transposed_scale(granularity, scale_layout):
        scale = scale.t()
    y = (v * _spread(scale.reshape(blocks), down, across, v.shape)).to(dtype)
    return (y.t() if granularity == "group_t" else y.reshape(shape)).contiguous()


def _fake_quantize(x, granularity, dtype, pow2_scale, scale_layout):
    check_options(granularity, scale_layout)
    q = x.new_empty(q_shape(x.shape, granularity), dtype=dtype)
    return q, x.new_empty(scale_shape(x.shape, granularity, scale_layout), dtype=torch.float32)


def _fake_static(x, scale, dtype):
    return x.new_empty(x.shape, dtype=dtype)


def _fake_dequantize(q, scale, granularity, code_dtype, dtype, scale_layout):
    check_options(granularity, scale_layout)
    return q.new_empty(q.shape[::-1] if granularity == "group_t" else q.shape, dtype=dtype)


QUANTIZE = TorchOp(
    "quantize_fp8(Tensor x, str granularity, ScalarType dtype, bool pow2_scale, str scale_layout) -> (Tensor, Tensor)",
    launch=_launch_quantize,
    reference=_reference_quantize,
    fake=_fake_quantize,
)
STATIC = TorchOp(
    "quantize_fp8_static(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
    launch=_launch_static,
    reference=_reference_static,
    fake=_fake_static,
)
DEQUANTIZE = TorchOp(
    "dequantize_fp8(Tensor q, Tensor scale, str granularity, ScalarType code_dtype, ScalarType dtype, str scale_layout)"
    " -> Tensor",
    launch=_launch_dequantize,
    reference=_reference_dequantize,
    fake=_fake_dequantize,
)


# ---- public ---------------------------------------------------------------------------------------------------------


def quantize_fp8(
    x: Tensor,
    scale: Tensor | None = None,
    *,
    granularity: str = "tensor",
    dtype: torch.dtype = torch.float8_e4m3fn,
    pow2_scale: bool = False,
    scale_layout: str = "row",
) -> tuple[Tensor, Tensor]:
    """Quantise a tensor to fp8 codes and the factors that give the values back.

    For each set of values that share a scale: ``scale = max(amax / fp8_max, 1e-30)`` with ``fp8_max`` 448 (e4m3) or
    57344 (e5m2), and ``q = fp8(x * (1 / scale))``; ``x ≈ q * scale``. Computed in fp32, rounded to nearest even, never
    beyond ±fp8_max. ``amax`` is the largest *finite* magnitude: NaN becomes the code 0x7f and ±infinity ±fp8_max, and
    neither changes the scale of its neighbours. All-zero sets have scale 1e-30 and codes 0.

    With ``[m, n]`` for x whose leading dimensions are flattened:

    ============  ======================  ==========================  =========================================
    granularity   values per scale        shape of q                  shape of the scale (float32)
    ============  ======================  ==========================  =========================================
    ``tensor``    all                     x's                         ``[]``
    ``row``       one row                 x's                         x's without the last dimension
    ``group``     128 of a row            x's                         x's with ``ceil(n/128)`` as last dimension;
                                                                      ``[ceil(n/128), m]`` for layout "column"
    ``group_t``   128 of a column         ``[n, m]``, transposed      ``[ceil(m/128), n]``
    ``block``     128 x 128               x's                         ``[ceil(m/128), ceil(n/128)]``
    ============  ======================  ==========================  =========================================

    Not differentiable: the results never require grad.

    Args:
        x: At least one dimension, bfloat16, float16 or float32; any strides (a copy is made unless rows are
            unit-stride and evenly spaced). May be any object with ``__dlpack__``; the results are then of its kind.
        scale: For granularity "tensor": the scale to use, one float32 on x's device (it is never read by the host).
            Used as it is; 0 and non-finite values give what ``x * (1 / scale)`` gives. None computes it.
        granularity: Which values share a scale, see above. The last group of a row or column may be shorter.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2_scale: Round computed scales up to a power of two.
        scale_layout: "row" or "column", for granularity "group".

    Returns:
        ``(q, scale)``, both dense.
    """
    if not isinstance(x, Tensor):
        options = {"granularity": granularity, "dtype": dtype, "pow2_scale": pow2_scale, "scale_layout": scale_layout}
        return interop.call(quantize_fp8, x, scale, **options)
    if x.requires_grad:
        x = x.detach()
    if scale is None:
        return QUANTIZE(x, granularity, dtype, pow2_scale, scale_layout)
    if granularity != "tensor":
        raise ArgumentError(f"scale can be given for granularity 'tensor' only, not for {granularity!r}")
    if pow2_scale:
        raise ArgumentError("pow2_scale rounds computed scales; a given scale is used as it is")
    scale = scale.detach()
    return STATIC(x, scale, dtype), scale


def dequantize_fp8(
    q: Tensor,
    scale: Tensor,
    *,
    granularity: str = "tensor",
    dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "row",
    code_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``q * scale``: the values that :func:`quantize_fp8` stored.

    One fp32 product per element, rounded once. Not differentiable.

    Args:
        q: Codes, float8_e4m3fn or float8_e5m2; any strides. ``[n, m]`` for granularity "group_t". May be any object
            with ``__dlpack__``; the result is then of its kind.
        scale: float32, of the shape that quantize_fp8 returns for `granularity` and `scale_layout`.
        granularity: As given to quantize_fp8.
        dtype: bfloat16, float16 or float32.
        scale_layout: As given to quantize_fp8.
        code_dtype: The fp8 type of codes that come as uint8 (NumPy has no other way without ml_dtypes).

    Returns:
        Dense, of q's shape; ``[m, n]`` for granularity "group_t".
    """
    if not isinstance(q, Tensor):
        options = {"granularity": granularity, "dtype": dtype, "scale_layout": scale_layout, "code_dtype": code_dtype}
        return interop.call(dequantize_fp8, q, scale, **options)
    if scale.requires_grad:
        scale = scale.detach()
    if q.requires_grad:
        q = q.detach()
    return DEQUANTIZE(q, scale, granularity, code_dtype or q.dtype, dtype, scale_layout)


# ---- registry -------------------------------------------------------------------------------------------------------


def _samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 136, generator=g, device=device)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    layouts = {"tensor": "row", "row": "row", "group": "column", "group_t": "row", "block": "row"}
    for granularity, layout in layouts.items():
        yield QUANTIZE, (x, granularity, e4m3, True, layout)
        q, scale = QUANTIZE(x, granularity, e4m3, True, layout)
        # torch's checks compare inputs before and after the call, which it cannot do for fp8.
        yield DEQUANTIZE, (q.view(torch.uint8), scale, granularity, e4m3, torch.bfloat16, layout)
    yield QUANTIZE, (x.bfloat16(), "group", e5m2, False, "row")
    yield STATIC, (x, torch.tensor(0.02, device=device), e5m2)


def _rows() -> Iterator[Row]:
    e4m3, rows = torch.float8_e4m3fn, 8192
    for cols in (2048, 4096, 8192):
        n, groups, shape = rows * cols, cols // GROUP, f"{rows}x{cols}"

        def make(device: str, generator: torch.Generator, cols: int = cols) -> dict[str, Any]:
            return {"x": torch.randn(8192, cols, dtype=torch.bfloat16, device=device, generator=generator)}

        def make_scaled(device: str, generator: torch.Generator, make: Callable = make) -> dict[str, Any]:
            return {**make(device, generator), "scale": torch.tensor(0.01, device=device)}

        def make_codes(device: str, generator: torch.Generator, make: Callable = make) -> dict[str, Any]:
            q, scale = QUANTIZE(make(device, generator)["x"], "group", e4m3, False, "row")
            return {"q": q, "scale": scale}

        scales = {"tensor": 1, "row": rows, "group": rows * groups, "group_t": rows // GROUP * cols}
        scales["block"] = rows // GROUP * groups
        for granularity, count in scales.items():
            yield Row(
                name=f"quantize_fp8_{granularity}",
                shape=shape,
                make=make,
                ours=lambda x, g=granularity: QUANTIZE(x, g, e4m3, False, "row"),
                torch=_torch_quantize(granularity),
                # The scale of a whole tensor is known only after reading it: two reads and a write.
                bytes=(5 if granularity == "tensor" else 3) * n + 4 * count,
            )
        yield Row(
            name="quantize_fp8_static",
            shape=shape,
            make=make_scaled,
            ours=lambda x, scale: STATIC(x, scale, e4m3),
            torch=lambda x, scale: (_wide(x) * (1 / scale)).clamp(-448, 448).to(e4m3),
            bytes=3 * n + 4,
        )
        yield Row(
            name="dequantize_fp8_group",
            shape=shape,
            make=make_codes,
            ours=lambda q, scale: DEQUANTIZE(q, scale, "group", e4m3, torch.bfloat16, "row"),
            torch=_torch_dequantize,
            bytes=3 * n + 4 * rows * groups,
        )


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _torch_quantize(granularity: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return the plain torch of a recipe for a matrix whose sides are multiples of 128."""

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        v = _wide(x).t() if granularity == "group_t" else _wide(x)
        down, across = _block_of(granularity, *v.shape)
        blocks = v.reshape(v.shape[0] // down, down, v.shape[1] // across, across)
        factor = (blocks.abs().amax((1, 3), keepdim=True) / 448).clamp(min=1e-30)
        q = (blocks * (1 / factor)).clamp(-448, 448).to(torch.float8_e4m3fn).reshape(v.shape)
        scale = factor.reshape(factor.shape[0], factor.shape[2])
        if granularity == "group_t":
            scale = scale.t()
        return q, scale.reshape(scale_shape(x.shape, granularity, "row"))

    return quantize


def _torch_dequantize(q: Tensor, scale: Tensor) -> Tensor:
    groups = _wide(q).unflatten(-1, (-1, GROUP)) * scale[..., None]
    return groups.flatten(-2).to(scale.dtype if scale.dtype == torch.float64 else torch.bfloat16)


OP = Op(
    "quantize_fp8",
    public=("quantize_fp8", "dequantize_fp8"),
    kernels=KERNELS,
    torch_ops=(QUANTIZE, STATIC, DEQUANTIZE),
    samples=_samples,
    rows=_rows,
)
