"""The backends of matrix products, and their order of preference."""

from __future__ import annotations

from rtkernels.ops.gemm import (
    cluster_plan,
    decode_plan,
    mma_plan,
    pad_plan,
    skinny_plan,
    sm90_plan,
    swapped_plan,
    tcgen05_plan,
    unpack_plan,
)
from rtkernels.ops.gemm.product import BYTES, Product
from rtkernels.ops.gemm.tune_tensors import tensors
from rtkernels.ops.shared.backend import Backend, Backends
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import DeviceInfo
from rtkernels.runtime.operator.plan import Steps

_SKINNY_FIRST = {2: 16, 1: 8}  # by bytes of an element of b, rows up to which it is asked before the others (H200)
_HALVES_FIRST = 16  # the same for rows that TMA does not read
_DECODE_FIRST = 8  # rows up to which products of 16-bit weights are like those of decoding steps
_LATENCY_ROWS = {2: 32, 1: 16}  # by bytes of an element: up to which products of few weights are bound by latency
_LATENCY_BYTES = 8 << 20  # of such weights, at most


# With batch invariance: the first one that has a kernel for these types. Operands that TMA cannot read are copied, so
# that alignment does not decide. Low-bit weights are never unpacked, because decoding reads them most often.
_INVARIANT = ("sm90", "pad", "mma")


def _is_latency(product: Product, info: DeviceInfo) -> bool:
    """Return True if latency matters more than bandwidth for a product."""
    weights = product.n * (1 if product.gate is None else 2) * product.k * BYTES[product.b.token]
    rows = _LATENCY_ROWS.get(int(BYTES[product.a.token]), 0)
    return "cluster" in info.target.features and product.m <= rows and weights <= _LATENCY_BYTES


def _leaves_sms_idle(product: Product, info: DeviceInfo) -> bool:
    """Return True if `sm90` would leave half of the SMs without a tile: it has one for most gated products."""
    one_tile = product.gate is not None and (product.a.token != "bf16" or product.quantized is not None)
    return one_tile and 2 * sm90_plan.gated_tiles(product) <= info.sm_count


def _order(product: Product, info: DeviceInfo) -> tuple[str, ...]:
    """Return the backends to try, by the number of rows and the size of the weights (times: docs/decisions/gemm.md)."""
    if level():
        return _INVARIANT
    first = _SKINNY_FIRST.get(int(BYTES[product.b.token]), 16) if product.b.aligned else _HALVES_FIRST
    skinny = product.m <= first or _leaves_sms_idle(product, info)
    order = ("skinny", "sm90", "unpack", "mma") if skinny else ("sm90", "skinny", "unpack", "mma")
    if _is_latency(product, info):
        order = ("cluster", *order)
    elif product.m <= _DECODE_FIRST and BYTES[product.b.token] == 2 and product.gate is None:
        order = ("decode", *order)
    order = tuple(dict.fromkeys((*swapped_plan.preferred(product, info), *order)))
    return ("pad", *order) if pad_plan.is_worthwhile(product, info) else order


def _pad_unsupported(product: Product, info: DeviceInfo) -> str | None:
    return pad_plan.unsupported(product, info, PRODUCTS)


def _pad_steps(product: Product, device: int) -> Steps:
    return pad_plan.steps(product, device, PRODUCTS)


def _pad_summary(product: Product, info: DeviceInfo) -> str:
    return pad_plan.summary(product, info, PRODUCTS)


def _decode_unsupported(product: Product, info: DeviceInfo) -> str | None:
    return decode_plan.unsupported(product, info.target, info.sm_count)


def _decode_summary(product: Product, info: DeviceInfo) -> str:
    return decode_plan.summary(product, info.target)


_DECODE = Backend("decode", _decode_unsupported, decode_plan.steps, (), _decode_summary)  # kernels: of `decode_linear`
PRODUCTS: Backends[Product] = Backends(
    "product",
    (
        Backend.of("sm90", sm90_plan), Backend.of("skinny", skinny_plan), Backend.of("unpack", unpack_plan),
        Backend.of("mma", mma_plan), Backend.of("cluster", cluster_plan), _DECODE,
        Backend.of("tcgen05", tcgen05_plan), Backend.of("swapped", swapped_plan),
        Backend("pad", _pad_unsupported, _pad_steps, pad_plan.KERNELS, _pad_summary),
    ),
    order=_order, automatic=("auto", "rtkernels"), others=("torch",),
    not_invariant=("skinny", "cluster", "decode", "unpack", "swapped"),
    tensors=tensors, problem=Product,
    functions=("scaled_mm", "gated_mm", "grouped_mm", "grouped_mm_masked", "grouped_wgrad"),
)  # fmt: skip
