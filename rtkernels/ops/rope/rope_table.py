"""Tables of angles for rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.rope.rope_scaling import Scaling, rates, read
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import current_stream, is_capturing
from rtkernels.runtime.layout import DTYPE_TOKEN, FLOAT_DTYPES, GRID_LIMIT, TYPES
from rtkernels.runtime.operator.arguments import Among, Within, check_integer, check_number
from rtkernels.runtime.operator.autograd import needs_grad
from rtkernels.runtime.operator.declared import Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.torch_private import dispatch_modes, is_dynamo_compiling

_THREADS = 256
KERNEL = Kernel(
    "rope/rope_table.cu", "rope_table", template="T", variants=TYPES, max_registers=80,
    args="rates:ptr positions:ptr cosines:ptr sines:ptr rows:i64 pairs:i64 scaling:f64 factor:f64",
)  # fmt: skip
_RATES_LIMIT = 64
_rates: dict[Any, Tensor] = {}  # vectors by parameters, dim, device and stream, which are only read


def _outputs(rates: Meta, rows: int, dtype: torch.dtype) -> tuple[Memory, ...]:
    table = Memory((rows, rates.shape[0]), dtype)
    return table, table


def _check(rates: Meta, positions: Meta | None, rows: int, dtype: torch.dtype) -> None:
    token("the result", dtype, FLOAT_DTYPES)
    for name, meta in {"rates": rates, "positions": positions}.items():
        if meta is not None and meta.dtype != torch.float64:
            raise ArgumentError(f"{name} has dtype {meta.dtype}; expected float64".replace("torch.", ""))
    if len(rates.shape) != 1 or rows < 0:
        raise ArgumentError(f"rates has shape {tuple(rates.shape)} and rows is {rows}; expected one dimension and rows")
    if positions is not None and tuple(positions.shape) != (rows,):
        raise ArgumentError(f"positions has shape {tuple(positions.shape)}; expected ({rows},)")


def _plan(rates: Meta, rows: int, scaling: float, factor: float, dtype: torch.dtype, device: int) -> Steps:
    pairs = rates.shape[0]
    grid = min(-(-rows * pairs // _THREADS), GRID_LIMIT)
    launch = KERNEL.bind((DTYPE_TOKEN[dtype],), device, grid, _THREADS)
    return Steps(Step(launch, "rates", "positions", "cos", "sin", rows, pairs, float(scaling), float(factor)))


def _reference(
    rates: Tensor, positions: Tensor | None, rows: int, scaling: float, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if positions is None:
        positions = torch.arange(rows, dtype=torch.float64, device=rates.device)
    angles = (positions * scaling).unsqueeze(-1) * rates
    return (factor * angles.cos()).to(dtype), (factor * angles.sin()).to(dtype)


TABLE = Operator(
    "rope_table", (Dense("rates", None), Dense("positions", None, optional=True)),
    options="SymInt rows, float scaling, float factor, ScalarType dtype", results="cos sin", outputs=_outputs,
    plan=_plan, reference=_reference, check=_check,
)  # fmt: skip


_known_unscaled = lru_cache(maxsize=64)(partial(Scaling, "default"))


def _unscaled(base: float) -> Scaling:
    return Scaling("default", base) if is_dynamo_compiling() else _known_unscaled(base)  # Dynamo warns of caches


def _compute_rates(scaling: Scaling, dim: int, device: torch.device) -> Tensor:
    return rates(scaling, dim, device)


def _rates_of(scaling: Scaling, dim: int, device: torch.device) -> Tensor:
    """Return the frequencies, kept from another call of this stream if that can be.

    A graph computes its own: what is kept may be given back before the graph is replayed.
    """
    on_cuda = device.type == "cuda"
    if is_dynamo_compiling() or dispatch_modes() or (on_cuda and is_capturing()):
        return _compute_rates(scaling, dim, device)
    key = scaling, dim, device, current_stream(device.index) if on_cuda else 0
    found = _rates.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = _compute_rates(scaling, dim, device)
        if len(_rates) >= _RATES_LIMIT:
            _rates.clear()
        _rates[key] = found
    return found


def _default_device() -> torch.device:
    """Return torch's default device, as Dynamo can trace it, too."""
    if is_dynamo_compiling():
        return torch.empty(0, dtype=torch.float32, device=None).device
    return torch.get_default_device()


