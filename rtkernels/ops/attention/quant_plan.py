"""Quantised attention by mma.sync: kernel records and launches."""

from __future__ import annotations

from typing import Any, NamedTuple

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.mma_plan import head_section, tile_pitch
from rtkernels.ops.attention.problem import Strides
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT
from rtkernels.runtime.operator.plan import Step
from rtkernels.runtime.targets import Target

_TOKENS = ("bf16", "fp16")
_WIDTHS = (64, 128)
MAX_WIDTH = _WIDTHS[-1]
INT8, E4M3 = 0, 1  # q and k, attention_mma_quant.cu
VALUES_16, VALUES_E4M3, VALUES_INT8 = 0, 1, 2
_KINDS = ((INT8, VALUES_16), (INT8, VALUES_E4M3), (INT8, VALUES_INT8), (E4M3, VALUES_16), (E4M3, VALUES_E4M3))
BLOCK = 64  # rows that share a scale, where not each has its own; keys of a tile
ROWS_OF_SUMS = 256
_THREADS = 128


def _variants(target: Target) -> list[tuple[Any, ...]]:
    kinds = [k for k in _KINDS if "fp8_cvt" in target.features or not (k[0] == E4M3 or k[1] == VALUES_E4M3)]
    return [(t, *kind, d) for t in _TOKENS for kind in kinds for d in _WIDTHS]


FORWARD = Kernel(
    "attention/attention_mma_quant.cu",
    "attention_mma_quant",
    template="T QK PV D",
    args="q:ptr k:ptr v:ptr scale_q:ptr scale_k:ptr scale_v:ptr lengths:ptr cu_q:ptr cu_k:ptr out:ptr lse:ptr "
    "pairs:i64 heads:i64 group:i64 tiles:i64 section:i64 lq:i64 lkv:i64 d_qk:i64 d_v:i64 q_batch:i64 q_row:i64 "
    "q_head:i64 k_batch:i64 k_row:i64 k_head:i64 v_batch:i64 v_row:i64 v_head:i64 out_batch:i64 out_row:i64 "
    "out_head:i64 lse_batch:i64 lse_head:i64 sq_batch:i64 sq_head:i64 sq_shift:i64 sk_batch:i64 sk_head:i64 "
    "sk_shift:i64 sv_batch:i64 sv_head:i64 sv_block:i64 left:i64 right:i64 scale:f64",
    variants=_variants,
    max_registers=255,
)
_QUANTIZE_UNIT = "attention/attention_quantize.cu"
KEY_SUMS = Kernel(
    _QUANTIZE_UNIT,
    "attention_key_sums",
    template="T",
    args="k:ptr sums:ptr rows:i64 width:i64 k_batch:i64 k_row:i64 k_head:i64",
    variants=[(t,) for t in _TOKENS],
    max_registers=64,
)
ROWS = Kernel(
    _QUANTIZE_UNIT,
    "attention_quantize_rows",
    template="T",
    args="x:ptr sums:ptr codes:ptr scales:ptr taken:ptr rows:i64 width:i64 x_batch:i64 x_row:i64 x_head:i64 parts:i64 "
    "group:i64 count:i64 blocks_of_rows:i64 e4m3_codes:i64 scale:f64",
    variants=[(t,) for t in _TOKENS],
    max_registers=152,
)
VALUES = Kernel(
    _QUANTIZE_UNIT,
    "attention_quantize_values",
    template="T",
    args="v:ptr codes:ptr scales:ptr rows:i64 width:i64 padded:i64 v_batch:i64 v_row:i64 v_head:i64 e4m3_codes:i64",
    variants=[(t,) for t in _TOKENS],
    max_registers=80,
)


class Quantized(NamedTuple):
    """One call. Strides are in elements (bytes of codes); `sq`, `sk`: (batch, head, rows of a scale); `sv` as used."""

    token: str
    qk: int
    pv: int
    batch: int
    heads_q: int
    heads_kv: int
    lq: int
    lkv: int
    d_qk: int
    d_v: int
    q: Strides
    k: Strides
    v: tuple[int, int, int]  # batch, row (key, or column of transposed codes), head
    out: Strides
    lse: tuple[int, int]
    sq: tuple[int, int, int]
    sk: tuple[int, int, int]
    sv: tuple[int, int, int]
    left: int
    right: int
    scale: float


def forward(call: Quantized, device: int) -> Step | None:
    """Return the launch, None if there is nothing to do."""
    c = call
    target = device_info(device).target
    width = next(w for w in _WIDTHS if max(c.d_qk, c.d_v) <= w)
    variant = (c.token, c.qk, c.pv, width)
    if variant not in _variants(target):
        raise ArgumentError(f"{target} has no products of float8_e4m3fn; expected int8 codes")
    codes = c.pv != VALUES_16
    queries = 128 if (c.qk, c.pv) == (INT8, VALUES_16) else 64
    keys = BLOCK * tile_pitch(width // 2)
    values = width * tile_pitch(BLOCK // 2) if codes else BLOCK * tile_pitch(width)
    shared = queries * tile_pitch(width // 2) + 2 * (keys + values)
    tiles, pairs = -(-c.lq // queries), c.batch * c.heads_q
    if tiles * pairs == 0:
        return None
    if tiles * pairs > GRID_LIMIT:
        raise ValueError(f"attention of {pairs} heads of {c.lq} queries; expected fewer than 2^31 tiles")
    group = c.heads_q // c.heads_kv
    section = head_section(c.d_qk + (1 if codes else 2) * c.d_v, c.lkv, pairs, group)
    return Step(
        FORWARD.bind(variant, device, tiles * pairs, _THREADS, shared),
        *("q", "k", "v", "scale_q", "scale_k", "scale_v" if codes else 0, "lengths", "cu_q", "cu_k", "out", "lse"),
        *(pairs, c.heads_q, group, tiles, section, c.lq, c.lkv, c.d_qk, c.d_v),
        *(*c.q[:3], *c.k[:3], *c.v, *c.out[:3], *c.lse),
        *(*c.sq[:2], c.sq[2].bit_length() - 1, *c.sk[:2], c.sk[2].bit_length() - 1, *c.sv),
        *(c.left, c.right, c.scale),
    )
