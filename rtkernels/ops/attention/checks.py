"""Checks of the tensors of attention operators, and the ``Attention`` that describes a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.problem import Attention, Bias, Strides
from rtkernels.runtime.layout import DTYPE_TOKEN, check_same
from rtkernels.runtime.operator.arguments import Among
from rtkernels.runtime.operator.declared import Argument, Dense, Meta

HALVES = (torch.bfloat16, torch.float16)
MAX_WIDTH = 256  # of a head
MAX_LENGTH = 2**29  # of a sequence: positions plus windows stay within 32 bits
LAYOUT = Among(("blhd", "bhld"), "one of blhd, bhld")


def check_dims(dims: int, order: str = "", **tensors: Any) -> None:
    """Raise an ArgumentError that names the first argument that is not a tensor of so many dimensions."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor) or t.dim() != dims:
            got = f"shape {tuple(t.shape)}" if isinstance(t, Tensor) else f"type {type(t).__name__}"
            raise ArgumentError(f"{name} has {got}; expected a tensor of {dims} dimensions{order}")


class Heads(Argument):
    """[batch, length, heads, width] or, packed, [tokens, heads, width]; the elements of a head are contiguous.

    Those whose address or strides are not multiples of 16 bytes are copied.
    """

    def fits(self, meta: Meta) -> bool:
        if 0 in meta.shape:
            return True
        per_vector = 16 // meta.dtype.itemsize
        steps = [step for size, step in zip(meta.shape[:-1], meta.stride[:-1], strict=True) if size > 1]
        unit = meta.shape[-1] == 1 or meta.stride[-1] == 1
        return unit and not meta.misaligned and all(step >= 0 and step % per_vector == 0 for step in steps)


class Destination(Heads):
    """The argument for the output."""

    written = True


