"""Benchmark rows of ``scaled_mm``: squares, layers of large models, decoding; torch's own products for comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.gemm.scaled_mm import scaled_mm
from rtkernels.ops.quant import pack
from rtkernels.ops.quant.nvfp4 import quantize_mxfp4, quantize_mxfp8

F8 = torch.float8_e4m3fn
SQUARES = ((1024,) * 3, (2048,) * 3, (4096,) * 3, (8192,) * 3)
# Of DeepSeek-V3, as DeepGEMM measures them: m, n, k.
LAYERS = tuple(
    (4096, n, k)
    for n, k in ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
)
SPEED_OF_LIGHT = ((12288,) * 3, (16384,) * 3)  # with the larger squares: the sweep of gn_kernels, best of all sizes
DECODING = ((1, 4096, 4096), (16, 4096, 14336), (64, 28672, 4096), (128, 7168, 2048))


def _random(device: str, g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, generator=g)


def _floats(device: str, generator: torch.Generator, sizes: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    m, n, k = sizes
    return {"a": _random(device, generator, m, k).to(dtype), "b": _random(device, generator, n, k).to(dtype)}


def _fp8(device: str, generator: torch.Generator, sizes: tuple[int, int, int], recipe: str) -> dict[str, Any]:
    m, n, k = sizes
    given = _floats(device, generator, sizes, F8)
    if recipe == "tensor":
        scales = torch.rand((), device=device), torch.rand((), device=device)
    elif recipe == "row":
        scales = torch.rand(m, 1, device=device), torch.rand(1, n, device=device)
    else:
        pitch = -(-m // 4) * 4
        scales = (
            torch.rand(-(-k // 128), pitch, device=device)[:, :m].t(),
            torch.rand(-(-n // 128), -(-k // 128), device=device),
        )
    return {**given, "scale_a": scales[0], "scale_b": scales[1]}


def _int8(device: str, generator: torch.Generator, sizes: tuple[int, int, int]) -> dict[str, Any]:
    m, n, k = sizes
    a, b = (torch.randint(-128, 128, (rows, k), device=device, generator=generator).to(torch.int8) for rows in (m, n))
    return {"a": a, "b": b, "scale_a": torch.rand(m, 1, device=device), "scale_b": torch.rand(1, n, device=device)}


def _int4(device: str, generator: torch.Generator, sizes: tuple[int, int, int]) -> dict[str, Any]:
    return _int8(device, generator, (sizes[0], sizes[1], sizes[2] // 2))


def _weights(device: str, generator: torch.Generator, sizes: tuple[int, int, int], kind: str) -> dict[str, Any]:
    """Weights of few bits: a is bf16."""
    m, n, k = sizes
    a, w = _random(device, generator, m, k).bfloat16(), _random(device, generator, n, k)
    if kind == "int4":
        codes, scale = pack.quantize_int4(w, 128)
        return {"a": a, "b": codes, "scale_b": scale}
    codes, scale, _ = pack.quantize_nvfp4(w)
    return {"a": a, "b": codes, "scale_b": scale}


def _nvfp4(device: str, generator: torch.Generator, sizes: tuple[int, int, int]) -> dict[str, Any]:
    m, n, k = sizes
    (a, sa, _), (b, sb, _) = (pack.quantize_nvfp4(_random(device, generator, rows, k)) for rows in (m, n))
    return {"a": a, "b": b, "scale_a": sa, "scale_b": sb}


def _tiles(device: str, generator: torch.Generator, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """fp8 with a scale for 128 x 128 elements of either operand."""
    m, n, k = sizes
    given = _floats(device, generator, sizes, F8)
    scales = (torch.rand(rows // 128, k // 128, device=device, generator=generator) for rows in (m, n))
    return {**given, **dict(zip(("scale_a", "scale_b"), scales, strict=True))}


def _mx(device: str, generator: torch.Generator, sizes: tuple[int, int, int], quantize: Any) -> dict[str, Any]:
    m, n, k = sizes
    (a, sa), (b, sb) = (quantize(_random(device, generator, rows, k).bfloat16()) for rows in (m, n))
    return {"a": a, "b": b, "scale_a": sa, "scale_b": sb}


# ---- the same in torch ----------------------------------------------------------------------------------------------


def _block(size: int, scales: int) -> int:
    """Return how many elements share a scale; the last of the scales of blocks of 128 may have fewer."""
    return 128 if 128 * (scales - 1) < size <= 128 * scales else -(-size // scales)


def _torch(a: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None, *, out=None, **options):
    """Operands times scales in bf16 (in fp64 for the exact result), one product."""
    dtype = options.pop("dtype", torch.bfloat16)
    packed = options.get("packed") or (None, None)
    values = []
    for t, scale, kind in ((a, scale_a, packed[0]), (b, scale_b, packed[1])):
        t = t.to(dtype) if kind is None else pack.nibble_values(t, kind, dtype)
        if scale is not None and scale.dim() == 0:
            t = t * scale.to(dtype)
        elif scale is not None:
            scale = scale.to(dtype) if scale.dtype != torch.uint8 else scale
            if scale.shape[0] == 1 and t.shape[0] != 1 and scale.shape[1] == t.shape[0]:
                scale = scale.t()
            blocks = scale.repeat_interleave(_block(t.shape[0], scale.shape[0]), 0)[: t.shape[0]]
            t = t * blocks.repeat_interleave(_block(t.shape[1], blocks.shape[1]), 1)[:, : t.shape[1]]
        values.append(t)
    return values[0] @ values[1].t()


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b.t())


def _scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)


def _blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return scaled_mm(a, b.t(), scale_a, recipes[0], scale_b.t(), recipes[1], output_dtype=torch.bfloat16)


def _int(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return (torch._int_mm(a, b.t()).float() * scale_a * scale_b).bfloat16()


def _grown(t: Tensor, rows: int, cols: int) -> Tensor:
    """Return a copy with zeros up to a size."""
    result = torch.zeros(rows, cols, dtype=t.dtype, device=t.device)
    result[: t.shape[0], : t.shape[1]].copy_(t)
    return result


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _padded(kind: str, fast: bool) -> Callable[..., Callable[[], Tensor]]:
    """Return an adapter of torch's product whose operands are padded beforehand to sizes that it takes."""

    def prepare(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **_: Any) -> Callable[[], Tensor]:
        (m, k), n = a.shape, b.shape[0]
        rows, columns, depth = max(m, 17) if kind == "int8" else m, _up(n, 16), _up(k, 16)
        if kind == "fp8_block":
            rows = _up(m, 4)  # columns of scales begin at multiples of 16 bytes
        a, b = _grown(a, rows, depth), _grown(b, columns, depth)
        if kind == "fp8_tensor":
            return lambda: torch._scaled_mm(
                a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
            )[:, :n]  # fmt: skip
        if kind == "fp8_block":
            return _strided_blocks(a, b, _grown(scale_a, rows, scale_a.shape[1]), scale_b, m, n)
        scale_a, scale_b = _grown(scale_a.view(-1, 1), rows, 1), _grown(scale_b.view(1, -1), 1, columns)
        if kind == "fp8_row":
            return lambda: torch._scaled_mm(
                a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
            )[:, :n]  # fmt: skip
        return lambda: _int(a, b, scale_a, scale_b)[:m, :n]

    return prepare


