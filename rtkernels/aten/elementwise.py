"""Launching functors of ``cuda_src/pointwise/functors.cuh`` on tensors as torch would: promotion, broadcasting,
memory formats.

``run`` is what handlers call. Everything that depends on metadata only (promotion, the layout of the result, the
choice of a kernel) is worked out for the first call of its kind and kept; a call like one before allocates and
launches.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.functors import ABSENT, COPY, FLOATS, KERNELS, TOKENS, Functor
from rtkernels.aten.strides import arrange, broadcast, overlaps_itself
from rtkernels.aten.table import INVALID, OUT_OF_RANGE, OVERLAP, NotHandled
from rtkernels.runtime.call.launches import LaunchTrace, launch_trace
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import extent
from rtkernels.runtime.operator.plan import Memory, Step, StepPlan, Steps

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # what a copy moves
Meta = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]  # shape, strides, dtype, bytes past a multiple of 16
Number = bool | int | float

_SHAPES = NotHandled("shapes that do not broadcast")
_DEVICES = NotHandled("several devices")
_RANK = NotHandled("more than 6 dimensions")
_OUT = NotHandled("out= of another dtype or shape")
_COMPLEX = NotHandled("complex")
_NUMBERS_ONLY = NotHandled("numbers only")
_LAZY = NotHandled("lazy negative or conjugate")


# ---- promotion ------------------------------------------------------------------------------------------------------


def promoted(metas: Sequence[Any], default: torch.dtype) -> torch.dtype | None:
    """Return the dtype that torch promotes tensors (a ``Meta``) and numbers (their types) to; None: complex.

    Args:
        metas: Of the operands.
        default: ``torch.get_default_dtype()``: that of numbers that are floats.
    """
    by_kind: list[torch.dtype | None] = [None, None, None]  # tensors with dimensions, without, numbers
    for meta in metas:
        if isinstance(meta, tuple):
            kind, dtype = (0 if len(meta[0]) else 1), meta[2]
        else:
            kind, dtype = 2, {bool: torch.bool, int: torch.int64, float: default}.get(meta)
            if dtype is None:
                return None
        before = by_kind[kind]
        by_kind[kind] = dtype if before is None else torch.promote_types(before, dtype)
    result = _higher(by_kind[0], _higher(by_kind[1], by_kind[2]))
    return None if result is None or result.is_complex else result


def common_dtype(functor: Functor, metas: Sequence[Any], default: torch.dtype) -> torch.dtype | None:
    """Return the dtype that a functor computes in, before 16-bit floats become float32; None: complex.

    Args:
        functor: Which.
        metas: Of its operands, as for ``promoted``.
        default: As for ``promoted``.
    """
    counted = [meta for i, meta in enumerate(metas) if not functor.own >> i & 1]
    common = promoted(counted, default)
    if common is None:
        return None
    if functor.promotion == "float" and not common.is_floating_point:
        return default
    if functor.promotion == "long" and common == torch.bool:
        return torch.int64
    return counted[0][2] if functor.promotion == "first" else common


def _higher(above: torch.dtype | None, below: torch.dtype | None) -> torch.dtype | None:
    if above is None or below is None:
        return below if above is None else above
    if above.is_complex or (above.is_floating_point and not below.is_complex):
        return above
    if above == torch.bool or below.is_floating_point or below.is_complex:
        return torch.promote_types(above, below)
    return above


# ---- plans ----------------------------------------------------------------------------------------------------------


class _Plan:
    __slots__ = ("common", "dtype", "inverts", "is_float", "launch", "range", "rounds", "shape", "stride")


def _build(
    functor: Functor, device: int, default: torch.dtype, common: Any, result: Any, out: Meta | None, *metas: Any
) -> _Plan | NotHandled:
    if common is None:
        common = common_dtype(functor, metas, default)
        if common is None:
            return _COMPLEX
    if common not in functor.dtypes or common not in TOKENS:
        return NotHandled(str(common).removeprefix("torch."))
    for meta in metas:
        if isinstance(meta, tuple) and meta[2] not in TOKENS:
            return NotHandled(str(meta[2]).removeprefix("torch."))
    tensors = [meta for meta in metas if isinstance(meta, tuple)]
    try:
        shape = tuple(torch.broadcast_shapes(*(meta[0] for meta in tensors))) if tensors else out[0]
    except RuntimeError:
        return _SHAPES
    number = (), (), common, 0  # moves nowhere
    operands = [meta if isinstance(meta, tuple) and meta[3] >= 0 else number for meta in metas]
    plan = _Plan()
    plan.common, plan.is_float, plan.rounds = common, common in FLOATS, functor.rounds_numbers
    by_number = bool(functor.by_number) and plan.is_float and operands[1] is number
    plan.inverts = by_number and functor.reciprocal
    plan.range = None if plan.is_float else integer_range(common)
    plan.dtype = result or functor.result or common
    plan.shape = shape
    if out is not None:
        if out[2] != plan.dtype or out[0] != shape:
            return _OUT
        if overlaps_itself(shape, out[1]):
            return OVERLAP
        plan.stride = out[1]
    else:
        counted = [functor.numbers_count or isinstance(meta, tuple) for meta in metas]
        plan.stride = output_strides(shape, [*compress(operands, counted)])
    plan.launch = None
    if 0 in shape:
        return plan
    strides = [plan.stride, *(broadcast(meta[0], meta[1], shape) for meta in operands)]
    itemsizes = [plan.dtype.itemsize, *(meta[2].itemsize for meta in operands)]
    starts = [out[3] if out is not None else 0, *(meta[3] for meta in operands)]
    types = [TOKENS[meta[2]] for meta in operands]
    how = arrange(shape, strides, itemsizes, starts)
    if how is None:
        return _RANK
    name = functor.by_number if by_number else functor.name
    variant = (name, TOKENS[common], TOKENS[plan.dtype], *types, *[ABSENT] * (3 - len(types)))
    plan.launch = (functor.kernels or KERNELS).bind(variant, how, device)
    return plan


_PLANS = Plans(_build)


def output_strides(shape: tuple[int, ...], metas: Sequence[Meta]) -> tuple[int, ...]:
    """Return the strides that torch gives the result of operands, numbers among them: those of a permuted dense tensor.

    Operands of one shape that all have one format give it to the result, where they are dense in several formats
    (those with one channel, or one pixel) the first of these. For others torch's iterator says so itself, for tensors
    without memory, where it leaves out that shorter way.
    """
    if not metas or not shape:
        return torch.empty(shape, dtype=torch.float32, device="meta").stride()
    given = [torch.empty_strided(meta[0], meta[1], dtype=torch.float32, device="meta") for meta in metas]
    if all(tensor.shape == shape for tensor in given):
        for is_format in _FORMATS if len(shape) == 4 else _FORMATS[:1]:
            if all(tensor.is_contiguous(memory_format=is_format) for tensor in given):
                return torch.empty(shape, dtype=torch.float32, device="meta", memory_format=is_format).stride()
        stride = given[0].stride()
        if all(tensor.stride() == stride for tensor in given) and torch.empty_like(given[0]).stride() == stride:
            return stride
    made = _ITERATED[len(given)](*given)
    return made.stride() if made.shape == torch.Size(shape) else torch.empty_like(made.expand(shape)).stride()


_FORMATS = (torch.contiguous_format, torch.channels_last)
_ITERATED = {1: torch.neg, 2: torch.add, 3: torch.addcmul}  # operators of so many operands that count alike


def integer_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest value of an integer dtype or bool."""
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


