"""Matrix products on sm_100a with tcgen05: kernel record and launches. Compiled and emulated, never run on a GPU.

A backend of ``product`` that callers must ask for by name. Operands of 16 bits, e4m3 and e5m2 with scales of whole rows
or tensors, MXFP8 and NVFP4 with scales in blocks of 128 x 4.
"""

from __future__ import annotations

from rtkernels.ops.gemm.product import FLOAT16, FP8, Product
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Boxes, Step, Steps, box_strides
from rtkernels.runtime.targets import Target

# As in gemm_tcgen05.cu.
_ROWS = 128  # of a tile
_F16, _FP8, _MXFP8, _NVFP4 = range(4)
_TILES = {_F16: (256, 4), _FP8: (256, 4), _MXFP8: (128, 6), _NVFP4: (128, 5)}  # columns and stages
_STAGED_BYTES = 128 * 33 * 4  # of sums between tensor memory and results
_SCALE_BYTES = {_MXFP8: 1024, _NVFP4: 4096}  # of a stage
_STEP = {_MXFP8: 32, _NVFP4: 64}  # elements of k of one product
_TYPES = {"bf16": 0, "fp16": 1, "fp32": 2}
_ACTS = {None: 0, "relu": 1, "silu": 2, "gelu_tanh": 3, "gelu": 4}
_BLOCK_FORMATS = {("e4m3", "e8m0", 32): _MXFP8, ("e2m1", "ue4m3", 16): _NVFP4}

_KERNEL = Kernel(
    "gemm/gemm_tcgen05.cu", "gemm_tcgen05", template="T KIND COLS STAGES", max_registers=255, needs=("tcgen05",),
    args="a_map:tmap b_map:tmap block_scale_a:ptr block_scale_b:ptr scale_a:ptr scale_b:ptr global_scale:ptr bias:ptr "
    "add:ptr out:ptr m:i64 n:i64 k:i64 out_pitch:i64 add_pitch:i64 scale_a_step:i64 scale_b_step:i64 flags:i64 "
    "types:i64",
    variants=[
        *((token, _F16, *_TILES[_F16]) for token in FLOAT16), *((token, _FP8, *_TILES[_FP8]) for token in FP8),
        ("e4m3", _MXFP8, *_TILES[_MXFP8]), ("E2m1Pair", _NVFP4, *_TILES[_NVFP4]),
    ],
)  # fmt: skip
KERNELS = (_KERNEL,)


def unsupported(product: Product, target: Target) -> str | None:
    """Return why this backend cannot compute a product on a target, or None."""
    p = product
    if not _KERNEL.supports(target):
        return f"{target} has no tcgen05"
    if p.groups is not None or p.gate is not None or p.quantized is not None:
        return "no grouped, gated or quantised products"
    if p.a.token != p.b.token or p.a.token not in (*FLOAT16, *FP8, "e2m1"):
        return f"no {p.a.token} and {p.b.token} operands"
    if p.a.across or p.b.across or not (p.a.aligned and p.b.aligned):
        return "operands have rows of k whose address and distance are multiples of 16 bytes"
    if p.k == 0 or p.sums not in ("fp32", "fast") or p.out.token not in _TYPES:
        return "sums are fp32, of at least one product, and results bf16, fp16 or fp32"
    kind = _kind(p)
    if kind is None:
        return "scales are those of tensors or rows, or those of MXFP8 and NVFP4 in blocks of 128 x 4"
    if kind in _STEP and p.k % _STEP[kind]:
        return f"k is {p.k}, no multiple of {_STEP[kind]}"
    return None


def _kind(p: Product) -> int | None:
    """Return the kind of product, None if there is none for these scales."""
    scales = p.scale_a, p.scale_b
    if all(s is None or s.of_rows(p.k) for s in scales):
        return _F16 if p.a.token in FLOAT16 else _FP8 if p.a.token in FP8 else None
    if any(s is None or not s.swizzled or s.rows != 1 or not s.aligned for s in scales):
        return None
    kinds = {_BLOCK_FORMATS.get((p.a.token, s.token, s.depth)) for s in scales}
    return kinds.pop() if len(kinds) == 1 else None


def _operand(name: str, token: str, pitch: int, rows: int, k: int, box_rows: int) -> Boxes:
    """Boxes of 128 bytes of k; two 4-bit codes are a byte."""
    size = 2 if token in FLOAT16 else 1
    columns, step = (k // 2, pitch // 2) if token == "e2m1" else (k, pitch)
    sizes = (columns, rows)
    return Boxes(
        name, token if token in FLOAT16 else "byte", sizes, box_strides(sizes, (step,), size), (128 // size, box_rows)
    )


def steps(product: Product, device: int) -> Steps:
    """Return the launch of a product that ``unsupported`` accepts."""
    p = product
    if p.m == 0 or p.n == 0:
        return Steps()
    kind = _kind(p)
    columns, stages = _TILES[kind]
    tiles = -(-p.m // _ROWS) * -(-p.n // columns)
    stage = (_ROWS + columns) * 128 + _SCALE_BYTES.get(kind, 0)
    launch = _KERNEL.bind(
        ("E2m1Pair" if p.a.token == "e2m1" else p.a.token, kind, columns, stages),
        device, min(tiles, device_info(device).sm_count), 192, 1024 + stages * (stage + 16) + 48 + _STAGED_BYTES,
    )  # fmt: skip
    in_blocks = kind in _STEP
    types = _TYPES.get(p.bias, 0), _TYPES.get(p.add, 0), _TYPES[p.out.token], _ACTS[p.act]
    scale_steps = [0 if in_blocks or s is None or not s.rows else s.row_pitch for s in (p.scale_a, p.scale_b)]
    scales = ["scale_a" if p.scale_a else 0, "scale_b" if p.scale_b else 0]
    return Steps(
        Step(
            launch, _operand("a", p.a.token, p.a.pitch, p.m, p.k, _ROWS),
            _operand("b", p.b.token, p.b.pitch, p.n, p.k, columns),
            *(scales if in_blocks else (0, 0)), *((0, 0) if in_blocks else scales),
            "global_scale" if p.global_scale else 0, "bias" if p.bias else 0, "add" if p.add else 0, "out", p.m, p.n,
            p.k, p.out.pitch, p.add_pitch, *scale_steps, int(p.accumulate),
            sum(value << 4 * i for i, value in enumerate(types)),
        )
    )  # fmt: skip


def summary(product: Product, target: Target) -> str:
    """Return the tile of a product, for ``explain``."""
    columns, stages = _TILES[_kind(product)]
    return f"{_ROWS} x {columns}, {stages} stages, sums in tensor memory; never run on a GPU"
