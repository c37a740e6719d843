"""Products of decoding steps, up to 16 rows whose weights are read once: kernel records and launches.

A backend of ``product``: 16-bit activations, weights of 16, 8 or 4 bits, every target from sm_80 on. The op
``decode_linear`` adds a norm in front.
"""

from __future__ import annotations

from typing import NamedTuple

from rtkernels.ops.gemm.product import BYTES, FLOAT16, Product, Scales
from rtkernels.runtime.launch.device import device_info, shared_limit
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.targets import Target

MAX_ROWS = 16
_STREAM_ROWS = 4  # up to which weights are streamed through shared memory, not loaded into registers
_E2M1_ROWS = 8  # of e2m1 codes, which are always streamed

# As in gemm_decode_stage.cuh.
_WARPS = 8
_PARTS = (1, 2, 4, 8)  # blocks of a cluster, which share k
_CLUSTER = 100  # what another block of a cluster costs, in units of the estimate
_ALONE = 130  # what a block costs that leaves no memory for one of the next launch
_LARGE = 1 << 20  # bytes of weights from which on an SM gets two blocks, if they are loaded into registers
_SUMS = 16384  # bytes of sums of a pass, at the most: of each octet and warp along k, eight for a row
_GROUP = 128  # of k, that share a scale
_RING = 4  # slots of a warp that streams
_SCALES = 128  # bytes of scales of such a slot; of e2m1 codes twice as many
_E2M1_DEPTH = 256  # what k is a multiple of, so that rows of their scales are aligned
_STEPS = {2: 6, 1: 8, 0.5: 4}  # of such a slot, at the most; by the bytes of a weight
_STATIC = {True: 2112, False: 2048}  # shared memory that is not dynamic, and what the driver takes; if weights stream

_CODES = {
    "bf16": "bf16", "fp16": "fp16", "e4m3": "e4m3", "int8": "int8_codes", "int4": "int4_codes", "uint4": "int4_codes",
    "e2m1": "e2m1_codes",
}  # fmt: skip
_TYPES = {"bf16": 0, "fp16": 1, "fp32": 2}
_ACTS = {None: 0, "relu": 1, "silu": 2, "gelu_tanh": 3, "gelu": 4}
_GATED, _CONSTANT, _SIGNED, _BY_ROW = 1, 2, 4, 8

_ARGS = (
    "x:ptr weight:ptr scale:ptr {}bias:ptr residual:ptr norm_weight:ptr out:ptr m_:i64 n:i64 k_:i64 x_pitch:i64 "
    "weight_pitch:i64 out_pitch:i64 residual_pitch:i64 scale_row:i64 scale_group:i64 scale_shift:i64 groups:i64 "
    "octets_:i64 row_shift_:i64 pass_octets_:i64 slot_steps_:i64 flags:i64 types:i64 eps:f64 offset:f64 "
    "factor:f64"
)
_TYPES_OF = [(codes or math, math) for codes in (None, "e4m3", "int8_codes", "int4_codes") for math in FLOAT16]
KERNEL = Kernel(
    "gemm/gemm_decode.cu", "gemm_decode", template="Codes Math TOKENS", max_registers=160, tier="serve",
    args=_ARGS.format(""),
    variants=[(*types, tokens) for types in _TYPES_OF for tokens in (1, 2)],
)  # fmt: skip
STREAM = Kernel(
    "gemm/gemm_stream.cu", "gemm_stream", template="Codes Math QUADS", max_registers=128, tier="serve",
    args=_ARGS.format("global_scale:ptr "),
    variants=[(*types, 1) for types in _TYPES_OF] + [("e2m1_codes", math, n) for math in FLOAT16 for n in (1, 2)],
)  # fmt: skip
KERNELS = (KERNEL, STREAM)


class Shape(NamedTuple):
    """How a launch is cut.

    Blocks that share k, octets of a block, warps of a block along octets (power of two), steps of a slot,
    shared memory; whether weights are streamed through it.
    """

    parts: int
    octets: int
    row_shift: int
    steps: int
    shared: int
    streams: bool


