"""Torch's linear layers and embeddings at level 3 of batch invariance, for parameters that have a ``main_grad``.

Autograd would compute a gradient of each micro-batch and add it to the sum so far, in an order that depends on the
micro-batches. Here the sum so far starts the accumulators. Registered in place of torch's autograd kernels at the first
level 3; parameters without a ``main_grad``, and other levels, take torch's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.registration import Lasting, torch_kernel
from rtkernels.runtime.layout import as_rows
from rtkernels.runtime.operator.autograd import once_differentiable
from rtkernels.runtime.operator.main_grad import Start, start_of


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, starts):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias)
        ctx.starts = starts
        return torch.ops.aten.linear.default.decompose(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        from rtkernels.ops.shared.block_sum import weight_gradient

        if dy is None:
            return None, None, None, None
        x, weight, bias = ctx.saved_tensors
        rows, states = as_rows(dy), as_rows(x)
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dx = torch.mm(rows, weight).reshape(x.shape) if need_x else None
        dweight = _weight_gradient(ctx.starts[0], rows, states) if need_weight else None
        dbias = weight_gradient(ctx.starts[1], bias, rows) if need_bias else None
        return dx, dweight, dbias, None


def _weight_gradient(start: Start | None, rows: Tensor, states: Tensor) -> Tensor | None:
    from rtkernels.ops.gemm.weight_gradient import add_product_

    if start is None:
        return torch.mm(rows.t(), states)
    add_product_(start.total, rows, states)
    return start.added()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.is_grad_enabled() and weight.dim() == 2 and x.dim() > 0:
        starts = start_of(weight, "a linear layer"), start_of(bias, "a linear layer")
        if any(start is not None for start in starts):
            return _Linear.apply(x, weight, bias, starts)
    return torch.ops.aten.linear.default.decompose(x, weight, bias)


def _embedding(
    native: Any, weight: Tensor, ids: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:  # fmt: skip
    plain = not (scale_grad_by_freq or sparse) and torch.is_grad_enabled() and weight.dim() == 2
    if plain and (start := start_of(weight, "an embedding")) is not None:
        from rtkernels.ops.index.embedding import looked_up

        return looked_up(weight, ids, None if padding_idx < 0 else padding_idx, start)
    return native(weight, ids, padding_idx, scale_grad_by_freq, sparse)


def _kernels(key: str) -> dict[str, Any]:
    return {"linear": _linear, "embedding": partial(_embedding, torch_kernel("embedding", key))}


install = Lasting(_kernels, "Autograd").install
