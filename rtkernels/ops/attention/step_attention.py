"""Attention of a decoding step in one launch: norm and rotation of heads, the new key into the cache, attention."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import decode_heads, reference
from rtkernels.ops.attention.checks import HALVES, check_factor
from rtkernels.ops.attention.mma_plan import ANY_TYPE
from rtkernels.runtime.launch.device import device_info, shared_limit
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, FLOAT_DTYPES, check_same
from rtkernels.runtime.operator.declared import Dense, InPlace, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

MAX_KEYS = 4096  # of the cache; for more, attention_decode spreads the keys over more blocks
_WIDTHS = (64, 128, 256)
# As in step_attention.cu.
_WARPS = 8
_ROWS = 16  # query heads of a cluster
_KEYS = 16  # of a warp at a time
_WHOLE, _INTERLEAVED, _CONSTANT = 1, 2, 4

_KERNEL = Kernel(
    "attention/step_attention.cu", "step_attention", template="T D", max_registers=255, needs=("cluster", "pdl"),
    tier="serve",
    args="qkv:ptr q_weight:ptr k_weight:ptr cosines:ptr sines:ptr positions:ptr slots:ptr lengths:ptr sinks:ptr "
    "k_cache:ptr v_cache:ptr out:ptr group_:i64 kv_heads:i64 rotary:i64 qkv_row:i64 angle_row:i64 angle_rows:i64 "
    "k_batch:i64 k_row:i64 k_head:i64 v_batch:i64 v_row:i64 v_head:i64 capacity:i64 stages_:i64 flags:i64 "
    "eps:f64 offset:f64 scale:f64 softcap:f64",
    variants=[(t, d) for t in ("bf16", "fp16") for d in _WIDTHS],
)  # fmt: skip


def _check(
    qkv, q_weight, k_weight, cos, sin, positions, slots, lengths, sinks, k_cache, v_cache, rotary, scale, softcap
) -> None:  # fmt: skip
    angles = cos, sin
    if positions is not None:
        if positions.dtype != torch.int64 or tuple(positions.shape) != tuple(qkv.shape[:1]):
            raise ArgumentError(
                f"positions is {positions.dtype} {tuple(positions.shape)}; expected int64 {tuple(qkv.shape[:1])}"
            )
        for name, table in (("cos", cos), ("sin", sin)):
            if table.dim() != 2 or not table.shape[0]:
                raise ArgumentError(f"{name} has shape {tuple(table.shape)}; expected a row for each position")
        angles = tuple(t._replace(shape=torch.Size((qkv.shape[0], t.shape[1]))) for t in angles)
        check_same("sin", tuple(sin.shape), tuple(cos.shape), "shape", of="cos")
    decode_heads.check(qkv, q_weight, k_weight, *angles, slots, k_cache, v_cache, rotary)
    if lengths.dtype != torch.int32 or tuple(lengths.shape) != tuple(slots.shape):
        raise ArgumentError(f"lengths is {lengths.dtype} {tuple(lengths.shape)}; expected int32 {tuple(slots.shape)}")
    q_heads, kv_heads = decode_heads.head_counts(qkv, k_cache)
    if not kv_heads or q_heads % kv_heads:
        raise ArgumentError(f"qkv has {q_heads} q heads, k_cache {kv_heads}; expected a multiple of those of k_cache")
    if sinks is not None:
        check_same("sinks", tuple(sinks.shape), (q_heads,), "shape", of="q heads")
    check_factor(scale)
    if not 0.0 <= softcap < float("inf"):
        raise ArgumentError(f"softcap is {softcap}; expected 0 (none) or a positive number")


def _shared(width: int, stages: int) -> int:
    return (
        _WARPS * stages * _KEYS * (4 * width + 80) + _ROWS * (2 * width + 64) + 4 * width
        + 4 * _ROWS * (width + 2 + 2 * _WARPS)
    )  # fmt: skip


def _blocks(pairs: int, sms: int) -> int:
    """Return the blocks that share the keys of a sequence and a key head: as many as run at the same time."""
    return next((blocks for blocks in (8, 4, 2) if pairs * blocks <= sms), 1)


def unsupported(q_heads: int, k_cache: Meta, v_cache: Meta, device: int) -> str | None:
    """Return why one launch cannot do a step over a cache ``[batch, rows, heads, width]``, None if it can."""
    batch, rows, kv_heads, width = k_cache.shape
    if width not in _WIDTHS or v_cache.shape[3] != width:
        return f"heads of {width} elements; expected {', '.join(map(str, _WIDTHS))}"
    if not 0 < rows <= MAX_KEYS:
        return f"a cache of {rows} keys; {MAX_KEYS} at the most"
    if max(batch, kv_heads) >= 1 << 16:
        return f"{batch} sequences of {kv_heads} heads; less than 65536 of each"
    if not kv_heads or not batch or q_heads // kv_heads > _ROWS:
        return f"{q_heads} heads of queries, {kv_heads} of keys; {_ROWS} for each of those at the most"
    for cache in (k_cache, v_cache):
        if cache.misaligned or cache.stride[3] != 1 or any(stride % 8 for stride in cache.stride[:3]):
            return "rows of the cache are not aligned to 16 bytes"
    info = device_info(device)
    if not _KERNEL.supports(info.target):
        return f"{info.target} has no clusters"
    return None


def _plan(qkv, q_weight, cos, sinks, k_cache, v_cache, rotary, interleaved, constant, scale, softcap, device):
    batch, rows, kv_heads, width = k_cache.shape
    q_heads, _ = decode_heads.head_counts(qkv, k_cache)
    if unsupported(q_heads, k_cache, v_cache, device) is not None:
        return IN_TORCH
    info = device_info(device)
    limit, blocks = shared_limit(info.target), _blocks(batch * kv_heads, info.sm_count)
    stages = 2 if rows > blocks * _WARPS * _KEYS and _shared(width, 2) <= limit else 1
    launch = _KERNEL.bind(
        (DTYPE_TOKEN[qkv.dtype], width), device, (blocks, kv_heads, batch), 32 * _WARPS, _shared(width, stages),
        overlap=True, cluster=blocks,
    )  # fmt: skip
    flags = _WHOLE * (cos.shape[1] == rotary) + _INTERLEAVED * interleaved + _CONSTANT * constant
    flags += ANY_TYPE[DTYPE_TOKEN[cos.dtype]] << 4
    flags += ANY_TYPE[DTYPE_TOKEN[q_weight.dtype]] << 8 if q_weight is not None else 0
    flags += ANY_TYPE[DTYPE_TOKEN[sinks.dtype]] << 12 if sinks is not None else 0
    numbers = (
        q_heads // kv_heads, kv_heads, rotary, qkv.row_stride if batch > 1 else 0, cos.shape[1], cos.shape[0],
        *k_cache.stride[:3], *v_cache.stride[:3], rows, stages, flags,
    )  # fmt: skip
    names = (
        "qkv", "q_weight", "k_weight", "cos", "sin", "positions", "slots", "lengths", "sinks", "k_cache", "v_cache",
        "out",
    )  # fmt: skip
    return Steps(Step(launch, *names, *numbers, "eps", "offset", scale, softcap))


def _reference(
    qkv, q_weight, k_weight, cos, sin, positions, slots, lengths, sinks, k_cache, v_cache, rotary, interleaved, eps,
    offset, scale, softcap,
) -> Tensor:  # fmt: skip
    if positions is not None:
        rows = positions.clamp(0, cos.shape[0] - 1)
        cos, sin = cos[rows], sin[rows]
    q = decode_heads.heads_reference(
        qkv, q_weight, k_weight, cos, sin, slots, k_cache, v_cache, rotary, interleaved, eps, offset
    )
    used = lengths.clamp(0, k_cache.shape[1])
    outside = torch.arange(k_cache.shape[1], dtype=torch.int64, device=qkv.device) >= used.view(-1, 1)
    k, v = (t.float().masked_fill(outside[:, :, None, None], 0.0) for t in (k_cache, v_cache))
    extra = None if sinks is None else sinks.float()
    out, _ = reference.forward(q.float()[:, None], k, v, extra, None, used, None, None, None, scale, -1, 0, softcap)
    return out.squeeze(1).to(qkv.dtype)


def _outputs(qkv, k_cache) -> tuple[Memory]:
    q_heads, _ = decode_heads.head_counts(qkv, k_cache)
    return (Memory((qkv.shape[0], q_heads, k_cache.shape[3]), qkv.dtype),)


FORWARD = Operator(
    "step_attention",
    (
        Rows("qkv", HALVES), Dense("q_weight", FLOAT_DTYPES, optional=True),
        Dense("k_weight", FLOAT_DTYPES, optional=True), Dense("cos", FLOAT_DTYPES), Dense("sin", FLOAT_DTYPES),
        Dense("positions", None, optional=True), Dense("slots", None), Dense("lengths", None),
        Dense("sinks", FLOAT_DTYPES, optional=True), InPlace("k_cache", None), InPlace("v_cache", None),
    ),
    options="int rotary, bool interleaved, bool constant, float eps, float offset, float scale, float softcap",
    numbers="eps offset", results="out", outputs=_outputs, plan=_plan, reference=_reference, check=_check,
    not_invariant=(1, "keys are shared by as many blocks as fill the GPU"),
)  # fmt: skip

OP = Op("step_attention", public=(), kernels=(_KERNEL,), torch_ops=(FORWARD,))
