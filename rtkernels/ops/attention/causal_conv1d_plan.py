"""Causal convolutions: kernel records and launches."""

from __future__ import annotations

import torch

from rtkernels.ops.shared.column_sum import column_sum_step
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import TYPES, WIDTH, vector_bytes
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps

WIDTHS = tuple(range(2, 9))  # taps
# As in causal_conv1d.cuh.
_ROWS = 16 * 8  # of a block
_THREADS = 256


def _vector_of(taps: int) -> int:
    """Return how many channels a thread owns: more take registers that loads in flight need."""
    return 4 if taps <= 4 else 2


_FLAGS = "weight_fp32:i64 bias_fp32:i64 silu:i64"
_VECTORS = [(t, w, n) for t in WIDTH for w in WIDTHS for n in (1, _vector_of(w))]
FWD = Kernel(
    "attention/causal_conv1d.cu", "causal_conv1d_fwd", template="T W N", max_registers=168,
    args="x:ptr weight:ptr bias:ptr initial:ptr cu:ptr y:ptr sequences:i64 length:i64 channels:i64 x_batch:i64 "
    f"x_row:i64 columns:i64 {_FLAGS}",
    variants=_VECTORS,
)  # fmt: skip
STATE = Kernel(
    "attention/causal_conv1d.cu", "causal_conv1d_state", template="T", max_registers=64,
    args="x:ptr initial:ptr cu:ptr final:ptr sequences:i64 length:i64 channels:i64 x_batch:i64 x_row:i64 columns:i64",
    variants=TYPES,
)  # fmt: skip
STEP = Kernel(
    "attention/causal_conv1d.cu", "causal_conv1d_step", template="T W", max_registers=64, tier="serve",
    args="x:ptr weight:ptr bias:ptr state:ptr y:ptr sequences:i64 channels:i64 x_batch:i64 columns:i64 " + _FLAGS,
    variants=[(t, w) for t in WIDTH for w in WIDTHS],
)  # fmt: skip
_BWD_ARGS = "sequences:i64 length:i64 channels:i64 dy_batch:i64 dy_row:i64 x_batch:i64 x_row:i64 columns:i64 " + _FLAGS
BWD = Kernel(
    "attention/causal_conv1d_bwd.cu", "causal_conv1d_bwd", template="T W N", max_registers=255,
    args="dy:ptr dfinal:ptr x:ptr weight:ptr bias:ptr initial:ptr cu:ptr dx:ptr dweight:ptr dbias:ptr " + _BWD_ARGS,
    variants=_VECTORS,
)  # fmt: skip
STATE_BWD = Kernel(
    "attention/causal_conv1d_bwd.cu", "causal_conv1d_state_bwd", template="T W", max_registers=96,
    args="dy:ptr dfinal:ptr x:ptr weight:ptr bias:ptr initial:ptr cu:ptr dinitial:ptr " + _BWD_ARGS,
    variants=[(t, w) for t in WIDTH for w in WIDTHS],
)  # fmt: skip
KERNELS = (FWD, STATE, STEP, BWD, STATE_BWD)


def _strides(x: Meta, packed: bool) -> tuple[int, int]:
    """Return the distances between sequences and between rows; 0 for one that is never used."""
    steps = [0 if size <= 1 else step for size, step in zip(x.shape[:-1], x.stride[:-1], strict=True)]
    return (0, steps[0]) if packed else (steps[0], steps[1])


def _vector(x: Meta, others: tuple[Meta, ...], packed: bool, taps: int) -> int:
    distances = [step * t.dtype.itemsize for t in (x, *others) for step in _strides(t, packed)]
    size = x.dtype.itemsize
    vector = _vector_of(taps)
    return vector if vector_bytes(misaligned(x, *others), x.shape[-1] * size, *distances) >= vector * size else 1


def _counts(x: Meta, cu: Meta | None) -> tuple[int, int, int]:
    """Return the number of sequences, rows of a sequence (of all if they are packed) and channels."""
    if cu is None:
        return x.shape
    return cu.shape[0] - 1, x.shape[0], x.shape[1]


