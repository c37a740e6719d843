"""Merging parts of an attention by their log-sum-exps: context parallelism, cascades, split keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.checks import LAYOUT
from rtkernels.ops.attention.mma_plan import ANY_TYPE
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import FLOAT_DTYPES, check_dtype
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, GRID_LIMIT, check_same
from rtkernels.runtime.operator.autograd import applied, once_differentiable
from rtkernels.runtime.operator.declared import Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_WARPS = 8
_NUMBERS = "rows:i64 length:i64 heads:i64 width:i64 type_a:i64 type_b:i64 type_out:i64"
_FWD = Kernel(
    "attention/merge.cu", "attention_merge_fwd", template="WARPS", max_registers=64,
    args=f"a:ptr lse_a:ptr b:ptr lse_b:ptr out:ptr lse:ptr {_NUMBERS}", variants=[(_WARPS,)],
)  # fmt: skip
_BWD = Kernel(
    "attention/merge.cu", "attention_merge_bwd", template="WARPS", max_registers=64,
    args=f"dout:ptr dlse:ptr a:ptr lse_a:ptr b:ptr lse_b:ptr da:ptr dlse_a:ptr db:ptr dlse_b:ptr {_NUMBERS}",
    variants=[(_WARPS,)],
)  # fmt: skip
_FLOAT32 = torch.float32


def _check(a: Meta, lse_a: Meta, b: Meta, lse_b: Meta) -> None:
    if a.dim() != 4:
        raise ArgumentError(f"a part has shape {tuple(a.shape)}; expected [batch, length, heads, width]")
    check_same("b", tuple(b.shape), tuple(a.shape), "shape", of="a")
    batch, length, heads, _ = a.shape
    for name, meta in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tuple(meta.shape) != (batch, heads, length):
            raise ArgumentError(
                f"{name} has shape {tuple(meta.shape)}; expected {(batch, heads, length)}, that of its part"
            )
    if batch * length * heads > GRID_LIMIT:
        raise ArgumentError(f"parts have {batch * length * heads} rows; expected fewer than 2^31")


def _numbers(a: Meta, b: Meta, out: torch.dtype) -> tuple[int, ...]:
    batch, length, heads, width = a.shape
    types = (ANY_TYPE[DTYPE_TOKEN[dtype]] for dtype in (a.dtype, b.dtype, out))
    return batch * length * heads, length, heads, width, *types


def _plan(a: Meta, b: Meta, fp32: bool, device: int) -> Steps:
    numbers = _numbers(a, b, _FLOAT32 if fp32 else a.dtype)
    grid = -(-numbers[0] // _WARPS)
    return Steps(
        Step(_FWD.bind((_WARPS,), device, grid, 32 * _WARPS), *("a", "lse_a", "b", "lse_b", "out", "lse"), *numbers)
    )


def _plan_backward(dout: Meta, a: Meta, b: Meta, device: int) -> Steps:
    numbers = _numbers(a, b, dout.dtype)
    names = ("dout", "dlse", "a", "lse_a", "b", "lse_b", "da", "dlse_a", "db", "dlse_b")
    return Steps(Step(_BWD.bind((_WARPS,), device, -(-numbers[0] // _WARPS), 32 * _WARPS), *names, *numbers))


def _weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return both weights, [batch, length, heads, 1], and the lse of all."""
    lse = torch.logaddexp(lse_a, lse_b)
    shift = lse.masked_fill(lse == float("-inf"), 0.0)
    weights = (torch.exp(part - shift).transpose(1, 2).unsqueeze(-1) for part in (lse_a, lse_b))
    return *weights, lse


def _weighted(weight: Tensor, part: Tensor) -> Tensor:
    return torch.where(weight == 0.0, 0.0, weight * part.float())


def _reference(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor, fp32: bool) -> tuple[Tensor, Tensor]:
    weight_a, weight_b, lse = _weights(lse_a, lse_b)
    out = _weighted(weight_a, a) + _weighted(weight_b, b)
    return out.to(_FLOAT32 if fp32 else a.dtype).contiguous(), lse.contiguous()


def _reference_backward(dout, dlse, a, lse_a, b, lse_b):
    weight_a, weight_b, _ = _weights(lse_a, lse_b)
    g = dout.float()
    rest = -(g * (_weighted(weight_a, a) + _weighted(weight_b, b))).sum(-1)
    if dlse is not None:
        rest = rest + dlse.transpose(1, 2)
    results: list[Tensor] = []
    for weight, part in ((weight_a, a), (weight_b, b)):
        results.append((g * weight).to(part.dtype).contiguous())
        dot = (g * torch.where(weight == 0.0, 0.0, part.float())).sum(-1)
        results.append((weight.squeeze(-1) * (dot + rest)).transpose(1, 2).contiguous())
    return tuple(results)


