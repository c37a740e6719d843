"""Quantised attention by mma.sync and, on sm_90a, by wgmma: kernel records and launches."""

from __future__ import annotations

from typing import Any, NamedTuple

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.mma_plan import (
    WALK_ARGUMENTS,
    check_tiles,
    head_section,
    stride_arguments,
    tile_pitch,
)
from rtkernels.ops.attention.problem import Strides
from rtkernels.ops.attention.sm90_forward_plan import heads_in_l2
from rtkernels.ops.shared.backend import Backend, Backends
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Boxes, Step, Steps, box_strides
from rtkernels.runtime.targets import Target

_TOKENS = ("bf16", "fp16")
_WIDTHS = (64, 128)
MAX_WIDTH = _WIDTHS[-1]
WIDEST_QK = 192  # of q and k, by wgmma alone
INT8, E4M3, MXFP8 = 0, 1, 2  # q and k, attention_mma_quant.cu
VALUES_16, VALUES_E4M3, VALUES_INT8 = 0, 1, 2
_VALUES_WHOLE = 3  # e4m3 with a scale per column (attention_sm90_quant.cu)
_KINDS = ((INT8, VALUES_16), (INT8, VALUES_E4M3), (INT8, VALUES_INT8), (E4M3, VALUES_16), (E4M3, VALUES_E4M3))
BLOCK = 64  # rows that share a scale, where not each has its own; keys of a tile
ROWS_OF_SUMS = 256
_THREADS = 128


def _variants(target: Target) -> list[tuple[Any, ...]]:
    kinds = _KINDS
    if "fp8_cvt" not in target.features:
        kinds = [k for k in kinds if k[0] == INT8 and k[1] != VALUES_E4M3]
    found = [(t, *kind, d) for kind in kinds for t in _TOKENS if t == kernel_token(t, kind[1]) for d in _WIDTHS]
    return found + [("bf16", MXFP8, VALUES_16, d) for d in _WIDTHS if multiplies_mx(target)]


def multiplies_mx(target: Target) -> bool:
    """Return True if products of MXFP8 codes are taken: not with wgmma, with which bfloat16 is faster (H200)."""
    return "fp8_cvt" in target.features and "wgmma" not in target.features


def kernel_token(token: str, values: int) -> str:
    """Return the type that a kernel is compiled for: with quantised values, one kernel serves both result types."""
    return token if values == VALUES_16 else "bf16"


def _variants_sm90(target: Target) -> list[tuple[Any, ...]]:
    kinds = (*_KINDS, (INT8, _VALUES_WHOLE), (E4M3, _VALUES_WHOLE))
    direct = (VALUES_16, _VALUES_WHOLE)
    return [
        (t, *kind, *widths)
        for kind in kinds
        for t in _TOKENS
        if t == kernel_token(t, kind[1])
        for widths in ((64, 64), (128, 128), *(((WIDEST_QK, MAX_WIDTH),) if kind[1] in direct else ()))
    ]


