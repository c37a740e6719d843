"""The functors of ``cuda_src/pointwise/functors.cuh`` as Python knows them: what torch's operators say about their
dtypes, the kernels that apply them, and which variants of these there are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rtkernels.aten.strides import SQUARES, Arrangement
from rtkernels.aten.table import Overload
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.targets import Target

TOKENS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "boolean",
}
FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
NUMBERS = FLOATS | INTEGERS
ANY = NUMBERS | {torch.bool}
ABSENT = "u8"  # the template argument of an operand that there is not
_NUMBERS = "na:i64 nb:i64 nd:i64 s0:i64 s1:i64 s2:i64 s3:i64"
_TABLE = " ".join(f"{name}{i}:i64" for name in "nqoabd" for i in range(6))


@dataclass(frozen=True, eq=False)
class Functor:
    """A functor of the header, and what torch's operators say about its dtypes.

    Attributes:
        name: Of the struct in namespace ``rtk``.
        inputs: Tensors or numbers that it takes, 0 to 3.
        dtypes: Promoted dtypes that it is for.
        promotion: What operands are converted to: "default" (torch's promotion), "float" (integers become the default
            float), or "first" (the dtype of the first operand that counts).
        result: Dtype of the result; None: the promoted one.
        own: A bit for each operand that keeps its dtype and does not count for promotion (masks).
        by_number: The functor in the place of this one where the second operand is a number and the dtype a float.
        reciprocal: `by_number` gets the reciprocal of the number.
        rounds_numbers: Numbers are rounded to the promoted dtype before they are used, as torch does in comparisons.
        numbers_count: Numbers are operands for torch, of no dimensions, when it chooses the strides of the result.
        unit: Source; the built-in functors are in ``pointwise/pointwise.cu``.
    """

    name: str
    inputs: int
    dtypes: frozenset[torch.dtype] = ANY
    promotion: str = "default"
    result: torch.dtype | None = None
    own: int = 0
    rounds_numbers: bool = False
    numbers_count: bool = True
    by_number: str = ""
    reciprocal: bool = False
    kernels: Any = None  # of a user's unit


class Kernels:
    """The kernels of one unit, one or two for each class of layouts."""

    def __init__(self, unit: str, sample: Any, tier: str = "aten") -> None:
        types = "F T O A B D"
        pointers = "out:ptr a:ptr b:ptr d:ptr"
        self.flat = Kernel(
            unit, "pointwise_flat", template=types, tier=tier, max_registers=96,
            args=f"{pointers} {_NUMBERS} count:i64 steps:i64 aligned16:i64",
            variants=lambda target: sample("V", target),
        )  # fmt: skip
        self.strided = Kernel(
            unit, "pointwise_strided", template=f"{types} INDEX64", tier=tier, max_registers=96,
            args=f"{pointers} {_NUMBERS} {_TABLE} count:i64 dims:i64 steps:i64 vectors:i64",
            variants=lambda target: sample("G", target),
        )  # fmt: skip
        self.transposed = Kernel(
            unit, "pointwise_transposed", template=types, tier=tier, max_registers=96,
            args=f"{pointers} {_NUMBERS} {_TABLE} dims:i64 tiles:i64 tiles_x:i64 tiles_y:i64",
            variants=lambda target: sample("T", target),
        )  # fmt: skip
        self.squares = Kernel(
            unit, "pointwise_squares", template=f"{types} TILED", tier=tier, max_registers=128,
            args=f"{pointers} {_NUMBERS} {_TABLE} dims:i64 steps:i64 tiles_x:i64 tiles_y:i64",
            variants=lambda target: sample("S", target),
        )  # fmt: skip

    def bind(self, types: tuple[str, ...], how: Arrangement, device: int) -> Any:
        if how.kind == "V":
            return self.flat.bind(types, device, how.grid, 256, ending=how.ending)
        if how.tiled is not None:
            return self.squares.bind((*types, how.tiled), device, how.grid, 256, ending=how.ending)
        if how.kind == "T":
            return self.transposed.bind(types, device, how.grid, 256, ending=how.ending)
        return self.strided.bind((*types, how.index64), device, how.grid, 256, ending=how.ending)

    def all(self) -> tuple[Kernel, ...]:
        return self.flat, self.strided, self.transposed, self.squares


COPY = Functor("Copy", 1)
FILL = Functor("Fill", 0)
_FUNCTORS: dict[str, Functor] = {
    "Copy": COPY,
    "Fill": FILL,
}  # every built-in functor, by name: what all variants are made of


def functor(name: str, inputs: int, **options: Any) -> Functor:
    """Return a new built-in functor."""
    made = _FUNCTORS[name] = Functor(name, inputs, **options)
    return made


def row_adder(rows: list[Overload]) -> Callable[..., None]:
    """Return a function that adds a row of family ``ew``: its name, handler and OpInfo, "" for none, and options."""

    def add(name: str, handler: Callable[..., Any], opinfo: str, **options: Any) -> None:
        rows.append(Overload(name, "ew", handler, opinfo=(opinfo,) if opinfo else (), replays=True, **options))

    return add


def all_variants(kind: str) -> Iterator[tuple[Any, ...]]:
    """Yield the variants of every built-in functor for operands of one dtype: all but mixtures."""
    for made in _FUNCTORS.values():
        for dtype in TOKENS:
            if dtype not in made.dtypes:
                continue
            token = TOKENS[dtype]
            result = TOKENS[made.result] if made.result is not None else token
            types = ["boolean" if made.own >> i & 1 and made is not COPY else token for i in range(made.inputs)]
            variant = (made.name, token, result, *types, *[ABSENT] * (3 - made.inputs))
            if kind == "S":  # the last operand that has the promoted dtype is transposed
                tiled = next((i for i in reversed(range(made.inputs)) if types[i] == token), None)
                if tiled is not None and dtype.itemsize in SQUARES and (made.result or dtype).itemsize <= 4:
                    yield (*variant, tiled)
            else:
                yield (*variant, False) if kind == "G" else variant


_SAMPLED = {"V": 48, "G": 32, "T": 8, "S": 12}


def _sample(kind: str, target: Target) -> list[tuple[Any, ...]]:
    """Return the variants that warming and the compile tests build: some of all, by a hash of their names."""
    from rtkernels.aten import gradients, index, pointwise, ternary  # noqa: F401  their functors

    ranked = sorted(set(all_variants(kind)), key=lambda variant: zlib.crc32(f"{kind} {variant}".encode()))
    return ranked[: _SAMPLED[kind]]


KERNELS = Kernels("pointwise/pointwise.cu", _sample)
OP = Op("aten_pointwise", public=(), kernels=KERNELS.all(), torch_ops=())
