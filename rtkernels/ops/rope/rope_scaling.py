"""Frequencies of rotary embeddings for long contexts, from the ``rope_parameters`` of a transformers configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.block_formats import divided
from rtkernels.runtime.launch.memory import is_capturing
from rtkernels.runtime.operator.arguments import check_integer, check_number

_ANY = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings")
_ORIGINAL = "original_max_position_embeddings"
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor",),
}
_BASE = 10000.0


class Scaling(NamedTuple):
    """Checked parameters. `bounds` are yarn's pairs, llama3's factors or the number of proportional's rotated pairs."""

    kind: str
    base: float
    attention_factor: float = 1.0
    factor: float = 1.0
    length: int = 0  # up to which nothing is scaled
    bounds: tuple[float, ...] = ()
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @property
    def by_length(self) -> bool:
        """True if the frequencies depend on the length of the sequence."""
        return self.kind in ("dynamic", "longrope")

    def at(self, length: int, dim: int) -> Scaling:
        """Return the parameters of a sequence of this length, which depend on it no more."""
        if self.kind == "dynamic":
            return Scaling("default", self.grown_base(max(length, self.length), dim))
        if self.kind == "longrope":
            return self._replace(short=self.long if length > self.length else self.short, long=())
        return self

    def grown_base(self, length: Any, dim: int) -> Any:
        """Return dynamic's base for a number or a scalar of positions, at least as many as are not scaled."""
        return self.base * (self.factor * length / self.length - (self.factor - 1)) ** (dim / (dim - 2))


class _Parameters:
    """A mapping whose values are checked as they are read; None is the same as no entry."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        kinds = [given[key] for key in ("rope_type", "type") if given.get(key) is not None]
        if not kinds:
            nested = [key for key, value in given.items() if isinstance(value, Mapping)]
            wanted = f"the parameters of one kind of layer, as in scaling[{nested[0]!r}]" if nested else "'rope_type'"
            raise ArgumentError(f"scaling has no 'rope_type'; expected {wanted}")
        if not all(isinstance(kind, str) and kind in _KEYS for kind in kinds):
            raise ArgumentError(f"scaling['rope_type'] is {kinds[0]!r}; expected one of {', '.join(_KEYS)}")
        if kinds[0] != kinds[-1]:
            raise ArgumentError(f"scaling['type'] is {kinds[1]!r}; expected {kinds[0]!r}, as 'rope_type' is")
        self.kind: str = kinds[0]
        known = (*_ANY, *_KEYS[self.kind])
        if unknown := [key for key in given if key not in known]:
            raise ArgumentError(
                f"scaling has {', '.join(map(repr, unknown))} with rope_type {self.kind!r}; expected no keys but "
                f"{', '.join(known)}"
            )

    def has(self, key: str) -> bool:
        return self.given.get(key) is not None

    def _value(self, key: str) -> Any:
        if not self.has(key):
            where = ", as in the model's configuration" if key == "max_position_embeddings" else ""
            raise ArgumentError(f"scaling has no {key!r}; expected it with rope_type {self.kind!r}{where}")
        return self.given[key]

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """Return a finite number above 0, or one that may be 0."""
        if default is not None and not self.has(key):
            return default
        return _number(f"scaling[{key!r}]", self._value(key), zero=zero)

    def length(self, key: str) -> int:
        """Return a number of positions."""
        value = check_integer(f"scaling[{key!r}]", self._value(key))
        if value < 2:
            raise ArgumentError(f"scaling[{key!r}] is {value}; expected 2 or more")
        return int(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return `count` numbers above 0."""
        values = self._value(key)
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ArgumentError(f"scaling[{key!r}] is a {type(values).__name__}; expected a list of {count} numbers")
        if len(values) != count:
            raise ArgumentError(f"scaling[{key!r}] has {len(values)} numbers; expected dim / 2, which is {count}")
        return tuple(_number(f"scaling[{key!r}][{i}]", value) for i, value in enumerate(values))

    def factor(self) -> float:
        """Return the factor; without one, by how much the context has grown."""
        if self.has("factor") or not self.has("max_position_embeddings"):
            return self.number("factor")
        return self.length("max_position_embeddings") / self.length(_ORIGINAL)


def _number(name: str, value: Any, *, zero: bool = False) -> float:
    number = float(check_number(name, value))
    if not (0 < number < math.inf or (zero and number == 0)):
        raise ArgumentError(f"{name} is {value}; expected a finite number {'of 0 or more' if zero else 'above 0'}")
    return number


