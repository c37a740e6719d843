"""Functions of FlagGems and vLLM by the same names and argument orders: experts of tokens, writing a KV cache,
``instance_norm``, convolutions.

They launch ``topk_router``, ``moe_index``, ``append_kv_cache``, a batch norm and ``conv``, do not synchronise and can
be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.append_kv_cache import append_kv_cache
from rtkernels.ops.conv.conv import conv
from rtkernels.ops.moe.moe_index import moe_index, moe_rows
from rtkernels.ops.reduce.instance_norm import instance_norm as instance_norm
from rtkernels.ops.router.topk_router import topk_router

_INDICES = (torch.int32, torch.int64, torch.uint32)
_VALUES = (torch.bfloat16, torch.float16, torch.float32)
_E4M3 = ("fp8", "fp8_e4m3", "fp8e4m3")


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


def _written(cache: Tensor, name: str, of: Tensor, kv_cache_dtype: str) -> Tensor:
    """Return a cache with the dtype of its elements, which may be stored as bytes; raise an ArgumentError otherwise."""
    if kv_cache_dtype == "auto":
        _check_dtype(name, cache, of.dtype)
        return cache
    if kv_cache_dtype not in _E4M3:
        names = ", ".join(map(repr, ("auto", *_E4M3)))
        raise ArgumentError(f"kv_cache_dtype is {kv_cache_dtype!r}; expected one of {names}")
    _check_dtype(name, cache, torch.uint8, torch.float8_e4m3fn)
    return cache.view(torch.float8_e4m3fn)


def _scales(kv_cache_dtype: str, **scales: Tensor) -> tuple[Tensor | None, ...]:
    """Return the scales of 8-bit codes; caches of the inputs' dtype have none, whatever is given."""
    if kv_cache_dtype == "auto":
        return (None,) * len(scales)
    for name, scale in scales.items():
        _check_dtype(name, scale, torch.float32)
        if scale.numel() != 1:
            raise ArgumentError(f"{name} has shape {tuple(scale.shape)}; expected one number")
    return tuple(scale.reshape(()) for scale in scales.values())


def _slots(slot_mapping: Tensor, rows: int, name: str) -> Tensor:
    _check_dtype("slot_mapping", slot_mapping, torch.int64, torch.int32)
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] > rows:
        raise ArgumentError(
            f"slot_mapping has shape {tuple(slot_mapping.shape)}; expected up to {rows}, rows of {name}"
        )
    return slot_mapping.to(torch.int32).unsqueeze(0)


