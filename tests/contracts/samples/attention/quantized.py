"""Arguments to try each operator with: ``quantized``."""

from __future__ import annotations

import torch

from rtkernels.ops.attention.quantized import FORWARD, QUANTIZE_QK, QUANTIZE_V


def samples(device: str):
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    q, k, v = normal(2, 5, 4, 16), normal(2, 7, 2, 16), normal(2, 7, 2, 24)
    yield QUANTIZE_QK, (q, k, False, False, True, 0.25)
    yield QUANTIZE_QK, (q, k, False, True, False, 0.25)
    yield QUANTIZE_V, (v, False)
    qc, qs, kc, ks, _ = QUANTIZE_QK(q, k, False, False, True, 0.25)
    options = (0.25, -1, 0, 1, 1)
    lengths = torch.tensor([7, 3], dtype=torch.int32, device=device)
    yield FORWARD, (qc, kc, v, qs, ks, None, lengths, None, None, *options, 0, 0, False)
    vc, vs = QUANTIZE_V(v, False)
    yield FORWARD, (qc, kc, vc, qs, ks, vs, None, None, None, *options, 0, 0, True)
    ends = tuple(torch.tensor(e, dtype=torch.int32, device=device) for e in ((0, 2, 5), (0, 4, 7)))
    yield FORWARD, (qc[0], kc[0], v[0], qs[0], ks[0], None, None, *ends, *options, 5, 7, False)
