"""The functions of FlagGems and vLLM between a router and its experts, by the same names and argument orders.

They launch ``topk_router`` and ``moe_index``, do not synchronise and can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.moe.moe_index import moe_index, moe_rows
from rtkernels.ops.router.topk_router import topk_router

_INDICES = (torch.int32, torch.int64, torch.uint32)


def _check_dtype(name: str, tensor: Tensor, *wanted: torch.dtype) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if tensor.dtype not in wanted:
        names = " or ".join(str(dtype) for dtype in wanted)
        raise ArgumentError(f"{name} has dtype {tensor.dtype}; expected {names}".replace("torch.", ""))


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, (int, torch.SymInt)) or value < 1:
        raise ArgumentError(f"{name} is {value!r}; expected an integer of 1 or more")


def topk_softmax(
    topk_weights: Tensor, topk_indices: Tensor, token_expert_indices: Tensor, gating_output: Tensor,
    renormalize: bool = False,
) -> None:  # fmt: skip
    """Write the k largest softmax probabilities of every row, their experts, and the number of every choice.

    Choice j of row r has the number ``j * rows + r``. FlagGems adds 1e-8 to the denominator of the softmax, which
    is less than the rounding of float32 and is not added here.

    Args:
        topk_weights: ``[rows, k]`` float32, overwritten: the probabilities, the largest first.
        topk_indices: ``[rows, k]`` int32, int64 or uint32, overwritten: the experts.
        token_expert_indices: ``[rows, k]`` int32 or int64, overwritten: the numbers of the choices.
        gating_output: ``[rows, experts]`` logits; bfloat16, float16 or float32; not with gradients.
        renormalize: Divide by the sum of the k probabilities.
    """
    _check_dtype("topk_weights", topk_weights, torch.float32)
    _check_dtype("topk_indices", topk_indices, *_INDICES)
    _check_dtype("token_expert_indices", token_expert_indices, torch.int32, torch.int64)
    _check_dtype("gating_output", gating_output, torch.float32, torch.bfloat16, torch.float16)
    if topk_weights.dim() != 2:
        raise ArgumentError(f"topk_weights has shape {tuple(topk_weights.shape)}; expected [rows, k]")
    rows, k = topk_weights.shape
    _check_shape("topk_indices", topk_indices, (rows, k))
    _check_shape("token_expert_indices", token_expert_indices, (rows, k))
    if gating_output.dim() != 2 or gating_output.shape[0] != rows:
        raise ArgumentError(f"gating_output has shape {tuple(gating_output.shape)}; expected ({rows}, experts)")
    if torch.is_grad_enabled() and gating_output.requires_grad:
        raise ArgumentError("gating_output requires grad; expected a tensor without, or a call under torch.no_grad()")
    weights = topk_weights if topk_weights.is_contiguous() else None
    indices = topk_indices.view(torch.int32) if topk_indices.dtype == torch.uint32 else topk_indices
    direct = indices if indices.dtype == torch.int32 and indices.is_contiguous() else None
    result = topk_router(gating_output, k, renormalize=renormalize, out=(weights, direct, None, None, None))
    if weights is None:
        topk_weights.copy_(result.probs)
    if direct is None:
        indices.copy_(result.indices)
    numbers = torch.arange(rows * k, dtype=token_expert_indices.dtype, device=token_expert_indices.device)
    token_expert_indices.copy_(numbers.view(k, rows).t())


def moe_align_block_size(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None = None, pad_sorted_ids: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices by expert, each expert's padded to whole blocks, and return the expert of every block.

    Choices of an expert are in the order of the tokens. Choices that are not 0 to ``num_experts - 1`` are left out.

    Args:
        topk_ids: Experts of each token, ``[tokens, k]`` int32, int64 or uint32.
        block_size: Number of choices in a block.
        num_experts: Number of experts, 1 to 4096.
        expert_map: What to return in the place of each expert, ``[num_experts]`` int32 or int64: its number on this
            device, or -1, for example. Default: the experts themselves.
        pad_sorted_ids: Round the length of `sorted_ids` up to whole blocks.

    Returns:
        ``(sorted_ids, expert_ids, num_tokens_post_pad)``, all int32. `sorted_ids` ``[numel + num_experts * (block_size
        - 1)]`` has the choice ``t * k + j`` in each row, and ``numel`` in pad rows. `expert_ids` has one entry for
        each block, -1 for blocks after the last used one. `num_tokens_post_pad` ``[1]`` is the number of rows in use.
    """
    _check_count("block_size", block_size)
    _check_count("num_experts", num_experts)
    _check_dtype("topk_ids", topk_ids, *_INDICES)
    rows = topk_ids.numel() + num_experts * (block_size - 1)
    blocks = -(-rows // block_size)
    if pad_sorted_ids:
        rows = blocks * block_size
    sorted_ids, experts, used = _aligned(topk_ids, block_size, num_experts, rows, blocks)
    if expert_map is not None:
        _check_dtype("expert_map", expert_map, torch.int32, torch.int64)
        _check_shape("expert_map", expert_map, (num_experts,))
        local = expert_map.to(torch.int32)[experts.clamp(max=num_experts - 1)]
        experts = torch.where(experts < num_experts, local, -1)
    else:
        experts = torch.where(experts < num_experts, experts, -1)
    return sorted_ids, experts, used


def moe_align_block_size_triton(
    topk_ids: Tensor, num_experts: int, block_size: int, sorted_token_ids: Tensor, expert_ids: Tensor,
    num_tokens_post_pad: Tensor,
) -> None:  # fmt: skip
    """Write the results of :func:`moe_align_block_size` to given tensors.

    Args:
        topk_ids: Experts of each token, ``[tokens, k]`` int32, int64 or uint32.
        num_experts: Number of experts, 1 to 4096.
        block_size: Number of choices in a block.
        sorted_token_ids: int32, overwritten; as many as any choice of the experts can need, or more.
        expert_ids: int32, overwritten; as many as there are blocks in these, or more.
        num_tokens_post_pad: ``[1]`` int32, overwritten.
    """
    _check_count("block_size", block_size)
    _check_count("num_experts", num_experts)
    _check_dtype("topk_ids", topk_ids, *_INDICES)
    needed = moe_rows(topk_ids.numel(), 1, num_experts, block_size)
    _check_dtype("num_tokens_post_pad", num_tokens_post_pad, torch.int32)
    _check_shape("num_tokens_post_pad", num_tokens_post_pad, (1,))
    sizes = ("sorted_token_ids", sorted_token_ids, needed), ("expert_ids", expert_ids, needed // block_size)
    for name, tensor, size in sizes:
        _check_dtype(name, tensor, torch.int32)
        if tensor.dim() != 1 or tensor.shape[0] < size:
            raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; expected ({size},) or more")
    ids, experts, used = _aligned(topk_ids, block_size, num_experts, sorted_token_ids.shape[0], expert_ids.shape[0])
    sorted_token_ids.copy_(ids)
    expert_ids.copy_(torch.where(experts < num_experts, experts, -1))
    num_tokens_post_pad.copy_(used)


def _aligned(
    topk_ids: Tensor, block_size: int, num_experts: int, rows: int, blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the choice of each row, the expert of each block (`num_experts` for unused ones) and the rows in use."""
    if topk_ids.dim() != 2:
        raise ArgumentError(f"topk_ids has shape {tuple(topk_ids.shape)}; expected [tokens, k]")
    ids = topk_ids.view(torch.int32) if topk_ids.dtype == torch.uint32 else topk_ids
    index = moe_index(ids, num_experts, multiple_of=block_size, rows=rows)
    first = torch.arange(0, blocks * block_size, block_size, dtype=torch.int32, device=ids.device)
    experts = torch.searchsorted(index.offsets[1:].contiguous(), first, right=True, out_int32=True)
    return torch.where(index.slots < 0, ids.numel(), index.slots), experts, index.offsets[-1:].clone()
