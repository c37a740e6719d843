"""Permuted rows as transposed fp8 codes with one scale per expert and column."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.moe.moe_index_layout import MoeIndex
from rtkernels.ops.moe.moe_permute import as_index, with_arrays
from rtkernels.ops.moe.moe_permute_plan import check_permute
from rtkernels.ops.moe.reference import gathered, kept
from rtkernels.ops.quant import reference
from rtkernels.ops.quant.quantize_fp8_experts import MAX_EXPERTS, row_blocks
from rtkernels.ops.quant.quantize_fp8_plan import groups_of, tile_threads
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel, build_together
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import address, check_same, divisor, metadata, row_stride, token, vector_bytes
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.operator import TorchOp

E4M3 = torch.float8_e4m3fn
_WIDER = {E4M3: torch.bfloat16, torch.float8_e5m2: torch.bfloat16}  # exact

KERNEL = Kernel(
    "moe/permute_channel.cu",
    "moe_permute_channel",
    template="T CODES",
    args="x:ptr slots:ptr offsets:ptr scale:ptr smooth:ptr row_factor:ptr most:ptr q_t:ptr scale_out:ptr choices:i64 "
    "divisor:i64 rows:i64 cols:i64 x_cols:i64 x_stride:i64 expert_count:i64 column_tiles:i64 pow2:i64",
    variants=[("bf16", False), ("bf16", True)],  # wider types are left to torch
    max_registers=128,
)
KERNELS = (KERNEL,)


def _check(x, rows, slots, offsets, row_factor, scale, smooth) -> None:
    check_permute(x, rows, slots, scale, None, None)
    if offsets[0] != torch.int32 or len(offsets[1]) != 1 or not 2 <= offsets[1][0] <= MAX_EXPERTS + 1:
        raise ArgumentError(f"index.offsets has shape {tuple(offsets[1])}; expected int32 and (experts + 1,)")
    sizes = {"row_factor": (row_factor, slots[1][0]), "scale": (scale, x[1][0]), "smooth": (smooth, x[1][1])}
    for name, (given, size) in sizes.items():
        if given is not None:
            token(name, given[0], (torch.float32,))
            check_same(name, tuple(given[1]), (size,), "shape", of="the rows, tokens or columns it is for")
            check_same(name, given[3], x[3], "device index")


def _plan(x, rows, slots, offsets, row_factor, scale, smooth, align: int):
    """Return ``(two launches, columns to add to x, integers)``; None if torch does it."""
    _check(x, rows, slots, offsets, row_factor, scale, smooth)
    (tokens, cols), device, size = x[1], x[3], x[0].itemsize
    count, top_k, experts = slots[1][0], rows[1][1], offsets[1][0] - 1
    if count * cols * tokens * top_k == 0 or x[0] != torch.bfloat16:
        return None
    step, extra = row_stride(x[1], x[2]), None
    if step is None or vector_bytes(align, cols * size, step * size) != 16:
        extra = -cols % (16 // size)
        step = cols + extra
    tiles, threads = groups_of(cols), tile_threads("bf16")
    grid = min(row_blocks(count, experts) * tiles, 512 // threads * 2 * device_info(device).sm_count)
    build_together(device, (KERNEL, ("bf16", False)), (KERNEL, ("bf16", True)))
    launches = [KERNEL.bind(("bf16", codes), device, grid, threads, 8 * (experts + 1)) for codes in (False, True)]
    numbers = (tokens * top_k, divisor(top_k), count, cols, cols + (extra or 0), step, experts, tiles)
    return launches, extra, numbers


_PLANS = Plans(_plan)


def _launch(
    x: Tensor,
    rows: Tensor,
    slots: Tensor,
    offsets: Tensor,
    row_factor: Tensor | None,
    scale: Tensor | None,
    smooth: Tensor | None,
    pow2_scale: bool,
) -> tuple[Tensor, Tensor]:
    x = x.to(_WIDER.get(x.dtype, x.dtype))
    slots, offsets, *factors = (
        None if t is None else t.contiguous() for t in (slots, offsets, scale, smooth, row_factor)
    )
    by_name = (factors[2], factors[0], factors[1])
    plan = _PLANS[(*map(metadata, (x, rows, slots, offsets, *by_name)), x.data_ptr() & 15)]
    if plan is None:
        return _reference(x, rows, slots, offsets, *by_name, pow2_scale)
    launches, extra, numbers = plan
    if extra is not None:
        x = F.pad(x, (0, extra)).contiguous() if extra else x.clone(memory_format=torch.contiguous_format)
    experts, cols = offsets.shape[0] - 1, numbers[3]
    most = torch.zeros((experts, cols), dtype=torch.float32, device=x.device)
    q = torch.empty(slots.shape[0] * cols, dtype=E4M3, device=x.device)
    out = torch.empty((experts, cols), dtype=torch.float32, device=x.device)
    pointers = [address(t) for t in (x, slots, offsets, *factors, most, q, out)]
    for launch in launches:
        launch(*pointers, *numbers, pow2_scale)
    return q, out


def permuted_values(x: Tensor, top_k: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that the slots name in fp32, zeros for pad rows, and the token of each row or -1."""
    there = kept(slots, x.shape[0] * top_k)
    source = torch.where(there, slots.div(max(top_k, 1), rounding_mode="floor"), -1)
    return gathered(x, source).float(), source


