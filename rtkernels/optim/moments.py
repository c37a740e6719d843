"""How ``AdamW`` and ``Lion`` keep moments: fp32, bf16, codes of 8 bits as bitsandbytes, fp8 or 4 bits as TorchAO."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import dynamic_codes
from rtkernels.ops.multi.dynamic_codes import BLOCKS, CODES, KIND_OF, fill_memory, in_memory
from rtkernels.runtime.launch.tables import same_order
from rtkernels.runtime.operator.sharding import is_sharded, local

MIN_CODED = 4096  # elements; smaller tensors keep fp32 moments, as in bitsandbytes
# Names of the two moments and of their scales in the state of a parameter.
_TORCHS = ("exp_avg", "exp_avg_sq")
NAMES = {"fp32": _TORCHS, "bf16": _TORCHS, "8bit": ("state1", "state2"), "fp8": _TORCHS, "4bit": _TORCHS}
_SCALES_OF_TORCHS = ("exp_avg_scale", "exp_avg_sq_scale")
SCALES = {"8bit": ("absmax1", "absmax2"), "fp8": _SCALES_OF_TORCHS, "4bit": _SCALES_OF_TORCHS}
_MAPS = ("qmap1", "qmap2")
_SIGNED = (True, False)
_ORDER = "order"  # dimensions from the outermost in memory, of 4-bit codes of a tensor that is not contiguous
_WRAPPED = "__bnb_optimizer_quant_state__"  # where state dicts of bitsandbytes have the moments, hidden from FSDP


def is_coded(p: Tensor, kind: str) -> bool:
    """Return whether the moments of a parameter are codes."""
    return kind in CODES and p.numel() >= MIN_CODED


def own(t: Tensor) -> Tensor:
    """Return this process's shard, or a plain tensor as it is."""
    return local(t) if is_sharded(t) else t


def entries(t: Tensor, count: int) -> Tensor:
    """Return this process's numbers among those that ``start`` allocated for blocks or packed codes."""
    return local(t).reshape(-1)[:count] if is_sharded(t) else t


# ---- new moments ----------------------------------------------------------------------------------------------------


def start(p: Tensor, kind: str, count: int = 2) -> dict[str, Any]:
    """Return `count` moments of 0."""
    names, mine = NAMES[kind][:count], own(p)
    if not is_coded(p, kind):
        return {name: _zeros(p, torch.bfloat16 if kind == "bf16" else torch.float32) for name in names}
    if kind == "4bit":
        state: dict[str, Any] = {name: _of_each_process(p, kind, True) for name in names}
        if not mine.is_contiguous():
            state[_ORDER] = _order(mine)
    else:
        state = {name: _zeros(p, CODES[kind]) for name in names}
    state |= {name: _of_each_process(p, kind, False) for name in SCALES[kind][:count]}
    if kind == "8bit":
        maps = (dynamic_codes.code_map(kind, signed).to(p.device) for signed in _SIGNED[:count])
        state |= dict(zip(_MAPS, maps, strict=False))
    return state


