"""Variations of a call: layouts of tensors, sizes, aliases, and which tensors require a gradient.

A variation has a name that reproduces it: ``x:expand0 w:off``, ``64->65 x:pitch1``, ``out[0]=x+16``,
``x=y``, ``grad x,w dy:expand``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from contracts.fuzz.calls import Call
from contracts.fuzz.memory import layouts

SHIFTS = (0, 16, -16, 2)  # bytes between the first elements of two tensors that share memory
SIZES = (0, 1, 7, 13, 17, 24, 40, 65, 72, 129)


class Variation(NamedTuple):
    """One variation.

    Attributes:
        layouts: Names of layouts by place of the tensor.
        sizes: Old and new size, of all tensors.
        alias: What is written, what it shares memory with, and the shift in bytes. What is written is ``out`` with a
            number, or the name of a tensor.
        same: Two tensors that are one.
        grads: Places of tensors that require a gradient.
        incoming: Name of the layout of incoming gradients.
    """

    layouts: tuple[tuple[int, str], ...] = ()
    sizes: tuple[int, int] | None = None
    alias: tuple[str, str, int] | None = None
    same: tuple[int, int] | None = None
    grads: tuple[int, ...] = ()
    incoming: str = ""

    def named(self, call: Call) -> str:
        """Return it as text."""
        parts = [f"{self.sizes[0]}->{self.sizes[1]}"] if self.sizes else []
        parts += [f"{call.names[i]}:{name}" for i, name in self.layouts]
        parts += ["{}={}{:+d}".format(*self.alias)] if self.alias else []
        parts += [f"{call.names[self.same[0]]} is {call.names[self.same[1]]}"] if self.same else []
        parts += [f"grad {','.join(call.names[i] for i in self.grads)}"] if self.grads else []
        parts += [f"dy:{self.incoming}"] if self.incoming else []
        return " ".join(parts) or "plain"


def is_index(t: Tensor) -> bool:
    """Return True for ids, counts and offsets: other values than the given ones may be invalid."""
    return not t.is_floating_point() and t.dtype not in (torch.int8, torch.uint8, torch.bool)


def _layout_names(t: Tensor) -> list[str]:
    return [layout.name for layout in layouts(t, shared=not is_index(t))]


def variations(call: Call, rng: random.Random, *, pairs: int = 6) -> Iterator[Variation]:
    """Yield the variations of a call; those of layouts alone first.

    Args:
        call: What is called.
        rng: Chooses layouts of several tensors at once, and sizes.
        pairs: How many of these.
    """
    yield Variation()
    names = {i: _layout_names(t) for i, t in enumerate(call.tensors)}
    for i, known in names.items():
        yield from (Variation(((i, name),)) for name in known)
    for _ in range(pairs):
        yield Variation(tuple((i, rng.choice(known)) for i, known in names.items() if known and rng.random() < 0.7))
    yield from _aliases(call)
    for i, j in itertools.combinations(range(len(call.tensors)), 2):
        a, b = call.tensors[i], call.tensors[j]
        if (a.shape, a.dtype) == (b.shape, b.dtype) and not {i, j} & call.written and not is_index(a):
            yield Variation(same=(i, j))
    for sizes in sizes_of(call):
        yield Variation(sizes=sizes)
        if 0 not in sizes:
            tensors = [i for i, known in names.items() if known and call.tensors[i].dim()]
            for _ in range(2):
                i = rng.choice(tensors)
                yield Variation(((i, rng.choice(names[i])),), sizes=sizes)
    if call.function:
        yield from _gradients(call, rng, names)


def _aliases(call: Call) -> Iterator[Variation]:
    targets = [call.names[i] for i in sorted(call.written)]
    if call.has_out:
        targets = [f"out[{i}]" for i in range(4)] + targets
    for target in targets:
        for name in call.names:
            if name != target:
                yield from (Variation(alias=(target, name, shift)) for shift in SHIFTS)


def _gradients(call: Call, rng: random.Random, names: dict[int, list[str]]) -> Iterator[Variation]:
    floats = [i for i, t in enumerate(call.tensors) if t.is_floating_point() and t.itemsize > 1]
    floats = [i for i in floats if i not in call.written]
    subsets = [s for n in range(1, len(floats) + 1) for s in itertools.combinations(floats, n)]
    if len(subsets) > 16:
        subsets = [tuple(floats), *((i,) for i in floats), *rng.sample(subsets, 8)]
    for subset in subsets:
        yield Variation(grads=subset)
        layouts_ = tuple((i, rng.choice(names[i])) for i in floats if names[i] and rng.random() < 0.5)
        yield Variation(layouts_, grads=subset, incoming=rng.choice(("expand", "swap01", "pitch1", "off", "windows1")))


def sizes_of(call: Call) -> list[tuple[int, int]]:
    """Return sizes that may be changed, with other ones.

    A size is changed wherever tensors have it. What integers refer to is left alone, and so are sizes of integer
    tensors that are ordered (offsets) or no two of which are equal (places that rows go to: repeated ones would be a
    race), and those that other arguments name.
    """
    found = {n for t in call.tensors for n in t.shape if n > 1}
    least = 0
    for t in call.tensors:
        if not is_index(t):
            continue
        if t.numel():
            least = max(least, int(t.max()) + 1)
            found -= {int(t.max())}
        if t.dim() <= 1 or call.written or _are_places(t):
            found -= set(t.shape)
    found -= call.numbers
    return [(old, new) for old in sorted(found) for new in SIZES if new != old and new >= least]


def _are_places(t: Tensor) -> bool:
    """Return True if no two integers are equal, but for negative ones, which stand for nothing."""
    given = t[t >= 0]
    return given.numel() > 1 and given.unique().numel() == given.numel()


def resized(t: Tensor, old: int, new: int) -> Tensor:
    """Return a tensor whose dimensions of size `old` have another size, its values repeated."""
    for d, size in enumerate(t.shape):
        if size == old:
            t = t.index_select(d, _places(t, old, new)) if t.dtype not in _NO_SELECT else _select(t, d, old, new)
    return t


_NO_SELECT = (torch.float8_e4m3fn, torch.float8_e5m2)


def _places(t: Tensor, old: int, new: int) -> Tensor:
    return torch.arange(new, device=t.device) % old  # some OpInfos put samples on a GPU whatever device is asked for


def _select(t: Tensor, d: int, old: int, new: int) -> Tensor:
    return t.view(torch.uint8).index_select(d, _places(t, old, new)).view(t.dtype)
