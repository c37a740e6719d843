"""The gated delta rule: kernel records and launches (gated_delta_rule.cuh has the formulas)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rtkernels.ops.attention.backends import packed_tail
from rtkernels.ops.attention.checks import result_strides, strides
from rtkernels.ops.attention.delta_gates import flags as gate_flags
from rtkernels.ops.attention.mma_plan import stride_arguments, tile_pitch
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Memory, Step

_TOKENS = ("bf16", "fp16")
_WIDTHS = (64, 128)  # of keys
_COLUMNS = (32, 64)  # of v that a block of a scan has
MAX_KEY_WIDTH, MAX_VALUE_WIDTH = _WIDTHS[-1], 256
# As in gated_delta_rule.cuh.
CHUNK_ROWS = 64
_ROW_KINDS = 4
_MAX_STAGES = 3
_STATIC_SHARED, _GRADS_STATIC = 1024, 5120  # at most, of kernels
_MATRIX = 2 * CHUNK_ROWS * CHUNK_ROWS  # bytes of T or P

_TYPES = [(t, d) for t in _TOKENS for d in _WIDTHS]
_SCANS = [(t, d, v, channels) for t, d in _TYPES for v in _COLUMNS for channels in (False, True)]
SIZES = "length:i64 heads:i64 key_heads:i64 d_k:i64 d_v:i64"
CHUNK = Kernel(
    "attention/gated_delta_rule_chunk.cu", "gated_delta_rule_chunk", template="T DK", max_registers=255,
    args="q:ptr k:ptr g:ptr beta:ptr cu:ptr solve:ptr inner:ptr rows:ptr sequences:i64 length:i64 heads:i64 "
    f"key_heads:i64 d_k:i64 {stride_arguments('q k')} l2norm:i64 scale:f64",
    variants=_TYPES,
)  # fmt: skip
SCAN = Kernel(
    "attention/gated_delta_rule_scan.cu", "gated_delta_rule_scan", template="T DK VT CHANNELS", max_registers=255,
    args="q:ptr k:ptr after:ptr v:ptr solve:ptr inner:ptr rows:ptr initial:ptr final:ptr ends:ptr cu:ptr out:ptr "
    f"states:ptr updates:ptr segment:i64 {SIZES} {stride_arguments('q k v')} stages:i64 scale:f64",
    variants=_SCANS,
)  # fmt: skip
REVERSE = Kernel(
    "attention/gated_delta_rule_reverse.cu", "gated_delta_rule_reverse", template="T DK VT CHANNELS", max_registers=255,
    args="q:ptr k:ptr after:ptr dout:ptr solve:ptr inner:ptr rows:ptr skip:ptr dfinal:ptr dinitial:ptr "
    f"starts:ptr cu:ptr dv:ptr dstates:ptr drest:ptr segment:i64 {SIZES} {stride_arguments('q k dout')} stages:i64 "
    "scale:f64",
    variants=_SCANS,
)  # fmt: skip
GRADS_ARGUMENTS = (
    "q:ptr k:ptr v:ptr dout:ptr rows:ptr cu:ptr states:ptr dstates:ptr updates:ptr drest:ptr dq:ptr dk:ptr dg:ptr "
    f"dbeta:ptr sequences:i64 {SIZES} {stride_arguments('q k v dout')} flags:i64 stages:i64 scale:f64"
)
GRADS = Kernel(
    "attention/gated_delta_rule_grads.cu", "gated_delta_rule_grads", template="T DK", max_registers=255, struct=True,
    args=GRADS_ARGUMENTS, variants=_TYPES,
)  # fmt: skip
STEP = Kernel(
    "attention/gated_delta_rule_step.cu", "gated_delta_rule_step", template="T S CHANNELS", max_registers=128,
    tier="serve",
    args="q:ptr k:ptr v:ptr g:ptr beta:ptr a_log:ptr dt_bias:ptr slots:ptr state:ptr out:ptr places:i64 heads:i64 "
    "key_heads:i64 d_k:i64 d_v:i64 q_batch:i64 q_head:i64 k_batch:i64 k_head:i64 v_batch:i64 v_head:i64 g_batch:i64 "
    "g_head:i64 g_channel:i64 beta_batch:i64 beta_head:i64 flags:i64 scale:f64 bound:f64 factor:f64",
    variants=[(t, s, channels) for t in _TOKENS for s in ("fp32", "bf16") for channels in (False, True)],
)  # fmt: skip
# With a decay per channel.
KDA_CHUNK = Kernel(
    "attention/kda_chunk.cu", "kda_chunk", template="T DK", max_registers=255,
    args="q:ptr k:ptr g:ptr beta:ptr cu:ptr solve:ptr inner:ptr rows:ptr keys_before:ptr queries_before:ptr "
    f"keys_after:ptr sequences:i64 length:i64 heads:i64 key_heads:i64 d_k:i64 {stride_arguments('q k')} l2norm:i64 "
    "scale:f64",
    variants=_TYPES,
)  # fmt: skip
KDA_GRADS = Kernel(
    "attention/kda_grads.cu", "kda_grads", template="T DK", max_registers=255, struct=True,
    args="q:ptr k:ptr v:ptr dout:ptr g:ptr rows:ptr cu:ptr states:ptr dstates:ptr updates:ptr drest:ptr dq:ptr "
    "dk:ptr dg:ptr dbeta:ptr kept:ptr sequences:i64 length:i64 heads:i64 d_k:i64 d_v:i64 "
    f"{stride_arguments('q k v dout')} l2norm:i64 scale:f64",
    variants=_TYPES,
)  # fmt: skip
KERNELS = (CHUNK, SCAN, REVERSE, GRADS, STEP, KDA_CHUNK, KDA_GRADS)


class Call(NamedTuple):
    """The sizes of a call."""

    token: str
    dtype: torch.dtype
    sequences: int
    length: int  # of a sequence, or of all packed ones
    heads: int
    key_heads: int
    d_k: int
    d_v: int
    packed: bool
    scale: float
    l2norm: bool
    corrected: bool = True  # False: U is beta V, as in the SSD of Mamba-2
    skip: bool = False  # a factor of v for each head is added
    channels: bool = False  # each has a decay of its own
    segment: int = 0  # rows of a segment (gated_delta_rule_segments.py); 0: sequences are not split

    @classmethod
    def of(
        cls, q: Meta, v: Meta, cu: Meta | None, scale: float, l2norm: bool, corrected: bool = True, skip: bool = False,
        channels: bool = False,
    ) -> Call:  # fmt: skip
        """Return the sizes of a call from its tensors."""
        sequences = q.shape[0] if cu is None else cu.shape[0] - 1
        length = q.shape[1] if cu is None else q.shape[0]
        sizes = (sequences, length, v.shape[-2], q.shape[-2], q.shape[-1], v.shape[-1])
        return cls(DTYPE_TOKEN[q.dtype], q.dtype, *sizes, cu is not None, scale, l2norm, corrected, skip, channels)

    @property
    def chunks(self) -> int:
        """Numbers that chunks may have."""
        if self.packed:
            return self.length // CHUNK_ROWS + self.sequences if self.length else 0
        return self.sequences * -(-self.length // CHUNK_ROWS)

    @property
    def segments(self) -> int:
        """Numbers that segments may have."""
        if not self.segment:
            return self.sequences
        if self.packed:
            return self.length // self.segment + self.sequences
        return self.sequences * -(-self.length // self.segment)

    @property
    def width(self) -> int:
        """Keys as kernels have them."""
        return next(w for w in _WIDTHS if self.d_k <= w)

    @property
    def cu(self) -> str | int:
        """The argument of kernels."""
        return "cu_seqlens" if self.packed else 0

    @property
    def keys(self) -> tuple[str | int, ...]:
        """The arguments of scans for queries and keys."""
        return ("queries_before", "keys_before", "keys_after") if self.channels else ("q", "k", 0)

    @property
    def matrices(self) -> tuple[str | int, ...]:
        """The arguments of scans that say what happens inside of chunks."""
        return "solve" if self.corrected else 0, "inner", "rows", "skip" if self.skip else 0


def flat_strides(*metas: Meta) -> tuple[int, ...]:
    """Return the strides of batch, row and head of each."""
    return tuple(number for meta in metas for number in strides(meta)[:3])


def inside_chunks(call: Call, q: Meta, k: Meta, device: int) -> tuple[list[Step], dict[str, Memory]]:
    """Return the launch that prepares all chunks, and its results as scratch."""
    matrices = Memory((call.chunks, call.heads, CHUNK_ROWS, CHUNK_ROWS), call.dtype)
    rows = Memory((call.chunks, call.heads, _ROW_KINDS, CHUNK_ROWS), torch.float32)
    if call.channels:
        shared = (2 * CHUNK_ROWS + 96) * tile_pitch(call.width) + 2 * 4 * CHUNK_ROWS * 68
        launch = KDA_CHUNK.bind((call.token, call.width), device, (call.chunks, call.heads), 256, shared)
        step = Step(
            launch, *("q", "k", "g", "beta", call.cu, "solve", "inner", "rows", "keys_before", "queries_before"),
            *("keys_after", call.sequences, call.length, call.heads, call.key_heads, call.d_k, *flat_strides(q, k)),
            *(int(call.l2norm), call.scale),
        )  # fmt: skip
        keys = Memory((call.chunks, call.heads, CHUNK_ROWS, call.d_k), call.dtype)
        scaled = {"keys_before": keys, "queries_before": keys, "keys_after": keys}
        return [step], {"solve": matrices, "inner": matrices, "rows": rows} | scaled
    shared = max(2 * CHUNK_ROWS * tile_pitch(call.width), 2 * 4 * CHUNK_ROWS * 68)
    launch = CHUNK.bind((call.token, call.width), device, (call.chunks, call.key_heads), 256, shared)
    step = Step(
        launch, *("q", "k", "g", "beta", call.cu, *call.matrices[:3], call.sequences, call.length, call.heads),
        *(call.key_heads, call.d_k, *flat_strides(q, k), int(call.l2norm), call.scale),
    )  # fmt: skip
    parts = Memory((call.chunks, call.heads, 2, CHUNK_ROWS, CHUNK_ROWS), call.dtype)
    return [step], ({"solve": parts} if call.corrected else {}) | {"inner": matrices, "rows": rows}


class _Shape(NamedTuple):
    """How a scan is launched."""

    columns: int  # of v that a block has
    stages: int
    shared: int

    @classmethod
    def of(cls, call: Call, tiles: int, device: int, transitions: bool = False) -> _Shape:
        """Return the launch of a scan with `tiles` tiles of 64 rows beside its state and its stages."""
        width = call.d_v + (call.d_k if transitions else 0)
        blocks = call.segments * call.heads * -(-width // _COLUMNS[0])
        limit = device_info(device).shared_per_block - _STATIC_SHARED
        for columns in _COLUMNS[int(blocks > device_info(device).sm_count) :: -1]:
            values, keys = CHUNK_ROWS * tile_pitch(columns), CHUNK_ROWS * tile_pitch(call.width)
            stage = (3 if call.channels else 2) * keys + values + 2 * _MATRIX + 4 * _ROW_KINDS * CHUNK_ROWS
            others = call.width * tile_pitch(columns) + tiles * values
            stages = min((limit - others) // stage, _MAX_STAGES)
            if stages > 0:
                break
        return cls(columns, stages, stages * stage + others)


def scan(call: Call, q: Meta, k: Meta, v: Meta, names: dict[str, str], device: int) -> Step:
    """Return the launch from chunk to chunk. `names`: what scan_arguments takes."""
    transitions = is_first_pass(names)
    shape = _Shape.of(call, 4, device, transitions)
    tiles = -(-call.d_v // shape.columns) + (-(-call.d_k // shape.columns) if transitions else 0)
    grid = (tiles, call.heads, call.segments)
    launch = SCAN.bind((call.token, call.width, shape.columns, call.channels), device, grid, 256, shape.shared)
    rest = scan_arguments(call, names, q, k, v, shape.stages)
    return Step(launch, *call.keys, "v", *call.matrices[:3], *rest)


def is_first_pass(names: dict[str, str]) -> bool:
    """Return whether a scan computes only what segments pass on: states from zeros, and transitions."""
    return "out" not in names and "updates" not in names


def scan_arguments(call: Call, names: dict[str, str], q: Meta, k: Meta, v: Meta, stages: int) -> tuple:
    """Return a scan's arguments from `initial` on. `names`: initial, final, ends, out, states, updates, if wanted."""
    given = (names.get(name, 0) for name in ("initial", "final", "ends"))
    results = (names.get(name, 0) for name in ("out", "states", "updates"))
    return *given, call.cu, *results, *sizes(call), *flat_strides(q, k, v), stages, call.scale


