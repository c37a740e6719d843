"""Permuted rows as transposed fp8 codes with one scale per expert and column."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.moe.moe_index_layout import MoeIndex
from rtkernels.ops.moe.moe_permute import as_index
from rtkernels.ops.moe.moe_permute_plan import check_permute
from rtkernels.ops.moe.reference import gathered, kept
from rtkernels.ops.quant import reference
from rtkernels.ops.quant.quantize_fp8_channel import whole_rows
from rtkernels.ops.quant.quantize_fp8_plan import tile_threads
from rtkernels.ops.shared.fp8_layout import E4M3, MAX_EXPERTS, groups_of, row_blocks_of
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_same, token
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel, build_together
from rtkernels.runtime.layout import divisor
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.declared import Argument, Dense, Meta, Operator
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Step, Steps

_WIDER = {E4M3: torch.bfloat16, torch.float8_e5m2: torch.bfloat16}  # exact

KERNEL = Kernel(
    "moe/permute_channel.cu",
    "moe_permute_channel",
    template="T CODES",
    args="x:ptr slots:ptr offsets:ptr scale:ptr smooth:ptr row_factor:ptr max_abs:ptr q_t:ptr scale_out:ptr "
    "choices:i64 divisor:i64 rows:i64 cols:i64 x_cols:i64 x_stride:i64 expert_count:i64 column_tiles:i64 pow2:i64",
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


def _plan(
    x: Meta, rows: Meta, slots: Meta, offsets: Meta, row_factor: Meta | None, scale: Meta | None, smooth: Meta | None,
    pow2_scale: bool, device: int,
) -> Steps:  # fmt: skip
    (tokens, cols), count, top_k, experts = x.shape, slots.shape[0], rows.shape[1], offsets.shape[0] - 1
    kind = _WIDER.get(x.dtype, x.dtype)
    if count * cols * tokens * top_k == 0 or kind != torch.bfloat16:
        return IN_TORCH
    meta, x_cols, converted = whole_rows(x, kind)
    tiles, threads = groups_of(cols), tile_threads("bf16")
    grid = min(row_blocks_of(count, experts) * tiles, 512 // threads * 2 * device_info(device).sm_count)
    build_together(device, (KERNEL, ("bf16", False)), (KERNEL, ("bf16", True)))
    stride = meta.row_stride
    numbers = tokens * top_k, divisor(top_k), count, cols, x_cols, stride, experts, tiles, int(pow2_scale)
    tensors = "x", "slots", "offsets", "scale", "smooth", "row_factor", "amax", "q_t", "scale_out"
    launches = [KERNEL.bind(("bf16", codes), device, grid, threads, 8 * (experts + 1)) for codes in (False, True)]
    steps = (Step(launch, *tensors, *numbers) for launch in launches)
    return Steps(*steps, zeros={"amax": experts * cols}, converted=converted)


def permuted_values(x: Tensor, top_k: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that the slots name in fp32, zeros for pad rows, and the token of each row or -1."""
    there = kept(slots, x.shape[0] * top_k)
    source = torch.where(there, slots.div(max(top_k, 1), rounding_mode="floor"), -1)
    return gathered(x, source).float(), source