def _reference(x, rows, slots, offsets, row_factor, scale, smooth, pow2_scale):
    _check(*map(metadata, (x, rows, slots, offsets, row_factor, scale, smooth)))
    z, source = permuted_values(x, rows.shape[1], slots)
    times = torch.ones(len(slots), device=x.device) if scale is None else gathered(scale, source)
    if row_factor is not None:
        times = times * row_factor
    products = (z if smooth is None else z * smooth) * times[:, None]
    z = torch.where((source >= 0)[:, None], products, 0)
    count, cols, counts = len(slots), x.shape[1], offsets.diff().clamp(min=0)
    ends = counts.cumsum(0).clamp(max=count)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    line = torch.arange(count, device=x.device)
    expert = torch.searchsorted(ends, line, right=True)  # past the last one behind its rows
    most = torch.zeros((len(ends) + 1, cols), dtype=torch.float32, device=x.device)
    finite = torch.where(z.isfinite(), z.abs(), 0.0)
    most = most.scatter_reduce(0, expert[:, None].expand(count, cols), finite, "amax")
    scales = reference.scale_of(most, E4M3, pow2_scale)
    codes = reference.codes(z, (1.0 / scales)[expert], E4M3).view(torch.uint8)
    own = expert.clamp(max=len(ends) - 1)
    column = torch.arange(cols, device=x.device)
    place = (starts[own] * cols + line - starts[own])[:, None] + column * (ends - starts)[own][:, None]
    place = torch.where((expert < len(ends))[:, None], place, count * cols)
    q = torch.zeros(count * cols + 1, dtype=torch.uint8, device=x.device).scatter(0, place.flatten(), codes.flatten())
    return q[:-1].clone().view(E4M3), scales[:-1].clone()


def _fake(x, rows, slots, offsets, row_factor, scale, smooth, pow2_scale):
    scales = x.new_empty((offsets.shape[0] - 1, x.shape[1]), dtype=torch.float32)
    return x.new_empty(slots.shape[0] * x.shape[1], dtype=E4M3), scales


CHANNEL = TorchOp(
    "moe_permute_smooth_t_fwd(Tensor x, Tensor rows, Tensor slots, Tensor offsets, Tensor? row_factor, Tensor? scale, "
    "Tensor? smooth, bool pow2_scale) -> (Tensor, Tensor)",
    launch=_launch,
    reference=_reference,
    fake=_fake,
)


class MoePermutedChannel(NamedTuple):
    """Transposed codes, one expert's matrix after the other, and scales ``[experts, H]``."""

    q_t: Tensor
    scale: Tensor


def moe_permute_smooth_t(
    x: Tensor,
    index: MoeIndex,
    row_factor: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    smooth: Tensor | None = None,
    pow2_scale: bool = False,
) -> MoePermutedChannel:
    """Copy the rows of tokens to their experts, times factors, as transposed fp8 codes with one scale per column.

    ``z[r] = x[t] * smooth * (scale[t] * row_factor[r])`` for row r of token t, in fp32 and each product rounded. An
    expert's rows, pad rows (zeros) included, are quantised as :func:`quantize_fp8_smooth` does with granularity
    "channel". For codes padded to 32 rows, build the index with ``multiple_of=32``. Not differentiable.

    bfloat16 and fp8 rows take two launches; float16 and float32 are put together from several of torch's own kernels.

    Args:
        x: ``[T, H]``; bfloat16, float16, float32, float8_e4m3fn or float8_e5m2. Any strides (a copy is made unless rows
            are unit-stride and of whole 16 bytes). May be any object with ``__dlpack__``; all others are then of its
            kind.
        index: From ``moe_index``, for these T tokens.
        row_factor: Factors of the permuted rows, float32 ``[R]``.
        scale: Scales of x's rows, float32 ``[T]``.
        smooth: Factors of the columns, float32 ``[H]``.
        pow2_scale: Round scales up to a power of two.

    Returns:
        A named tuple ``(q_t, scale)``: float8_e4m3fn ``[R * H]``, of which ``[s * H : (s + c) * H]`` is the matrix
        ``[H, c]`` of the expert with rows s to s + c - 1, and zeros after the last one; float32 ``[experts, H]``.
    """
    if not isinstance(x, Tensor):
        options = {"scale": scale, "smooth": smooth, "pow2_scale": pow2_scale}
        return with_arrays(moe_permute_smooth_t, x, index, row_factor, **options)
    index = as_index(index)
    x, row, scale, smooth = detached(x, row_factor, scale, smooth)
    return MoePermutedChannel(*CHANNEL(x, index.rows, index.slots, index.offsets, row, scale, smooth, pow2_scale))


def samples(x: Tensor, index: MoeIndex, smooth: Tensor, row_factor: Tensor):
    """Yield arguments of the operator."""
    parts = index.rows, index.slots, index.offsets
    yield CHANNEL, (x, *parts, row_factor, x[:, 0].contiguous(), smooth, False)
    yield CHANNEL, (x.bfloat16(), *parts, None, None, None, True)
