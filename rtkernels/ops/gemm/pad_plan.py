"""Products of operands whose rows lie badly in memory: one kernel copies them to rows that do not.

TMA and vector loads need rows that are multiples of 16 bytes; other loads take more instructions. Rows that are no
multiples of 32 begin inside of a sector of L2, which takes twice as long to load: large products gain more than the
copy costs.

A backend as ``product`` describes it (device code: ``cuda_src/gemm/pad_rows.cu``, then that of the backend which is
first in order for the copies). The copies are scratch. Their rows end with zeros, so that k may be rounded up where
both operands are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rtkernels.ops.gemm import skinny_plan, sm90_plan
from rtkernels.ops.gemm.product import BYTES, Matrix, Product
from rtkernels.ops.shared.backend import Backend, Backends, Choice, in_words
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Boxes, Memory, Offset, Step, Steps

# Bytes of operands from which a copy takes less time than what it saves. A kernel that reads single elements loses more
# than the launch of the copy costs as soon as operands fill a few tiles.
_MIN_BYTES = 64 << 10
_HALVES_ROWS = 16  # of a, up to which vectors are loaded in halves
_THREADS = 256
_VECTOR = 16
_SECTOR = 32
_LINE = 128  # multiples at which rows of copies begin
_COPY_CYCLES = (7360, 2930)  # of a launch, and bytes read or written in a cycle (H200)
_MIN_ROWS = 256  # of a, for copies that are not necessary
_GAIN = 0.96  # part of the time that a product may take with aligned copies, at most

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


def memory_size(p: Product, name: str) -> tuple[int, int, int]:
    """Return how many matrices an operand consists of, the rows of one in memory, and elements of such a row."""
    matrix: Matrix = getattr(p, name)
    rows = p.m if name == "a" else 2 * p.n if p.gate is not None else p.n
    g = p.groups
    stacked = g is not None and (g.kind == "masked" if name == "a" else g.kind != "depth")
    return (g.count if stacked else 1, *((p.k, rows) if matrix.across else (rows, p.k)))


def _bytes(p: Product, name: str) -> int:
    count, rows, cols = memory_size(p, name)
    return int(count * rows * cols * BYTES[getattr(p, name).token])


def _needed(p: Product, info: DeviceInfo) -> list[str]:
    """Return the operands that must be copied; none if `skinny` loads them in halves of vectors."""
    names = [name for name in ("a", "b") if not getattr(p, name).aligned]
    if p.m <= _HALVES_ROWS and all(getattr(p, name).halves for name in names):
        return names if skinny_plan.unsupported(p, info.target) else []
    return names


def _begin_in_sectors(p: Product) -> list[str]:
    """Return the operands that may be copied."""
    matrices = {name: getattr(p, name) for name in ("a", "b")}
    return [name for name, matrix in matrices.items() if int(matrix.pitch * BYTES[matrix.token]) % _SECTOR]


def _faster(p: Product, info: DeviceInfo) -> tuple[str, ...]:
    """Return operands that need not be copied, of which copies save more time than they take."""
    names = _begin_in_sectors(p)
    if not names or p.m < _MIN_ROWS or p.groups is not None or sm90_plan.unsupported(p, info.target) is not None:
        return ()

    best = min(((name,) for name in names), key=lambda copied: _cycles(p, copied, info))  # both at once gained nothing
    return best if _cycles(p, best, info) < _GAIN * _cycles(p, (), info) else ()


def _cycles(p: Product, copied: Sequence[str], info: DeviceInfo) -> float:
    """Return how long copies and the product of them take."""
    copies = _COPY_CYCLES[0] + sum(2 * _bytes(p, name) for name in copied) / _COPY_CYCLES[1] if copied else 0.0
    return copies + sm90_plan.estimate(_padded(p, copied), info.sm_count)


def is_worthwhile(product: Product, info: DeviceInfo) -> bool:
    """Return True if copies of operands save more time than they take."""
    p, needed = product, _needed(product, info)
    if not needed:
        return bool(_faster(p, info))
    if sum(_bytes(p, name) for name in needed) < _MIN_BYTES:
        return False
    if sm90_plan.unsupported(p, info.target) is None:  # it moves rows in shared memory
        return _cycles(p, _copied(p, info), info) < _cycles(p, (), info)
    return True


def _pitch(matrix: Matrix, cols: int) -> int:
    """Return the elements from row to row of a copy; short rows end with a sector."""
    size = BYTES[matrix.token]
    step = int((_LINE if cols * size >= 4 * _LINE else _SECTOR) / size)
    return -(-cols // step) * step


def _padded(p: Product, names: Sequence[str]) -> Product:
    """Return the product of the copies."""
    changed = {}
    for name in names:
        matrix: Matrix = getattr(p, name)
        count, rows, cols = memory_size(p, name)
        pitch = _pitch(matrix, cols)
        group_pitch = rows * pitch if count > 1 else 0
        changed[name] = matrix._replace(pitch=pitch, aligned=True, halves=False, group_pitch=group_pitch)
    padded = p._replace(**changed)
    depths = [scales.depth for scales in (p.scale_a, p.scale_b) if scales is not None]
    # Zeros of both operands add nothing, and no scale covers a part of a vector.
    if len(names) == 2 and p.a.token == p.b.token and not (p.a.across or p.b.across or p.groups):
        if BYTES[p.a.token] >= 1 and not any(depth % _VECTOR for depth in depths):
            each = int(_VECTOR / BYTES[p.a.token])
            padded = padded._replace(k=-(-p.k // each) * each)
    return padded


def _copied(p: Product, info: DeviceInfo) -> list[str]:
    """Return the operands that are copied: those that must be, else those that gain by it, else all that may.

    One is enough if `sm90` moves the rows of the other one, and that takes less time.
    """
    needed = _needed(p, info)
    if len(needed) == 2 and sm90_plan.unsupported(p, info.target) is None:
        return min((needed, needed[:1], needed[1:]), key=lambda names: _cycles(p, names, info))
    return needed or list(_faster(p, info)) or _begin_in_sectors(p)


def _inner(p: Product, info: DeviceInfo, products: Backends[Product]) -> Choice[Product]:
    return products.choose(_padded(p, _copied(p, info)), info)


def unsupported(product: Product, info: DeviceInfo, products: Backends[Product]) -> str | None:
    """Return why this backend cannot compute a product, or None."""
    p, names = product, _copied(product, info)
    if not names:
        return "rows of both operands are multiples of 32 bytes"
    if p.k == 0:
        return "there is nothing to add up"
    for name in names:
        count, rows, cols = memory_size(p, name)
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
    names = _copied(p, info)
    padded = _padded(p, names)
    inner = sm90_plan.steps(padded, device, overlap=True) if backend.name == "sm90" else backend.steps(padded, device)
    return _after_copies(p, device, names, inner)


def _after_copies(p: Product, device: int, names: list[str], inner: Steps) -> Steps:
    """Return the copies, then the launches of a product, which read them."""
    if not inner.steps:
        return inner
    numbers, blocks, scratch = [], {"a": 0, "b": 0}, {}
    for name in ("a", "b"):
        if name not in names:
            numbers += [0, 0, 0, 0, 0, 0]
            continue
        matrix: Matrix = getattr(p, name)
        count, rows, cols = memory_size(p, name)
        size = BYTES[matrix.token]
        row_bytes, pitch, group_pitch = (int(n * size) for n in (cols, matrix.pitch, matrix.group_pitch))
        vectors = int(_pitch(matrix, cols) * size) // _VECTOR
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
        if_not_resident=None if others is None else lambda: _after_copies(p, device, names, others()),
    )  # fmt: skip


def _renamed(argument: Any, names: list[str]) -> Any:
    """Return the argument of a launch, with the copy of an operand in its place."""
    if isinstance(argument, Boxes | Offset):
        return argument._replace(name=f"padded_{argument.name}") if argument.name in names else argument
    return f"padded_{argument}" if isinstance(argument, str) and argument in names else argument


def summary(product: Product, info: DeviceInfo, products: Backends[Product]) -> str:
    """Return what is copied, and which backend multiplies the copies, for ``explain``."""
    backend, names = _inner(product, info, products).backend, _copied(product, info)
    more = "" if backend is None or backend.summary is None else backend.summary(_padded(product, names), info)
    name = "" if backend is None else backend.name
    return f"rows of {' and '.join(names)} to multiples of 16 bytes or more first, then {name}" + (
        f": {more}" if more else ""
    )
