"""Latent attention over chosen keys (DeepSeek sparse attention), of latents in 16 bits or in 656 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.checks import HALVES, Heads, check_factor, check_width
from rtkernels.ops.attention.decode_plan import COMBINE, combine, dense_strides, part_memory, split_count
from rtkernels.ops.attention.mla_decode import SM90_ROWS, SM90_SHARED, split_count_sm90
from rtkernels.ops.attention.options import default_scale
from rtkernels.ops.attention.sparse_mla_gradient import gradients
from rtkernels.runtime.call.public import public
from rtkernels.runtime.invariance import level, refuse
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, GRID_LIMIT, check_same
from rtkernels.runtime.operator.arguments import check_integer
from rtkernels.runtime.operator.autograd import applied, once_differentiable, refuse_gradients
from rtkernels.runtime.operator.declared import Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

# As in sparse_mla.cu.
_ROWS, _KEYS = 32, 32  # heads of a block, keys of a tile
_WIDTH, _VALUE = 576, 512  # of a latent with its rotated part, and of these what is a value, too
_CODED = 656  # bytes of a latent: codes, four scales, the rotated part
_SCORES = 2 * 4 * _KEYS // 8 * 32 * 16
_TILE = _KEYS * 2 * _WIDTH

KERNEL = Kernel(
    "attention/sparse_mla.cu", "sparse_mla", template="T CODED", max_registers=255, tier="serve",
    args="q:ptr cache:ptr indices:ptr positions:ptr sinks:ptr out:ptr lse:ptr parts:ptr part_lse:ptr tokens:i64 "
    "heads:i64 keys:i64 count:i64 d_qk:i64 d_v:i64 splits:i64 q_row:i64 q_head:i64 cache_row:i64 "
    "index_row:i64 scale:f64",
    variants=[(t, coded) for t in ("bf16", "fp16") for coded in (False, True)],
)  # fmt: skip

KERNEL_SM90 = Kernel(
    "attention/sparse_mla_sm90.cu", "sparse_mla_sm90", template="T CODED", max_registers=168, needs=("wgmma",),
    tier="serve",
    args="q:ptr cache:ptr indices:ptr positions:ptr sinks:ptr out:ptr lse:ptr parts:ptr part_lse:ptr tokens:i64 "
    "heads:i64 keys:i64 count:i64 d_qk:i64 d_v:i64 splits:i64 q_row:i64 q_head:i64 cache_row:i64 "
    "index_row:i64 scale:f64",
    variants=[(t, coded) for t in ("bf16", "fp16") for coded in (False, True)],
)  # fmt: skip


def _check(q: Meta, kv: Meta, indices: Meta, positions: Meta | None, sinks: Meta | None, value_width, scale) -> None:
    if q.dim() != 3:
        raise ArgumentError(f"q has shape {tuple(q.shape)}; expected [tokens, heads, width]")
    check_width("q", q, _WIDTH)
    if kv.dim() != 2:
        raise ArgumentError(f"kv has shape {tuple(kv.shape)}; expected [keys, width]")
    if kv.dtype == torch.uint8:
        check_same("kv", kv.shape[1], _CODED, "bytes of a latent", of="codes, scales and the rotated part")
        check_same("q", q.shape[2], _WIDTH, "width", of="a latent of 656 bytes")
    else:
        check_same("kv", kv.dtype, q.dtype, "dtype", of="q, unless it is uint8")
        check_same("kv", kv.shape[1], q.shape[2], "width", of="q")
    if indices.dtype != torch.int32 or indices.dim() != 2 or indices.shape[0] != q.shape[0]:
        raise ArgumentError(
            f"indices is {indices.dtype} {tuple(indices.shape)}; expected int32 [{q.shape[0]}, keys of a token]"
        )
    if positions is not None and (positions.dtype != torch.int32 or tuple(positions.shape) != (q.shape[0],)):
        raise ArgumentError(f"positions is {positions.dtype} {tuple(positions.shape)}; expected int32 [{q.shape[0]}]")
    if sinks is not None:
        check_same("sinks", tuple(sinks.shape), (q.shape[1],), "shape", of="the heads of q")
    if not 8 <= value_width <= min(_VALUE, q.shape[2]) or value_width % 8:
        raise ArgumentError(f"value_width is {value_width}; expected a multiple of 8 to {min(_VALUE, q.shape[2])}")
    check_factor(scale)
    if q.shape[0] * -(-q.shape[1] // _ROWS) > GRID_LIMIT:
        raise ArgumentError(f"q has shape {tuple(q.shape)}; expected up to 2^31 blocks of 32 heads")


def _outputs(q: Meta, value_width: int) -> tuple[Memory, Memory]:
    return Memory((*q.shape[:-1], value_width), q.dtype), Memory(tuple(q.shape[:-1]), torch.float32)


def _stride(meta: Meta, dim: int) -> int:
    return 0 if meta.shape[dim] <= 1 else meta.stride[dim]


def _plan(q: Meta, kv: Meta, indices: Meta, positions, sinks, value_width: int, scale: float, device: int) -> Steps:
    (tokens, heads, width), token, coded = q.shape, DTYPE_TOKEN[q.dtype], kv.dtype == torch.uint8
    info, count, rows = device_info(device), indices.shape[1], tokens * heads
    if "wgmma" in info.target.features:
        blocks, threads, shared = tokens * -(-heads // SM90_ROWS), 384, SM90_SHARED
        splits = 1 if level() else split_count_sm90(blocks, rows, count, info.sm_count)
        kernel = KERNEL_SM90
    else:
        blocks, threads = tokens * -(-heads // _ROWS), 256
        splits = 1 if level() else split_count(blocks, count, info.sm_count)
        kernel, shared = KERNEL, _SCORES + (_TILE + 2 * _KEYS * _CODED if coded else 2 * _TILE)
    scratch = part_memory(splits, rows, value_width)
    parts, sink = ("parts", "part_lse") if scratch else (0, 0), 0 if sinks is None else "sinks"
    step = Step(
        kernel.bind((token, coded), device, (blocks, splits), threads, shared),
        *("q", "kv", "indices", 0 if positions is None else "positions", sink, "out", "lse", *parts, tokens, heads),
        *(kv.shape[0], count, width, value_width, splits, _stride(q, 0), _stride(q, 1)),
        *(_stride(kv, 0) * (1 if coded else 2), count, scale),
    )
    sizes = (tokens, 1, heads, value_width)
    merge = [combine(token, sink, sizes, splits, dense_strides(1, heads, value_width), device)] if scratch else []
    return Steps(step, *merge, scratch=scratch)


def decoded(kv: Tensor) -> Tensor:
    """Return latents of 656 bytes as float32 [keys, 576]."""
    codes = kv[:, :_VALUE].contiguous().view(torch.float8_e4m3fn).float()
    scales = kv[:, _VALUE : _VALUE + 16].contiguous().view(torch.float32)
    rotated = kv[:, _VALUE + 16 :].contiguous().view(torch.bfloat16).float()
    return torch.cat(((codes.unflatten(1, (4, 128)) * scales.unsqueeze(-1)).flatten(1), rotated), 1)


def _reference(q, kv, indices, positions, sinks, value_width, scale):
    dtype = torch.promote_types(q.dtype, torch.float32)
    latents = decoded(kv) if kv.dtype == torch.uint8 else kv.to(dtype)
    last = latents.shape[0] - 1
    limit = torch.full((q.shape[0], 1), last, dtype=torch.int64, device=q.device)
    if positions is not None:
        limit = limit.minimum(positions.unsqueeze(1).long())
    counts = (indices >= 0) & (indices <= limit)
    out = q.new_zeros((*q.shape[:-1], value_width))
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    for t in range(q.shape[0]):
        rows = latents[indices[t][counts[t]].long()]
        scores = scale * (q[t].to(dtype) @ rows.mT)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(dtype).unsqueeze(1)), 1)
        lse[t] = scores.logsumexp(1)
        weights = torch.exp(scores - lse[t].to(dtype).unsqueeze(1))[:, : rows.shape[0]]
        out[t] = (weights @ rows[:, :value_width]).to(q.dtype)
    return out, lse


FORWARD = Operator(
    "sparse_mla_fwd",
    (
        Heads("q", HALVES), Heads("kv", None), Dense("indices", None),
        Dense("positions", None, optional=True), Dense("sinks", (torch.float32,), optional=True),
    ),
    options="int value_width, float scale", results="out lse", outputs=_outputs, plan=_plan, reference=_reference,
    check=_check,
)  # fmt: skip


class _SparseMla(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, indices, positions, sinks, value_width, scale):
        ctx.set_materialize_grads(False)
        out, lse = FORWARD.call(q, kv, indices, positions, sinks, value_width, scale)
        ctx.save_for_backward(q, kv, indices, positions, sinks, lse)
        ctx.options = value_width, scale
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 7
        dq, dkv, dsinks = gradients(dout, dlse, *ctx.saved_tensors, *ctx.options)
        need = ctx.needs_input_grad
        return dq if need[0] else None, dkv if need[1] else None, None, None, dsinks, None, None


_differentiable = applied(_SparseMla)


@public
def sparse_mla(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float | None = None, value_width: int = 512,
    positions: Tensor | None = None, sinks: Tensor | None = None, return_lse: bool = False,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return latent attention of each token over the keys that its indices choose (DeepSeek sparse attention).

    The absorbed form, as in ``mla_decode``: a latent is the key of all heads, and its first columns are the value. For
    prompts and for decoding alike; indices are rows of `kv`, which may be all pages of a cache. Differentiable in q, kv
    of 16 bits and sinks, also through the log-sum-exp; deterministic. The backward pass gathers the latents of some
    tokens at a time and multiplies in fp32 with torch's products, which is several times slower than the forward.

    Args:
        q: bfloat16 or float16 [tokens, heads, width]; width up to 576, a multiple of 8.
        kv: [keys, width] in q's dtype. Or uint8 [keys, 656]: 512 e4m3 codes of a latent, four float32 scales, one for
            128 codes each, and 64 bfloat16 columns, for a width of 576.
        indices: int32 [tokens, count]. Entries that are negative or not below the number of keys are ignored. A key
            that is listed twice counts twice.
        scale: Factor of the scores. Default: ``1 / sqrt(width)``. Models usually need the scale of the expanded heads
            instead, ``1 / sqrt(192)`` for DeepSeek.
        value_width: Number of columns, from the first one of a latent, that are the value; up to 512.
        positions: int32 [tokens]: a token ignores indices greater than its position. Default: none is ignored.
        sinks: float32 [heads]: a score of each head that takes part in its softmax, without a value.
        return_lse: Also return the log-sum-exp (natural, with the sink) of the scores.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        [tokens, heads, value_width] in q's dtype, 0 where no key counts; with return_lse a pair of it and lse, float32
        [tokens, heads], -inf there.
    """
    values = (q, kv, indices, positions, sinks, check_integer("value_width", value_width), default_scale(scale, q))
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, kv, sinks))
    if differentiated and kv.dtype == torch.uint8:
        refuse_gradients("sparse_mla of latents of 656 bytes", (q, sinks))
    if differentiated and level():
        refuse("the gradient of sparse_mla", "torch's products choose their order of sums by the number of tokens")
    result, lse = _differentiable(*values) if differentiated else FORWARD.call(*values)
    return (result, lse) if return_lse else result


OP = Op(
    "sparse_mla", public=("sparse_mla",), kernels=(KERNEL, KERNEL_SM90, COMBINE), torch_ops=(FORWARD,),
    uses=("embedding",),
)  # fmt: skip
