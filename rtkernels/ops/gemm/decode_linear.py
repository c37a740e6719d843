"""A linear layer of a decoding step in one launch: norm in front, activation and residual behind."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import checks, chunk_plan, decode_plan, reference, swapped_codes_plan, swapped_plan
from rtkernels.ops.gemm.checks import TOKENS, Operand
from rtkernels.ops.gemm.product import Product
from rtkernels.runtime.call.public import public
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.layout import check_same, row_stride
from rtkernels.runtime.operator.arguments import Among, check_number
from rtkernels.runtime.operator.declared import Aligned, Argument, Dense, Exact, Meta, Operator, Rows
from rtkernels.runtime.operator.kinds import meta_of
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Steps
from rtkernels.runtime.operator.registry import Op

_HALVES = (torch.bfloat16, torch.float16)


class _Apart(Rows):
    """Rows that do not overlap; others are copied."""

    def fits(self, meta: Meta) -> bool:
        found = row_stride(meta.shape, meta.stride) if meta.shape else None
        return found is not None and (found >= meta.shape[-1] or meta.rows <= 1)


_TENSORS = (
    _Apart("a", _HALVES),
    _Apart("b", None),
    Argument("scale_b", None, optional=True),
    Dense("bias", None, optional=True),
    Rows("add", None, optional=True),
    Aligned("norm_weight", None, optional=True),
    Exact("global_scale", None, optional=True),
)
_OPTIONS = "str? packed, str? act, bool gated, bool constant, float eps, float offset, float factor"


class DecodeLinear(NamedTuple):
    """Arguments of the operator. Checks and plans get metas in place of tensors."""

    a: Any
    b: Any
    scale_b: Any
    bias: Any
    add: Any
    norm_weight: Any
    global_scale: Any
    packed: str | None
    act: str | None
    gated: bool
    constant: bool
    eps: float = 0.0
    offset: float = 0.0
    factor: float = 1.0

    @property
    def metas(self) -> DecodeLinear:
        """The same with metas of tensors."""
        return DecodeLinear(*checks.metas(*self[: len(_TENSORS)]), *self[len(_TENSORS) :])


class _Described(NamedTuple):
    product: Product
    left: Operand
    right: Operand


def _describe(call: DecodeLinear) -> _Described:
    a, b = call.a, call.b
    checks.check_devices(
        a=a, b=b, scale_b=call.scale_b, bias=call.bias, add=call.add, norm_weight=call.norm_weight,
        global_scale=call.global_scale,
    )  # fmt: skip
    packed = None if call.packed is None else f"-,{call.packed}"
    left, right, _, scales = checks.operands_of(a, b, None, call.scale_b, "auto", "nk", packed)
    n = right.rows
    if call.gated:
        if n % 2 or call.act is None:
            raise ArgumentError(f"b has {n} rows and act is {call.act!r}; expected two halves and an activation")
        n //= 2
    checks.check_act(call.act)
    if call.norm_weight is not None:
        check_same("norm_weight", call.norm_weight.dtype, a.dtype, "dtype", of="a")
        check_same("norm_weight", tuple(call.norm_weight.shape), (left.k,), "shape", of="the last dimension of a")
    found = call.global_scale
    if found is not None and (found.dtype != torch.float32 or found.numel() != 1):
        raise ArgumentError(
            f"global_scale has dtype {str(found.dtype).removeprefix('torch.')} and shape {tuple(found.shape)}; "
            f"expected one number of float32"
        )
    add_pitch = n
    if call.add is not None:
        check_same("add", tuple(call.add.shape), (*a.shape[:-1], n), "shape", of="the result")
        check_same("add", call.add.dtype, a.dtype, "dtype", of="a")
        found = row_stride(call.add.shape, call.add.stride)
        add_pitch = n if found is None else found
    product = Product(
        left.rows, n, left.k, left.matrix, right.matrix, checks.dense_result(a.dtype, left.rows, n), None, scales,
        bias=checks.check_vector("bias", call.bias, right.rows),
        add=None if call.add is None else TOKENS[call.add.dtype], add_pitch=add_pitch,
        act=None if call.gated else call.act, gate=call.act if call.gated else None,
        global_scale=0 if call.global_scale is None else 1,
    )  # fmt: skip
    return _Described(product, left, right)


def _without_add(p: Product) -> Product:
    return p._replace(add=None)


def _plan(call: DecodeLinear, device: int) -> Steps:
    p, info, norm = _describe(call).product, device_info(device), call.norm_weight is not None
    is_chunk = chunk_plan.unsupported(p, info.target) is None
    if is_chunk and swapped_plan.is_small(p):
        return chunk_plan.launches(p, device, norm, call.constant)
    if swapped_plan.serves_step(p, info.target, norm):
        return swapped_plan.launches(p, device, norm=norm, constant=call.constant, add_last=True)
    if swapped_codes_plan.serves_step(p, info.target):
        return swapped_codes_plan.launches(p, device, norm=norm, constant=call.constant)
    if is_chunk:
        return chunk_plan.launches(p, device, norm, call.constant)
    if decode_plan.unsupported(_without_add(p), info.target, info.sm_count, norm) is not None:
        return IN_TORCH
    return decode_plan.launches(p, device, norm, call.constant, True)


def _outputs(call: DecodeLinear) -> tuple[Memory]:
    rows = call.b.shape[0]
    return (Memory((*call.a.shape[:-1], rows // 2 if call.gated else rows), call.a.dtype),)


def _reference(call: DecodeLinear) -> Tensor:
    described = _describe(call.metas)
    a = call.a
    if call.norm_weight is not None:
        x = a.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + call.eps) * (call.offset + call.norm_weight.float())
        a = x.to(a.dtype)
    p = _without_add(described.product)
    sums = reference.product(
        p, described.left, described.right, a, call.b, None, call.scale_b, call.global_scale, call.bias, None
    )
    result = sums.reshape(*call.a.shape[:-1], p.n) * call.factor
    return (result if call.add is None else result + call.add.float()).to(call.a.dtype)


FORWARD = Operator(
    "decode_linear", _TENSORS, options=_OPTIONS, numbers="eps offset factor", results="out", outputs=_outputs,
    plan=_plan, reference=_reference, check=_describe, not_invariant=(1, "k is split by the number of rows"),
)  # fmt: skip


def unsupported(
    a: Tensor, b: Tensor, scale_b: Tensor | None = None, packed: str | None = None, gated: bool = False,
    norm: bool = False, global_scale: Tensor | None = None,
) -> str | None:  # fmt: skip
    """Return why the kernel cannot compute a product, behind a norm if there is one; None if it can."""
    act = "silu" if gated else None
    call = DecodeLinear(
        *map(meta_of, (a, b, scale_b)), None, None, None, None if global_scale is None else meta_of(global_scale),
        packed, act, gated, False,
    )  # fmt: skip
    if level():
        return "k is split by the number of rows, which batch invariance forbids"
    if not (a.is_cuda or a.get_device() < 0):
        return f"no kernels for {a.device}"
    info = device_info(a.get_device())
    return decode_plan.unsupported(_describe(call).product, info.target, info.sm_count, norm)


def serves_many(a: Tensor, b: Tensor, gated: bool, norm: bool) -> bool:
    """Return True if ``generate()`` takes this op for more rows than ``decoding.OWN_ROWS``.

    With a norm in front, a gate or more than 16 rows, cuBLAS and a kernel for each of these are faster.
    """
    if norm or gated or level() or not a.is_cuda:
        return False
    call = DecodeLinear(*map(meta_of, (a, b)), *(None,) * 7, False, False)
    p, target = _describe(call).product, device_info(a.get_device()).target
    return swapped_plan.serves_short_step(p, target)


def serves_many_codes(
    rows: int, dtype: torch.dtype, b: Tensor, scale_b: Tensor | None, packed: str | None, global_scale: Tensor | None
) -> bool:  # fmt: skip
    """Return the same for weights of codes and so many dense rows of a; a gate and a norm make no difference."""
    if level() or not b.is_cuda:
        return False
    k = b.shape[1] * (1 if packed is None else 2)
    a = Meta(dtype, (rows, k), (k, 1), b.get_device(), 0)
    call = DecodeLinear(a, *map(meta_of, (b, scale_b)), *(None,) * 3, meta_of(global_scale), packed, None, False, False)
    return swapped_codes_plan.serves_step(_describe(call).product, device_info(b.get_device()).target)


@public(
    options={"packed": Among((None, "int4", "uint4", "e2m1"), "'int4', 'uint4', 'e2m1' or None")},
    no_gradients="a b scale_b bias norm_weight add global_scale",
)
def decode_linear(
    a: Tensor, b: Tensor, scale_b: Tensor | None = None, *, bias: Tensor | None = None, act: str | None = None,
    gated: bool = False, norm_weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0,
    add: Tensor | None = None, factor: float = 1.0, packed: str | None = None, constant: bool = False,
    global_scale: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return a linear layer of a few tokens, in one launch with the norm before it and the residual sum after it.

    ``factor * act(rms_norm(a) @ b.T * scale_b + bias) + add``, in fp32, rounded once (the norm's result is rounded as
    well). If `gated`, the rows of b are two halves, and the activation is ``act(first half) * second half``. The
    weights are read once, at the speed of memory. With more than 8 rows, a launch before may prepare those of a.

    A modulated norm, ``norm(x) * (1 + scale) + shift``, is ``norm_weight=scale, offset=1`` with ``shift @ b.T`` as the
    bias. A gate in front of the residual sum is a factor for each result, which `scale_b` takes. Both can be computed
    in advance where they depend on the step only: the action expert of ``examples/vla_policy.py`` does so.

    Args:
        a: Tokens ``[..., k]``, bfloat16 or float16. Up to 16 rows take a kernel (8 with e2m1 codes), on sm_90 up to 64
            (in float16 only without codes and norm); more run in plain torch, as do rows that are too long for shared
            memory.
        b: Weights ``[n, k]``: of a's dtype, or codes (float8_e4m3fn, int8; uint8 with `packed`).
        scale_b: float32: one scale, or one per row of b; for codes also one per 128 x 128 block or per 128 of a row.
            For e2m1 codes float8_e4m3fn, one per 16 of a row (NVFP4); the kernel takes rows of a multiple of 256.
        bias: ``[n]``, any float dtype.
        act: "relu", "silu", "gelu_tanh", "gelu" or None.
        gated: The rows of b are two halves, as above. Needs `act`.
        norm_weight: ``[k]``, a's dtype: a is normalised by its root mean square, and multiplied by
            ``offset + norm_weight``.
        eps: Added to the mean square in the norm.
        offset: Added to `norm_weight`.
        add: The residual, shape and dtype of the result.
        factor: Multiplies the result before `add` is added.
        packed: "int4", "uint4" or "e2m1" if b holds two codes in a byte.
        constant: No kernel that may still be running writes b, `scale_b`, `bias` or `norm_weight`, as in a captured
            model. The kernel then loads them before the previous kernel has ended.
        global_scale: One float32 factor of the sums, for e2m1 codes.
        out: Tensor to write the result to, with its shape, dtype and strides.

    Returns:
        ``[..., n]`` (gated: half of b's rows) in a's dtype. There is no gradient.
    """
    numbers = (check_number(name, value) for name, value in (("eps", eps), ("offset", offset), ("factor", factor)))
    return FORWARD.call(
        a, b, scale_b, bias, add, norm_weight, global_scale, packed, act, bool(gated), bool(constant), *numbers
    )


OP = Op(
    "decode_linear",
    public=("decode_linear",),
    kernels=(*decode_plan.KERNELS, *chunk_plan.KERNELS, *swapped_codes_plan.KERNELS),
    torch_ops=(FORWARD,),
    uses=("scaled_mm",),
)