def _reference(x, rows, slots, offsets, row_factor, scale, smooth, pow2_scale):
    z, source = permuted_values(x, rows.shape[1], slots)
    times = torch.ones(len(slots), dtype=torch.float32, device=x.device) if scale is None else gathered(scale, source)
    if row_factor is not None:
        times = times * row_factor
    products = (z if smooth is None else z * smooth) * times[:, None]
    z = torch.where((source >= 0)[:, None], products, 0)
    count, cols, counts = len(slots), x.shape[1], offsets.diff().clamp(min=0)
    ends = counts.cumsum(0).clamp(max=count)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    line = torch.arange(count, dtype=torch.int64, device=x.device)
    expert = torch.searchsorted(ends, line, right=True)  # past the last one behind its rows
    amax = torch.zeros((len(ends) + 1, cols), dtype=torch.float32, device=x.device)
    finite = torch.where(z.isfinite(), z.abs(), 0.0)
    amax = amax.scatter_reduce(0, expert[:, None].expand(count, cols), finite, "amax")
    scales = reference.scale_of(amax, E4M3, pow2_scale)
    codes = reference.codes(z, (1.0 / scales)[expert], E4M3).view(torch.uint8)
    own = expert.clamp(max=len(ends) - 1)
    column = torch.arange(cols, dtype=torch.int64, device=x.device)
    place = (starts[own] * cols + line - starts[own])[:, None] + column * (ends - starts)[own][:, None]
    place = torch.where((expert < len(ends))[:, None], place, count * cols)
    q = torch.zeros(count * cols + 1, dtype=torch.uint8, device=x.device).scatter(0, place.flatten(), codes.flatten())
    return q[:-1].clone().view(E4M3), scales[:-1].clone()


def _outputs(x, slots, offsets):
    scales = Memory((offsets.shape[0] - 1, x.shape[1]), torch.float32)
    return Memory((slots.shape[0] * x.shape[1],), E4M3), scales


_INDEX = (Dense(name, None) for name in ("rows", "slots", "offsets"))
_FACTORS = (Dense(name, None, optional=True) for name in ("row_factor", "scale", "smooth"))
CHANNEL = Operator(
    "moe_permute_smooth_t_fwd", (Argument("x", None), *_INDEX, *_FACTORS), options="bool pow2_scale",
    results="q_t scale_out", outputs=_outputs, plan=_plan, reference=_reference, check=_check, plans_empty=True,
)  # fmt: skip


class MoePermutedChannel(NamedTuple):
    """Transposed codes, one expert's matrix after the other, and scales ``[experts, H]``."""

    q_t: Tensor
    scale: Tensor


@public
def moe_permute_smooth_t(
    x: Tensor, index: MoeIndex, row_factor: Tensor | None = None, *, scale: Tensor | None = None,
    smooth: Tensor | None = None, pow2_scale: bool = False,
    out: tuple[Tensor | None, ...] | None = None,
) -> MoePermutedChannel:  # fmt: skip
    """Copy the rows of tokens to their experts, times factors, as transposed fp8 codes with one scale per column.

    ``z[r] = x[t] * smooth * (scale[t] * row_factor[r])`` for row r of token t, in fp32 with each product rounded. An
    expert's rows, including pad rows (zeros), are quantised as by :func:`quantize_fp8_smooth` with granularity
    "channel". For codes padded to 32 rows, build the index with ``multiple_of=32``. Not differentiable.

    bfloat16 and fp8 rows take two launches; float16 and float32 use several of torch's kernels.

    Args:
        x: ``[T, H]``; bfloat16, float16, float32, float8_e4m3fn or float8_e5m2. Any strides (copied unless rows are
            unit-stride and a multiple of 16 bytes). Any object with ``__dlpack__`` is accepted; other arguments must
            be, and results are, of the same kind.
        index: From ``moe_index``, for these T tokens.
        row_factor: Factors of the permuted rows, float32 ``[R]``.
        scale: Scales of x's rows, float32 ``[T]``.
        smooth: Factors of the columns, float32 ``[H]``.
        pow2_scale: Round scales up to a power of two.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A named tuple ``(q_t, scale)``: codes float8_e4m3fn ``[R * H]``, where ``[s * H : (s + c) * H]`` is the matrix
        ``[H, c]`` of the expert with rows s to s + c - 1, with zeros after the last expert; scales float32
        ``[experts, H]``.
    """
    index = as_index(index)
    x, row, scale, smooth = detached(x, row_factor, scale, smooth)
    return MoePermutedChannel(*CHANNEL.call(x, index.rows, index.slots, index.offsets, row, scale, smooth, pow2_scale))