def unsupported(product: Product, target: Target, sms: int = 132, norm: bool = False) -> str | None:
    """Return why this backend cannot compute a product on so many SMs, behind a norm if there is one, or None."""
    p = product
    if p.groups is not None:
        return "no grouped products"
    if p.m > MAX_ROWS:
        return f"{p.m} rows of a; {MAX_ROWS} at the highest"
    if p.quantized is not None or p.accumulate or p.scale_a is not None:
        return "no quantised results, sums with the output or scales of a"
    if p.b.token == "e2m1":
        if p.m > _E2M1_ROWS:
            return f"{p.m} rows of a; {_E2M1_ROWS} at the highest with e2m1 codes"
        if not _fits_e2m1(p):
            return f"e2m1 codes without e4m3 scales of 16, or {p.k} of them; expected a multiple of {_E2M1_DEPTH}"
    elif p.global_scale:
        return f"no global scales of {p.b.token} weights"
    if p.sums != "fp32":
        return f"no sums of kind {p.sums!r}"
    if p.a.token not in FLOAT16 or p.b.token not in _CODES or (p.b.token in FLOAT16 and p.b.token != p.a.token):
        return f"no {p.a.token} activations with {p.b.token} weights"
    if p.a.across or p.b.across:
        return "rows of memory are those of the summed dimension"
    if not (p.a.aligned and p.b.aligned) or p.k * BYTES[p.b.token] % 16 or p.k % 8 or not p.k:
        return "rows are no multiples of 16 bytes"
    if p.out.token not in _TYPES:
        return f"no results of type {p.out.token}"
    if p.add and (p.act or p.gate):
        return "a matrix to add and an activation"
    if max(p.k, p.n, p.a.pitch, p.b.pitch) >= 1 << 24:
        return "more steps than a launch counts"
    if p.scale_b is not None and p.b.token != "e2m1" and not _fits(p.scale_b, p):
        return f"scales of b for {p.scale_b.rows} x {p.scale_b.depth}"
    return None if _shape(p, target, sms, norm) else "too little shared memory"


def _fits(s: Scales, p: Product) -> bool:
    if s.token != "fp32" or s.swizzled or s.rows not in (0, 1, 128):
        return False
    return not _varies(s, p.k) or (s.depth == _GROUP and p.b.token not in FLOAT16)


def _fits_e2m1(p: Product) -> bool:
    s = p.scale_b
    if s is None or s.token != "ue4m3" or s.swizzled or p.global_scale > 1:
        return False
    return s.rows == 1 and s.depth == 16 and s.depth_pitch == 1 and s.aligned and p.k % _E2M1_DEPTH == 0


def _varies(s: Scales | None, k: int) -> bool:
    return s is not None and 0 < s.depth < k


