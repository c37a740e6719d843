"""Inputs of embedding, and what its results must be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import rtkernels

embedding, embedding_grad_ = rtkernels.embedding, rtkernels.embedding_grad_


# ---- inputs: one list for every place -------------------------------------------------------------------------------


@dataclass
class Inputs:
    ids: Tensor
    rows: int
    dy: Tensor
    padding: int | None = None
    start: int = 0


def exact_sums(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The gradient in fp64, and the sum of magnitudes."""
    cols = inputs.dy.shape[-1]
    padding = inputs.padding if inputs.padding is None or inputs.padding >= 0 else inputs.padding + inputs.rows
    ids = inputs.ids.reshape(-1).long()
    kept = (ids >= inputs.start) & (ids < inputs.start + inputs.rows)
    if padding is not None:
        kept &= ids != padding
    dy = inputs.dy.reshape(len(ids), cols)[kept].double()
    zeros = torch.zeros(inputs.rows, cols, dtype=torch.float64, device=dy.device)
    local = ids[kept] - inputs.start
    return zeros.index_add(0, local, dy), zeros.index_add(0, local, dy.abs())
