"""Lists of tensors, and what functions over them must give."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_norms(tensors: list[Tensor], ord: float) -> tuple[Tensor, Tensor]:
    each = [torch.linalg.vector_norm(t.double().flatten(), ord) if t.numel() else torch.zeros(()) for t in tensors]
    norms = torch.stack([e.double().cpu() for e in each])
    return torch.linalg.vector_norm(norms, ord), norms