def _check_key_value(key: Tensor, value: Tensor) -> None:
    for name, tensor in (("key", key), ("value", value)):
        _check_dtype(name, tensor, *_VALUES)
        if tensor.dim() != 3:
            raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; expected [tokens, heads, width]")
    _check_dtype("value", value, key.dtype)


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
    k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    """Write keys and values of new tokens into a paged cache, as ``attention_varlen`` and ``attention_decode`` read it.

    Args:
        key: ``[tokens, heads, width]``, bfloat16, float16 or float32; more rows than `slot_mapping` has are padding.
        value: Like `key`; the width may differ.
        key_cache: ``[pages, page size, heads, width]``, overwritten; key's dtype, or uint8 or float8_e4m3fn for "fp8".
        value_cache: The same for `value`, overwritten.
        slot_mapping: ``[tokens]`` int64 or int32: ``page * page size + index in the page``, negative to skip a token.
        kv_cache_dtype: "auto" for caches of key's dtype; "fp8", "fp8_e4m3" or "fp8e4m3" for e4m3 codes.
        k_scale: One float32: keys are the codes times this. Not read for "auto".
        v_scale: The same for values.
    """
    _check_key_value(key, value)
    slots = _slots(slot_mapping, key.shape[0], "key")
    rows, caches = slots.shape[1], []
    for name, given, of in (("key_cache", key_cache, key), ("value_cache", value_cache, value)):
        cache = _written(given, name, of, kv_cache_dtype)
        if cache.dim() != 4 or tuple(cache.shape[2:]) != tuple(of.shape[1:]):
            raise ArgumentError(
                f"{name} has shape {tuple(cache.shape)}; expected (pages, page size, {of.shape[1]}, {of.shape[2]})"
            )
        caches.append(cache)
    scales = _scales(kv_cache_dtype, k_scale=k_scale, v_scale=v_scale)
    append_kv_cache(
        key[:rows].unsqueeze(0), value[:rows].unsqueeze(0), *caches, slots=slots, k_scale=scales[0], v_scale=scales[1]
    )


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
    k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    """Write keys and values of new tokens into a cache with keys in vectors of x elements and values transposed.

    Arguments as for :func:`reshape_and_cache_flash`, except for the caches. Our attention does not read this layout.

    Args:
        key: ``[tokens, heads, width]``.
        value: ``[tokens, heads, width]``.
        key_cache: ``[pages, heads, width / x, page size, x]``, contiguous, overwritten; x elements are 16 bytes.
        value_cache: ``[pages, heads, width, page size]``, contiguous, overwritten.
        slot_mapping: ``[tokens]`` int64 or int32; negative for tokens to skip.
        kv_cache_dtype: "auto" or "fp8".
        k_scale: One float32.
        v_scale: One float32.
    """
    _check_key_value(key, value)
    _check_shape("value", value, tuple(key.shape))
    slots = _slots(slot_mapping, key.shape[0], "key")
    rows = slots.shape[1]
    keys = _written(key_cache, "key_cache", key, kv_cache_dtype)
    values = _written(value_cache, "value_cache", value, kv_cache_dtype)
    scales = _scales(kv_cache_dtype, k_scale=k_scale, v_scale=v_scale)
    heads, width = key.shape[1:]
    x = 16 // keys.dtype.itemsize
    if keys.dim() != 5 or width % x or tuple(keys.shape[i] for i in (1, 2, 4)) != (heads, width // x, x):
        raise ArgumentError(
            f"key_cache has shape {tuple(key_cache.shape)}; expected (pages, {heads}, {width} / {x}, page size, {x})"
        )
    pages, size = keys.shape[0], keys.shape[3]
    _check_shape("value_cache", value_cache, (pages, heads, width, size))
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not cache.is_contiguous():
            raise ArgumentError(f"{name} has strides {cache.stride()}; expected a contiguous cache")
    # Vectors of x elements as heads: those of values have their elements a page apart.
    vectors = heads * width // x
    append_kv_cache(
        key[:rows].reshape(1, rows, vectors, x), value[:rows].reshape(1, rows, vectors, x),
        keys.view(pages, vectors, size, x).transpose(1, 2), values.view(pages, vectors, x, size).permute(0, 3, 1, 2),
        slots=slots, k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip


def concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Tensor
) -> None:
    """Write latents and rotated keys of new tokens side by side into a paged cache, as ``mla_decode`` reads it.

    Args:
        kv_c: ``[tokens, latent]``, bfloat16, float16 or float32; more rows than `slot_mapping` has are padding.
        k_pe: ``[tokens, rotated]``; DeepSeek has 512 and 64 columns.
        kv_cache: ``[pages, page size, latent + rotated]``, overwritten; kv_c's dtype, or uint8 or float8_e4m3fn for
            "fp8".
        slot_mapping: ``[tokens]`` int64 or int32: ``page * page size + index in the page``, negative to skip a token.
        kv_cache_dtype: "auto" for a cache of kv_c's dtype; "fp8", "fp8_e4m3" or "fp8e4m3" for e4m3 codes.
        scale: One float32: elements are the codes times this. Not read for "auto".
    """
    for name, tensor in (("kv_c", kv_c), ("k_pe", k_pe)):
        _check_dtype(name, tensor, *_VALUES)
        if tensor.dim() != 2 or tensor.shape[0] != kv_c.shape[0]:
            raise ArgumentError(
                f"{name} has shape {tuple(tensor.shape)}; expected [tokens, columns], tokens as in kv_c"
            )
    _check_dtype("k_pe", k_pe, kv_c.dtype)
    slots = _slots(slot_mapping, kv_c.shape[0], "kv_c")
    cache = _written(kv_cache, "kv_cache", kv_c, kv_cache_dtype)
    rows, (factor,) = slots.shape[1], _scales(kv_cache_dtype, scale=scale)
    latent, rotated = kv_c.shape[1], k_pe.shape[1]
    if cache.dim() != 3 or cache.shape[2] != latent + rotated:
        raise ArgumentError(
            f"kv_cache has shape {tuple(kv_cache.shape)}; expected (pages, page size, {latent + rotated})"
        )
    parts = cache.unsqueeze(2).split((latent, rotated), -1)
    new = (t[:rows].unsqueeze(0).unsqueeze(2) for t in (kv_c, k_pe))
    append_kv_cache(*new, *parts, slots=slots, k_scale=factor, v_scale=factor)


def conv1d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride=1, padding=0, dilation=1, groups=1
) -> Tensor:
    """Convolution of ``[n, channels, length]``; arguments of ``torch.nn.functional.conv1d``, see ``conv``."""
    return conv(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)


def conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride=1, padding=0, dilation=1, groups=1
) -> Tensor:
    """Convolution of ``[n, channels, height, width]``; arguments of ``torch.nn.functional.conv2d``, see ``conv``."""
    return conv(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)


def conv3d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride=1, padding=0, dilation=1, groups=1
) -> Tensor:
    """Convolution in three dimensions; arguments of ``torch.nn.functional.conv3d``, see ``conv``."""
    return conv(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)


def conv_depthwise2d(
    input: Tensor, weight: Tensor, kernel_size, bias: Tensor | None, stride, padding, dilation
) -> Tensor:  # fmt: skip
    """Depthwise convolution of ``[n, channels, height, width]``; arguments of ``aten::_conv_depthwise2d``."""
    sizes = (kernel_size,) * 2 if isinstance(kernel_size, int) else tuple(kernel_size)
    if sizes != tuple(weight.shape[2:]):
        raise ArgumentError(f"kernel_size is {kernel_size}; expected {tuple(weight.shape[2:])}, the windows of weight")
    return conv(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=input.shape[1])
