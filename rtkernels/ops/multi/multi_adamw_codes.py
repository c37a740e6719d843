"""One AdamW step with coded moments, or on 16-bit weights without an fp32 copy; behind ``rtkernels.optim.AdamW``."""

from __future__ import annotations

import torch

from rtkernels.ops.multi import dynamic_codes, multi_adamw, multi_moments
from rtkernels.runtime.operator.declared import Number, Operator, Tensors


def _reference(
    weights, grads, exp_avgs, exp_avg_sqs, steps, origins, scales1, scales2, copies, lr_by, grad_scale, found_inf, lr,
    beta1, beta2, eps, weight_decay, maximize, seed, stochastic,
) -> None:  # fmt: skip
    with torch.no_grad():
        if found_inf is not None and bool(found_inf):
            return
        scales = (scales1, scales2) if len(scales1) else ([None] * len(weights),) * 2
        for i, w in enumerate(weights):
            m, v, scale1, scale2 = exp_avgs[i], exp_avg_sqs[i], scales[0][i], scales[1][i]
            full, grad = (dynamic_codes.in_memory(t).reshape(-1) for t in (w, grads[i]))
            full = full.float()
            first = multi_moments.decoded(m, scale1, True, w.numel())
            second = multi_moments.decoded(v, scale2, False, w.numel())
            multi_adamw._reference(
                [full], [grad], [first], [second], [steps[i]], [], lr_by, grad_scale, None, lr, beta1, beta2, eps,
                weight_decay, maximize,
            )  # fmt: skip
            results = (m, first, scale1, True), (v, second, scale2, False)
            copy = copies[i] if len(copies) else None
            multi_moments.write(w, full, results, copy, origins[i], steps[i], seed, stochastic)


STEP = Operator(
    "multi_adamw_codes_",
    (
        Tensors("weights", written=True), Tensors("grads"), Tensors("exp_avgs", written=True, counted=False),
        Tensors("exp_avg_sqs", written=True, counted=False), Tensors("steps", written=True, counted=False),
        Tensors("origins"), Tensors("scales1", written=True, counted=False, optional=True),
        Tensors("scales2", written=True, counted=False, optional=True),
        Tensors("copies", written=True, optional=True), Number("lr_by", called="lr"), Number("grad_scale"),
        Number("found_inf"),
    ),
    options="float lr, float beta1, float beta2, float eps, float weight_decay, bool maximize, int seed, "
    "bool stochastic",
    numbers="lr beta1 beta2 eps weight_decay maximize seed stochastic",
    derived=(multi_moments.DERIVED, multi_moments.numbers), results="",
    tables=multi_moments.tables(multi_moments.ADAMW), plan=multi_moments.plan, reference=_reference,
)  # fmt: skip