_PARTS = (Dense("a"), Dense("lse_a", (_FLOAT32,)), Dense("b"), Dense("lse_b", (_FLOAT32,)))
FORWARD = Operator(
    "attention_merge_fwd",
    _PARTS,
    options="bool fp32",
    results="out lse",
    outputs=lambda a, lse_a, fp32: (
        Memory(tuple(a.shape), _FLOAT32 if fp32 else a.dtype), Memory(tuple(lse_a.shape), _FLOAT32)
    ),
    plan=_plan,
    reference=_reference,
    check=_check,
)  # fmt: skip
BACKWARD = Operator(
    "attention_merge_bwd", (Dense("dout"), Dense("dlse", (_FLOAT32,), optional=True), *_PARTS),
    results="da dlse_a db dlse_b",
    outputs=lambda a, lse_a, b, lse_b: tuple(Memory(tuple(t.shape), t.dtype) for t in (a, lse_a, b, lse_b)),
    plan=_plan_backward, reference=_reference_backward, check=_check,
)  # fmt: skip


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, lse_a, b, lse_b, fp32):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, lse_a, b, lse_b)
        return FORWARD.call(a, lse_a, b, lse_b, fp32)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 5
        a, lse_a, b, lse_b = ctx.saved_tensors
        if dout is None:
            dout = a.new_zeros(a.shape)
        grads = BACKWARD.call(dout, dlse, a, lse_a, b, lse_b)
        return *[grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)], None


_merge = applied(_Merge)


@public(options={"layout": LAYOUT})
def merge_attention(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, out_dtype: torch.dtype | None = None, layout: str = "blhd",
    out: tuple[Tensor | None, ...] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Merge attentions over parts of the keys into the attention over all keys, using their log-sum-exps.

    Merges from left to right in fp32. Differentiable in all parts. A part without keys (lse ``-inf``) is ignored. Pass
    sinks to one part only.

    Args:
        outs: Results of ``attention(..., return_lse=True)`` for the same queries: bfloat16, float16 or float32, in
            `layout`, or [tokens, heads, width] for packed sequences.
        lses: One per part, float32 [batch, heads, queries] or [heads, tokens].
        out_dtype: Dtype of the result: float32, for further merges, or by default that of the first part.
        layout: Layout of all parts: "blhd" or "bhld".
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        The merged output and its lse, with the shapes of the first part.
    """
    lists = isinstance(outs, Sequence) and isinstance(lses, Sequence) and 0 < len(outs) == len(lses)
    if not lists or not all(isinstance(t, Tensor) for t in (*outs, *lses)):
        raise ArgumentError("outs and lses are not sequences of equally many tensors; expected at least one of each")
    first, shape, lse_shape = outs[0], outs[0].shape, lses[0].shape
    if out_dtype not in (None, first.dtype, _FLOAT32):
        raise ArgumentError(f"out_dtype is {out_dtype}; expected {first.dtype} or float32")
    _check_alike("outs", outs, FLOAT_DTYPES)
    _check_alike("lses", lses, (_FLOAT32,))
    if first.dim() == 3:
        rows = lambda out: out.unsqueeze(0)  # noqa: E731
        logs = lambda lse: lse.unsqueeze(0)  # noqa: E731
    elif layout == "bhld" and first.dim() == 4:  # rows are in the order of lse
        rows = lambda out: out.reshape(1, -1, 1, shape[-1])  # noqa: E731
        logs = lambda lse: lse.reshape(1, 1, -1)  # noqa: E731
    else:
        rows = logs = lambda t: t
    merged, log_sum = rows(first), logs(lses[0])
    last = len(outs) - 1
    for i in range(1, len(outs)):
        wants_fp32 = i < last or (out_dtype or first.dtype) == _FLOAT32
        parts = (merged, log_sum, rows(outs[i]), logs(lses[i]))
        merged, log_sum = _run(parts, wants_fp32)
    merged = merged.to(out_dtype or first.dtype)
    return merged.reshape(shape), log_sum.reshape(lse_shape)


def _check_alike(name: str, parts: Sequence[Tensor], dtypes: tuple[torch.dtype, ...]) -> None:
    for t in parts:
        check_dtype(name, t.dtype, dtypes)
        check_same(name, tuple(t.shape), tuple(parts[0].shape), "shape", of="the first")


def _run(parts: tuple[Tensor, ...], fp32: bool) -> Any:
    if torch.is_grad_enabled() and any(t.requires_grad for t in parts):
        return _merge(*parts, fp32)
    return FORWARD.call(*parts, fp32)


OP = Op("merge", public=("merge_attention",), kernels=(_FWD, _BWD), torch_ops=(FORWARD, BACKWARD))
