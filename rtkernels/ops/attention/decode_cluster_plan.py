"""Decoding over a short cache in one launch: kernel record, and when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import divisor
from rtkernels.runtime.operator.plan import Step, Steps

if TYPE_CHECKING:
    from rtkernels.ops.attention.decode_plan import Decode

_WIDTHS = (128, 256)
# As in decode_cluster.cu.
_BLOCKS = 8  # of a cluster
_WARPS = 8  # of a block
_ROWS = 16  # of queries of a cluster
_KEYS = 16 * _BLOCKS * _WARPS

CLUSTER = Kernel(
    "attention/decode_cluster.cu", "attention_decode_cluster", template="T D", max_registers=255,
    needs=("cluster", "pdl"), tier="serve",
    args="q:ptr k_cache:ptr v_cache:ptr lengths:ptr table:ptr sinks:ptr out:ptr lse:ptr heads:i64 group:i64 lq:i64 "
    "lkv:i64 page_size:i64 page_divisor:i64 table_row:i64 q_batch:i64 q_row:i64 q_head:i64 k_batch:i64 k_row:i64 "
    "k_head:i64 v_batch:i64 v_row:i64 v_head:i64 out_batch:i64 out_row:i64 out_head:i64 left:i64 right:i64 scale:f64",
    variants=[(t, d) for t in ("bf16", "fp16") for d in _WIDTHS],
)  # fmt: skip


def steps(call: Decode, device: int, tensors: Sequence[str | int]) -> Steps | None:
    """Return the launch of a call whose tensors have these names.

    None unless its cache is short and all of its clusters run at the same time.
    """
    info = device_info(device)
    plain = not call.codes and not call.page_size % 16 and not call.softcap and call.d_qk == call.d_v
    if not plain or call.d_qk not in _WIDTHS or not 0 < call.lkv <= _KEYS or not CLUSTER.supports(info.target):
        return None
    group = call.heads_q // call.heads_kv
    tiles = -(-call.lq * group // _ROWS)
    if device >= 0 and tiles * call.heads_kv * call.batch * _BLOCKS > info.sm_count:  # any number of emulated ones
        return None
    width = call.d_qk
    shared = _WARPS * _ROWS * (2 * width + 16 + 4 * (width + 8) + 8)
    if shared > info.shared_per_block:
        return None
    out = call.out or (call.lq * call.heads_q * width, call.heads_q * width, width)
    launch = CLUSTER.bind(
        (call.token, width), device, (tiles * _BLOCKS, call.heads_kv, call.batch), 32 * _WARPS, shared, overlap=True,
        cluster=_BLOCKS,
    )  # fmt: skip
    return Steps(
        Step(
            launch, *tensors[:5], tensors[7], "out", "lse", call.heads_q, group, call.lq, call.lkv,
            call.page_size, divisor(max(call.page_size, 1)), call.table_row,
            *call.q, *call.k, *call.v, *out, call.left, call.right, call.scale,
        )
    )  # fmt: skip
