"""The kernels of the router, the choice between them, their launches, and references in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.router import warp_rows
from rtkernels.ops.router.topk import largest, sort_key
from rtkernels.ops.router.warp_rows import KIND, OCTET, WARP_COLUMNS, check_k, check_rows
from rtkernels.ops.shared.experts import MAX_EXPERTS
from rtkernels.runtime.checks import check_same, check_shape, token
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, vector_bytes
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Step, Steps

SOFTMAX, SCORE_FIRST, RENORMALIZE = 1, 2, 4  # bits of `mode`
_WARPS = 8  # of a block
_MANY_WARPS = 32  # of a block, if there are rows for all of them
_WARPS_PER_SM = 32
_SMALL_WARPS = 16  # of a block of topk_router_small
_SMALL_BLOCKS_PER_SM = 2
_VECTOR = 4

_FWD = Kernel(
    "router/topk_router.cu", "router_fwd", template="V BLOCK_PER_ROW", max_registers=96,
    args="x:ptr bias:ptr probs:ptr indices:ptr dense:ptr map:ptr counts:ptr rows:i64 experts:i64 "
    "x_stride:i64 top_k:i64 number_kind:i64 whole_vectors:i64 modes:i64 number_of_groups:i64 top_groups:i64 "
    "of_group:i64 lanes_of_group:i64 scaling:f64 epsilon:f64",
    variants=[(2, False), (8, False), (8, True)],
)  # fmt: skip
_FWD_SMALL = Kernel(
    "router/topk_router_small.cu", "router_fwd_small", template="SIZE", max_registers=64,
    args="x:ptr bias:ptr probs:ptr indices:ptr dense:ptr map:ptr counts:ptr rows:i64 experts:i64 x_stride:i64 "
    "top_k:i64 number_kind:i64 modes:i64 scaling:f64 epsilon:f64",
    variants=[(2,), (4,)],
)  # fmt: skip
_BWD = Kernel(
    "router/topk_router_bwd.cu", "router_bwd", template="VEC", max_registers=64,
    args="x:ptr indices:ptr g_compact:ptr g_dense:ptr dx:ptr rows:i64 experts:i64 x_stride:i64 g_stride:i64 top_k:i64 "
    "number_kind:i64 whole_in:i64 whole_out:i64 modes:i64 scaling:f64 epsilon:f64",
    variants=[(_VECTOR,)],
)  # fmt: skip
KERNELS = (_FWD, _FWD_SMALL, _BWD)


def check(logits: Meta, bias: Meta | None, k: int, num_groups: int, top_groups: int, group_k: int) -> None:
    """Raise an ArgumentError for arguments that do not fit together."""
    check_rows("logits", logits, MAX_EXPERTS, "experts")
    experts = logits.shape[-1]
    check_k(k, experts)
    if bias is not None:
        token("bias", bias.dtype)
        check_shape("bias", bias.shape, (experts,), "one number for each expert")
    if num_groups < 1 or experts % num_groups:
        raise ArgumentError(f"num_groups is {num_groups}; expected a divisor of the {experts} experts")
    if not 1 <= top_groups <= num_groups:
        raise ArgumentError(f"top_groups is {top_groups}; expected 1 to num_groups ({num_groups})")
    size = experts // num_groups
    if k > top_groups * size:
        raise ArgumentError(f"k is {k}; expected at most {top_groups * size}, the experts of {top_groups} groups")
    if num_groups > 1 and not 1 <= group_k <= size:
        raise ArgumentError(f"group_k is {group_k}; expected 1 to {size}, the experts of a group")


def check_bwd(logits: Meta, indices: Meta, g_compact: Meta | None, g_dense: Meta | None) -> None:
    """Raise an ArgumentError for gradients that do not belong to the logits."""
    token("logits", logits.dtype)
    if indices.dtype != torch.int32:
        raise ArgumentError(f"indices has dtype {str(indices.dtype)[6:]}; expected int32")
    check_same("indices", indices.shape[:-1], logits.shape[:-1], "leading shape", of="logits")
    check_k(indices.shape[-1], logits.shape[-1])
    for name, g, like in (("the gradient of probs", g_compact, indices), ("that of dense_probs", g_dense, logits)):
        if g is not None:
            check_same(name, g.dtype, torch.float32, "dtype", of="probabilities")
            check_same(name, g.shape, like.shape, "shape", of="probabilities")


def _lanes_of_group(v: int, experts: int, num_groups: int, group_k: int) -> int:
    """Return how many lanes share a group of experts where groups are whole lanes, else 0: through shared memory."""
    size = experts // num_groups
    lanes = size // v
    return lanes if v == 8 and group_k <= 2 and size % v == 0 and lanes & (lanes - 1) == 0 else 0


def _round(n: int) -> int:
    return -(-n // 16) * 16


def plan_fwd(
    logits: Meta, bias: Meta | None, k: int, mode: int, num_groups: int, top_groups: int, group_k: int, scale: float,
    eps: float, dense: bool, routing_map: bool, device: int,
) -> Steps:  # fmt: skip
    rows, experts, stride = logits.rows, logits.shape[-1], logits.row_stride
    results = "probs", "indices", "dense_probs" if dense else 0, "chosen" if routing_map else 0, "counts"
    tensors, sizes, sms = ("logits", "bias", *results), (rows, experts, stride, k), device_info(device).sm_count
    if bias is None and num_groups == 1 and warp_rows.takes_octets(logits, k):
        warps = min(_SMALL_WARPS, -(-rows * OCTET // 32))
        grid = min(-(-rows * OCTET // (32 * warps)), _SMALL_BLOCKS_PER_SM * sms)
        launch = _FWD_SMALL.bind((logits.dtype.itemsize,), device, grid, 32 * warps)
        return Steps(Step(launch, *tensors, *sizes, KIND[logits.dtype], mode, scale, eps))
    several_warps, v = experts > WARP_COLUMNS, warp_rows.lane_columns(experts)
    lanes = 0 if several_warps or num_groups == 1 else _lanes_of_group(v, experts, num_groups, group_k)
    whole = warp_rows.whole_vectors(logits, v)
    if bias is not None:
        wanted = min(16, 4 * v)
        whole = whole and vector_bytes(bias.misaligned, limit=wanted) == wanted
    row_bytes = _round(5 * experts) if dense or routing_map else 0
    if num_groups > 1 and lanes == 0:
        row_bytes += _round(4 * (experts + num_groups) + num_groups)
    if several_warps:
        warps, rows_of_block = -(-experts // WARP_COLUMNS), 1
        grid = min(rows, max(_WARPS_PER_SM * sms // warps // 2, 1))
    else:
        # Blocks add their counts to the same few numbers, so large ones where there are rows for all of them; half
        # as large where rows have memory of their own (docs/decisions/moe.md).
        many = _MANY_WARPS // 2 if row_bytes else _MANY_WARPS
        warps = rows_of_block = many if rows > _WARPS_PER_SM * sms else _WARPS
        rounds = -(-rows // (_WARPS_PER_SM * sms))  # every warp gets the same number of rows
        grid = -(-rows // (warps * rounds))
    shared = _round(4 * experts) + rows_of_block * row_bytes
    launch = _FWD.bind((v, several_warps), device, min(grid, GRID_LIMIT), 32 * warps, shared)
    numbers = KIND[logits.dtype], int(whole), mode, num_groups, top_groups, group_k, lanes, scale, eps
    return Steps(Step(launch, *tensors, *sizes, *numbers))


def plan_bwd(
    logits: Meta, indices: Meta, g_dense: Meta | None, mode: int, scale: float, eps: float, device: int
) -> Steps:
    rows, experts, size = logits.rows, logits.shape[-1], logits.dtype.itemsize
    stride, vector = logits.row_stride, _VECTOR * size
    g_stride = 0 if g_dense is None else g_dense.row_stride
    whole_in = vector_bytes(logits.misaligned, stride * size, experts * size, limit=vector) == vector
    whole_out = vector_bytes(experts * size, limit=vector) == vector
    launch = _BWD.bind((_VECTOR,), device, min(-(-rows // _WARPS), GRID_LIMIT), 32 * _WARPS)
    numbers = indices.shape[-1], KIND[logits.dtype], int(whole_in), int(whole_out), mode, scale, eps
    tensors = "logits", "indices", "g_compact", "g_dense", "dx"
    return Steps(Step(launch, *tensors, rows, experts, stride, g_stride, *numbers))


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of the last dimension, 0 in rows that have nothing but -inf."""
    top = x.amax(-1, keepdim=True)
    e = (x - torch.where(top == -torch.inf, 0.0, top)).exp()
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total == 0, 1.0, total)