def _strided_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, m: int, n: int) -> Callable[[], Tensor]:
    """Return the call with the first layout of scales that torch accepts: they differ between its versions.

    Scales of a are columns; those of b have rows of a multiple of 4, of which some versions want to see all.
    """
    (rows, k_blocks), n_blocks = scale_a.shape, scale_b.shape[0]
    left = scale_a.new_zeros(k_blocks, rows).copy_(scale_a.t()).t()
    whole = _grown(scale_b, n_blocks, _up(k_blocks, 4))
    errors = []
    for right in (whole, whole[:, :k_blocks], scale_b):
        try:
            _blocks(a, b, left, right)
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
            continue
        return lambda right=right: _blocks(a, b, left, right)[:m, :n]
    raise RuntimeError("; ".join(errors))


def _row(
    kind: str, sizes: tuple[int, int, int], make: Callable[..., Any], fused: Callable[..., Any] | None, nbytes: float,
    **options: Any,
) -> Row:  # fmt: skip
    m, n, k = sizes
    packed = {"packed": options["packed"]} if "packed" in options else {}
    return Row(
        name="scaled_mm",
        shape=f"{m}x{n}x{k}_{kind}",
        make=make,
        ours=partial(scaled_mm, **options),
        torch=partial(_torch, **packed),
        exact=partial(_torch, dtype=torch.float64, **packed),
        fused=fused,
        bytes=int((m * k) * nbytes + n * k * nbytes) + 2 * m * n,
        flops=2 * m * n * k,
    )


