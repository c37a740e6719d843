"""Lightning attention of float32 operands, in chunks, by torch's products: differentiable like any torch function."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.invariance import level, refuse

_CHUNK = 128  # rows whose products with each other are computed at once; states are computed between chunks


def check(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise an ArgumentError unless these operands belong together."""
    if level():
        refuse("lightning_attention of float32", "its products are chosen by torch")
    if cu_seqlens is not None:
        raise ArgumentError("cu_seqlens is given and q is float32; expected [batch, length, heads, width] without it")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4 or t.dtype != torch.float32 or t.device != q.device:
            raise ArgumentError(
                f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}; expected float32 [batch, length, heads, width] "
                f"on {q.device}, as q"
            )
    if k.shape != q.shape or v.shape[:3] != q.shape[:3]:
        raise ArgumentError(
            f"k and v have shapes {tuple(k.shape)} and {tuple(v.shape)}; expected {tuple(q.shape)}, v with any width"
        )
    if tuple(decay.shape) != (q.shape[2],):
        raise ArgumentError(f"decay has shape {tuple(decay.shape)}; expected ({q.shape[2]},), the heads of q")
    expected = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    if state is not None and tuple(state.shape) != expected:
        raise ArgumentError(f"initial_state has shape {tuple(state.shape)}; expected {expected}")


def lightning(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention [batch, length, heads, width of v] and the state after the last row.

    Rows of zeros before the first one fill the first chunk, and change nothing. The state before chunk n is the sum of
    what earlier chunks leave, each decayed by its distance: one product for all chunks.
    """
    length = q.shape[1]
    chunk = min(_CHUNK, max(length, 1))
    missing = -length % chunk if length else chunk
    q, k, v = (torch.nn.functional.pad(t.transpose(1, 2), (0, 0, missing, 0)) for t in (q, k, v))
    q, k, v = (t.unflatten(2, (-1, chunk)) for t in (q, k, v))  # batch, heads, chunks, rows, width
    chunks = q.shape[2]
    rates = decay.view(-1, 1, 1)
    rows, numbers = (torch.arange(n, device=q.device, dtype=torch.float32) for n in (chunk, chunks))

    def decayed(distance: Tensor) -> Tensor:
        """Return the factor of a distance for each head, 0 for negative ones."""
        return torch.exp(-rates * distance.clamp(min=0)).masked_fill(distance < 0, 0.0)

    within = decayed(rows.view(-1, 1) - rows)  # heads, rows, rows
    out = (q @ k.transpose(-1, -2) * within.unsqueeze(1)) @ v
    left = (k * decayed(chunk - 1 - rows.view(-1, 1)).unsqueeze(1)).transpose(-1, -2) @ v  # by each chunk at its end
    before = decayed((numbers.view(-1, 1) - 1 - numbers) * chunk)  # heads, chunks, chunks
    states = (before @ left.flatten(-2)).unflatten(-1, left.shape[-2:])
    out = out + decayed(rows.view(-1, 1) + 1).unsqueeze(1) * (q @ states)
    out = scale * out.flatten(2, 3)[:, :, missing:]
    whole = torch.full((), float(chunk), dtype=torch.float32, device=q.device)
    final = left[:, :, -1] + decayed(whole) * states[:, :, -1]
    if state is not None:
        steps = torch.arange(1, length + 1, device=q.device, dtype=torch.float32).view(-1, 1)
        out = out + scale * decayed(steps) * (q.flatten(2, 3)[:, :, missing:] @ state)
        final = final + decayed(torch.full((), float(length), dtype=torch.float32, device=q.device)) * state
    return out.transpose(1, 2).contiguous(), final