FORWARD = Kernel(
    "attention/attention_mma_quant.cu", "attention_mma_quant", template="T QK PV D", max_registers=255, struct=True,
    args="q:ptr k:ptr v:ptr scale_q:ptr scale_k:ptr scale_v:ptr lengths:ptr cu_q:ptr cu_k:ptr out:ptr lse:ptr "
    f"{WALK_ARGUMENTS} {stride_arguments('q k v out')} lse_batch:i64 lse_head:i64 sq_batch:i64 sq_head:i64 "
    "sq_shift:i64 sk_batch:i64 sk_head:i64 sk_shift:i64 sv_batch:i64 sv_head:i64 sv_block:i64 left:i64 right:i64 "
    "out_fp16:i64 scale:f64",
    variants=_variants,
)  # fmt: skip
FORWARD_SM90 = Kernel(
    "attention/attention_sm90_quant.cu", "attention_sm90_quant", template="T QK PV DQK D", max_registers=168,
    needs=("wgmma",),
    args="q_map:tmap k_map:tmap v_map:tmap scale_q:ptr scale_k:ptr scale_v:ptr lengths:ptr cu_q:ptr cu_k:ptr out:ptr "
    f"lse:ptr counter:ptr batches:i64 heads:i64 heads_per_kv:i64 lq:i64 lkv:i64 d_v:i64 {stride_arguments('out')} "
    "lse_batch:i64 lse_head:i64 sq_batch:i64 sq_head:i64 sq_shift:i64 sk_batch:i64 sk_head:i64 sk_shift:i64 "
    "sv_batch:i64 sv_head:i64 sv_block:i64 left:i64 right:i64 heads_together:i64 out_fp16:i64 scale:f64",
    variants=_variants_sm90,
)  # fmt: skip
_SM90_ROWS, _SM90_KEYS = 128, 128
_QUANTIZE_UNIT = "attention/attention_quantize.cu"
KEY_SUMS = Kernel(
    _QUANTIZE_UNIT, "attention_key_sums", template="T", max_registers=64,
    args=f"k:ptr sums:ptr rows:i64 width:i64 {stride_arguments('k')}", variants=[(t,) for t in _TOKENS],
)  # fmt: skip
ROWS = Kernel(
    _QUANTIZE_UNIT, "attention_quantize_rows", template="T", max_registers=80,
    args="q:ptr k:ptr sums:ptr q_codes:ptr q_scales:ptr k_codes:ptr k_scales:ptr taken:ptr q_rows:i64 k_rows:i64 "
    f"q_heads:i64 width:i64 {stride_arguments('q k')} parts:i64 blocks_of_rows:i64 e4m3_codes:i64 scale:f64",
    variants=[(t,) for t in _TOKENS],
)  # fmt: skip
VALUES = Kernel(
    _QUANTIZE_UNIT, "attention_quantize_values", template="T", max_registers=80,
    args=f"v:ptr codes:ptr scales:ptr rows:i64 width:i64 padded:i64 {stride_arguments('v')} e4m3_codes:i64",
    variants=[(t,) for t in _TOKENS],
)  # fmt: skip


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
    varlen: bool = False
    rows_q: int = 0  # of all sequences
    rows_k: int = 0
    keys_of_v: int = 0  # of codes, with those behind the last one

    @property
    def title(self) -> str:
        """Sizes and types, for messages."""
        values = {VALUES_16: self.token, VALUES_E4M3: "e4m3", VALUES_INT8: "int8"}[self.pv]
        types = f"{('int8', 'e4m3', 'mxfp8')[self.qk]} queries and keys, {values} values"
        return f"{self.rows_q} queries x {self.rows_k} keys, {self.heads_q} heads over {self.heads_kv}, {types}"

    @property
    def width(self) -> int:
        """The head width that kernels are compiled for."""
        return next((w for w in _WIDTHS if max(self.d_qk, self.d_v) <= w), MAX_WIDTH)

    @property
    def variant(self) -> tuple[Any, ...]:
        """The template arguments of either kernel."""
        return kernel_token(self.token, self.pv), self.qk, self.pv, self.width

    @property
    def variant_sm90(self) -> tuple[Any, ...]:
        """The template arguments of the wgmma kernel."""
        whole = self.pv == VALUES_E4M3 and self.sv[2] == 0
        values = _VALUES_WHOLE if whole else self.pv
        widths = (WIDEST_QK, MAX_WIDTH) if self.d_qk > MAX_WIDTH else (self.width, self.width)
        return kernel_token(self.token, self.pv), self.qk, values, *widths


def _unsupported_sm90(call: Quantized, info: DeviceInfo) -> str | None:
    c = call
    if "wgmma" not in info.target.features:
        return f"{info.target} has no wgmma"
    if 0 in (c.batch, c.heads_q, c.lq, c.lkv):
        return "there are no queries or no keys"
    if c.qk == MXFP8:
        return "wgmma adds up all of a head, whose parts have scales of their own"
    if c.pv != VALUES_16 and c.lkv % 4:
        return f"{c.lkv} keys; expected a multiple of 4 for values with codes"
    if c.variant_sm90 not in _variants_sm90(info.target):
        return f"heads of {c.d_qk} elements need values of 16 bits, or e4m3 with a scale per column"
    tiles = c.batch * c.heads_q * -(-c.lq // _SM90_ROWS)
    return "too many rows" if max(c.lq, c.lkv, c.rows_q, c.rows_k) >= 1 << 29 or tiles >= 1 << 31 else None


def _boxes(
    name: str, token: str, sizes: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...], size: int = 1
) -> Boxes:
    """Return the tensor map of a tensor with strides in elements."""
    return Boxes(name, token, sizes, box_strides(sizes, steps, size), box)


