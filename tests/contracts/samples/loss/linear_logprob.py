"""Arguments to try each operator with: ``linear_logprob``."""

from __future__ import annotations

import torch

import rtkernels
from rtkernels.ops.loss import linear_logprob_projected as projected
from rtkernels.ops.loss.linear_logprob_operators import BACKWARD, BACKWARD_SAVED, FINISH, PARTS

CALLS = {"linear_logprob": lambda x, ids: rtkernels.linear_logprob(x, x.detach()[:2].repeat(5, 1), ids)}


def samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=g, device=device)
    weight, bias = (torch.randn(*shape, generator=g, device=device) for shape in ((24, 8), (24,)))
    ids = torch.arange(20, device=device).view(2, 5, 2)
    warm = torch.rand(2, 5, generator=g, device=device) + 0.5
    options = (-100, 0.7, 5.0, 1.3, False, 512, 0, 24)
    everything = 31
    tensors = (hidden, weight, ids, bias, warm)
    yield PARTS, (*tensors, *options, False, everything)
    yield PARTS, (hidden, weight, ids[..., 0], None, None, *options, True, 0)
    parts, targets, _ = PARTS.reference(*tensors, *options, False, everything)
    found = (parts.unsqueeze(0), targets.unsqueeze(0), ids)
    yield FINISH, (*found, -100, 24, 2, everything)
    logprob, entropy, lse, squares, mean, _, stats = FINISH.reference(*found, -100, 24, 2, everything)
    each = [t.view(2, 5) for t in (entropy, lse, squares, mean)]
    saved = (stats, each[0], each[2], targets)
    yield BACKWARD, (*tensors, logprob, *each, *saved, *options, True, True, True, False)
    yield BACKWARD, (*tensors, None, None, each[1], None, None, *saved, *options, True, False, False, True)
    logits = torch.randn(10, 24, generator=g, device=device)
    yield BACKWARD_SAVED, (*tensors, logprob, *each, *saved, *options, True, True, True, False, logits)
    yield projected.PROJECT, (*tensors, *options, everything)
    parts, targets, sums = projected.PROJECT.reference(*tensors, *options, everything)
    yield (
        projected.BACKWARD,
        (hidden, weight, ids, warm, logprob, each[0], each[1], parts[0].contiguous(), stats, each[0], targets, sums,
         *options[:4], 0, 24),
    )  # fmt: skip