def meta_of(tensor: Tensor) -> Meta:
    """Return what a plan depends on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15


# ---- calls ----------------------------------------------------------------------------------------------------------


def run(
    functor: Functor,
    operands: Sequence[Tensor | Number],
    scalars: Sequence[Number] = (),
    *,
    out: Tensor | None = None,
    common: torch.dtype | None = None,
    result: torch.dtype | None = None,
    known_as: Tensor | None = None,
) -> Tensor | NotHandled:
    """Run a functor on tensors and numbers, and return its result, of torch's dtype, shape and memory format.

    Args:
        functor: Which.
        operands: As many as it has inputs. 0-d CPU tensors beside CUDA tensors are numbers.
        scalars: Its s0 to s3.
        out: Written instead of a new tensor: any strides.
        common: The dtype to convert operands to, if not the promoted one.
        result: Dtype of the result, if not the functor's.
        known_as: The tensor that `out` is a view of, with another dtype.
    """
    device, like = -1, out
    for operand in operands:
        if isinstance(operand, Tensor):
            at = operand.get_device()
            if like is None or at > device:
                device, like = at, operand
    if out is not None:
        device = out.get_device()
    elif like is None:
        return _NUMBERS_ONLY  # torch.add(2, 3)
    metas, addresses, numbers = [], [], []
    for operand in operands:
        if not isinstance(operand, Tensor):
            metas.append(type(operand))
            addresses.append(0)
            numbers.append(operand)
            continue
        at = operand.get_device()
        if at == device:
            address = operand.data_ptr()
            metas.append((operand.shape, operand.stride(), operand.dtype, address & 15))
            addresses.append(address)
            numbers.append(0)
        elif at < 0 and operand.dim() == 0 and operand.is_cpu:
            metas.append(((), (), operand.dtype, -1))  # -1: a number with the dtype of a tensor
            addresses.append(0)
            numbers.append(operand.item())
        else:
            return _DEVICES
    to = None
    if out is not None:
        for operand in operands:
            if isinstance(operand, Tensor) and operand is not out and shares_partly(operand, out):
                return OVERLAP
        to = meta_of(out)
    plan = _PLANS[(functor, device, torch.get_default_dtype(), common, result, to, *metas)]
    if type(plan) is NotHandled:
        return plan
    bits = [bits_of(plan, i, value) for i, value in enumerate(numbers)] + [0] * (3 - len(numbers))
    bits += [bits_of(plan, 3 + i, value) for i, value in enumerate(scalars)] + [0] * (4 - len(scalars))
    if None in bits:
        return OUT_OF_RANGE
    made = out
    if made is None:
        made = torch.empty_strided(plan.shape, plan.stride, dtype=plan.dtype, device=like.device)
    if plan.launch is not None:
        while len(addresses) < 3:
            addresses.append(0)
        plan.launch(made.data_ptr(), *addresses, *bits)
    if (trace := launch_trace()) is not None:
        values = [*numbers, *[0] * (3 - len(numbers)), *scalars]
        _record(trace, plan, device, operands, values, bits, made, out, known_as)
    return made


def _record(
    trace: LaunchTrace, plan: _Plan, device: int, operands: Sequence[Tensor | Number], values: Sequence[Number],
    bits: Sequence[int], made: Tensor, out: Tensor | None, known_as: Tensor | None,
) -> None:  # fmt: skip
    """Record this launch, with the bits of its numbers but for those that may be others in the next call."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    if plan.launch is None or any(tensor.get_device() != device for tensor in tensors):
        trace.refuse("the host read a number, or nothing was launched")
        return
    passed = {i: trace.number(value, partial(bits_of, plan, i)) for i, value in enumerate(values)}
    passed = {i: number for i, number in passed.items() if number is not None}
    names = iter("abc")
    places = [next(names) if isinstance(operand, Tensor) else 0 for operand in operands]
    step = Step(
        plan.launch, "result", *places, *[0] * (3 - len(places)),
        *(f"n_{i}" if i in passed else value for i, value in enumerate(bits)),
    )  # fmt: skip
    arguments, given, memory = [place for place in places if place], tensors, {}
    if out is None:
        memory["result"] = Memory(tuple(plan.shape), plan.dtype, tuple(plan.stride))
    else:
        arguments, given = ["result", *arguments], [out, *tensors]
    written = StepPlan("pointwise", arguments, [f"n_{i}" for i in passed], memory, "single", Steps(step), device)
    trace.record(written, [*given, *passed.values()], made if out is None else None, out, known_as)