def _flags(x: Meta, weight: Meta, bias: Meta | None, silu: bool) -> tuple[int, int, int]:
    return int(weight.dtype != x.dtype), int(bias is not None and bias.dtype != x.dtype), int(silu)


def _grid(x: Meta, cu: Meta | None, vector: int) -> tuple[int, int, int]:
    _, length, channels = _counts(x, cu)
    return -(-length // _ROWS), -(-channels // (32 * vector)), x.shape[0] if cu is None else 1


def state_step(x: Meta, cu: Meta | None, initial: bool, columns: int, device: int) -> Step:
    """Return the launch that writes the final states."""
    sequences, length, channels = _counts(x, cu)
    grid = min(-(-sequences * channels * columns // 256), 1 << 20)
    return Step(
        STATE.bind((x.token,), device, grid, 256),
        *("x", "initial_state" if initial else 0, "cu_seqlens" if cu is not None else 0, "final_state"),
        *(sequences, length, channels, *_strides(x, cu is not None), columns),
    )


def plan(x, weight, bias, initial_state, cu_seqlens, silu, columns, wants_state, device) -> Steps:
    """Return the launches of a forward pass."""
    cu, taps = cu_seqlens, weight.shape[1]
    vector = _vector(x, (), cu is not None, taps)
    steps = [Step(
        FWD.bind((x.token, taps, vector), device, _grid(x, cu, vector), _THREADS),
        *("x", "weight", "bias", "initial_state", "cu_seqlens", "y", *_counts(x, cu), *_strides(x, cu is not None)),
        columns, *_flags(x, weight, bias, silu),
    )]  # fmt: skip
    if wants_state:
        steps.append(state_step(x, cu, initial_state is not None, columns, device))
    return Steps(*steps)


def plan_backward(
    dy, dfinal_state, x, weight, bias, initial_state, cu_seqlens, silu, columns, need_x, need_weight, need_bias,
    need_initial_state, device,
) -> Steps:  # fmt: skip
    """Return the launches of a backward pass."""
    cu, (channels, taps) = cu_seqlens, weight.shape
    packed = cu is not None
    numbers = (
        *_counts(x, cu), *_strides(dy, packed), *_strides(x, packed), columns, *_flags(x, weight, bias, silu),
    )  # fmt: skip
    inputs = ("dy", "dfinal_state", "x", "weight", "bias", "initial_state", "cu_seqlens")
    steps, scratch = [], {}
    vector = _vector(x, (dy,), packed, taps)
    grid = _grid(x, cu, vector)
    parts = grid[0] * grid[2]
    if (need_x or need_weight or need_bias) and parts:
        to = ("dx" if need_x else 0, "weight_parts" if need_weight else 0, "bias_parts" if need_bias else 0)
        steps.append(Step(BWD.bind((x.token, taps, vector), device, grid, _THREADS), *inputs, *to, *numbers))
    for needed, name, part, meta, cols in (
        (need_weight, "dweight", "weight_parts", weight, channels * taps),
        (need_bias, "dbias", "bias_parts", bias, channels),
    ):
        if needed and parts and cols:
            scratch[part] = Memory((parts, cols), torch.float32)
            steps.append(column_sum_step(part, name, parts, cols, meta.dtype, device, overlaps=False))
    if need_initial_state and initial_state is not None:
        grid = -(-numbers[0] * channels // 256)
        launch = STATE_BWD.bind((x.token, taps), device, grid, 256)
        steps.append(Step(launch, *inputs, "dinitial_state", *numbers))
    return Steps(*steps, scratch=scratch)


def plan_step(x, weight, bias, state, silu, device) -> Steps:
    """Return the launch of one token."""
    batch, channels = x.shape
    return Steps(Step(
        STEP.bind((x.token, weight.shape[1]), device, -(-batch * channels // 256), 256),
        *("x", "weight", "bias", "state", "y", batch, channels, x.stride[0] if batch > 1 else 0, state.shape[-1]),
        *_flags(x, weight, bias, silu),
    ))  # fmt: skip
