"""Which matrix products the wgmma kernel computes (``sm90_plan``), and how it applies their scales."""

from __future__ import annotations

from rtkernels.ops.gemm.product import BYTES, FLOAT16, FP8, Product, Scales
from rtkernels.ops.gemm.tile_choice import COLUMN_SCALES, GATED, MAX_GROUPS, NO_SCALES, PLAIN, QUANTIZED, ROW_SCALES
from rtkernels.runtime.invariance import level, starts_from_result
from rtkernels.runtime.targets import Target

TYPES = {"bf16": "bf16", "fp16": "fp16", "e4m3": "e4m3", "e5m2": "e5m2", "int8": "s8", "uint8": "u8"}  # in device code
INTEGERS = ("int8", "uint8")
PAIRS = {(t, t) for t in FLOAT16} | {(a, b) for kinds in (FP8, INTEGERS) for a in kinds for b in kinds}
OUTPUTS = {"bf16": 0, "fp16": 1, "fp32": 2, "int32": 3, "e4m3": 4, "e5m2": 5}
SHIFTED = {("e4m3", "e4m3"), ("int8", "int8")}  # those whose rows may be multiples of 8 bytes
SPLIT = {(t, t) for t in (*FLOAT16, "e4m3")}  # those that load even and odd rows of b separately
REGISTERS = {("bf16", "bf16"), ("e4m3", "e4m3")}  # those with quantised and gated results
ACTS = {None: 0, "relu": 1, "silu": 2, "gelu_tanh": 3, "gelu": 4}


def unsupported(product: Product, target: Target) -> str | None:
    """Return why this backend cannot compute a product on a target, or None."""
    p = product
    if "wgmma" not in target.features:
        return f"{target} has no wgmma"
    if (p.a.token, p.b.token) not in PAIRS:
        return f"wgmma has no product of {p.a.token} and {p.b.token}"
    if p.a.token not in FLOAT16 and (p.a.across or p.b.across):
        return f"wgmma reads {p.a.token} operands along k only"
    if not (p.a.aligned and p.b.aligned) and not is_shifted(p):
        return "TMA needs operands whose address and rows are multiples of 16 bytes"
    if p.k == 0:
        return "there is nothing to add up"
    if p.global_scale:
        return "no global scale"
    if p.out.token not in OUTPUTS:
        return f"results are {', '.join(OUTPUTS)}"
    if p.sums == "fp16":
        return "sums are fp32 or int32"
    if p.out.token == "int32" and (p.a.token in FLOAT16 + FP8 or p.scale_a or p.scale_b or p.bias or p.add or p.act):
        return "int32 results are plain sums of integers"
    if p.act not in ACTS or p.gate not in ACTS:
        return f"activations are {', '.join(map(str, ACTS))}"
    return _unsupported_scales(p) or _unsupported_groups(p) or _unsupported_finish(p)


def is_shifted(p: Product) -> bool:
    """Return True if rows that begin at odd multiples of 8 bytes are moved in shared memory."""
    halves = [x.halves for x in (p.a, p.b)]
    # Behind the first row of a pair, 8 bytes of the second one are read.
    whole = all(x.aligned or (x.halves and x.pitch == p.k) for x in (p.a, p.b)) and min(p.m, p.n) > 1
    return (
        any(halves) and whole and not level() and (p.a.token, p.b.token) in SHIFTED and not (p.a.across or p.b.across)
        and p.groups is None and finish_of(p) == PLAIN
        and loop_scales(p) in ((NO_SCALES,) if p.a.token in INTEGERS else (NO_SCALES, ROW_SCALES))
    )  # fmt: skip


def is_split(p: Product) -> bool:
    """Return True if even and odd rows of b may be loaded separately: they are odd multiples of 16 bytes apart."""
    size = int(BYTES[p.b.token])
    return (
        (p.a.token, p.b.token) in SPLIT and p.b.aligned and p.b.pitch * size % 32 == 16 and p.k * size % 16 == 0
        and not (p.a.across or p.b.across or is_shifted(p)) and p.groups is None and p.n > 1
        and not level() and not (p.accumulate and starts_from_result()) and p.quantized is None
        and not (in_loop(p.scale_a, p.k) or in_loop(p.scale_b, p.k))
        and (p.gate is None or (p.n % 2 == 0 and p.a.token == "bf16"))
    )  # fmt: skip


