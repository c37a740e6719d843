"""Parts of rows from the accumulators of a product on sm_90a, which never stores logits.

For one id per row, without a bias, soft cap, temperatures of rows and sums of squares; the rest works on slabs of
logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.loss import logprob_plan as plans
from rtkernels.ops.loss.label_report import report
from rtkernels.ops.loss.linear_logprob_head import flat_rows
from rtkernels.ops.loss.logprob_reference import PARTS as PART_ROWS
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import nothing
from rtkernels.runtime.operator.declared import Argument, Dense, Meta, Primitive
from rtkernels.runtime.operator.plan import Boxes, Memory, Step, Steps, box_strides

_UNIT = "loss/linear_logprob_tiles.cu"
_ROWS, _COLS, _STAGES = 128, 256, 4
_ROW_BYTES = 128  # of k in a stage
_BAND = 1024 // _ROWS  # rows of tiles that blocks walk together
_FOLD_ROWS = 32
_LIMIT_ROWS = 16384  # of a launch, so that statistics of tiles stay small
FEWEST = (1024, 8192)  # rows and columns

TILES = Kernel(
    _UNIT, "linear_logprob_tiles", template="T ROUND COLS STAGES", max_registers=168,
    args="a_map:tmap b_map:tmap ids:ptr tiles:ptr targets:ptr rows:i64 columns:i64 depth:i64 ids_int64:i64 "
    "ignore_index:i64 first:i64 wanted:i64 band:i64 factor:f64",
    variants=[(token, rounds, _COLS, _STAGES) for token in ("bf16", "fp16") for rounds in (False, True)],
    needs=("wgmma",),
)  # fmt: skip
FOLD = Kernel(
    _UNIT, "linear_logprob_fold", template="T", max_registers=80, variants=[("fp32",)],
    args="tiles:ptr ids:ptr parts:ptr targets:ptr report:ptr rows:i64 columns:i64 count:i64 wanted:i64 ids_int64:i64 "
    "ignore_index:i64 first:i64 vocabulary:i64 begin:i64",
)  # fmt: skip
KERNELS = (TILES, FOLD)


def _aligned(meta: Meta) -> bool:
    """Return True if TMA can read the rows of a matrix."""
    pitch = meta.row_stride
    return pitch is not None and pitch >= meta.shape[-1] and pitch % 8 == 0 and meta.misaligned == 0


def suits(
    hidden: Meta, weight: Meta, ids: Meta, bias: Meta | None, temperatures: Meta | None, logit_scale: float,
    softcap: float, keep_logits: bool, wanted: int, device: int,
) -> bool:  # fmt: skip
    """Return True if a call needs nothing that tiles do not give, and is large enough to be worth it."""
    one_id = ids.dim() < hidden.dim() or ids.shape[-1] == 1
    plain = bias is None and temperatures is None and softcap == 0.0 and logit_scale > 0.0
    if keep_logits or wanted & plans.SQUARES or not (one_id and plain) or hidden.dtype == torch.float32:
        return False
    large = not level() and hidden.rows >= FEWEST[0] and weight.shape[0] >= FEWEST[1] and 0 < weight.shape[1] < 1 << 24
    return large and _aligned(hidden) and _aligned(weight) and TILES.supports(device_info(device).target)


def _planes(wanted: int) -> int:
    return 3 + sum(bool(wanted & bit) for bit in (plans.MEAN, plans.TOP1))


def _operand(name: str, matrix: Meta, rows: int) -> Boxes:
    count, depth = matrix.shape
    sizes = (depth, count, 1)
    return Boxes(name, matrix.token, sizes, box_strides(sizes, (matrix.row_stride, 0), 2), (64, rows, 1))


def _plan(
    states: Meta, weight: Meta, ids: Meta, ignore_index: int, vocabulary: int, wanted: int, fp32_logits: bool,
    factor: float, device: int,
) -> Steps:  # fmt: skip
    (rows, depth), columns = states.shape, weight.shape[0]
    count, flags, is_int64 = -(-columns // _COLS), wanted & (plans.MEAN | plans.TOP1), int(ids.dtype == torch.int64)
    grid = min(device_info(device).sm_count, -(-rows // _ROWS) * count)
    shared = _STAGES * ((_ROWS + _COLS) * _ROW_BYTES + 16) + 1024
    variant = (states.token, not fp32_logits, _COLS, _STAGES)
    tiles = TILES.bind(variant, device, grid, 384, shared)
    fold = FOLD.bind(("fp32",), device, -(-rows // _FOLD_ROWS), 256)
    sizes = rows, columns, depth, is_int64, ignore_index, "first", flags, _BAND, factor
    numbers = rows, columns, count, flags, is_int64, ignore_index, "first", vocabulary, "begin"
    operands = _operand("states", states, _ROWS), _operand("weight", weight, _COLS)
    return Steps(
        Step(tiles, *operands, "ids", "tiles", "targets", *sizes),
        Step(fold, "tiles", "ids", "parts", "targets", "report", *numbers),
        scratch={"tiles": Memory((_planes(wanted), count, rows), torch.float32)},
        kept={"report": report(device).tensor},
    )  # fmt: skip


# 16-bit states [rows, depth] and weight [columns, depth] that TMA can read, ids [rows, 1]. No checks.
PARTS_OF_TILES = Primitive(
    "linear_logprob_tiles", (Argument("states", None), Argument("weight", None), Dense("ids", None)),
    "int ignore_index, int vocabulary, int wanted, bool fp32_logits, float factor, int first, int begin",
    results="parts targets", plan=_plan, numbers="first begin",
    outputs=lambda states: (
        Memory((PART_ROWS, states.shape[0]), torch.float32), Memory((1, states.shape[0]), torch.float32)
    ),
)  # fmt: skip


def parts(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Any, temperatures: Any, ignore_index: int, logit_scale: float,
    softcap: float, temperature: float, fp32_logits: bool, chunk_bytes: int, first: int, vocabulary: int,
    keep_logits: bool, wanted: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator ``linear_logprob_parts`` for calls that ``suits`` accepts."""
    states, flat = flat_rows(hidden, ids)
    numbers = ignore_index, vocabulary, wanted, fp32_logits, logit_scale / temperature, first
    found = [
        PARTS_OF_TILES(states[begin : begin + _LIMIT_ROWS], weight, flat[begin : begin + _LIMIT_ROWS], *numbers, begin)
        for begin in range(0, len(states), _LIMIT_ROWS)
    ]
    together = found[0] if len(found) == 1 else [torch.cat(each, 1) for each in zip(*found, strict=True)]
    return together[0], together[1], nothing(together[0])