def sizes(call: Call) -> tuple[int, ...]:
    """Return the arguments of scans that are sizes."""
    return call.segment, call.length, call.heads, call.key_heads, call.d_k, call.d_v


def reverse(call: Call, q: Meta, k: Meta, dout: Meta, names: dict[str, str], device: int) -> Step:
    """Return the launch of gradients from chunk to chunk. `names`: what reverse_arguments takes."""
    shape = _Shape.of(call, 5, device)
    grid = (-(-call.d_v // shape.columns), call.heads, call.segments)
    launch = REVERSE.bind((call.token, call.width, shape.columns, call.channels), device, grid, 256, shape.shared)
    return Step(launch, *call.keys, "dout", *call.matrices, *reverse_arguments(call, names, q, k, dout, shape.stages))


def reverse_names(dfinal_state: Meta | None, needs_state: bool) -> dict[str, str]:
    """Return the names of a reverse scan's arguments in an operator of gradients."""
    dfinal = {} if dfinal_state is None else {"dfinal": "dfinal_state"}
    return dfinal | ({"dinitial": "dinitial_state"} if needs_state else {}) | {"dv": "dv"}


def reverse_arguments(call: Call, names: dict[str, str], q: Meta, k: Meta, dout: Meta, stages: int) -> tuple:
    """Return a reverse scan's arguments from `dfinal` on. `names`: of dfinal, dinitial, starts and dv, if wanted."""
    given = (names.get(name, 0) for name in ("dfinal", "dinitial", "starts"))
    results = ("dv", "dstates", "drest") if "dv" in names else (0, 0, 0)
    return *given, call.cu, *results, *sizes(call), *flat_strides(q, k, dout), stages, call.scale


def grads(call: Call, q: Meta, k: Meta, v: Meta, dout: Meta, device: int) -> Step:
    """Return the launch of gradients inside chunks."""
    if call.channels:
        shared = CHUNK_ROWS * (5 * tile_pitch(64) + 3 * 4 * 65)
        launch = KDA_GRADS.bind((call.token, call.width), device, (call.chunks, call.heads), 256, shared)
        return Step(
            launch, *("q", "k", "v", "dout", "g", "rows", call.cu, "states", "dstates", "updates", "drest", "dq", "dk"),
            *("dg", "dbeta", "kept" if call.width > 64 else 0, call.sequences, call.length, call.heads, call.d_k),
            *(call.d_v, *flat_strides(q, k, v, dout), int(call.l2norm), call.scale),
        )  # fmt: skip
    keys, values = CHUNK_ROWS * tile_pitch(call.width), CHUNK_ROWS * tile_pitch(64)
    stage = 3 * values + 2 * call.width * tile_pitch(64)
    fits = 2 * (keys + stage) + _GRADS_STATIC <= device_info(device).shared_per_block
    stages = min(2 if fits else 1, _MAX_STAGES)
    shared = 2 * keys + stages * stage
    launch = GRADS.bind((call.token, call.width), device, (call.chunks, call.key_heads), 256, shared)
    return Step(launch, *grads_arguments(call, q, k, v, dout, stages))


def grads_arguments(call: Call, q: Meta, k: Meta, v: Meta, dout: Meta, stages: int) -> tuple:
    """Return the arguments of gradients inside chunks, with a decay per head."""
    return (
        *("q", "k", "v", "dout", "rows", call.cu, "states", "dstates", "updates", "drest", "dq", "dk", "dg"),
        *("dbeta", call.sequences, call.length, call.heads, call.key_heads, call.d_k, call.d_v),
        *(*flat_strides(q, k, v, dout), int(call.l2norm) + 2 * (not call.corrected), stages, call.scale),
    )  # fmt: skip


def gradient_scratch(call: Call) -> dict[str, Memory]:
    """Return what gradients keep of each chunk."""
    states = Memory((call.chunks, call.heads, call.d_k, call.d_v), call.dtype)
    rows = Memory((call.chunks, call.heads, CHUNK_ROWS, call.d_v), call.dtype)
    kept = {"kept": Memory((call.chunks, call.heads, 2, CHUNK_ROWS, 64), torch.float32)}
    given = {"states": states, "dstates": states, "updates": rows, "drest": rows}
    return given | kept if call.channels and call.width > 64 else given


def step(
    q: Meta, k: Meta, v: Meta, state: Meta, numbers: tuple[Meta | None, ...], slots: Meta | None, scale: float,
    options: tuple[bool, bool], device: int,
) -> Step:  # fmt: skip
    """Return the launch of one token. `numbers`: g, beta, A_log and dt_bias; `options`: l2norm, and of beta."""
    batch, key_heads, d_k = q.shape
    heads, d_v = v.shape[1:]
    g, beta = numbers[:2]
    channels = g is not None and g.dim() == 3
    variant = (DTYPE_TOKEN[q.dtype], state.token, channels)
    launch = STEP.bind(variant, device, (-(-d_v // 32), heads, batch), 256)
    apart = [number for meta in (q, k, v) for number in strides(meta)[1:3]]
    decays = (0, 0, 0) if g is None else (*g.stride, 0)[:3]
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "slots", "state", "out")
    flags = gate_flags(options[1], *numbers) | int(options[0]) << 1
    sizes = (state.shape[0] if slots is not None else batch, heads, key_heads, d_k, d_v, *apart, *decays, *beta.stride)
    return Step(launch, *names, *sizes, flags, scale, "lower_bound", "factor")


def tails(call: Call, names: tuple[tuple[str, int, int], ...], device: int) -> list[Step]:
    """Return the launches that clear rows behind the last packed sequence: of results with these heads and widths."""
    if not call.packed:
        return []
    shapes = [(name, (call.length, heads, width)) for name, heads, width in names]
    return [
        packed_tail(call.token, name, 0, "cu_seqlens", call.sequences, shape, result_strides(shape, False), device)
        for name, shape in shapes
    ]
