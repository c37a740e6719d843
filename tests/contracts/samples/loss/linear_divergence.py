"""Arguments to try each operator with: ``linear_divergence``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.loss.linear_divergence_operators import BACKWARD, BACKWARD_KEPT, FORWARD
from rtkernels.ops.loss.linear_divergence_parallel import PARTS, SUMS


def _call(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    head = torch.linspace(-1.0, 1.0, 10 * x.shape[-1], dtype=x.dtype, device=x.device).view(10, -1)
    return rtkernels.linear_divergence(x, head, x.detach() * 0.5, head, beta=0.5, labels=ids[:, 0])


CALLS = {"linear_divergence": _call}


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    shapes = ((2, 5, 8), (24, 8), (2, 5, 6), (24, 6), (24,), (24,))
    tensors = [torch.randn(*shape, generator=g, dtype=torch.float32, device=device) for shape in shapes]
    labels = torch.arange(10, dtype=torch.int64, device=device).view(2, 5)
    for beta in (0.0, 0.3, 1.0):
        options = (3, beta, 1.5, 512)
        for keeps in (0, 1, 2):
            yield FORWARD, (*tensors, labels, *options, keeps)
            loss, stats, kept = FORWARD.reference(*tensors, labels, *options, keeps)
            if keeps:
                needs = (True, keeps == 1, keeps == 1)
                yield BACKWARD_KEPT, (loss, kept, *tensors[:2], labels, options[0], keeps, *needs)
        yield BACKWARD, (loss, *tensors, labels, stats, *options, True, True, True, beta == 0.3)
        yield PARTS, (*tensors, labels, *options)
        yield SUMS, (*tensors, labels, stats, *options)
    yield FORWARD, (*tensors[:4], None, None, None, -100, 0.5, 1.0, 0, 0)
