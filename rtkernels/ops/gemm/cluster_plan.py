"""Products of up to 64 rows whose time is latency, not bandwidth: kernel record and launches.

A backend of ``product``: 16-bit operands, or e4m3 ones with scales of whole rows, from sm_90 on.
"""

from __future__ import annotations

from rtkernels.ops.gemm.product import BYTES, FLOAT16, Product
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.targets import Target

MAX_ROWS = 64

# As in gemm_cluster.cu.
_WARPS = 8  # of a block
_TILE_ROWS = 32  # weight rows of a tile
_PITCH = 36  # sums from row to row in shared memory
_STEP_BYTES = 64  # of k, of a warp's step
_MIN_STEPS = 2  # of a warp
_PARTS = (4, 2, 1)  # blocks of a cluster; 8 start later than they gain
_ROUND = 1.25  # most blocks per SM if tiles are shared
_TOKENS = (1, 2, 4)  # tiles of 16 rows of a
_TYPES = {"bf16": 0, "fp16": 1, "fp32": 2}
_ACTS = {None: 0, "relu": 1, "silu": 2, "gelu_tanh": 3, "gelu": 4}
_GATED, _ACCUMULATE, _HALF_VECTORS = 1, 2, 4

_CLUSTER = Kernel(
    "gemm/gemm_cluster.cu", "gemm_cluster", template="T TOKENS", max_registers=255, needs=("cluster", "pdl"),
    tier="serve",
    args="a:ptr b:ptr scale_a:ptr scale_b:ptr global_scale:ptr bias:ptr add:ptr out:ptr m:i64 n:i64 k_bytes:i64 "
    "a_pitch:i64 b_pitch:i64 out_pitch:i64 add_pitch:i64 scale_a_step:i64 scale_b_step:i64 global_step:i64 parts_:i64 "
    "flags:i64 types:i64",
    variants=[(token, tokens) for token in FLOAT16 for tokens in _TOKENS] + [("e4m3", 1), ("e4m3", 2)],
)  # fmt: skip
KERNELS = (_CLUSTER,)


def unsupported(product: Product, target: Target) -> str | None:
    """Return why this backend cannot compute a product, or None."""
    p = product
    if not _CLUSTER.supports(target):
        return f"{target} has no clusters of blocks"
    if p.groups is not None:
        return "no grouped products"
    rows = MAX_ROWS if p.a.token in FLOAT16 else MAX_ROWS // 2  # 8-bit operands need registers to become others
    if p.m > rows:
        return f"{p.m} rows of a; {rows} at the highest"
    if p.quantized is not None:
        return "no quantised results"
    if p.sums not in ("fp32", "fast"):  # no sums are less exact than those
        return f"no sums of kind {p.sums!r}"
    if p.a.token != p.b.token or p.a.token not in (*FLOAT16, "e4m3"):
        return f"no {p.a.token} and {p.b.token} operands"
    if p.a.across or p.b.across:
        return "rows of memory are those of the summed dimension"
    if not (_whole_vectors(p) or _half_vectors(p)):
        return "rows are no multiples of 16 bytes, or of 8 for operands of 8 bits"
    if p.k * BYTES[p.a.token] >= 1 << 24 or p.n >= 1 << 24:
        return "more steps than a launch counts"
    if p.out.token not in _TYPES:
        return f"no results of type {p.out.token}"
    for name, scales in (("a", p.scale_a), ("b", p.scale_b)):
        if scales is not None and not scales.of_rows(p.k):
            return f"scales of {name} for {scales.rows} x {scales.depth}"
    return None


def _whole_vectors(p: Product) -> bool:
    return p.a.aligned and p.b.aligned and p.k * BYTES[p.a.token] % 16 == 0


def _half_vectors(p: Product) -> bool:
    """Return True if rows are multiples of 8 bytes."""
    return all(x.aligned or x.halves for x in (p.a, p.b)) and BYTES[p.a.token] == 1 and p.k % 8 == 0


def parts_of(product: Product, sm_count: int) -> int:
    """Return how many blocks share a tile: as many as run at the same time and find something to do."""
    p = product
    tiles = -(-p.n // (_TILE_ROWS // 2 if p.gate else _TILE_ROWS))
    steps = -(-int(p.k * BYTES[p.a.token]) // _STEP_BYTES)
    return next((n for n in _PARTS if tiles * n <= _ROUND * sm_count and n * _WARPS * _MIN_STEPS <= steps), 1)


def _token_tiles(p: Product) -> int:
    return next(tiles for tiles in _TOKENS if 16 * tiles >= p.m)


def steps(product: Product, device: int) -> Steps:
    """Return the launch of a product that ``unsupported`` accepts."""
    p, info = product, device_info(device)
    if p.m == 0 or p.n == 0:
        return Steps()
    tokens, parts, size = _token_tiles(p), parts_of(p, info.sm_count), int(BYTES[p.a.token])
    tiles = -(-p.n // (_TILE_ROWS // 2 if p.gate else _TILE_ROWS))
    shared = 4 * (_WARPS * 16 * tokens * _PITCH + (parts > 1) * parts * -(-p.m // parts) * _TILE_ROWS)
    scale_steps = [s.row_pitch if s is not None and s.rows else 0 for s in (p.scale_a, p.scale_b)]
    types = _TYPES.get(p.bias, 0), _TYPES.get(p.add, 0), _TYPES[p.out.token], _ACTS[p.gate if p.gate else p.act]
    launch = _CLUSTER.bind(
        (p.a.token, tokens),
        device,
        tiles * parts,
        32 * _WARPS,
        shared,
        overlap=True,
        cluster=parts,
        ending=(
            p.m, p.n, p.k * size, p.a.pitch * size, p.b.pitch * size, p.out.pitch, p.add_pitch, *scale_steps,
            max(p.global_scale - 1, 0), parts,
            _GATED * (p.gate is not None) + _ACCUMULATE * p.accumulate + _HALF_VECTORS * (not _whole_vectors(p)),
            sum(value << 4 * i for i, value in enumerate(types)),
        ),
    )  # fmt: skip
    tensors = (
        "a", "b", "scale_a" if p.scale_a else 0, "scale_b" if p.scale_b else 0, "global_scale" if p.global_scale else 0,
        "bias" if p.bias else 0, "add" if p.add else 0, "out",
    )  # fmt: skip
    return Steps(Step(launch, *tensors))


def summary(product: Product, target: Target) -> str:
    """Return the tile of a product, for ``explain``."""
    return f"{_TILE_ROWS} weight rows x {product.m} tokens, k shared by the blocks of a cluster"
