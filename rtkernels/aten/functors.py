"""The functors of ``cuda_src/pointwise/functors.cuh`` as Python knows them: what torch's operators say about their
dtypes, the kernels that apply them, and which variants of these there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.strides import SQUARES, Arrangement
from rtkernels.aten.table import Overload
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.registry import Op

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
NUMBER_ARGUMENTS = "na:i64 nb:i64 nd:i64 s0:i64 s1:i64 s2:i64 s3:i64"
TABLE_ARGUMENTS = " ".join(f"{name}{i}:i64" for name in "nqoabd" for i in range(6))


@dataclass(frozen=True, eq=False)
class Functor:
    """A functor of the header, and what torch's operators say about its dtypes.

    Attributes:
        name: Of the struct in namespace ``rtk``.
        inputs: Tensors or numbers that it takes, 0 to 3.
        dtypes: Promoted dtypes that it is for.
        promotion: What operands are converted to: "default" (torch's promotion), "float" (integers become the default
            float), "long" (bool becomes int64), or "first" (the dtype of the first operand that counts).
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

    def __init__(
        self, unit: str, variants: Callable[..., Any], rare: Callable[..., Any] | None = None, tier: str = "aten"
    ) -> None:
        """Declare them. `variants` and `rare` are functions of a class of layouts (V, G, T, S) and a target."""

        def kernel(kind: str, entry: str, args: str, types: str = "", max_registers: int = 96) -> Kernel:
            rarely = (lambda target: rare(kind, target)) if rare is not None else ()
            tables = f" {TABLE_ARGUMENTS}" if kind != "V" else ""
            return Kernel(
                unit, entry, struct=kind != "V", template=f"F T O A B D {types}", tier=tier,
                max_registers=max_registers, args=f"out:ptr a:ptr b:ptr d:ptr {NUMBER_ARGUMENTS}{tables} {args}",
                variants=lambda target: variants(kind, target), rare=rarely,
            )  # fmt: skip

        self.flat = kernel("V", "pointwise_flat", "count:i64 steps:i64 aligned16:i64")
        self.strided = kernel("G", "pointwise_strided", "count:i64 dims:i64 steps:i64 vectors:i64", "INDEX64")
        self.transposed = kernel("T", "pointwise_transposed", "dims:i64 tiles:i64 tiles_x:i64 tiles_y:i64")
        self.squares = kernel("S", "pointwise_squares", "dims:i64 steps:i64 tiles_x:i64 tiles_y:i64", "TILED", 128)

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


def row_adder() -> tuple[Callable[..., None], Callable[[], Iterator[Overload]]]:
    """Return a function that adds rows of family ``ew`` for overloads that share a handler, and one that yields all.

    The first takes the operator's name, the handler, names of overloads ("default" for the one without a name; "_" in
    front of those of the in-place operator, for which the handler gets the first operand as `out`), the OpInfo if that
    has another name, "" for none, and options of the rows.
    """
    rows: list[Overload] = []

    def add(
        name: str, handler: Callable[..., Any], overloads: str = "default", opinfo: str | None = None, **options: Any
    ) -> None:
        def in_place(self: Tensor, *args: Any, **named: Any) -> Any:
            return handler(self, *args, **named, out=self)

        samples = name if opinfo is None else opinfo
        options = {"opinfo": (samples,) if samples else (), "replays": True, **options}
        for overload in overloads.split():
            changes = overload.startswith("_")
            full = f"{name}{'_' * changes}.{overload.removeprefix('_')}".removesuffix(".default")
            call = in_place if changes else handler
            rows.append(Overload(full, "ew", call, **options))

    return add, lambda: iter(rows)


def all_variants(kind: str) -> Iterator[tuple[Any, ...]]:
    """Yield the variants of every built-in functor for operands of one dtype, and conversions from any to any."""
    for made in _FUNCTORS.values():
        for dtype in TOKENS:
            if dtype not in made.dtypes:
                continue
            token = TOKENS[dtype]
            result = made.result if made.result is not None else dtype
            types = ["boolean" if made.own >> i & 1 else token for i in range(made.inputs)]
            yield from _of_layout(kind, made.name, token, TOKENS[result], types, result.itemsize)
    if kind in "VG":
        for to, source in itertools.permutations(TOKENS.values(), 2):
            yield from _of_layout(kind, COPY.name, to, to, [source])


def _of_layout(
    kind: str, name: str, common: str, result: str, types: list[str], result_bytes: int = 1
) -> Iterator[tuple[Any, ...]]:
    """Yield the template arguments of a functor for one class of layouts; one for each operand that can be tiled."""
    variant = (name, common, result, *types, *[ABSENT] * (3 - len(types)))
    if kind != "S":
        yield (*variant, False) if kind == "G" else variant
    elif _ITEMSIZES[common] in SQUARES and result_bytes <= 4:
        yield from ((*variant, i) for i, operand in enumerate(types) if operand == common)


_ITEMSIZES = {token: dtype.itemsize for dtype, token in TOKENS.items()}
# What most programs launch: dense operands of these dtypes, strided ones of floats, and transposed ones that are
# copied, added or multiplied. Copies move elements as integers of their size.
_FLOAT_TOKENS = frozenset(TOKENS[dtype] for dtype in FLOATS)
_USUAL_TYPES = {"V": _FLOAT_TOKENS | {"i64", "boolean"}, "G": _FLOAT_TOKENS, "T": _FLOAT_TOKENS, "S": _FLOAT_TOKENS}
_USUAL_TRANSPOSED = {"Copy", "Add", "Mul"}


def _is_usual(kind: str, variant: tuple[Any, ...]) -> bool:
    name, common, _, first = variant[:4]
    if name == COPY.name:
        return first == common or {first, common} <= _USUAL_TYPES["V"]
    return common in _USUAL_TYPES[kind] and (kind in "VG" or name in _USUAL_TRANSPOSED)


def _variants(kind: str, usual: bool) -> list[tuple[Any, ...]]:
    from rtkernels.aten import gradients, index, pointwise, ternary  # noqa: F401  their functors

    return [variant for variant in dict.fromkeys(all_variants(kind)) if _is_usual(kind, variant) is usual]


KERNELS = Kernels(
    "pointwise/pointwise.cu", lambda kind, target: _variants(kind, True), lambda kind, target: _variants(kind, False)
)
OP = Op("aten_pointwise", public=(), kernels=KERNELS.all(), torch_ops=())