def product(kind: str, m: int, n: int, k: int, acc: str = "auto") -> Row:
    """Return the row of a product of any size: bf16, fp8_tensor, fp8_row, fp8_block or int8.

    torch's product of 8-bit operands accumulates as ours, and its operands are padded beforehand.
    """
    sizes = (m, n, k)
    if kind == "bf16":
        return _row(kind, sizes, partial(_floats, sizes=sizes, dtype=torch.bfloat16), _mm, 2)
    backends = {"padded": _padded(kind, acc == "fast")}
    if kind == "int8":
        row = _row(kind, sizes, partial(_int8, sizes=sizes), None, 1, recipe="row")
        return dataclasses.replace(row, backends=backends)
    recipe = {"fp8_block": "block_1x128_128x128"}.get(kind, kind.removeprefix("fp8_"))
    options = {} if acc == "auto" else {"acc": acc}
    make = partial(_fp8, sizes=sizes, recipe=recipe)
    row = _row(kind if acc == "auto" else f"{kind}_{acc}", sizes, make, None, 1, recipe=recipe, **options)
    return dataclasses.replace(row, backends=backends)


def rows() -> Iterator[Row]:
    """bf16, fp8 with scales of rows and of blocks, int8, int4, fp4; weights of few bits for decoding."""
    for sizes in (*SQUARES, (4096, 7168, 2048), (4096, 7168, 16384), *DECODING):
        yield _row("bf16", sizes, partial(_floats, sizes=sizes, dtype=torch.bfloat16), _mm, 2)
    for sizes in (*SQUARES, *DECODING[1:]):
        make = partial(_fp8, sizes=sizes, recipe="row")
        yield _row("fp8_row", sizes, make, _scaled, 1, recipe="row", acc="fast")
    for sizes in (*SQUARES[2:], *LAYERS):
        recipe = "block_1x128_128x128"
        yield _row("fp8_block", sizes, partial(_fp8, sizes=sizes, recipe=recipe), _blocks, 1, recipe=recipe)
    for sizes in SQUARES:
        yield _row("int8_row", sizes, partial(_int8, sizes=sizes), _int, 1, recipe="row")
    for sizes in SQUARES[2:]:
        yield _row("int4_row", sizes, partial(_int4, sizes=sizes), None, 0.5, recipe="row", packed=("int4", "int4"))
        make = partial(_nvfp4, sizes=sizes)
        yield _row("nvfp4", sizes, make, None, 0.5625, recipe="nvfp4", packed=("e2m1", "e2m1"))
    yield from _of_gn_kernels()
    for sizes in (*DECODING, SQUARES[2]):
        for kind, packed in (("int4", "int4"), ("nvfp4", "e2m1")):
            m, n, k = sizes
            row = _row(f"bf16_{kind}", sizes, partial(_weights, sizes=sizes, kind=kind), None, 0, packed=(None, packed))
            yield Row(**{**row.__dict__, "bytes": 2 * m * k + int(n * k * 0.5625) + 2 * m * n})


def _of_gn_kernels() -> Iterator[Row]:
    """What the benchmark of gn_kernels has besides: fp16 sums, scales of tiles, MX formats, and the largest squares."""
    for sizes in SQUARES[2:]:
        make = partial(_floats, sizes=sizes, dtype=torch.float16)
        yield _row("fp16_sums", sizes, make, _mm, 2, acc="fp16")
        yield _row("fp8_tile", sizes, partial(_tiles, sizes=sizes), None, 1, recipe="tile")
        make = partial(_mx, sizes=sizes, quantize=quantize_mxfp8)
        yield _row("mxfp8", sizes, make, None, 1.03125, recipe="mx32")
        make = partial(_mx, sizes=sizes, quantize=quantize_mxfp4)
        yield _row("mxfp4", sizes, make, None, 0.53125, recipe="mx32", packed=("e2m1", "e2m1"))
    for sizes in SPEED_OF_LIGHT:
        yield _row("bf16", sizes, partial(_floats, sizes=sizes, dtype=torch.bfloat16), _mm, 2)
        make = partial(_fp8, sizes=sizes, recipe="row")
        yield _row("fp8_row", sizes, make, _scaled, 1, recipe="row", acc="fast")
        yield _row("int8_row", sizes, partial(_int8, sizes=sizes), _int, 1, recipe="row")