def _steps_of(p: Product) -> tuple[int, int]:
    """Return how many granules k has, which are not split, and the steps of a granule."""
    depth = int(64 / BYTES[p.b.token])
    granule = 2 if depth == 64 else 1
    return -(-p.k // (depth * granule)), granule


def _shape(p: Product, target: Target, sms: int, normed: bool) -> Shape | None:
    """Return the shape of a launch, None if none fits. Weights go to registers if rings leave no room for rows of a."""
    if p.b.token == "e2m1":
        return _fastest(p, target, sms, normed, True)
    streamed = _fastest(p, target, sms, normed, True) if p.m <= _STREAM_ROWS else None
    return streamed or _fastest(p, target, sms, normed, False)


def _fastest(p: Product, target: Target, sms: int, normed: bool, streams: bool) -> Shape | None:
    """Return the shape of a launch that takes the shortest on its busiest SM, None if none fits.

    The unit of the estimate is the time in which an SM reads 512 bytes.
    """
    octets = -(-p.n // (4 if p.gate else 8))
    granules, granule = _steps_of(p)
    if not streams and p.m <= 8 and p.n * p.k * BYTES[p.b.token] >= _LARGE:  # registers of more rows do not allow it
        sms *= 2
    limit, half = largest(target), (shared_limit(target) + 1024) // 2 - _STATIC[streams]
    found: list[tuple[float, Shape]] = []
    for parts in _PARTS if "cluster" in target.features else (1,):
        if parts > granules or (parts > 2 and found):  # clusters of four leave SMs without a block
            break
        own = -(-octets // max(sms // parts, 1))
        for row_shift in range(4):
            along_k, along_rows = _WARPS >> row_shift, 1 << row_shift
            own_granules = -(-granules // parts)
            per_octet = -(-own_granules // along_k) * granule
            rounds = -(-own // along_rows)
            sizes = {
                steps: _shared(p, own, own_granules * granule, row_shift, parts, normed, steps if streams else 0)
                for steps in range(_slot_steps(p, streams), 0, -granule)
            }
            longest = next((steps for room in (half, limit) for steps, size in sizes.items() if size <= room), None)
            if longest is None:
                continue
            slots = -(-per_octet // longest)
            balanced = -(-per_octet // slots)
            steps = -(-balanced // granule) * granule
            shared, passes = sizes[steps], -(-own // _together(p.m, along_k, own))
            time = _WARPS * rounds * (per_octet + slots) + 12 * passes
            time += _CLUSTER * (parts - 1) + _ALONE * (shared > half)
            found.append((time, Shape(parts, own, row_shift, steps, shared, streams)))
    return min(found)[1] if found else None


def largest(target: Target) -> int:
    """Return the most dynamic shared memory that plans give to a block."""
    return shared_limit(target) - 2048


def _together(m: int, along_k: int, octets: int) -> int:
    """Return the octets of a pass."""
    return min(_SUMS * (2 if m > 8 else 1) // (32 * m * along_k), octets, 32)


def _slot_steps(p: Product, streams: bool) -> int:
    """Return the steps that a slot has at the most."""
    return _STEPS[BYTES[p.b.token]] if streams else 4 if BYTES[p.b.token] < 1 else 6


def _shared(
    p: Product, octets: int, steps: int, row_shift: int, parts: int, normed: bool, ring_steps: int
) -> int:  # fmt: skip
    """Return the bytes of shared memory of a block; `ring_steps`: of a slot in it, 0 if slots are registers."""
    row = steps * int(128 / BYTES[p.b.token])
    along_k = _WARPS >> row_shift
    together = _together(p.m, along_k, octets)
    sums = along_k * together + (parts * -(-together // parts) if parts > 1 else 0)
    scales = _SCALES * _varies(p.scale_b, p.k) * (2 if p.b.token == "e2m1" else 1)
    rings = _WARPS * _RING * (512 * ring_steps + scales) if ring_steps else 0
    return rings + p.m * (-(-row // 128) * 128 + 64) + row * normed + 32 * p.m * sums


def steps(product: Product, device: int) -> Steps:
    """Return the launch of a product that ``unsupported`` accepts."""
    return launches(product, device)


def launches(product: Product, device: int, norm: bool = False, constant: bool = False, factor: bool = False) -> Steps:
    """Return the launch of a product, with a norm of the rows of a if `norm` is set.

    Args:
        product: The product; its `add` is added behind an activation.
        device: CUDA ordinal, or -1 for the host emulator.
        norm: The rows of a are normalised first; the call has numbers ``eps`` and ``offset``.
        constant: No kernel that may still be running writes the weights, so that they are loaded without waiting.
        factor: The call has a number ``factor``, by which results are multiplied before `add` is added.
    """
    p, info = product, device_info(device)
    if p.m == 0 or p.n == 0:
        return Steps()
    shape = _shape(p, info.target, info.sm_count, norm)
    if shape is None:
        reason = unsupported(p, info.target, info.sm_count, norm)
        raise ValueError(f"the decoding kernel does not compute this product: {reason}")
    s, varies = p.scale_b, _varies(p.scale_b, p.k)
    octets, size = -(-p.n // (4 if p.gate else 8)), BYTES[p.b.token]
    flags = (
        _GATED * (p.gate is not None) + _CONSTANT * constant + _SIGNED * (p.b.token == "int4")
        + _BY_ROW * (s is not None and s.rows != 0 and not p.global_scale)
    )  # fmt: skip
    types = (_TYPES.get(p.bias, 0), _TYPES.get(p.add, 0), _TYPES[p.out.token], _ACTS[p.gate or p.act])
    along_k = _WARPS >> shape.row_shift
    kernel, tokens = (STREAM, _STREAM_ROWS) if shape.streams else (KERNEL, 8)
    launch = kernel.bind(
        (_CODES[p.b.token], p.a.token, 2 if p.m > tokens else 1),
        device,
        (shape.parts, -(-octets // shape.octets)),
        32 * _WARPS,
        shape.shared,
        overlap=True,
        cluster=shape.parts,
    )
    numbers = (
        p.m, p.n, p.k, 2 * p.a.pitch, int(p.b.pitch * size), p.out.pitch, p.add_pitch,
        s.row_pitch if s and s.rows else 0, s.depth_pitch if varies else 0, 7 if s and s.rows == 128 else 0,
        -(-p.k // s.depth) if varies else 0, shape.octets, shape.row_shift, _together(p.m, along_k, shape.octets),
        shape.steps, flags,
        sum(value << 4 * i for i, value in enumerate(types)),
    )  # fmt: skip
    factors = ("global_scale" if p.global_scale else 0,) if shape.streams else ()
    return Steps(
        Step(
            launch, "a", "b", "scale_b" if s else 0, *factors, "bias" if p.bias else 0, "add" if p.add else 0,
            "norm_weight" if norm else 0, "out", *numbers, *(("eps", "offset") if norm else (0.0, 0.0)),
            "factor" if factor else 1.0,
        )
    )  # fmt: skip


def summary(product: Product, target: Target) -> str:
    """Return the tile of a product, for ``explain``."""
    shape = _shape(product, target, 132, False)
    return f"{shape.octets} octets of weight rows per block, k shared by {shape.parts} blocks" if shape else ""