def _scores(x: Tensor, mode: int) -> Tensor:
    return softmax(x) if mode & SOFTMAX else torch.sigmoid(x)


def _allowed(key: Tensor, num_groups: int, top_groups: int, group_k: int) -> Tensor:
    """Return which experts are in the best groups."""
    grouped = key.unflatten(-1, (num_groups, -1))
    best = grouped.gather(-1, largest(sort_key(grouped), group_k))
    score = best[..., 0]
    for j in range(1, group_k):
        score = score + best[..., j]
    chosen = largest(sort_key(score), top_groups)
    mask = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, chosen, True)
    return mask.unsqueeze(-1).expand_as(grouped).flatten(-2)


def choose(x: Tensor, bias: Tensor | None, k: int, mode: int, num_groups: int, top_groups: int, group_k: int) -> Tensor:
    """Return the chosen experts of fp32 or wider logits."""
    if bias is None and num_groups == 1:
        return largest(sort_key(x), k)
    key = _scores(x, mode) if mode & SCORE_FIRST else x
    if bias is not None:
        key = key + bias.to(x.dtype)
    ordered = sort_key(key)
    if num_groups > 1:
        ordered = ordered.masked_fill(~_allowed(key, num_groups, top_groups, group_k), -(1 << 41))
    return largest(ordered, k)


def probabilities(x: Tensor, indices: Tensor, mode: int, scale: float, eps: float) -> Tensor:
    """Return the probabilities of the chosen experts, in the dtype of x."""
    if mode & SOFTMAX and not mode & SCORE_FIRST:
        return softmax(x.gather(-1, indices)) * scale
    s = _scores(x, mode).gather(-1, indices)
    return s / (s.sum(-1, keepdim=True) + eps) * scale if mode & RENORMALIZE else s * scale


def gradient(x: Tensor, indices: Tensor, g: Tensor, mode: int, scale: float, eps: float) -> Tensor:
    """Return the gradient of the logits from that of the compact probabilities, in the dtype of x."""
    dx = torch.zeros_like(x)
    if mode & SOFTMAX and not mode & SCORE_FIRST:
        s = softmax(x.gather(-1, indices))
        return dx.scatter_(-1, indices, scale * s * (g - (g * s).sum(-1, keepdim=True)))
    every = _scores(x, mode)
    s = every.gather(-1, indices)
    dot = (g * s).sum(-1, keepdim=True)
    z = s.sum(-1, keepdim=True) + eps
    ds = scale / z * (g - dot / z) if mode & RENORMALIZE else scale * g
    if not mode & SOFTMAX:
        return dx.scatter_(-1, indices, ds * s * (1 - s))
    common = scale * dot / z * (eps / z) if mode & RENORMALIZE else scale * dot
    return every * (dx.scatter_(-1, indices, ds) - common)
