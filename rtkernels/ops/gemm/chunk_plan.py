"""Linear layers of 9 to 16 tokens whose time is latency, with a norm in front: kernel record and launches.

``decode_linear`` uses them; ``decode_plan`` has the kernel for fewer tokens and other types.
"""

from __future__ import annotations

from rtkernels.ops.gemm.product import BYTES, Product
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.targets import Target

MIN_ROWS, MAX_ROWS = 9, 16  # 50 rows in tiles of 64 take longer than norms and products of their own

# As in gemm_chunk.cu.
_WARPS = 8  # of a block
_TILE_ROWS = 32  # weight rows of a tile
_PITCH = 36  # sums from row to row in shared memory
_STEP_BYTES = 64  # of a row of weights, of a warp's step
_PARTS = (4, 2, 1)  # blocks of a cluster
_ROUND = 1.25  # most blocks per SM if tiles are shared
_TOKENS = (1,)  # tiles of 16 rows
_TYPES = {"bf16": 0, "fp16": 1, "fp32": 2}
_ACTS = {None: 0, "relu": 1, "silu": 2, "gelu_tanh": 3, "gelu": 4}
_GATED, _CONSTANT, _NORM = 1, 2, 4

_KERNEL = Kernel(
    "gemm/gemm_chunk.cu", "gemm_chunk", template="Codes TOKENS", max_registers=128, needs=("cluster", "pdl"),
    tier="serve",
    args="x:ptr weight:ptr scale:ptr bias:ptr residual:ptr gain:ptr out:ptr m:i64 n:i64 k:i64 x_pitch:i64 "
    "weight_pitch:i64 out_pitch:i64 residual_pitch:i64 scale_step:i64 parts_:i64 flags:i64 types:i64 eps:f64 "
    "offset:f64 factor:f64",
    variants=[(codes, tokens) for codes in ("bf16", "e4m3") for tokens in _TOKENS],
)  # fmt: skip
KERNELS = (_KERNEL,)


def unsupported(product: Product, target: Target) -> str | None:
    """Return why this kernel cannot compute a product (whose `add` is added last), or None."""
    p, s = product, product.scale_b
    if not _KERNEL.supports(target):
        return f"{target} has no clusters of blocks"
    if not MIN_ROWS <= p.m <= MAX_ROWS:
        return f"{p.m} rows of a; expected {MIN_ROWS} to {MAX_ROWS}"
    if p.a.token != "bf16" or p.b.token not in ("bf16", "e4m3") or p.out.token != "bf16":
        return f"no {p.a.token} activations with {p.b.token} weights"
    if p.a.across or p.b.across or not (p.a.aligned and p.b.aligned) or p.k * BYTES[p.b.token] % 16:
        return "rows are no multiples of 16 bytes"
    if p.global_scale:
        return "no global scales"
    if s is not None and (s.token != "fp32" or s.swizzled or s.rows not in (0, 1) or 0 < s.depth < p.k):
        return f"scales of b for {s.rows} x {s.depth}"
    return None if 0 < p.k < 1 << 22 and p.n < 1 << 24 else "more steps than a launch counts"


def _parts_of(p: Product, sm_count: int) -> int:
    """Return how many blocks share a tile: as many as run at the same time and find something to do."""
    tiles = -(-p.n // (_TILE_ROWS // 2 if p.gate else _TILE_ROWS))
    steps = -(-int(p.k * BYTES[p.b.token]) // _STEP_BYTES)
    return next((n for n in _PARTS if tiles * n <= _ROUND * sm_count and n * _WARPS <= steps), 1)


def launches(product: Product, device: int, norm: bool, constant: bool) -> Steps:
    """Return the launch of a product that ``unsupported`` accepts; the call has ``eps``, ``offset`` and ``factor``."""
    p, info = product, device_info(device)
    if p.n == 0:
        return Steps()
    tokens, parts, size = next(t for t in _TOKENS if 16 * t >= p.m), _parts_of(p, info.sm_count), BYTES[p.b.token]
    tiles = -(-p.n // (_TILE_ROWS // 2 if p.gate else _TILE_ROWS))
    shared = 4 * (_WARPS * 16 * tokens * _PITCH + (parts > 1) * parts * -(-p.m // parts) * (_TILE_ROWS + 1))
    types = _TYPES.get(p.bias, 0), _TYPES.get(p.add, 0), _ACTS[p.gate or p.act]
    launch = _KERNEL.bind(
        (p.b.token, tokens), device, tiles * parts, 32 * _WARPS, shared, overlap=True, cluster=parts
    )  # fmt: skip
    numbers = (
        p.m, p.n, p.k, 2 * p.a.pitch, int(p.b.pitch * size), p.out.pitch, p.add_pitch,
        p.scale_b.row_pitch if p.scale_b and p.scale_b.rows else 0, parts,
        _GATED * (p.gate is not None) + _CONSTANT * constant + _NORM * norm,
        sum(value << 4 * i for i, value in enumerate(types)),
    )  # fmt: skip
    return Steps(
        Step(
            launch, "a", "b", "scale_b" if p.scale_b else 0, "bias" if p.bias else 0, "add" if p.add else 0,
            "norm_weight" if norm else 0, "out", *numbers, "eps", "offset", "factor",
        )
    )  # fmt: skip
