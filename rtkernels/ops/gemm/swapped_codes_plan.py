"""Products of 9 to 64 rows in bf16 with weights in codes of 4 or 8 bits as wgmma's left operand: record, launches.

``decode_linear`` has them, with a norm in front; ``swapped_plan`` has the kernel for operands that wgmma reads.
"""

from __future__ import annotations

from rtkernels.ops.gemm import swapped_tokens_plan
from rtkernels.ops.gemm.product import BYTES, Product, Scales
from rtkernels.ops.gemm.swapped_plan import ACTS, TYPES, Shape
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Boxes, Step, Steps, box_strides
from rtkernels.runtime.targets import Target

MIN_ROWS, MAX_ROWS = 9, 64

# As in gemm_swapped_codes_sm90.cu.
_DEPTH = 128  # of k, of a step; codes that share a scale along k
_RING = 110592  # bytes of stages
_GATED, _CONSTANT, _SIGNED, _VARIES = 1, 4, 16, 32
_CODES = {
    "e4m3": "e4m3", "int8": "int8_codes", "int4": "int4_codes", "uint4": "int4_codes", "e2m1": "e2m1_codes",
}  # fmt: skip
_SIZES = ((16, 1), (16, 2), (32, 2), (64, 2))  # tokens and warpgroups of a block
_PARTS = (1, 2, 4, 8)  # blocks of a cluster

# Clock cycles of an H200, fitted to 54 products of 16 to 64 rows, cut in every way (docs/decisions/gemm.md).
_START = 4100  # until the first stage has arrived
_STEP = (560, 13)  # of a step, and of each of its tokens
_FINE = 1.08  # times as long with e2m1 codes
_BOTH, _SHARED = 1.26, 1.77  # times as long with two warpgroups, and with two blocks on an SM
_FINISH = 12500  # behind the loop
_CLUSTER = {1: 0, 2: 730, 4: 1460, 8: 6700}  # of a launch of clusters, and of their barriers
_DELIVERED = 1900  # bytes that memory delivers in a cycle, at most

KERNEL = Kernel(
    "gemm/gemm_swapped_codes_sm90.cu", "gemm_swapped_codes_sm90", template="Codes TOKENS CONSUMERS", max_registers=128,
    needs=("wgmma", "cluster", "pdl"),
    args="a_map:tmap b_map:tmap b:ptr scale:ptr global_scale:ptr bias:ptr add:ptr out:ptr m:i64 n:i64 k_:i64 "
    "b_pitch:i64 out_pitch:i64 add_pitch:i64 scale_row:i64 scale_group:i64 scale_shift:i64 parts_shift_:i64 "
    "flags:i64 types:i64 factor:f64",
    variants=[(codes, *size) for codes in dict.fromkeys(_CODES.values()) for size in _SIZES], tier="serve",
)  # fmt: skip
KERNELS = (KERNEL, *swapped_tokens_plan.KERNELS)


def unsupported(product: Product, target: Target) -> str | None:
    """Return why this kernel cannot compute a product (whose `add` is added last), or None; with a norm or without."""
    p = product
    if not KERNEL.supports(target):
        return f"{target} has no wgmma"
    if p.groups is not None:
        return "no grouped products"
    if not MIN_ROWS <= p.m <= MAX_ROWS:
        return f"{p.m} rows of a; expected {MIN_ROWS} to {MAX_ROWS}"
    if p.quantized is not None or p.accumulate or p.scale_a is not None or p.sums != "fp32":
        return "no quantised results, sums with the output, scales of a or other sums than those of fp32"
    if p.a.token != "bf16" or p.b.token not in _CODES:
        return f"no {p.a.token} activations with {p.b.token} weights"
    if p.a.across or p.b.across:
        return "rows of memory are those of the summed dimension"
    if not (p.a.aligned and p.b.aligned):
        return "TMA needs operands whose address and rows are multiples of 16 bytes"
    if p.out.token not in TYPES:
        return f"no results of type {p.out.token}"
    if not 0 < p.k < 1 << 22 or p.n >= 1 << 23:
        return "more steps than a launch counts, or none"
    s, fine = p.scale_b, p.b.token == "e2m1"
    if (p.global_scale and not fine) or p.global_scale > 1:
        return "one global scale, of e2m1 codes only"
    if not (_is_fine(s) if fine else s is None or s.of_rows(p.k) or _varies(s, p.k)):
        return "no such scales of b" if s is None else f"scales of b for {s.rows} x {s.depth}"
    return None


def _is_fine(s: Scales | None) -> bool:
    if s is None or s.token != "ue4m3" or s.swizzled or not s.aligned:
        return False
    return s.rows == 1 and s.depth == 16 and s.depth_pitch == 1


