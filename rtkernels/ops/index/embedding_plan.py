"""The kernels of the embedding, the choice between them, and their launches."""

from __future__ import annotations

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.index import embedding_order
from rtkernels.ops.index.embedding_order import order_steps
from rtkernels.runtime.checks import check_dtype, check_same, token
from rtkernels.runtime.invariance import refuse, starts_from_result
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import WIDTH, group_threads, row_blocks, row_stride, vector_bytes
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_SORT_ROUNDS = 16
_SORT_THREADS = 1024
SORT_LIMIT = _SORT_ROUNDS * _SORT_THREADS  # tokens; more are sorted in passes
_BIN_TOKENS = 64  # of a sorting block, or more
_MAX_BIN_BITS = 7  # 2^7 blocks, or fewer
_MAX_LOW_BITS = 17  # of the key: 31 with the bits of a token
_FILL_BYTES = _SORT_THREADS * 16 * 16  # zeros one block writes
_SUM_THREADS = 128
_WINDOW = 32
MIN_WINDOWS = 256
MAX_WINDOWS = 2048  # between the two, as many as are resident
_SUM_BLOCKS = 4  # of embedding_sum on a processor

_FWD = Kernel(
    "index/embedding_lookup.cu", "embedding_fwd", template="BYTES", max_registers=48,
    args="ids:ptr weight:ptr y:ptr tokens:i64 units:i64 weight_stride:i64 rows:i64 start:i64 ids_int64:i64 "
    "threads_per_row:i64",
    variants=[(16,), (4,), (2,)],
)  # fmt: skip
_SORT = Kernel(
    "index/embedding_sort.cu", "embedding_sort", template="ROUNDS", max_registers=64,
    args="ids:ptr list:ptr counters:ptr fill:ptr tokens:i64 rows:i64 start:i64 padding:i64 ids_int64:i64 key_bits:i64 "
    "bin_bits:i64 counter_count:i64 fill_bytes:i64",
    variants=[(_SORT_ROUNDS,)],
)  # fmt: skip
# Gradients whose rows cannot be accessed 16 bytes at a time, and other pairs of types, take dy as fp32.
_PAIRS = ("bf16 bf16", "bf16 fp32", "fp16 fp16", "fp16 fp32", "fp32 fp32")
_SUM = Kernel(
    "index/embedding_sum.cu", "embedding_sum", template="FROM TO VEC ADDS", max_registers=128,
    args="dy:ptr grad:ptr entries:ptr partial:ptr counters:ptr weights:ptr tokens:i64 cols:i64 dy_stride:i64 "
    "grad_stride:i64 window_size:i64 dy_half:i64 grad_half:i64 accumulate:i64",
    variants=[(2, 2, 8, False), *((*each, True) for each in ((2, 2, 8), (2, 4, 8), (4, 4, 4), (4, 4, 1), (4, 2, 1)))],
)  # fmt: skip
_ADD_ROWS = Kernel(
    "index/embedding_add_rows.cu", "embedding_add_rows", template="FROM VEC", max_registers=128,
    args="dy:ptr grad:ptr entries:ptr tokens:i64 cols:i64 dy_stride:i64 grad_stride:i64 dy_half:i64",
    variants=[(2, 8), (4, 4), (4, 1)],
)  # fmt: skip
KERNELS = (_FWD, _SORT, _SUM, _ADD_ROWS, *embedding_order.KERNELS)

# ---- validation -----------------------------------------------------------------------------------------------------


def check_fwd(weight: Meta, ids: Meta) -> None:
    """Raise an ArgumentError for a table or ids that a look-up cannot use."""
    if len(weight[1]) != 2:
        raise ArgumentError(f"weight has {len(weight[1])} dimensions; expected 2, [rows, columns]")
    check_dtype("ids", ids[0])


def check_bwd(dy: Meta, ids: Meta, rows: int) -> None:
    """Raise an ArgumentError for arguments of the gradient that do not fit together."""
    if tuple(dy[1][:-1]) != tuple(ids[1]) or not dy[1]:
        raise ArgumentError(
            f"dy has shape {tuple(dy[1])}; expected {(*ids[1], 'columns')}, the shape of ids and columns"
        )
    if rows < 0:
        raise ArgumentError(f"rows is {rows}; expected 0 or more")
    if rows > 2**31 - 1 or dy.rows > 2**31 - 1:
        raise ArgumentError(f"{rows} rows and {dy.rows} tokens; expected fewer than 2^31 of either")
    check_dtype("ids", ids[0])


def check_main_grad(main_grad: Meta, cols: int, device: int, of: str) -> None:
    """Raise an ArgumentError for a gradient that cannot be added to."""
    dtype, shape, stride, where = main_grad[:4]
    token("main_grad", dtype)
    if len(shape) != 2 or shape[1] != cols:
        raise ArgumentError(f"main_grad has shape {tuple(shape)}; expected (rows, {cols})")
    check_same("main_grad", where, device, "device index", of=of)
    step = row_stride(shape, stride)
    if step is None or (shape[0] > 1 and step < cols):
        raise ArgumentError(f"main_grad has strides {tuple(stride)}; expected unit-stride rows that do not overlap")


def check_add(main_grad: Meta, dy: Meta, ids: Meta) -> None:
    check_bwd(dy, ids, main_grad[1][0] if main_grad[1] else 0)
    if starts_from_result() and main_grad[0] != torch.float32:
        refuse(f"adding to a main_grad of {main_grad.token}", "sums so far must be float32")
    check_main_grad(main_grad, dy[1][-1], dy[3], "dy")


# ---- plans ----------------------------------------------------------------------------------------------------------