def _zeros(p: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros_like(p, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)  # fp8 has no fill of its own
    if dtype != torch.float8_e4m3fn:
        return zeros
    return zeros.view(dtype)


def _rows(p: Any, kind: str, packed: bool) -> tuple[int, int]:
    """Return the shape of the codes or scales of a DTensor: a row for each shard, as long as the largest needs."""
    sizes, rows = list(p.shape), 1
    for way, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            sizes[dim], rows = -(-sizes[dim] // way), rows * way
    return rows, _count(math.prod(sizes), kind, packed)


def _count(elements: int, kind: str, packed: bool) -> int:
    return dynamic_codes.codes_of(elements, kind) if packed else dynamic_codes.blocks_of(elements, kind)


def _of_each_process(p: Any, kind: str, packed: bool) -> Tensor:
    """Return zeros for the packed codes or the scales of a parameter.

    Those of a DTensor are one, too: a checkpoint then has the numbers of all processes, and another number of
    processes cannot mistake them for its own.
    """
    dtype = CODES[kind] if packed else torch.float32
    if not is_sharded(p):
        return torch.zeros(_count(p.numel(), kind, packed), dtype=dtype, device=p.device)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    row = torch.zeros((1, _rows(p, kind, packed)[1]), dtype=dtype, device=p.device)
    ways = [Replicate() if getattr(placement, "dim", None) is None else Shard(0) for placement in p.placements]
    return DTensor.from_local(row, p.device_mesh, ways, run_check=False)


def _order(t: Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(t.dim()), key=t.stride, reverse=True))


def of_shard(p: Tensor, state: dict[str, Any], kind: str, count: int = 2) -> dict[str, Any]:
    """Return a parameter's state with this process's moments only, as plain tensors."""
    if not is_sharded(p):
        return state
    elements, result = own(p).numel(), dict(state)
    for name in NAMES[kind][:count]:
        packed = kind == "4bit" and is_coded(p, kind)
        result[name] = entries(state[name], _count(elements, kind, True)) if packed else own(state[name])
    for name in SCALES[kind][:count] if is_coded(p, kind) else ():
        result[name] = entries(state[name], dynamic_codes.blocks_of(elements, kind))
    return result


# ---- loading --------------------------------------------------------------------------------------------------------


def loaded(p: Tensor, given: dict[str, Any], kind: str, count: int = 2) -> dict[str, Any]:
    """Return the moments of a state dict (ours, torch's, bitsandbytes' or TorchAO's) as `kind` keeps them."""
    given = {**given, **given.get(_WRAPPED, {})}
    names = NAMES["8bit"] if "state1" in given else _TORCHS
    if count == 1 and given.get(names[1]) is not None:
        raise ArgumentError(f"the state of a parameter has {names[1]}; expected one moment, as Lion has it")
    values = [given.get(name) for name in names[:count]]
    if any(value is None for value in values):
        lacking = "two moments" if count == 2 else "a moment"
        raise ArgumentError(f"the state of a parameter has {', '.join(map(str, given))}; expected {lacking}")
    scales: list[Tensor | None] = [None] * count
    for pair in SCALES.values():
        if pair[0] in given:
            scales = [given[name] for name in pair[:count]]
    state = start(p, kind, count)
    for i, (name, signed) in enumerate(zip(NAMES[kind][:count], _SIGNED, strict=False)):
        found = _Moment(p, values[i], scales[i], signed, given.get(_ORDER), given.get(_MAPS[i]))
        if not is_coded(p, kind):
            own(state[name]).copy_(placed(found.dense(), found.like, p))
            continue
        elements = own(p).numel()
        scale = entries(state[SCALES[kind][i]], dynamic_codes.blocks_of(elements, kind))
        codes = entries(state[name], _count(elements, kind, True)) if kind == "4bit" else own(state[name])
        if found.fits(p, kind, codes, state.get(_ORDER)):
            _raw(codes).copy_(_raw(found.value))
            scale.copy_(found.scale)
            continue
        ordered = torch.empty_like(own(p), dtype=torch.float32).copy_(placed(found.dense(), found.like, p))
        new, scales_of_new = dynamic_codes.encode(in_memory(ordered), kind, signed)
        fill_memory(_raw(codes), _raw(new))
        scale.copy_(scales_of_new)
    return state


class _Moment:
    """A moment of a state dict, as far as this process has it.

    Attributes:
        value: Numbers or codes.
        scale: Those of the blocks, or None.
        like: A DTensor that is sharded like the moment, or None.
        kind: Of the codes, or None.

    Args:
        p: The parameter.
        value: A tensor, a DTensor, or TorchAO's state of a tensor or shard.
        scale: None if there are no codes, or TorchAO's state has it.
        signed: Whether it is the first moment.
        order: Dimensions in memory, of packed codes.
        qmap: Values of the codes, if the state dict has them.
    """

    def __init__(self, p: Tensor, value: Any, scale: Any, signed: bool, order: Any, qmap: Any) -> None:
        self.like, self._signed = value if is_sharded(value) else None, signed
        self._order = None if order is None else tuple(order)
        given, value, block = value, own(value), None
        self._shape = value.shape
        if hasattr(value, "codes") and hasattr(value, "scale"):
            scale, qmap, block = value.scale, getattr(value, "qmap", None), getattr(value, "block_size", None)
            value = value.codes
            if value.dtype == torch.uint8 and value.numel() < math.prod(self._shape):
                value = value.view(torch.int8)
        elif value.dtype == torch.int8:
            value = self._packed(p, given)
        self.value, self.kind, self.scale = value, KIND_OF.get(value.dtype), None
        if (scale is None) != (self.kind is None):
            dtype = str(value.dtype).removeprefix("torch.")
            raise ArgumentError(
                f"a moment of a state dict is {dtype} with{'out' * (scale is None)} scales; expected floating-point "
                "numbers without, or uint8, float8_e4m3fn or packed int8 codes with scales"
            )
        if self.kind is None:
            return
        elements = math.prod(self._shape)
        if is_sharded(scale):
            _check_rows(scale, p if self.like is None else self.like, self.kind, False)
            scale = entries(scale, dynamic_codes.blocks_of(elements, self.kind))
        elif scale.dim() != 1:
            raise ArgumentError(_OTHERS.format("scales", tuple(scale.shape), "one dimension"))
        self.scale, self.block = scale, block or _block(elements, scale.numel(), self.kind)
        if qmap is not None and self.kind != "fp8":
            wanted, qmap = dynamic_codes.code_map(self.kind, signed), qmap.detach().float().cpu()
            if qmap.shape != wanted.shape or not torch.allclose(qmap, wanted, atol=1e-6):
                raise ArgumentError(
                    f"{_MAPS[not signed]} of a state dict is another map than that of {len(wanted)} dynamic codes"
                )

    def _packed(self, p: Tensor, given: Tensor) -> Tensor:
        """Return packed codes of ours, which have no shape of their own."""
        mine = own(p)
        if is_sharded(given):
            _check_rows(given, p, "4bit", True)
            self.like, self._shape = None, mine.shape
            return entries(given, _count(mine.numel(), "4bit", True))
        for shape in (p.shape, mine.shape):
            if given.shape == (_count(shape.numel(), "4bit", True),):
                self._shape = shape
                return given
        raise ArgumentError(_OTHERS.format("packed codes", tuple(given.shape), (_count(p.numel(), "4bit", True),)))

    def fits(self, p: Tensor, kind: str, codes: Tensor, order: Any) -> bool:
        """Return whether codes and scales can be copied as they are."""
        if self.kind != kind or self.block != BLOCKS[kind] or self.value.numel() != codes.numel():
            return False
        if self.like is not None and not (is_sharded(p) and _together(self.like, p)):
            return False
        return self._order == order if kind == "4bit" else same_order(self.value, codes)

    def dense(self) -> Tensor:
        """Return the numbers."""
        if self.scale is None:
            return self.value
        value, scale = self.value, self.scale.to(self.value.device).float()
        if self.kind != "4bit":
            full = torch.empty_like(value, dtype=torch.float32)
            fill_memory(full, dynamic_codes.decode(in_memory(value), scale, self._signed, block=self.block))
            return full
        flat = dynamic_codes.decode(value, scale, self._signed, math.prod(self._shape), self.block)
        order = self._order or tuple(range(len(self._shape)))
        return flat.reshape([self._shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])


_OTHERS = (
    "{} of a state dict have shape {}; expected {}. States of other numbers of processes are loaded from the result of "
    'export_state_dict("torch")'
)


def _check_rows(t: Tensor, p: Any, kind: str, packed: bool) -> None:
    expected = _rows(p, kind, packed) if is_sharded(p) else "that of a tensor that is not sharded"
    if tuple(t.shape) != expected:
        raise ArgumentError(_OTHERS.format("packed codes" if packed else "scales", tuple(t.shape), expected))


def _block(elements: int, scales: int, kind: str) -> int:
    """Return how many elements share a scale."""
    for block in (BLOCKS[kind], 2048):  # the latter in older versions of bitsandbytes
        if -(-elements // block) == scales:
            return block
    raise ArgumentError(
        f"a moment of a state dict has {scales} scales for {elements} numbers; expected "
        f"{dynamic_codes.blocks_of(elements, kind)}"
    )


def _together(a: Any, b: Any) -> bool:
    return a.device_mesh == b.device_mesh and tuple(a.placements) == tuple(b.placements)


def placed(numbers: Tensor, like: Any, p: Any) -> Tensor:
    """Return those of numbers that belong to this process's shard of a parameter.

    Args:
        numbers: A tensor as large as the parameter or its shard, or this process's shard of a DTensor.
        like: That DTensor, or None.
        p: The parameter, sharded or not.
    """
    mine = own(p)
    if like is not None and not (is_sharded(p) and _together(like, p)):
        numbers = sharded(numbers, like).full_tensor()
        like = None
    if like is None and is_sharded(p) and numbers.shape == p.shape != mine.shape:
        from torch.distributed.tensor import DTensor, Replicate

        whole = DTensor.from_local(numbers, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)
        numbers = own(whole.redistribute(placements=p.placements))
    if numbers.numel() != mine.numel():
        expected = " or ".join(str(tuple(shape)) for shape in dict.fromkeys((p.shape, mine.shape)))
        raise ArgumentError(f"a tensor of a state dict has shape {tuple(numbers.shape)}; expected {expected}")
    return numbers.reshape(mine.shape)


def copied(p: Tensor, given: Tensor) -> Tensor:
    """Return fp32 numbers of a state dict, sharded like a parameter."""
    result = torch.empty_like(p, dtype=torch.float32)
    own(result).copy_(placed(own(given), given if is_sharded(given) else None, p))
    return result


def sharded(mine: Tensor, like: Any) -> Any:
    """Return a DTensor of this process's shard, sharded like another one."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(like.shape, dtype=like.dtype, device="meta").stride()
    return DTensor.from_local(
        mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride
    )  # fmt: skip


def _raw(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def origin(p: Any, index: int) -> Tensor:
    """Return which random numbers a parameter gets, and the place of its first element in the whole tensor."""
    first = 0
    if is_sharded(p):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        for size, at in zip(p.shape, offset, strict=True):
            first = first * size + at
    return torch.tensor([index, first], dtype=torch.int64, device=p.device)