def _varies(s: Scales | None, k: int) -> bool:
    """Return True for scales along k, of one row or of blocks."""
    known = s is not None and s.token == "fp32" and not s.swizzled and s.rows in (1, 128)
    return known and s.depth == _DEPTH and (s.depth < k or s.rows == 128)


def _steps_of(p: Product) -> int:
    return -(-p.k // _DEPTH)


def _row_bytes(p: Product) -> int:
    return int(_DEPTH * BYTES[p.b.token])


def shared(p: Product, shape: Shape) -> int:
    """Return the bytes of dynamic shared memory of a launch."""
    stage = shape.rows * (_row_bytes(p) + (8 if p.b.token == "e2m1" else 4)) + shape.tokens * 2 * _DEPTH
    return 1024 + _RING // stage * stage


def cycles(p: Product, shape: Shape, sms: int) -> float:
    """Return how long a product takes."""
    blocks, steps = shape.tiles(p) * shape.parts, -(-_steps_of(p) // shape.parts)
    of_sm = -(-blocks // sms)
    rounds = -(-of_sm // shape.blocks_of_sm)
    step = (_STEP[0] + _STEP[1] * shape.tokens) * (_FINE if p.b.token == "e2m1" else 1.0)
    step *= (_BOTH if shape.consumers == 2 else 1.0) * (_SHARED if of_sm > 1 else 1.0)
    memory = p.n * (2 if p.gate else 1) * p.k * BYTES[p.b.token] / _DELIVERED
    return _START + _CLUSTER[shape.parts] + max(rounds * steps * step, memory) + rounds * _FINISH


def shape_of(p: Product, sms: int) -> Shape:
    """Return how a launch is cut."""
    tokens = next(size for size, _ in _SIZES if size >= p.m)
    shapes = [
        Shape(tokens, consumers, parts)
        for size, consumers in _SIZES if size == tokens
        for parts in _PARTS if parts <= max(_steps_of(p) // 2, 1)
    ]  # fmt: skip
    return min(shapes, key=lambda shape: cycles(p, shape, sms))


def serves_step(product: Product, target: Target) -> bool:
    """Return True if a linear layer of a decoding step (``decode_linear``) takes this kernel."""
    return unsupported(product, target) is None


def launches(product: Product, device: int, *, norm: bool = False, constant: bool = False) -> Steps:
    """Return the launches of a product that ``unsupported`` accepts; the call has a number ``factor``.

    Args:
        product: The product; its `add` is added behind an activation.
        device: CUDA ordinal, or -1 for the host emulator.
        norm: The rows of a are normalised first; the call has numbers ``eps`` and ``offset``.
        constant: No kernel that may still be running writes what belongs to the weights.
    """
    p, info = product, device_info(device)
    if p.n == 0:
        return Steps()
    shape, row_bytes, s = shape_of(p, info.sm_count), _row_bytes(p), p.scale_b
    b_rows, box_rows = (2 * p.n, shape.rows // 2) if p.gate else (p.n, shape.rows)
    b_sizes = (int(p.k * BYTES[p.b.token]), b_rows)
    b_pitch = int(p.b.pitch * BYTES[p.b.token])
    b_boxes = Boxes(
        "b", "byte", b_sizes, box_strides(b_sizes, (b_pitch,), 1), (row_bytes, box_rows),
        True if row_bytes == 128 else row_bytes,
    )  # fmt: skip
    order = swapped_tokens_plan.BYTES if row_bytes == 128 else swapped_tokens_plan.HALF_BYTES
    tokens = swapped_tokens_plan.prepared(p, device, shape.tokens, norm=norm, order=order)
    along_k = s is not None and (p.b.token == "e2m1" or _varies(s, p.k))
    flags = (
        _GATED * (p.gate is not None) + _CONSTANT * constant + _SIGNED * (p.b.token == "int4") + _VARIES * along_k
    )  # fmt: skip
    types = TYPES.get(p.bias, 0), TYPES.get(p.add, 0), TYPES[p.out.token], ACTS[p.gate or p.act]
    launch = KERNEL.bind(
        (_CODES[p.b.token], shape.tokens, shape.consumers), device, shape.tiles(p) * shape.parts,
        128 * shape.consumers, shared(p, shape), overlap=True, cluster=shape.parts,
    )  # fmt: skip
    return Steps(
        tokens.step,
        Step(
            launch, tokens.boxes, b_boxes, "b", "scale_b" if s else 0, "global_scale" if p.global_scale else 0,
            "bias" if p.bias else 0, "add" if p.add else 0, "out", p.m, p.n, p.k, b_pitch, p.out.pitch, p.add_pitch,
            s.row_pitch if s and s.rows else 0, s.depth_pitch if along_k else 0,
            7 if along_k and s.rows == 128 else 0, shape.parts.bit_length() - 1, flags,
            sum(value << 4 * i for i, value in enumerate(types)), "factor",
        ),
        scratch=tokens.scratch,
    )  # fmt: skip
