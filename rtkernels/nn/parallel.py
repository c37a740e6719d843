"""Attention and expert layers over the processes of a group, with ``torch.distributed``.

For a vocabulary that is split between processes, ``cross_entropy`` and ``linear_cross_entropy`` take a group. For
DTensors the ops have sharding rules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.attention import BACKWARD, attention
from rtkernels.ops.attention.merge import merge_attention
from rtkernels.ops.attention.options import default_scale, window_sides
from rtkernels.ops.attention.sequence_parts import check_order
from rtkernels.ops.moe.moe_index import moe_index
from rtkernels.ops.moe.moe_permute import moe_permute, moe_unpermute
from rtkernels.runtime.operator.autograd import differentiable, once_differentiable

# ---- attention ------------------------------------------------------------------------------------------------------


class _Ring:
    """Sends tensors to the next process and receives those of the previous one."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """Return the memory of the tensors to receive, and the requests to wait for."""
        received = [torch.empty_like(t) for t in tensors]
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        moves = [dist.P2POp(dist.isend, t, group=self.group, group_peer=after) for t in tensors]
        moves += [dist.P2POp(dist.irecv, t, group=self.group, group_peer=before) for t in received]
        return received, dist.batch_isend_irecv(moves)

    def moved(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of the previous process."""
        if self.size == 1:
            return list(tensors)
        received, work = self.start(tensors)
        for each in work:
            each.wait()
        return received