def plan_fwd(weight: Meta, ids: Meta, start: int, device: int) -> Steps:
    (rows, cols), size, tokens = weight.shape, weight.dtype.itemsize, ids.numel()
    stride = weight.row_stride * size
    width = vector_bytes(weight.misaligned, cols * size, stride)
    width = 16 if width == 16 else min(width, 4)
    units = cols * size // width
    threads = group_threads(-(-units // 4), 256)
    launch = _FWD.bind((width,), device, *row_blocks(tokens, threads))
    ids_int64 = int(ids.dtype == torch.int64)
    return Steps(Step(launch, "ids", "weight", "y", tokens, units, stride, rows, start, ids_int64, threads))


def plan_bwd(dy: Meta, ids: Meta, rows: int, start: int, padding: int, device: int) -> Steps:
    shape = (rows, dy.shape[-1])
    grad = Meta(dy.dtype, shape, dense_strides(shape), device, 0)
    return sum_steps(dy, ids, grad, start, padding, device)


def plan_add(main_grad: Meta, dy: Meta, ids: Meta, start: int, padding: int, device: int) -> Steps:
    return sum_steps(dy, ids, main_grad, start, padding, device, "dy", "main_grad", accumulate=True)


def sum_steps(
    dy: Meta, ids: Meta, grad: Meta, start: int, padding: int, device: int, dy_name: str = "dy",
    grad_name: str = "grad", ids_name: str = "ids", weights: str | int = 0, accumulate: bool = False,
) -> Steps:  # fmt: skip
    """Return what writes (or adds) the sums of dy's rows to grad: kernels sort the tokens and write zeros, one adds up.

    `weights`, dense fp32 with one number for each token, multiplies them. Unless it accumulates, grad must be dense.
    """
    tokens, cols, rows = dy.rows, dy.shape[-1], grad.shape[0]
    t, g, size, grad_size = dy.token, grad.token, dy.dtype.itemsize, grad.dtype.itemsize
    dy_stride, grad_stride = dy.row_stride, grad.row_stride
    aligned16 = vector_bytes(misaligned(dy, grad), cols * size, dy_stride * size, grad_stride * grad_size) == 16
    aligned16 = aligned16 and f"{t} {g}" in _PAIRS
    converted = None
    if not aligned16 and t != "fp32":
        converted = {dy_name: torch.float32}
        t, size, dy_stride = "fp32", 4, cols
    vec = WIDTH[t] if aligned16 else 1
    threads = min(-(-cols // (vec * 32)) * 32, _SUM_THREADS)
    slices = -(-cols // (threads * vec))
    resident_groups = device_info(device).sm_count * _SUM_BLOCKS * _SUM_THREADS // (threads * slices)
    if accumulate and starts_from_result():
        steps, scratch, entries = _sort_steps(ids, ids_name, 0, rows, start, padding, 1, 0, device)
        launch = _ADD_ROWS.bind((size, vec), device, (-(-tokens // _WINDOW), slices), threads)
        numbers = tokens, cols, dy_stride, grad_stride, int(t == "fp16")
        add = Step(launch, dy_name, grad_name, entries, *numbers)
        scratch["counters"] = Memory((1,), torch.int32)
        return Steps(*steps, add, scratch=scratch, converted=converted)
    window = _WINDOW * -(-tokens // (_WINDOW * min(max(resident_groups, MIN_WINDOWS), MAX_WINDOWS)))
    windows = -(-tokens // window)
    counters, fill_bytes = 3 * windows * slices, 0 if accumulate else rows * cols * grad_size
    fill = 0 if accumulate else grad_name
    steps, scratch, entries = _sort_steps(ids, ids_name, fill, rows, start, padding, counters, fill_bytes, device)
    sizes = (size, grad_size, vec)
    variant = (*sizes, accumulate or sizes != (2, 2, 8))
    launch = _SUM.bind(variant, device, (windows, slices), threads, overlap=True)
    numbers = tokens, cols, dy_stride, grad_stride, window, int(t == "fp16"), int(g == "fp16"), int(accumulate)
    scratch |= {"counters": Memory((counters,), torch.int32), "partial": Memory((2 * windows * cols,), torch.float32)}
    add = Step(launch, dy_name, grad_name, entries, "partial", "counters", weights, *numbers)
    return Steps(*steps, add, scratch=scratch, converted=converted)


def _sort_steps(
    ids: Meta, ids_name: str, fill: str | int, rows: int, start: int, padding: int, counters: int, fill_bytes: int,
    device: int,
) -> tuple[list[Step], dict[str, Memory], str]:  # fmt: skip
    """Return what sorts the tokens by row: one kernel, or passes (``embedding_order``), and as that does."""
    tokens = ids.numel()
    key_bits = max(1, (rows - 1).bit_length())
    processors = device_info(device).sm_count.bit_length() - 1
    bin_bits = min((-(-tokens // _BIN_TOKENS) - 1).bit_length(), processors, _MAX_BIN_BITS, key_bits)
    bin_bits = max(bin_bits, key_bits - _MAX_LOW_BITS)
    if tokens > SORT_LIMIT or bin_bits > _MAX_BIN_BITS:
        return order_steps(ids, ids_name, fill, rows, start, padding, counters, fill_bytes, device)
    grid = (1 << bin_bits) + -(-fill_bytes // _FILL_BYTES)
    launch = _SORT.bind((_SORT_ROUNDS,), device, grid, _SORT_THREADS, 4 * tokens)
    ids_int64 = int(ids.dtype == torch.int64)
    numbers = tokens, rows, start, padding, ids_int64, key_bits, bin_bits, counters, fill_bytes
    return (
        [Step(launch, ids_name, "list", "counters", fill, *numbers)],
        {"list": Memory((tokens,), torch.int64)},
        "list",
    )
