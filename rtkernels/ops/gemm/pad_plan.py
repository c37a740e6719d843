"""Products of operands whose rows are not multiples of 16 bytes: one kernel copies them to rows that are.

A backend as ``product`` describes it (device code: ``cuda_src/gemm/pad_rows.cu``, then that of the backend which is
first in order for the copies). The copies are scratch. Their rows end with zeros, so that k may be rounded up where
both operands are copied.
"""

from __future__ import annotations

from typing import Any

import torch

from rtkernels.ops.gemm.product import BYTES, Matrix, Product
from rtkernels.ops.shared.backend import Backend, Backends, Choice, in_words
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Boxes, Memory, Offset, Step, Steps

# Bytes of operands from which a copy takes less time than what it saves. A kernel that reads single elements loses more
# than the launch of the copy costs as soon as operands fill a few tiles.
_MIN_BYTES = 64 << 10
_THREADS = 256
_VECTOR = 16

PAD = Kernel(
    "gemm/pad_rows.cu", "pad_rows", template="THREADS",
    args="a:ptr a_to:ptr b:ptr b_to:ptr "
    + " ".join(
        f"{x}_rows:i64 {x}_row_bytes:i64 {x}_pitch:i64 {x}_group_pitch:i64 {x}_vectors:i64 {x}_all_rows:i64"
        for x in "ab"
    )
    + " first_blocks:i64",
    variants=[(_THREADS,)], max_registers=40,
)  # fmt: skip
KERNELS = (PAD,)


def _size(p: Product, name: str) -> tuple[int, int, int]:
    """Return how many matrices an operand consists of, the rows of one in memory, and elements of such a row."""
    matrix: Matrix = getattr(p, name)
    rows = p.m if name == "a" else 2 * p.n if p.gate is not None else p.n
    g = p.groups
    stacked = g is not None and (g.kind == "masked" if name == "a" else g.kind != "depth")
    return (g.count if stacked else 1, *((p.k, rows) if matrix.across else (rows, p.k)))


def _names(p: Product) -> list[str]:
    """Return the operands that are copied."""
    return [name for name in ("a", "b") if not getattr(p, name).aligned]


def is_worthwhile(product: Product) -> bool:
    """Return True if operands are not aligned, and large enough for a copy."""
    p = product
    sizes = {name: _size(p, name) for name in _names(p)}
    return sum(count * rows * cols * BYTES[getattr(p, name).token] for name, (count, rows, cols) in sizes.items()) >= (
        _MIN_BYTES
    )


def _padded(p: Product) -> Product:
    """Return the product of the copies."""
    names, changed = _names(p), {}
    for name in names:
        matrix: Matrix = getattr(p, name)
        count, rows, cols = _size(p, name)
        each = int(_VECTOR / BYTES[matrix.token])
        pitch = -(-cols // each) * each
        changed[name] = matrix._replace(pitch=pitch, aligned=True, group_pitch=rows * pitch if count > 1 else 0)
    padded = p._replace(**changed)
    depths = [scales.depth for scales in (p.scale_a, p.scale_b) if scales is not None]
    # Zeros of both operands add nothing, and no scale covers a part of a vector.
    if len(names) == 2 and padded.a.pitch == padded.b.pitch and not (p.a.across or p.b.across or p.groups):
        if BYTES[p.a.token] >= 1 and BYTES[p.b.token] >= 1 and not any(depth % _VECTOR for depth in depths):
            padded = padded._replace(k=padded.a.pitch)
    return padded


def _inner(p: Product, info: DeviceInfo, products: Backends[Product]) -> Choice[Product]:
    return products.choose(_padded(p), info)


def unsupported(product: Product, info: DeviceInfo, products: Backends[Product]) -> str | None:
    """Return why this backend cannot compute a product, or None."""
    p, names = product, _names(product)
    if not names:
        return "rows of both operands are multiples of 16 bytes"
    if p.k == 0:
        return "there is nothing to add up"
    for name in names:
        count, rows, cols = _size(p, name)
        matrix: Matrix = getattr(p, name)
        if BYTES[matrix.token] < 1 and (matrix.pitch % 2 or matrix.group_pitch % 2 or cols % 2):
            return f"rows of {name} begin inside of a byte"
        if count * rows >= 1 << 31:
            return f"{name} has {count * rows} rows; expected less than 2^31"
    choice = _inner(p, info, products)
    return in_words(choice.refused) if choice.backend is None else None


def steps(product: Product, device: int, products: Backends[Product]) -> Steps:
    """Return the launches of a product that ``unsupported`` does not refuse."""
    p, info = product, device_info(device)
    backend: Backend[Product] | None = _inner(p, info, products).backend
    if backend is None:
        raise ValueError(f"no backend for the product of padded operands: {p.title}")
    return _after_copies(p, device, backend.steps(_padded(p), device))


def _after_copies(p: Product, device: int, inner: Steps) -> Steps:
    """Return the copies, then the launches of a product, which read them."""
    if not inner.steps:
        return inner
    names, numbers, blocks, scratch = _names(p), [], {"a": 0, "b": 0}, {}
    for name in ("a", "b"):
        if name not in names:
            numbers += [0, 0, 0, 0, 0, 0]
            continue
        matrix: Matrix = getattr(p, name)
        count, rows, cols = _size(p, name)
        size = BYTES[matrix.token]
        row_bytes, pitch, group_pitch = (int(n * size) for n in (cols, matrix.pitch, matrix.group_pitch))
        vectors = -(-row_bytes // _VECTOR)
        numbers += [rows, row_bytes, pitch, group_pitch if count > 1 else 0, vectors, count * rows]
        blocks[name] = -(-count * rows * vectors // _THREADS)
        scratch[f"padded_{name}"] = Memory((count * rows, vectors * _VECTOR), torch.uint8)
    launch = PAD.bind((_THREADS,), device, blocks["a"] + blocks["b"], _THREADS, overlap=True)
    tensors = [x for name in ("a", "b") for x in ((name, f"padded_{name}") if name in names else (0, 0))]
    renamed = [Step(step.launch, *(_renamed(argument, names) for argument in step.arguments)) for step in inner.steps]
    others = inner.if_not_resident
    return Steps(
        Step(launch, *tensors, *numbers, blocks["a"]), *renamed, scratch={**scratch, **inner.scratch},
        zeros=inner.zeros, kept_zeros=inner.kept_zeros,
        if_not_resident=None if others is None else lambda: _after_copies(p, device, others()),
    )  # fmt: skip


def _renamed(argument: Any, names: list[str]) -> Any:
    """Return the argument of a launch, with the copy of an operand in its place."""
    if isinstance(argument, Boxes | Offset):
        return argument._replace(name=f"padded_{argument.name}") if argument.name in names else argument
    return f"padded_{argument}" if isinstance(argument, str) and argument in names else argument


def summary(product: Product, info: DeviceInfo, products: Backends[Product]) -> str:
    """Return what is copied, and which backend multiplies the copies, for ``explain``."""
    backend = _inner(product, info, products).backend
    more = "" if backend is None or backend.summary is None else backend.summary(_padded(product), info)
    name = "" if backend is None else backend.name
    return f"rows of {' and '.join(_names(product))} to multiples of 16 bytes first, then {name}" + (
        f": {more}" if more else ""
    )