def finish_of(p: Product) -> int:
    return GATED if p.gate is not None else PLAIN if p.quantized is None else QUANTIZED


def _unsupported_finish(p: Product) -> str | None:
    if (p.out.token in FP8) != (p.quantized is not None):
        return "fp8 results are quantised ones"
    if finish_of(p) == PLAIN:
        return None
    if (p.a.token, p.b.token) not in REGISTERS or p.a.across or p.b.across:
        return "gated and quantised results are made of bf16 or e4m3 operands along k"
    if p.quantized not in (None, "1x128"):
        return f"scales per {p.quantized} need more than a tile"
    if p.add is not None or p.accumulate:
        return "nothing is added to gated or quantised results"
    if loop_scales(p) == COLUMN_SCALES or (p.gate is not None and in_loop(p.scale_b, p.k) and p.n % 128 != 0):
        return "scales of b must cover 128 rows, and so must the gate"
    if p.groups is not None and p.groups.kind in ("masked", "depth"):
        return "these groups have plain results"
    return None


def _unsupported_scales(p: Product) -> str | None:
    for name, scales in (("scale_a", p.scale_a), ("scale_b", p.scale_b)):
        if scales is None:
            continue
        if scales.token != "fp32" or scales.swizzled:
            return f"{name} must be fp32 and not swizzled"
        stage = 128 // int(BYTES[p.a.token])
        if 0 < scales.depth < p.k and (scales.depth % stage or scales.depth & (scales.depth - 1)):
            return f"scales cover {stage} of k or {stage} times a power of two, not {scales.depth}"
    if p.a.token in FLOAT16 and (in_loop(p.scale_a, p.k) or (in_loop(p.scale_b, p.k) and (p.a.across or p.b.across))):
        return "16-bit operands have scales along k of b only, both operands along k"
    if loop_scales(p) != NO_SCALES and p.a.token not in (*FLOAT16, *FP8, "int8"):
        return f"there is no scaled loop for {p.a.token}"
    if loop_scales(p) != NO_SCALES and p.a.token == "int8" and p.b.token != "int8":
        return "there is no scaled loop for mixed integers"
    return None


def _unsupported_groups(p: Product) -> str | None:
    g = p.groups
    if g is None:
        return None
    if g.count > MAX_GROUPS:
        return f"at most {MAX_GROUPS} groups, not {g.count}"
    along_k = not (p.a.across and p.b.across)
    if g.kind == "depth" and along_k and g.align * BYTES[p.a.token] % 16:
        return "along k, TMA needs groups that begin at multiples of 16 bytes"
    if g.kind == "depth" and loop_scales(p) != NO_SCALES and g.align % 128 != 0:
        return "scales per 128 of k need groups that begin at multiples of 128"
    if p.add is not None and g.kind in ("masked", "depth"):
        return "a matrix to add does not go with these groups"
    return None


def in_loop(scales: Scales | None, k: int) -> bool:
    """Return whether the main loop applies these scales; the epilogue does so with one for each row, or for all."""
    if scales is None:
        return False
    # Accumulators that start from a result need products that have been scaled.
    return scales.rows > 1 or (scales.depth > 0 if starts_from_result() else 0 < scales.depth < k)


def loop_scales(p: Product) -> int:
    """Return which scales the main loop applies; fp8 sums that are to be fp32 take the loop without any."""
    if in_loop(p.scale_b, p.k) and (p.scale_b.rows % 128 != 0 or p.a.token in FLOAT16):
        return COLUMN_SCALES
    if in_loop(p.scale_a, p.k) or in_loop(p.scale_b, p.k) or (p.a.token in FP8 and p.sums == "fp32"):
        return ROW_SCALES
    return NO_SCALES
