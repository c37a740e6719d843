"""ALiBi, ``slope * (key - position of the query)`` added to scores, as a bias that depends on head and key only.

Where no query attends to later keys, the part of the query is the same for all scores of a row, so it does not change
the softmax: the bias is one number per head and key, and the log-sum-exp gets the part of the query afterwards.
The kernel for paged caches adds ALiBi itself, for any mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError


def check_slopes(slopes: Tensor, q: Tensor, batch: int, heads: int) -> None:
    """Raise an ArgumentError for slopes that are not a tensor [heads] or [batch, heads] on q's device."""
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point():
        kind = slopes.dtype if isinstance(slopes, Tensor) else type(slopes).__name__
        raise ArgumentError(f"alibi_slopes is {kind}; expected a floating tensor [heads] or [batch, heads]")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        got = tuple(slopes.shape)
        raise ArgumentError(f"alibi_slopes has shape {got}; expected {(heads,)} or {(batch, heads)}")
    if slopes.device != q.device:
        raise ArgumentError(f"alibi_slopes is on {slopes.device}; expected that of q, {q.device}")
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("alibi_slopes requires a gradient; expected none")


def _check_mask(bias: Tensor | None, sinks: Tensor | None, right: int) -> None:
    for name, given in (("bias", bias), ("sinks", sinks)):
        if given is not None:
            raise ArgumentError(f"alibi_slopes and {name} are both given; expected one of them")
    if right != 0:
        raise ArgumentError(
            "alibi_slopes is given, and queries attend to later keys; expected causal=True, or a window that ends at 0"
        )


def _by_batch(slopes: Tensor) -> Tensor:
    """Return slopes as float32 [batch or 1, heads]."""
    return slopes.detach().float() if slopes.dim() == 2 else slopes.detach().float().unsqueeze(0)


def alibi_bias(
    slopes: Tensor, q: Tensor, k: Tensor, bias: Tensor | None, sinks: Tensor | None, right: int
) -> Tensor:  # fmt: skip
    """Return ``slope * (key - last key)``, float32 [batch or 1, heads, 1, keys].

    Args:
        slopes: [heads] or [batch, heads].
        q: [batch, queries, heads, width].
        k: [batch, keys, heads, width].
        bias: Must be None.
        sinks: Must be None: their score is not relative to the position of the query.
        right: How many keys after its own position a query attends to; -1 for all.
    """
    _check_mask(bias, sinks, right)
    batch, heads, keys = q.shape[0], q.shape[2], k.shape[1]
    check_slopes(slopes, q, batch, heads)
    distance = torch.arange(1 - keys, 1, dtype=torch.float32, device=q.device)
    return _by_batch(slopes)[..., None, None] * distance


def alibi_offset(slopes: Tensor, q: Tensor, k: Tensor, seqused_k: Tensor | None) -> Tensor:
    """Return ``slope * (last key - position of the query)``, which the bias lacks: [batch or 1, heads, queries]."""
    queries, keys = q.shape[1], k.shape[1]
    behind = torch.arange(queries - 1, -1, -1, dtype=torch.float32, device=q.device)
    if seqused_k is not None:  # positions are relative to the valid keys
        behind = behind + (keys - seqused_k).view(-1, 1, 1)
    return _by_batch(slopes).unsqueeze(-1) * behind


def packed_bias(
    slopes: Tensor, q: Tensor, k: Tensor, sequences: int, max_q: int, sinks: Tensor | None, right: int
) -> Tensor:
    """Return ``slope * key`` for packed sequences, float32 [sequences or 1, heads, queries, tokens of keys].

    Keys are counted from the first one of a sequence, so that numbers are no larger than its length demands.
    """
    _check_mask(None, sinks, right)
    check_slopes(slopes, q, sequences, q.shape[1])
    key = torch.arange(k.shape[0], dtype=torch.float32, device=q.device)
    bias = _by_batch(slopes)[..., None, None] * key
    return bias.expand(-1, -1, max_q, -1)


def packed_offset(slopes: Tensor, q: Tensor, cu_q: Tensor, cu_k: Tensor, seqused_k: Tensor | None) -> Tensor:
    """Return ``-slope * position of the query``, which the bias lacks: [heads, tokens]."""
    token = torch.arange(q.shape[0], dtype=torch.int64, device=q.device)
    sequence = (torch.searchsorted(cu_q, token, right=True) - 1).clamp(0, max(cu_q.shape[0] - 2, 0))
    keys = cu_k.diff() if seqused_k is None else torch.minimum(cu_k.diff(), seqused_k)
    position = token - cu_q[1:][sequence] + keys[sequence]
    of_head = _by_batch(slopes)
    return -(of_head.t()[:, sequence if of_head.shape[0] > 1 else 0 * sequence]) * position