_OPTIONS = {
    "dim": Within("int", "dim > 0 and dim % 2 == 0", "a multiple of 2 above 0, the rotated elements of a head"),
    "dtype": Among(FLOAT_DTYPES, "bfloat16, float16 or float32"),
    "base": Within("float", "base > 0", "a number above 0"),
}


@public(recent=False, options=_OPTIONS)
def rope_table(
    positions: int | Tensor, dim: int, *, base: float = 10000.0, scaling: float | Mapping[str, Any] = 1.0,
    dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return cos and sin of ``position * scaling * base ** (-2 i / dim)`` for the pairs of a head.

    For :func:`rope`, :func:`qkv_split` and :func:`append_kv_cache`, with either kind of pairs. Computed in float64,
    rounded to float32 and then to `dtype`.

    Args:
        positions: Number of positions, starting at 0, or a tensor ``[...]`` of positions.
        dim: Number of rotated elements of a head, a multiple of 2.
        base: Base of the frequencies; ``rope_theta`` in model configurations.
        scaling: Factor of the positions: 1 / s for linear interpolation by s. Or a mapping like ``rope_parameters`` of
            a transformers configuration, with ``rope_type`` ``"default"``, ``"linear"``, ``"dynamic"``, ``"yarn"``,
            ``"longrope"``, ``"llama3"`` or ``"proportional"`` and its keys. ``rope_theta`` then replaces `base`, and
            the attention factor multiplies cos and sin. ``"dynamic"`` also needs ``max_position_embeddings`` of the
            configuration, and so do ``"yarn"`` and ``"longrope"`` without ``factor``. ``"dynamic"`` and
            ``"longrope"`` depend on the length of the sequence: the number of positions, or the largest position + 1,
            which stays on the device. ``partial_rotary_factor`` is not applied to `dim`, which counts rotated elements
            only; with ``"proportional"``, `dim` is the size of a head and pairs past this part have angle 0.
        dtype: Dtype of the tables: bfloat16, float16 or float32.
        device: Device of the tables. Default: that of `positions` if it is a tensor.

    Returns:
        ``(cos, sin)``, each ``[positions, dim / 2]``.
    """
    if type(scaling) is float:
        kind, step = _unscaled(float(base)), scaling
    elif isinstance(scaling, Mapping):
        kind, step = read(scaling, dim, float(base)), 1.0
    else:
        kind, step = _unscaled(float(base)), float(check_number("scaling", scaling))
    if isinstance(positions, Tensor):
        flat = positions.reshape(-1).to(torch.float64)
        if kind.by_length and flat.shape[0]:
            frequencies = rates(kind, dim, flat.device, flat.detach().amax() + 1)
        else:
            frequencies = _rates_of(kind.at(0, dim), dim, flat.device)
        table = _reference if torch.is_grad_enabled() and needs_grad(positions) else TABLE.call
        cos, sin = table(frequencies, flat, flat.shape[0], step, kind.attention_factor, dtype)
        shape = *positions.shape, dim // 2
        return cos.view(shape), sin.view(shape)
    if (positions if type(positions) is int else check_integer("positions", positions)) < 0:
        raise ArgumentError(f"positions is {positions}; expected a number of positions, or a tensor of them")
    place = _default_device() if device is None else torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    frequencies = _rates_of(kind.at(positions, dim), dim, place)
    return TABLE.call(frequencies, None, positions, step, kind.attention_factor, dtype)