def check_out(out: Meta, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise an ArgumentError unless a result of this shape and dtype can be written to `out`."""
    check_same("out", tuple(out.shape), shape, "shape", of="q and v")
    check_same("out", out.dtype, dtype, "dtype", of="q")
    if not Heads("out").fits(out):
        raise ArgumentError(
            f"out has strides {tuple(out.stride)}; expected neighbouring elements of a head, other strides and the "
            f"address multiples of 16 bytes"
        )
    if any(size > 1 and step == 0 for size, step in zip(out.shape, out.stride, strict=True)):
        raise ArgumentError(f"out has strides {tuple(out.stride)}; expected memory of its own for every element")


def forward_arguments() -> tuple[Argument, ...]:
    """Return the tensor arguments of a forward pass, which all attention operators share."""
    return (
        Heads("q", HALVES),
        Heads("k", HALVES),
        Heads("v", HALVES),
        Dense("sinks", (torch.float32,), optional=True),
        Argument("bias", (*HALVES, torch.float32), optional=True),
        Dense("lengths", None, optional=True),
        Dense("kv_limit", None, optional=True),
        Dense("cu_q", None, optional=True),
        Dense("cu_k", None, optional=True),
    )


def _integers(name: str, meta: Meta | None, shapes: tuple[tuple[int, ...], ...], what: str) -> None:
    if meta is None:
        return
    if meta.dtype != torch.int32:
        raise ArgumentError(f"{name} has dtype {str(meta.dtype).removeprefix('torch.')}; expected int32")
    if tuple(meta.shape) not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected {expected}, {what}")


def check_width(name: str, meta: Meta, largest: int, unit: int = 8) -> None:
    """Raise an ArgumentError unless the heads of a tensor have a multiple of `unit` elements, up to `largest`."""
    width = meta.shape[-1]
    if not unit <= width <= largest or width % unit:
        raise ArgumentError(
            f"{name} has heads of {width} elements; expected a multiple of {unit} from {unit} to {largest}"
        )


def check_shared_heads(q: Meta, k: Meta, of: str = "k") -> None:
    """Raise an ArgumentError unless the number of heads of q is a multiple of that of k."""
    if k.shape[-2] < 1 or q.shape[-2] % k.shape[-2] or q.shape[-2] < 1:
        raise ArgumentError(f"q has {q.shape[-2]} heads; expected a multiple of the {k.shape[-2]} heads of {of}")


def check_factor(scale: float) -> None:
    """Raise an ArgumentError unless the factor of products is positive."""
    if not 0.0 < scale < float("inf"):
        raise ArgumentError(f"scale is {scale}; expected a positive number")


def check_grid(name: str, meta: Meta, batch: int) -> None:
    """Raise an ArgumentError unless sequences and heads are few enough for the second and third dimension of a grid."""
    if max(batch, meta.shape[-2]) > 65535:
        raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected up to 65535 sequences and heads")


def check_cache_rows(q: Meta, cache: Meta, lengths: Meta, page_table: Meta | None, name: str) -> None:
    """Raise an ArgumentError unless lengths and pages of a cache fit to q [batch, length, heads, width]."""
    batch = q.shape[0]
    for what, meta, dims in (("seqlens", lengths, 1), ("page_table", page_table, 2)):
        if meta is None:
            continue
        if meta.dtype != torch.int32:
            raise ArgumentError(f"{what} has dtype {str(meta.dtype).removeprefix('torch.')}; expected int32")
        if meta.dim() != dims or meta.shape[0] != batch:
            expected = "[batch]" if dims == 1 else "[batch, pages]"
            raise ArgumentError(f"{what} has shape {tuple(meta.shape)}; expected {expected}, batch {batch}")
    if page_table is None and cache.shape[0] != batch:
        raise ArgumentError(f"{name} has {cache.shape[0]} sequences; expected {batch}, as many as q, or a page_table")


def check_heads(q: Meta, k: Meta, v: Meta, dims: int, order: str) -> None:
    """Raise an ArgumentError unless q, k and v fit together. `order`: the dimensions, in words."""
    for name, meta in (("q", q), ("k", k), ("v", v)):
        if meta.dim() != dims:
            raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected {dims} dimensions, {order}")
        check_same(name, meta.dtype, q.dtype, "dtype", of="q")
    if k.shape[-1] != q.shape[-1]:
        raise ArgumentError(f"k has heads of {k.shape[-1]} elements; expected {q.shape[-1]}, those of q")
    check_same("v", tuple(v.shape[:-1]), tuple(k.shape[:-1]), "shape but for the last dimension", of="k")
    for name, meta in (("q", q), ("v", v)):
        check_width(name, meta, MAX_WIDTH)
    check_shared_heads(q, k, "k and v")


class Forward(NamedTuple):
    """Arguments of a forward pass. Checks and plans get metas in place of tensors."""

    q: Any
    k: Any
    v: Any
    sinks: Any
    bias: Any
    lengths: Any
    kv_limit: Any
    cu_q: Any
    cu_k: Any
    scale: float
    left: int
    right: int
    softcap: float
    max_q: int
    max_k: int
    heads_first: bool
    backend: str

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exps."""
        q = self.q
        return (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])