_DOUBLE, _INT64 = struct.Struct("<d"), struct.Struct("<q")


def bits_of(plan: _Plan, place: int, value: Number) -> int | None:
    """Return a number as the kernel takes it: the first three are operands, others scalars. None: it does not fit."""
    if not plan.is_float:
        low, high = plan.range
        return None if value and (isinstance(value, float) or not low <= value <= high) else int(value)
    if place > 2:
        if not fits(value, plan.common):
            return None
    elif plan.rounds:
        value = rounded(value, plan.common)
    if place == 1 and plan.inverts:
        value = _reciprocal(value)
    try:
        return _INT64.unpack(_DOUBLE.pack(value))[0]
    except (OverflowError, struct.error):
        return None


def fits(value: Number, dtype: torch.dtype) -> bool:
    """Return False for a number that torch refuses to convert to a floating dtype: a finite one beyond its largest."""
    return type(value) is not complex and (math.isinf(value) or not abs(value) > torch.finfo(dtype).max)


def _reciprocal(value: Number) -> float:
    """Return what a division of floats of 32 bits gives for the reciprocal."""
    divisor = rounded(value, torch.float32)
    return rounded(1.0 / divisor, torch.float32) if divisor else math.copysign(math.inf, divisor)


def rounded(value: Number, dtype: torch.dtype) -> float:
    """Return a number as an element of a floating dtype holds it."""
    if not value:
        return value
    form = "<e" if dtype == torch.float16 else "<f"
    try:
        if type(value) is int:
            value = float(value)  # packing a large one as float16 raises another error
        (result,) = struct.unpack(form, struct.pack(form, value))
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    if dtype == torch.bfloat16 and math.isfinite(result):
        (bits,) = struct.unpack("<I", struct.pack("<f", result))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        (result,) = struct.unpack("<f", struct.pack("<I", bits))
    return result


