"""Products of 9 to 256 rows with the weights as wgmma's left operand: kernel record, launches, when they are faster.

A backend of ``product``: 16-bit operands, or e4m3 ones with scales of whole rows, on sm_90a. Steps of ``decode_linear``
can use its kernel, too, with a norm in front.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rtkernels.ops.gemm import sm90_limits, sm90_plan, swapped_tokens_plan
from rtkernels.ops.gemm.product import BYTES, FLOAT16, Product
from rtkernels.ops.gemm.tile_choice import loads
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Boxes, Step, Steps, box_strides
from rtkernels.runtime.targets import Target

MIN_ROWS, MAX_ROWS = 9, 256  # of a; fewer are those of other kernels
NORM_ROWS = 64  # with a norm in front, and in decoding steps
CHUNK_ROWS = 16  # up to which `chunk_plan` computes steps with few weights, and `skinny` may be better than `sm90`
AUTOMATIC_ROWS = 64  # up to which `preferred` compares the backend with `sm90`

# As in gemm_swapped_sm90.cu.
_ROW = 128  # bytes of k in a stage, of every row
_PARTS = (1, 2, 4, 8)  # blocks of a cluster
_RINGS = {1: 196608, 2: 110592}  # bytes of stages, by the blocks that an SM holds
TYPES = {"bf16": 0, "fp16": 1, "fp32": 2}
ACTS = {None: 0, "relu": 1, "silu": 2, "gelu_tanh": 3, "gelu": 4}
_GATED, _ACCUMULATE, _CONSTANT, _ADD_LAST = 1, 2, 4, 8

# Clock cycles of an H200, fitted to products of 10 to 64 rows, 15 of them cut in every way (docs/decisions/gemm.md).
_START = 6400  # until the first stage has arrived: the blocks do nothing else before
_DELIVERED, _OF_AN_SM = 1890, 60  # bytes that memory delivers in a cycle, at most, and to one SM
_LOADED = 4.5  # cycles of 128 bytes from L2
_STEP = (240, 3)  # of a stage, at least, and of each of its tokens: barriers and products
_FINISH = (4450, 455)  # behind the loop, and of each result of a thread
_CLUSTER = {1: 0, 2: 80, 4: 1900, 8: 4200}  # of a launch of clusters, and of their barriers
# `sm90` with few rows takes so many times its estimate, and at least this, and a cycle for so many bytes of weights.
_SM90_FACTOR, _SM90_START, _SM90_DELIVERED = 1.1, 15300, 2200
_SMALL = 8 << 20  # bytes of weights, up to which `chunk_plan` is faster for steps of few rows
_LONG = 4096  # bytes of k
# By bytes of an element: rows up to which `cluster` was not compared with so few bytes of weights.
_CLUSTER_ROWS, _CLUSTER_BYTES = {2: 32, 1: 16}, 4 << 20


class Shape(NamedTuple):
    """How a launch is cut: tokens of a tile, warpgroups of 64 rows of weights, blocks of a cluster, which share k."""

    tokens: int
    consumers: int
    parts: int

    @property
    def rows(self) -> int:
        """Rows of weights of a tile."""
        return 64 * self.consumers

    @property
    def blocks_of_sm(self) -> int:
        """Blocks that run on an SM at the same time."""
        return 1 if self.tokens > 64 else 2

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        stage = (self.rows + self.tokens) * _ROW
        return 1024 + _RINGS[self.blocks_of_sm] // stage * stage

    def tiles(self, p: Product) -> int:
        """Return the tiles of a product."""
        return -(-p.n // (self.rows // 2 if p.gate else self.rows))


# Tokens and warpgroups: two share the tokens that they read from L2, one has twice as many tiles.
_SIZES = ((16, 1), (32, 1), (64, 1), (64, 2), (128, 2), (256, 2))


def _variants() -> Iterator[tuple[str | int | bool, ...]]:
    for token in (*FLOAT16, "e4m3"):
        for size in _SIZES:
            if token != "e4m3" or size[0] <= 128:  # two sets of sums
                yield (token, *size)


KERNEL = Kernel(
    "gemm/gemm_swapped_sm90.cu", "gemm_swapped_sm90", template="T TOKENS CONSUMERS", max_registers=168,
    needs=("wgmma", "cluster", "pdl"),
    args="a_map:tmap b_map:tmap b:ptr scale_a:ptr scale_b:ptr bias:ptr add:ptr out:ptr m:i64 n:i64 k_bytes:i64 "
    "b_pitch:i64 out_pitch:i64 add_pitch:i64 scale_a_step:i64 scale_b_step:i64 parts_shift_:i64 flags:i64 "
    "types:i64 factor:f64",
    variants=list(_variants()), tier="serve",
)  # fmt: skip
KERNELS = (KERNEL,)


def unsupported(product: Product, target: Target, norm: bool = False) -> str | None:
    """Return why this backend cannot compute a product, behind a norm if there is one, or None."""
    p = product
    if not KERNEL.supports(target):
        return f"{target} has no wgmma"
    if p.groups is not None:
        return "no grouped products"
    rows = NORM_ROWS if norm else MAX_ROWS if p.a.token in FLOAT16 else 128
    if not MIN_ROWS <= p.m <= rows:
        return f"{p.m} rows of a; expected {MIN_ROWS} to {rows}"
    if p.quantized is not None or p.global_scale:
        return "no quantised results and no global scales"
    if p.sums not in ("fp32", "fast"):
        return f"no sums of kind {p.sums!r}"
    if p.a.token != p.b.token or p.a.token not in (*FLOAT16, "e4m3"):
        return f"no {p.a.token} and {p.b.token} operands"
    if norm and p.a.token != "bf16":
        return "norms of bf16 rows only"
    if p.a.across or p.b.across:
        return "rows of memory are those of the summed dimension"
    if not (p.a.aligned and p.b.aligned):
        return "TMA needs operands whose address and rows are multiples of 16 bytes"
    if norm and p.k % 8:
        return "rows of a norm's weight are no multiples of 16 bytes"
    if not 0 < p.k * BYTES[p.a.token] < 1 << 24 or p.n >= 1 << 24:
        return "more steps than a launch counts, or none"
    if p.out.token not in TYPES:
        return f"no results of type {p.out.token}"
    for name, scales in (("a", p.scale_a), ("b", p.scale_b)):
        if scales is not None and not scales.of_rows(p.k):
            return f"scales of {name} for {scales.rows} x {scales.depth}"
    return None


def _steps_of(p: Product) -> int:
    return -(-int(p.k * BYTES[p.a.token]) // _ROW)


def cycles(p: Product, shape: Shape, sms: int) -> float:
    """Return how long a product takes."""
    size = int(BYTES[p.b.token])
    blocks, steps = shape.tiles(p) * shape.parts, -(-_steps_of(p) // shape.parts)
    of_tokens, of_weights = loads(p.a.pitch * size), loads(p.b.pitch * size)
    weights = p.n * (2 if p.gate else 1) * p.k * size
    memory = weights * of_weights / min(_DELIVERED, _OF_AN_SM * min(blocks, sms))
    of_sm = -(-blocks // sms)  # blocks of the busiest SM, which share what it loads
    rounds = -(-of_sm // shape.blocks_of_sm)
    loaded = of_sm * steps * (shape.rows * of_weights + shape.tokens * of_tokens) * _LOADED
    work = max(loaded, rounds * steps * (_STEP[0] + _STEP[1] * shape.tokens), memory)
    results = shape.rows * p.m / (shape.parts * shape.consumers * 128)  # of a thread
    return _START + _CLUSTER[shape.parts] + work + rounds * (_FINISH[0] + _FINISH[1] * results)


def _shapes(p: Product) -> list[Shape]:
    tokens = next(size for size, _ in _SIZES if size >= p.m)
    steps = _steps_of(p)
    return [
        Shape(tokens, consumers, parts)
        for size, consumers in _SIZES if size == tokens
        for parts in _PARTS if parts <= max(steps // 2, 1)
    ]  # fmt: skip


def shape_of(p: Product, sms: int) -> Shape:
    """Return how a launch is cut."""
    return min(_shapes(p), key=lambda shape: cycles(p, shape, sms))


def is_small(p: Product) -> bool:
    """Return True for few weights, whose time is latency."""
    return p.n * (2 if p.gate else 1) * p.k * BYTES[p.b.token] <= _SMALL


def preferred(product: Product, info: DeviceInfo) -> tuple[str, ...]:
    """Return the backend to be asked first for a product of few rows: this one or `sm90`, or none.

    Up to 16 rows with a long k, `skinny` reads weights faster than `sm90`.
    """
    p = product
    if not MIN_ROWS <= p.m <= AUTOMATIC_ROWS or p.n == 0 or p.gate is not None:
        return ()
    if unsupported(p, info.target) is not None:
        return ()
    size = int(BYTES[p.b.token])
    if p.m <= _CLUSTER_ROWS[size] and p.n * p.k * size <= _CLUSTER_BYTES:
        return ()
    if sm90_limits.unsupported(p, info.target) is not None:
        return ("swapped",)  # the others have no wgmma
    own = cycles(p, shape_of(p, info.sm_count), info.sm_count)
    memory = _SM90_START + p.n * p.k * size / _SM90_DELIVERED
    if own <= max(_SM90_FACTOR * sm90_plan.estimate(p, info.sm_count), memory):
        return ("swapped",)
    return ("sm90",) if p.m > CHUNK_ROWS or p.k * size <= _LONG else ()


def serves_step(product: Product, target: Target, norm: bool) -> bool:
    """Return True if this kernel computes a layer of a decoding step (``decode_linear``) that ``chunk_plan`` leaves."""
    return product.m <= NORM_ROWS and unsupported(product, target, norm) is None


def serves_short_step(product: Product, target: Target) -> bool:
    """Return True if this kernel or that of ``chunk_plan`` computes a layer of up to 16 rows faster than cuBLAS."""
    return product.m <= CHUNK_ROWS and unsupported(product, target) is None


def steps(product: Product, device: int, *, consumers: int | None = None, parts: int | None = None) -> Steps:
    """Return the launch of a product that ``unsupported`` accepts; `consumers` and `parts` instead of the choice."""
    return launches(product, device, consumers=consumers, parts=parts)


def launches(
    product: Product, device: int, *, norm: bool = False, constant: bool = False, add_last: bool = False,
    consumers: int | None = None, parts: int | None = None,
) -> Steps:  # fmt: skip
    """Return the launch of a product, behind one for the norm of the rows of a if `norm` is set.

    Args:
        product: The product.
        device: CUDA ordinal, or -1 for the host emulator.
        norm: The rows of a are normalised first; the call has numbers ``eps`` and ``offset``.
        constant: No kernel that may still be running writes what belongs to the weights.
        add_last: The call has a number ``factor``, by which results behind the activation are multiplied before `add`
            is added.
        consumers: Warpgroups of a block, instead of the choice.
        parts: Blocks of a cluster, likewise.
    """
    p, info = product, device_info(device)
    if p.m == 0 or p.n == 0:
        return Steps()
    shape = shape_of(p, info.sm_count)
    shape = shape._replace(consumers=consumers or shape.consumers, parts=parts or shape.parts)
    size = int(BYTES[p.a.token])
    token = p.a.token if p.a.token in FLOAT16 else "byte"
    b_rows, box_rows = (2 * p.n, shape.rows // 2) if p.gate else (p.n, shape.rows)

    def boxes(name: str, rows: int, pitch: int, count: int) -> Boxes:
        sizes = (p.k, rows)
        return Boxes(name, token, sizes, box_strides(sizes, (pitch,), size), (_ROW // size, count))

    flags = (
        _GATED * (p.gate is not None) + _ACCUMULATE * p.accumulate + _CONSTANT * constant + _ADD_LAST * add_last
    )  # fmt: skip
    types = TYPES.get(p.bias, 0), TYPES.get(p.add, 0), TYPES[p.out.token], ACTS[p.gate or p.act]
    scale_steps = [s.row_pitch if s is not None and s.rows else 0 for s in (p.scale_a, p.scale_b)]
    launch = KERNEL.bind(
        (p.a.token, shape.tokens, shape.consumers), device, shape.tiles(p) * shape.parts,
        128 * shape.consumers + 32, shape.shared, overlap=True, cluster=shape.parts,
    )  # fmt: skip
    normed = swapped_tokens_plan.prepared(p, device, shape.tokens, norm=True) if norm else None
    step = Step(
        launch, normed.boxes if normed else boxes("a", p.m, p.a.pitch, shape.tokens),
        boxes("b", b_rows, p.b.pitch, box_rows), "b", "scale_a" if p.scale_a else 0, "scale_b" if p.scale_b else 0,
        "bias" if p.bias else 0, "add" if p.add else 0, "out", p.m, p.n, p.k * size, p.b.pitch * size, p.out.pitch,
        p.add_pitch, *scale_steps, shape.parts.bit_length() - 1, flags,
        sum(value << 4 * i for i, value in enumerate(types)), "factor" if add_last else 1.0,
    )  # fmt: skip
    return Steps(normed.step, step, scratch=normed.scratch) if normed else Steps(step)


def candidates(product: Product, info: DeviceInfo) -> list[dict[str, Any]]:
    """Return the ways to cut a launch, for ``rtkernels tune``."""
    found = sorted(_shapes(product), key=lambda shape: cycles(product, shape, info.sm_count))
    return [{"consumers": shape.consumers, "parts": shape.parts} for shape in found]


def summary(product: Product, target: Target) -> str:
    """Return the tile that a product would get on an H200, for ``explain``."""
    shape = shape_of(product, 132)
    return f"{shape.rows} weight rows x {shape.tokens} tokens, k shared by {shape.parts} blocks of a cluster"