def check(given: Forward) -> None:
    """Raise an ArgumentError for arguments of attention that do not fit together."""
    q, k, v, sinks, bias, lengths, kv_limit, cu_q, cu_k = given[:9]
    max_q, max_k = given.max_q, given.max_k
    varlen = cu_q is not None
    if (cu_k is None) is varlen:
        raise ArgumentError("cu_q and cu_k go together; expected both or none")
    check_heads(q, k, v, 3 if varlen else 4, "[tokens, heads, width]" if varlen else "[batch, length, heads, width]")
    heads = q.shape[-2]
    if varlen:
        if cu_q.dim() != 1 or cu_q.shape[0] < 1:
            raise ArgumentError(f"cu_q has shape {tuple(cu_q.shape)}; expected one dimension, sequences + 1")
        batch, length = cu_q.shape[0] - 1, max_q
        for name, meta in (("cu_q", cu_q), ("cu_k", cu_k)):
            _integers(name, meta, ((batch + 1,),), "sequences + 1")
        for name, largest in (("max_q", max_q), ("max_k", max_k)):
            if not 0 <= largest < MAX_LENGTH:
                raise ArgumentError(f"{name} is {largest}; expected the length of the longest sequence")
        if kv_limit is not None:
            raise ArgumentError("kv_limit is given for packed sequences; expected None")
    else:
        batch, length = q.shape[0], q.shape[1]
        if k.shape[0] != batch:
            raise ArgumentError(f"k has {k.shape[0]} sequences; expected {batch}, as many as q")
        if max(length, k.shape[1]) >= MAX_LENGTH:
            raise ArgumentError(f"sequences have {length} queries and {k.shape[1]} keys; expected fewer than 2^29")
    if sinks is not None:
        check_same("sinks", tuple(sinks.shape), (heads,), "shape", of="heads of q")
    if bias is not None:
        shape = (batch, heads, length, k.shape[0 if varlen else 1])  # a sequence has no more keys than all together
        broadcast = tuple(n if size != 1 or n == 1 else 1 for n, size in zip(shape[:2], bias.shape[:2], strict=False))
        check_same("bias", tuple(bias.shape), (*broadcast, *shape[2:]), "shape", of="batch, heads, q and k")
    _integers("seqused_k", lengths, ((batch,),), "one for each sequence")
    _integers("kv_limit", kv_limit, ((length,), (batch, length)), "one for each query")
    check_factor(given.scale)
    if not -float("inf") < given.softcap < float("inf"):
        raise ArgumentError(f"softcap is {given.softcap}; expected a finite number")
    for name, side in (("left", given.left), ("right", given.right)):
        if not -1 <= side < MAX_LENGTH:
            raise ArgumentError(f"window has {side} keys to the {name}; expected -1 (all) to 2^29")


def strides(meta: Meta) -> Strides:
    """Return the strides of a tensor that ``Heads`` accepted, or of a result of the operator."""
    steps = [0 if size <= 1 else step for size, step in zip(meta.shape[:-1], meta.stride[:-1], strict=True)]
    if len(steps) == 2:
        steps.insert(0, 0)
    return Strides(*steps, all(step * meta.dtype.itemsize % 16 == 0 for step in steps) and not meta.misaligned)


def heads_first_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of [batch, length, heads, width] in memory that is dense as [batch, heads, length, width]."""
    _, length, heads, width = shape
    return (heads * length * width, width, length * width, 1)


def result_strides(shape: tuple[int, ...], heads_first: bool) -> Strides:
    """Return the strides of a result of this shape."""
    if len(shape) == 3:
        return Strides(0, shape[1] * shape[2], shape[2])
    if heads_first:
        return Strides(*heads_first_strides(shape)[:3])
    return Strides(shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3])


def problem_of(given: Forward, **others: Any) -> Attention:
    """Return the call as plain data. `others`: fields that only some operators have."""
    q, k, v, sinks, bias, lengths, kv_limit, cu_q, _ = given[:9]
    others.setdefault("out", result_strides(given.out_shape, given.heads_first))
    varlen = cu_q is not None
    batch = cu_q.shape[0] - 1 if varlen else q.shape[0]
    return Attention(
        batch=batch, heads_q=q.shape[-2], heads_kv=k.shape[-2],
        lq=given.max_q if varlen else q.shape[1],
        # No sequence has more keys than all together, and neither does a bias: kernels read it up to lkv.
        lkv=min(given.max_k, k.shape[0]) if varlen else k.shape[1],
        d_qk=q.shape[-1], d_v=v.shape[-1], token=DTYPE_TOKEN[q.dtype],
        q=strides(q), k=strides(k), v=strides(v), scale=given.scale, left=given.left, right=given.right,
        softcap=given.softcap, sinks=None if sinks is None else "fp32",
        bias=None if bias is None else Bias(
            DTYPE_TOKEN[bias.dtype],
            *(0 if size <= 1 else step for size, step in zip(bias.shape, bias.stride, strict=True)),
            *bias.shape[:2],
        ),
        lengths=lengths is not None,
        kv_limit=None if kv_limit is None else (0 if kv_limit.dim() == 1 else kv_limit.shape[1]),
        varlen=varlen, total_q=q.shape[0] if varlen else 0, total_k=k.shape[0] if varlen else 0,
        **others,
    )  # fmt: skip