def read(given: Mapping[str, Any], dim: int, base: float) -> Scaling:
    """Return the checked parameters; raise an ArgumentError that names the key which is wrong or missing."""
    of = _Parameters(given)
    theta = of.number("rope_theta", base)
    if base not in (_BASE, theta):
        raise ArgumentError(f"base is {base}; expected {theta}, which is scaling['rope_theta'], or no base")
    part = of.number("partial_rotary_factor", 1.0, zero=True)
    if of.kind == "linear":
        return Scaling(of.kind, theta, factor=of.number("factor"))
    if of.kind == "proportional":
        rotated = min(int(part * dim // 2), dim // 2)
        return Scaling(of.kind, theta, factor=of.number("factor", 1.0), bounds=(rotated,))
    if of.kind == "dynamic":
        if dim < 4:
            raise ArgumentError(f"dim is {dim}; expected 4 or more with rope_type 'dynamic'")
        return Scaling(of.kind, theta, factor=of.number("factor"), length=of.length("max_position_embeddings"))
    if of.kind == "yarn":
        return _read_yarn(of, dim, theta)
    if of.kind == "longrope":
        return _read_longrope(of, dim, theta)
    if of.kind == "llama3":
        low, high = of.number("low_freq_factor"), of.number("high_freq_factor")
        if high <= low:
            raise ArgumentError(f"scaling['high_freq_factor'] is {high}; expected more than 'low_freq_factor', {low}")
        return Scaling(of.kind, theta, factor=of.number("factor"), length=of.length(_ORIGINAL), bounds=(low, high))
    return Scaling(of.kind, theta)


def _read_yarn(of: _Parameters, dim: int, base: float) -> Scaling:
    if base <= 1:
        raise ArgumentError(f"base is {base}; expected more than 1 with rope_type 'yarn'")
    factor, length = of.factor(), of.length(_ORIGINAL)
    low, high = (
        dim * math.log(length / (of.number(key, default) * 2 * math.pi)) / (2 * math.log(base))
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    truncate = of.given.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ArgumentError(f"scaling['truncate'] is {truncate!r}; expected True or False")
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    mscale, mscale_all_dim = of.number("mscale", 0.0, zero=True), of.number("mscale_all_dim", 0.0, zero=True)
    both = mscale and mscale_all_dim
    usual = magnitude(mscale) / magnitude(mscale_all_dim) if both else magnitude(1.0)
    attention_factor = of.number("attention_factor", usual, zero=True)
    bounds = low, high + 0.001 if low == high else high
    return Scaling(of.kind, base, attention_factor, factor, length, bounds)


def _read_longrope(of: _Parameters, dim: int, base: float) -> Scaling:
    length, short, long = (
        of.length(_ORIGINAL),
        of.numbers("short_factor", dim // 2),
        of.numbers("long_factor", dim // 2),
    )
    if of.has("attention_factor"):
        attention_factor = of.number("attention_factor", zero=True)
    else:
        attention_factor = math.sqrt(1 + math.log(max(of.factor(), 1.0)) / math.log(length))
    return Scaling(of.kind, base, attention_factor, length=length, short=short, long=long)


def _vector(values: tuple[float, ...], device: torch.device) -> Tensor:
    if device.type == "cuda" and is_capturing():  # a graph cannot copy from pageable memory
        return torch.stack([torch.full((), value, dtype=torch.float64, device=device) for value in values])
    return torch.tensor(values, dtype=torch.float64, device=device)


def rates(scaling: Scaling, dim: int, device: torch.device, length: Tensor | None = None) -> Tensor:
    """Return the frequencies ``[dim / 2]`` in float64.

    Args:
        scaling: The parameters, after ``at`` if there is no `length`.
        dim: Number of rotated elements of a head.
        device: Device of the result.
        length: Length of the sequence as a float64 scalar of the device, for the kinds that depend on it.
    """
    kind, base, factor = scaling.kind, scaling.base, scaling.factor
    if kind == "dynamic":
        base = scaling.grown_base(length.clamp(min=scaling.length), dim)
    plain = base ** divided(torch.arange(0, dim, 2, dtype=torch.float64, device=device), -dim)
    if kind in ("default", "dynamic"):
        return plain
    if kind == "longrope":
        divisors = _vector(scaling.short, device)
        if length is not None:
            divisors = torch.where(length > scaling.length, _vector(scaling.long, device), divisors)
        return plain / divisors
    pair = torch.arange(dim // 2, dtype=torch.float64, device=device)
    if kind == "linear":
        kept = torch.zeros_like(pair)
    elif kind == "proportional":
        return torch.where(pair < scaling.bounds[0], plain / factor, 0.0)
    elif kind == "yarn":
        low, high = scaling.bounds
        kept = 1 - ((pair - low) / (high - low)).clamp(0, 1)
    else:
        low, high = scaling.bounds
        kept = ((scaling.length / (2 * math.pi) * plain - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / factor * (1 - kept)