def shares_partly(operand: Tensor, out: Tensor) -> bool:
    """Return True if writing `out` may change elements of an operand that are not read yet."""
    if operand.untyped_storage()._cdata != out.untyped_storage()._cdata:
        return False
    same = operand.data_ptr() == out.data_ptr() and operand.stride() == out.stride() and operand.shape == out.shape
    if same and operand.dtype == out.dtype:
        return False
    if not operand.numel() or not out.numel():
        return False
    (begin, end), (first, last) = extent(operand), extent(out)
    return begin < last and first < end


# ---- copies ---------------------------------------------------------------------------------------------------------


def copy_into(out: Tensor, source: Tensor) -> Tensor | NotHandled:
    """Write `source`, converted and broadcast, to `out`. Copies of one dtype move bits: any dtype up to 8 bytes."""
    if source.is_neg() or source.is_conj() or out.is_neg() or out.is_conj():
        return _LAZY  # the memory holds other values, and the dispatcher does not resolve this for copies
    if source.shape != out.shape:
        try:
            source = source.expand(out.shape)
        except RuntimeError:
            return _SHAPES
    if out.dtype != source.dtype:
        return run(COPY, (source,), out=out, common=out.dtype)
    bits = _BITS.get(out.dtype.itemsize)  # one kernel for all dtypes of a size
    if bits is None:
        return NotHandled(str(out.dtype).removeprefix("torch."))
    done = run(COPY, (source.view(bits),), out=out.view(bits), common=bits, known_as=out)
    return done if type(done) is NotHandled else out


def into_out(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``out=`` form of a handler, for an `out` that has the result's shape and dtype already."""

    def into(*args: Any, out: Tensor, **kwargs: Any) -> Any:
        made = handler(*args, **kwargs)
        if isinstance(made, NotHandled):
            return made
        fits = (out.shape, out.dtype, out.device) == (made.shape, made.dtype, made.device)
        return copy_into(out, made) if fits else INVALID

    return into
