"""One Lion step over lists of tensors, with moments of any kind; behind ``rtkernels.optim.Lion``."""

from __future__ import annotations

import torch

from rtkernels.ops.multi import dynamic_codes, multi_moments
from rtkernels.ops.multi.multi_adamw import single
from rtkernels.runtime.operator.declared import Number, Operator, Tensors


def _reference(
    weights, grads, exp_avgs, origins, steps, scales, copies, lr_by, grad_scale, found_inf, lr, beta1, beta2,
    weight_decay, maximize, seed, stochastic,
) -> None:  # fmt: skip
    with torch.no_grad():
        if found_inf is not None and bool(found_inf):
            return
        rate = lr if lr_by is None else lr_by.double().reshape(())
        sign = -1.0 if maximize else 1.0
        for i, w in enumerate(weights):
            m, scale = exp_avgs[i], scales[i] if len(scales) else None
            full, g = (dynamic_codes.in_memory(t).reshape(-1).float() for t in (w, grads[i]))
            first = multi_moments.decoded(m, scale, True, w.numel())
            g = g * (sign if grad_scale is None else (sign / grad_scale.reshape(())))
            update = beta1 * first + (1 - beta1) * g
            direction = torch.where(update.isnan(), update, update.sign())  # torch's sign of NaN is 0
            full = full * single(1 - rate * weight_decay) - single(rate) * direction
            first = beta2 * first + (1 - beta2) * g
            steps[i].add_(1)
            copy = copies[i] if len(copies) else None
            multi_moments.write(w, full, [(m, first, scale, True)], copy, origins[i], steps[i], seed, stochastic)


def _numbers(
    lr: float, beta1: float, beta2: float, weight_decay: float, maximize: bool, seed: int, stochastic: bool
) -> tuple:
    return multi_moments.numbers(lr, beta1, beta2, 0.0, weight_decay, maximize, seed, stochastic)


STEP = Operator(
    "multi_lion_",
    (
        Tensors("weights", written=True), Tensors("grads"), Tensors("exp_avgs", written=True, counted=False),
        Tensors("origins"), Tensors("steps", written=True, counted=False),
        Tensors("scales", written=True, counted=False, optional=True),
        Tensors("copies", written=True, optional=True), Number("lr_by", called="lr"), Number("grad_scale"),
        Number("found_inf"),
    ),
    options="float lr, float beta1, float beta2, float weight_decay, bool maximize, int seed, bool stochastic",
    numbers="lr beta1 beta2 weight_decay maximize seed stochastic", derived=(multi_moments.DERIVED, _numbers),
    results="", tables=multi_moments.tables(multi_moments.LION), plan=multi_moments.plan, reference=_reference,
)  # fmt: skip