def _blocks(rank: int, owner: int, length: int, causal: bool, zigzag: bool) -> tuple[slice, slice, bool] | None:
    """Return which queries of a process attend to which keys of another, and whether causally; None if none do."""
    everything, half = slice(None), length // 2
    if not causal or owner == rank:
        return everything, everything, causal
    if not zigzag:
        return (everything, everything, False) if owner < rank else None
    # Rank r has parts r and 2 n - 1 - r of a sequence. The first part of an earlier process is before both of ours and
    # its second part after both. Both parts of a later process are before our second part.
    return (everything, slice(None, half), False) if owner < rank else (slice(half, None), everything, False)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, causal, softcap, zigzag, group):
        ring, length, own = _Ring(group), q.shape[1], (k, v)
        out, lse = None, None
        for step in range(ring.size):
            last = step == ring.size - 1
            received, work = ((), ()) if last else ring.start((k, v))
            block = _blocks(ring.rank, (ring.rank - step) % ring.size, length, causal, zigzag)
            if block is not None:
                rows, columns, is_causal = block
                part, part_lse = attention(
                    q[:, rows], k[:, columns], v[:, columns], scale=scale, causal=is_causal, softcap=softcap,
                    return_lse=True,
                )  # fmt: skip
                if out is None:  # the process's own keys, some of which every query attends to
                    out, lse = part.float(), part_lse.clone()
                else:
                    parts = (out[:, rows].contiguous(), part), (lse[..., rows].contiguous(), part_lse)
                    out[:, rows], lse[..., rows] = merge_attention(*parts, out_dtype=torch.float32)
            for each in work:
                each.wait()
            if not last:
                k, v = received
        out = out.to(q.dtype)
        ctx.save_for_backward(q, *own, out, lse)
        ctx.options = scale, causal, softcap, zigzag, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        scale, causal, softcap, zigzag, group = ctx.options
        ring, length = _Ring(group), q.shape[1]
        dout, dq = dout.contiguous(), torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        sums = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v)]
        for step in range(ring.size):
            last = step == ring.size - 1
            received, work = ((), ()) if last else ring.start((k, v))
            block = _blocks(ring.rank, (ring.rank - step) % ring.size, length, causal, zigzag)
            if block is not None:
                rows, columns, is_causal = block
                # With the output and log-sum-exp over all keys, each part contributes its terms of the gradients.
                some = (q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[..., rows].contiguous())
                options = (scale, *window_sides(None, is_causal), softcap, 0, 0, False, "auto")
                found = BACKWARD.call(
                    dout[:, rows], None, *some, *(None,) * 6, *options, True, True, True, False, False
                )  # fmt: skip
                dq[:, rows] += found[0]
                sums[0][:, columns] += found[1]
                sums[1][:, columns] += found[2]
            sums = ring.moved(sums)  # these follow their keys and return after the last step
            for each in work:
                each.wait()
            if not last:
                k, v = received
        return dq.to(q.dtype), *(t.to(q.dtype) for t in sums), *(None,) * 5


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, scale: float | None = None, causal: bool = False,
    softcap: float = 0.0, zigzag: bool | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of queries over the keys of all processes of a group (context parallelism).

    Every process has an equal part of each sequence. Keys and values are passed from process to process in a ring, each
    process attends to the keys it currently has, and partial results are merged by their log-sum-exps. The backward
    pass does the same; gradients of keys and values travel along in fp32. Differentiable once in q, k and v.

    Args:
        q: bfloat16 or float16 ``[batch, length, heads, width]``, this process's queries.
        k: ``[batch, length, heads of keys, width]``, this process's keys.
        v: Like k.
        group: The process group.
        scale: As for ``attention``.
        causal: As for ``attention``, over whole sequences.
        softcap: As for ``attention``.
        zigzag: Needed with `causal`, because another order of parts would give other results without an error. False:
            rank r of n has part r of n of every sequence. True: it has parts r and ``2 n - 1 - r`` of ``2 n`` equal
            parts, as ``rope`` does with ``cp_rank`` and ``cp_size``; all processes then have the same amount of work.

    Returns:
        ``[batch, length, heads, width]`` in q's dtype.

    Raises:
        ArgumentError: Shapes do not match, the length is odd with `zigzag`, or `causal` is given without it.
    """
    if q.dim() != 4 or k.shape[:2] != q.shape[:2] or v.shape[:2] != q.shape[:2]:
        shapes = f"q has shape {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
        raise ArgumentError(f"{shapes}; expected [batch, length, heads, width] with the same batch and length")
    if causal:
        check_order(zigzag)
    if zigzag and q.shape[1] % 2:
        raise ArgumentError(f"q has length {q.shape[1]}; expected an even one for zigzag, two equal parts")
    scale = default_scale(scale, q)
    return _RingAttention.apply(
        q.contiguous(), k.contiguous(), v.contiguous(), scale, causal, float(softcap), bool(zigzag), group
    )


# ---- experts --------------------------------------------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.way_back = receive, send, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    @differentiable
    def backward(ctx, dy):
        return _Exchange.apply(dy, *ctx.way_back), None, None, None


def exchange_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], *, group: Any) -> Tensor:
    """Send rows to every process of a group and return the received rows: an all-to-all with gradients.

    Args:
        x: ``[rows, ...]``: the rows for rank 0, then those for rank 1, and so on.
        send: Number of rows for each rank.
        receive: Number of rows from each rank.
        group: The process group.

    Returns:
        ``[sum(receive), ...]``, in the order of ranks.

    Raises:
        ArgumentError: `send` or `receive` does not have one number per rank, or `send` does not add up to x's rows.
    """
    if sum(send) != x.shape[0] or len(send) != dist.get_world_size(group) or len(receive) != len(send):
        raise ArgumentError(
            f"send is {list(send)} and receive {list(receive)} for x with {x.shape[0]} rows; expected a number of rows "
            f"for each of {dist.get_world_size(group)} ranks, in send all of x's rows"
        )
    return _Exchange.apply(x, list(send), list(receive), group)


def expert_parallel(
    x: Tensor, experts: Tensor, weights: Tensor, compute: Callable[[Tensor, Tensor], Tensor], *, num_experts: int,
    group: Any,
) -> Tensor:  # fmt: skip
    """Return the weighted sum of each token's experts, which are split between the processes of a group.

    Tokens are sorted by expert, sent to the process of that expert, sorted by expert there, computed, and sent back.
    This takes two all-to-alls of rows and one of counts, which the host waits for. Differentiable in x and weights, and
    in everything that `compute` is differentiable in.

    Args:
        x: ``[tokens, width]``, the tokens of this process.
        experts: int32 or int64 ``[tokens, k]``: the experts of each token, numbered over all processes; -1 for none.
        weights: ``[tokens, k]``: factors of the experts' results.
        compute: Called with rows ``[R, width]`` sorted by expert and ``ends``, int32 ``[experts of this process]``: the
            row after each expert's last one, as ``grouped_mm`` takes them. Returns ``[R, width of the result]``.
        num_experts: Number of experts over all processes; rank r has the r-th of equal parts.
        group: The process group.

    Returns:
        ``[tokens, width of the result]``.

    Raises:
        ArgumentError: `num_experts` is not a multiple of the number of processes.
    """
    size = dist.get_world_size(group)
    if num_experts % size:
        raise ArgumentError(f"num_experts is {num_experts}; expected a multiple of {size}, the processes of the group")
    index = moe_index(experts, num_experts)
    arriving = torch.empty_like(index.counts)
    dist.all_to_all_single(arriving, index.counts.contiguous(), group=group)
    sizes = torch.stack([index.counts, arriving]).view(2, size, -1).sum(-1).tolist()
    send, receive = sizes
    permuted = moe_permute(x, index)
    rows = exchange_rows(permuted[: sum(send)], send, receive, group=group)
    # The received rows are sorted by process and then by expert.
    here = torch.arange(num_experts // size, dtype=torch.int64, device=x.device).repeat(size)
    local = moe_index(
        here.repeat_interleave(arriving, output_size=sum(receive)).unsqueeze(-1), num_experts // size
    )  # fmt: skip
    computed = moe_unpermute(compute(moe_permute(rows, local), local.offsets[1:]), local)
    back = exchange_rows(computed, receive, send, group=group)
    unused = back.new_zeros(permuted.shape[0] - back.shape[0], back.shape[1])  # rows of choices without an expert
    return moe_unpermute(torch.cat([back, unused]), index, probs=weights, dense_probs=False)
