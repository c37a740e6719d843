"""Products of codes that wgmma does not read: a kernel unpacks them, and the wgmma product multiplies what it wrote.

A backend as ``product`` describes it (device code: ``cuda_src/gemm/unpack_codes.cu``, then that of ``sm90_plan``).
Every conversion is exact: 4-bit integers become bytes, other codes the 16-bit type of ``a`` (bf16 if a is a code, too),
times their byte scales; fp32 scales stay with the product. Unpacked operands are scratch, as large as those of 8 or 16
bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rtkernels.ops.gemm import sm90_plan
from rtkernels.ops.gemm.product import BYTES, FLOAT16, INTEGERS, Matrix, Product, Scales
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.targets import Target

# Rows from which two kernels are faster than mma.sync, which takes codes as they are.
FLOAT_ROWS = 65  # of 16-bit products
INTEGER_ROWS = 512  # of products of bytes

_THREADS = 256
_EACH = 16  # elements that a thread unpacks
_KINDS = {"e4m3": 0, "e5m2": 1, "int8": 2, "uint8": 3, "int4": 4, "uint4": 5, "e2m1": 6}  # CodeKind of device code
_SCALE_TOKENS = {"e8m0": 2, "ue4m3": 3}
_INTEGERS = {"int4": "Int4Code", "uint4": "Uint4Code"}
_SCALED = {("e2m1", "bf16"): "E2m1Code", ("e2m1", "fp16"): "E2m1Code", ("e4m3", "bf16"): "e4m3"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "uint8": torch.uint8}

UNPACK = Kernel(
    "gemm/unpack_codes.cu", "unpack_codes", template="CODE OUT BLOCK_SCALES",
    args="codes:ptr scale:ptr out:ptr rows:i64 k:i64 pitch:i64 group_pitch:i64 out_pitch:i64 scale_row_pitch:i64 "
    "scale_depth_pitch:i64 scale_group_pitch:i64 scale_depth:i64 scale_option:i64 kind:i64",
    variants=[
        *((code, out, False) for code in ("AnyByteCode", "AnyNibbleCode") for out in FLOAT16),
        *((code, out, True) for (_, out), code in _SCALED.items()),
        *((code, "u8", False) for code in _INTEGERS.values()),
    ],
    max_registers=40, needs=("wgmma",),
)  # fmt: skip
KERNELS = (UNPACK,)


class _Operand(NamedTuple):
    """An operand that is unpacked: its codes, what they become, and the byte scales that go into them."""

    codes: Matrix
    token: str
    scales: Scales | None


def _unpacked(p: Product) -> tuple[Product, dict[str, _Operand]] | str:
    """Return the product of unpacked operands and those that are unpacked, by name; or why there is none."""
    tokens = {"a": p.a.token, "b": p.b.token}
    if all(token in INTEGERS for token in tokens.values()):
        to = {name: {"int4": "int8", "uint4": "uint8"}.get(token, token) for name, token in tokens.items()}
    elif p.b.token in FLOAT16:
        return f"b is {p.b.token}; of a mixed product a has 16 bits"
    else:
        to = {"a": p.a.token if p.a.token in FLOAT16 else "bf16"}
        to["b"] = to["a"]
    operands: dict[str, _Operand] = {}
    for name, matrix, scales in (("a", p.a, p.scale_a), ("b", p.b, p.scale_b)):
        by_bytes = scales is not None and scales.token != "fp32"
        if tokens[name] == to[name] and not by_bytes:
            continue
        if by_bytes and ((tokens[name], to[name]) not in _SCALED or scales.rows != 1 or scales.depth not in (16, 32)):
            return f"{tokens[name]} times scales of {scales.token} is not {to[name]}"
        if by_bytes and to[name] == "fp16" and scales.token != "ue4m3":
            return f"scales of {scales.token} have a larger range than fp16"
        if not matrix.aligned or matrix.across:
            return f"rows of {name} must lie along k and begin at multiples of 16 bytes"
        operands[name] = _Operand(matrix, to[name], scales if by_bytes else None)
    if not operands:
        return "there is nothing to unpack"
    pitch, changed = -(-p.k // _EACH) * _EACH, {}
    for name, operand in operands.items():
        rows = _rows(p, name)
        changed[name] = Matrix(operand.token, pitch, group_pitch=rows * pitch if _groups(p, name) > 1 else 0)
        if operand.scales is not None:
            changed[f"scale_{name}"] = None
    product = p._replace(**changed)
    if p.global_scale:
        if p.global_scale > 1 or product.scale_a is not None:
            return "one global scale takes the place of scales of a"
        product = product._replace(scale_a=Scales(0, 0), global_scale=0)
    return product, operands


def _rows(p: Product, name: str) -> int:
    return p.m if name == "a" else 2 * p.n if p.gate is not None else p.n


def _groups(p: Product, name: str) -> int:
    """Return how many matrices an operand consists of."""
    g = p.groups
    return 1 if g is None or (name == "a" and g.kind != "masked") else g.count


def unsupported(product: Product, target: Target) -> str | None:
    """Return why this backend cannot compute a product on a target, or None."""
    p = product
    if "wgmma" not in target.features:
        return f"{target} has no wgmma"
    if p.groups is not None and p.groups.kind == "depth":
        return "groups of k are not unpacked"
    rows = p.m
    if p.groups is not None:
        rows = p.groups.expected or p.m if p.groups.kind == "masked" else p.m // max(p.groups.count, 1)
    threshold = INTEGER_ROWS if BYTES[p.b.token] < 1 and p.a.token in INTEGERS else FLOAT_ROWS
    if rows < threshold:
        return f"{rows} rows are not worth unpacking operands for; expected {threshold}"
    described = _unpacked(p)
    return described if isinstance(described, str) else sm90_plan.unsupported(described[0], target)


def steps(product: Product, device: int) -> Steps:
    """Return the launches of a product that ``unsupported`` does not refuse."""
    p = product
    unpacked, operands = _unpacked(p)
    names = {name: f"unpacked_{name}" for name in operands}
    if p.global_scale:
        names["scale_a"] = "global_scale"
    inner = sm90_plan.steps(unpacked, device, names=names)
    if not inner.steps:
        return inner
    first, scratch = [], {}
    for name, (codes, token, scales) in operands.items():
        rows, groups = _rows(p, name), _groups(p, name)
        pitch = getattr(unpacked, name).pitch
        scratch[names[name]] = Memory((groups * rows, pitch), _DTYPES[token])
        if scales is not None:
            code, numbers = _SCALED[codes.token, token], (
                scales.row_pitch, scales.depth_pitch, scales.group_pitch, scales.depth,
                _SCALE_TOKENS[scales.token] | (4 if scales.swizzled else 0),
            )  # fmt: skip
        else:
            code, numbers = "AnyByteCode" if BYTES[codes.token] == 1 else "AnyNibbleCode", (0, 0, 0, 0, 0)
        variant = (code, token, scales is not None)
        if token in INTEGERS:
            variant = (_INTEGERS[codes.token], "u8", False)
        blocks = -(-rows * (pitch // _EACH) // _THREADS)
        launch = UNPACK.bind(variant, device, (blocks, groups), _THREADS, overlap=True)
        first.append(
            Step(launch, name, f"scale_{name}" if scales is not None else 0, names[name], rows, p.k, codes.pitch,
                 codes.group_pitch if groups > 1 else 0, pitch, *numbers, _KINDS[codes.token])
        )  # fmt: skip
    return Steps(*first, *inner.steps, scratch={**scratch, **inner.scratch}, zeros=inner.zeros)


def summary(product: Product, target: Target) -> str:
    """Return what is unpacked, and the tile, for ``explain``."""
    unpacked, operands = _unpacked(product)
    told = " and ".join(f"{name} to {operand.token}" for name, operand in operands.items())
    return f"{told} first, then {sm90_plan.summary(unpacked, target)}"
