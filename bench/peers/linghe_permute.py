"""linghe's permutation of tokens to experts and back."""

from __future__ import annotations

from typing import Any

from bench.peers.base import Absent, Call, Table, absent


def _map(rows: Any, experts: Any, counts: Any) -> Any:
    """Where each token goes as linghe has it: a column per expert, -1 where it does not go."""
    import torch

    table = torch.full((rows.shape[0], counts.shape[0] + 1), -1, dtype=torch.int32, device=rows.device)
    table.scatter_(1, torch.where(rows >= 0, experts, counts.shape[0]).long(), rows)
    return table[:, :-1].contiguous()


def _dense(probs: Any, experts: Any, counts: Any) -> Any:
    import torch

    table = torch.zeros(probs.shape[0], counts.shape[0] + 1, dtype=probs.dtype, device=probs.device)
    table.scatter_(1, torch.where(experts >= 0, experts, counts.shape[0]).long(), probs)
    return table[:, :-1].contiguous()


def _power_of_two(size: int) -> None:
    if size & (size - 1):
        raise Absent("linghe permutes rows of power-of-two length only")


def _permute(rows: Any, experts: Any, counts: Any, slots: Any, x: Any, probs: Any = None, **_: Any) -> Call:
    """The map is built beforehand; probabilities are its dense ones."""
    from linghe.utils.gather import triton_permute_with_mask_map

    _power_of_two(x.shape[1])
    table, numbers = _map(rows, experts, counts), None if probs is None else _dense(probs, experts, counts)
    return lambda: triton_permute_with_mask_map(
        x, None, numbers, table, slots.shape[0], contiguous=False, tokens_per_expert=counts
    )


def _unpermute_bwd(dout: Any, **inputs: Any) -> Call:
    return _permute(x=dout, **inputs)


def _unpermute(rows: Any, experts: Any, counts: Any, y: Any, dprobs: Any = None, **_: Any) -> Call:
    """The map is built beforehand."""
    from linghe.utils.scatter import triton_unpermute_with_mask_map

    table = _map(rows, experts, counts)
    return lambda: triton_unpermute_with_mask_map(y, table, dprobs)


def _permute_bwd(dy: Any, **inputs: Any) -> Call:
    return _unpermute(y=dy, **inputs)


def _permute_quant(x: Any, rows: Any, counts: Any, slots: Any, **_: Any) -> Call:
    """linghe also wants the counts on the host; they are read beforehand."""
    from linghe.utils.gather import triton_batch_block_pad_permute_with_indices

    indices = (slots.clamp(min=0) // rows.shape[1]).int()
    splits = counts.tolist()
    return lambda: triton_batch_block_pad_permute_with_indices(x, counts, indices, splits)


def _permute_smooth(x: Any, rows: Any, experts: Any, counts: Any, slots: Any, smooth: Any, **_: Any) -> Call:
    """The map is built beforehand; ``reverse`` multiplies by the factors as the row does. Pad rows are not written."""
    from linghe.utils.gather import triton_smooth_permute_with_mask_map

    _power_of_two(x.shape[1])
    table = _map(rows, experts, counts)
    sizes = x.shape[0], counts.shape[0], slots.shape[0], x.shape[1]
    return lambda: triton_smooth_permute_with_mask_map(x, table, None, *sizes, smooth, reverse=True)


_NO_WEIGHTS = {"linghe": absent("linghe adds rows without weights")}

ADAPTERS: Table = {
    "permute_pad": {"linghe": _permute},
    "permute_pad_bwd": {"linghe": _permute_bwd},
    "permute_pad_quant": {"linghe": _permute_quant},
    "permute_smooth": {"linghe": _permute_smooth},
    "unpermute_pad": {"linghe": _unpermute},
    "unpermute_pad_bwd": {"linghe": _unpermute_bwd},
    "unpermute_pad_probs": _NO_WEIGHTS,
    "unpermute_pad_probs_bwd": _NO_WEIGHTS,
}