def _steps_sm90(call: Quantized, device: int) -> Steps:
    c, codes, (_, _, values, width_qk, width) = call, call.pv != VALUES_16, call.variant_sm90
    direct = values in (VALUES_16, _VALUES_WHOLE)
    group, batch = c.heads_q // c.heads_kv, 1 if c.varlen else c.batch
    rows_q, rows_k = (c.rows_q, c.rows_k) if c.varlen else (c.lq, c.lkv)
    q = _boxes("q", "byte", (c.d_qk, rows_q, c.heads_q, batch), (c.q.row, c.q.head, c.q.batch), (128, _SM90_ROWS, 1, 1))
    if codes:
        sizes, steps = (c.d_qk, 4, rows_k // 4, c.heads_kv, batch), (c.k.row, 4 * c.k.row, c.k.head, c.k.batch)
        k = _boxes("k", "byte", sizes, steps, (128, 2, _SM90_KEYS // 4, 1, 1))
        sizes, steps = (c.keys_of_v, c.d_v, c.heads_kv, batch), (c.v[1], c.v[2], c.v[0])
        v = _boxes("v", "byte", sizes, steps, (_SM90_KEYS, width, 1, 1))
    else:
        sizes, steps = (c.d_qk, rows_k, c.heads_kv, batch), (c.k.row, c.k.head, c.k.batch)
        k = _boxes("k", "byte", sizes, steps, (128, _SM90_KEYS, 1, 1))
        sizes, steps = (c.d_v, rows_k, c.heads_kv, batch), (c.v[1], c.v[2], c.v[0])
        v = _boxes("v", c.token, sizes, steps, (64, _SM90_KEYS, 1, 1), 2)
    of_values = width * _SM90_KEYS * (1 if codes else 2) + (0 if direct else 8 * width)
    stages, row = 4 if not direct else 2 if width_qk > 128 else 3, -(-width_qk // 128) * 128
    shared = _SM90_ROWS * row + stages * (_SM90_KEYS * row + 4 * _SM90_KEYS + of_values) + 256 + 1024
    tiles, pairs = -(-c.lq // _SM90_ROWS), c.batch * c.heads_q
    blocks = min(device_info(device).sm_count, tiles * pairs)
    draws = blocks < tiles * pairs  # from a counter; else each block has one tile
    each = c.lkv * (c.d_qk + (1 if codes else 2) * c.d_v) / group
    together = heads_in_l2(pairs, each, c.left < 0 and c.right < 0 and not c.varlen)
    return Steps(
        Step(
            FORWARD_SM90.bind(c.variant_sm90, device, blocks, 384, shared),
            *(q, k, v, "scale_q", "scale_k", "scale_v" if codes else 0, "lengths", "cu_q", "cu_k"),
            *("out", "lse", "counter" if draws else 0),
            *(c.batch, c.heads_q, group, c.lq, c.lkv, c.d_v, *c.out[:3], *c.lse, *_scale_arguments(c)),
            *(c.left, c.right, together, int(c.token == "fp16"), c.scale),
        ),
        zeros={"counter": 1} if draws else None,
    )


def _scale_arguments(call: Quantized) -> tuple[int, ...]:
    c = call
    return (*c.sq[:2], c.sq[2].bit_length() - 1, *c.sk[:2], c.sk[2].bit_length() - 1, *c.sv)


def _unsupported_mma(call: Quantized, info: DeviceInfo) -> str | None:
    if call.d_qk > MAX_WIDTH:
        return f"heads of {call.d_qk} elements; expected up to {MAX_WIDTH}"
    if call.variant not in _variants(info.target):
        return f"{info.target} has no products of float8_e4m3fn; expected int8 codes"
    return None


def _steps_mma(call: Quantized, device: int) -> Steps:
    c, codes, width = call, call.pv != VALUES_16, call.width
    queries = 128 if (c.qk, c.pv) == (INT8, VALUES_16) else 64
    keys = BLOCK * tile_pitch(width // 2)
    values = width * tile_pitch(BLOCK // 2) if codes else BLOCK * tile_pitch(width)
    shared = queries * tile_pitch(width // 2) + 2 * (keys + values)
    tiles, pairs = -(-c.lq // queries), c.batch * c.heads_q
    if tiles * pairs == 0:
        return Steps()
    check_tiles(tiles, pairs, c.lq)
    group = c.heads_q // c.heads_kv
    section = head_section(c.d_qk + (1 if codes else 2) * c.d_v, c.lkv, pairs, group)
    return Steps(
        Step(
            FORWARD.bind(c.variant, device, tiles * pairs, _THREADS, shared),
            *("q", "k", "v", "scale_q", "scale_k", "scale_v" if codes else 0, "lengths", "cu_q", "cu_k", "out", "lse"),
            *(pairs, c.heads_q, group, tiles, section, c.lq, c.lkv, c.d_qk, c.d_v),
            *(*c.q[:3], *c.k[:3], *c.v, *c.out[:3], *c.lse, *_scale_arguments(c), c.left, c.right),
            *(int(c.token == "fp16"), c.scale),
        )
    )


def _instead(call: Quantized, info: DeviceInfo) -> str:
    mx = call.qk == MXFP8 and not multiplies_mx(info.target)
    return "attention of bfloat16 operands, which hold the same numbers" if mx else ""


QUANTIZED: Backends[Quantized] = Backends(
    "quantised attention",
    (
        Backend("sm90", _unsupported_sm90, _steps_sm90, (FORWARD_SM90,)),
        Backend("mma", _unsupported_mma, _steps_mma, (FORWARD,)),
    ),
    functions=("attention_quantized",),
    error=ArgumentError,
    instead=_instead,
)
