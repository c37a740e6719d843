"""Contracts say what to write: an op that lacks one piece gets a message with the file and the lines for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import pieces
from support.ops import op_named

from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.registry import Op

SAMPLES = "tests/contracts/samples/reduce/row_dot.py"
TESTS = "tests/ops/reduce/test_row_dot.py"
ROWS = "bench/rows/reduce/row_dot.py"
OP = op_named("row_dot")
FORWARD = OP.torch_ops[0]
KERNEL = Kernel(
    "reduce/row_dot.cu", "f", template="T", args="x:ptr rows:i64 eps:f64", variants=[], max_registers=8,
)  # fmt: skip


def function(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return something.

    Args:
        x: Rows.

    Returns:
        Rows.
    """


def bare(x: torch.Tensor) -> torch.Tensor:
    """Return something."""


def silent(x: torch.Tensor) -> torch.Tensor: ...


def complete(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return something.

    Args:
        x: Rows.
        out: The result's memory.

    Returns:
        Rows.
    """


def _op(**changes: Any) -> Op:
    """Return what looks like ``row_dot`` to a contract, changed; an ``Op`` would be registered."""
    return SimpleNamespace(**{**vars(OP), **changes})


# What is missing: the contract, and what its message must name.
MISSING: dict[str, tuple[Callable[[], str], list[str]]] = {
    "samples": (lambda: pieces.samples(OP, []), [SAMPLES, FORWARD.name, "yield OPERATOR, (torch.randn(3, 5"]),
    "samples of another op": (
        lambda: pieces.samples(_op(torch_ops=()), [(FORWARD, ())]), [SAMPLES, FORWARD.name, "Op(torch_ops=...)"]
    ),
    "tests": (
        lambda: pieces.tests_of(OP, Path("/nowhere")), [f"{TESTS} does not exist", "Write tests of numerics"]
    ),
    "rows": (lambda: pieces.bench_rows(OP, []), [ROWS, "Write rows()", "Row"]),
    "rows that differ": (lambda: pieces.bench_rows(OP, ["a 4x4", "a 4x4"]), [ROWS, "two rows 'a 4x4'"]),
    "a host row": (lambda: pieces.host_call("row_dot", "row_dot", ()), [ROWS, "def host(x):", "rtkernels.row_dot(x)"]),
    "a docstring": (lambda: pieces.documentation("silent", silent), ["silent in", "no docstring", "Args: and"]),
    "sections": (lambda: pieces.documentation("bare", bare), ["no section Args: and none Returns:"]),
    "a parameter": (lambda: pieces.documentation("function", function), ["does not describe eps", "        eps: ..."]),
    "out": (lambda: pieces.out_parameter("bare", bare), ["bare in", "out: Tensor | None = None", "WITHOUT_OUT"]),
    "a call": (
        lambda: pieces.call("row_dot", "row_dot", ()),
        [SAMPLES, 'CALLS = {"row_dot": lambda x, ids: rtkernels.row_dot(x)}'],
    ),
    "what it overwrites": (
        lambda: pieces.overwriting("row_dot_", "row_dot", ()),
        [SAMPLES, 'OVERWRITING = {"row_dot_": ((4, 8), lambda x:'],
    ),
    "a launch": (
        lambda: pieces.emulated(_op(kernels=(KERNEL,)), set()),
        ["launches f in the emulator", SAMPLES, TESTS, "def emulated_coverage()"],
    ),
    "a reason": (
        lambda: pieces.emulated(_op(kernels=(SimpleNamespace(emulated=""),)), set()),
        ["emulated=''", "why the emulator"],
    ),
    "its name": (lambda: pieces.table_of_names({}, ["row_dot"]), ["_public.py lacks row_dot", "docs/make.py"]),
    "its op": (lambda: pieces.table_of_names({"gone": "ops.a.gone"}, []), ["names gone, which no Op has", "make.py"]),
    "an argument": (
        lambda: pieces.parameters(KERNEL, ["const T* x", "i64 rows"]),
        ['args="x:ptr rows:i64 eps:f64" has 3 arguments', "cuda_src/reduce/row_dot.cu has 2: const T* x, i64 rows"],
    ),
    "the order of arguments": (
        lambda: pieces.parameters(KERNEL, ["const T* x", "double eps", "i64 rows"]),
        ["rows is i64 in its record", "'double eps' in its place"],
    ),
    "few variants": (lambda: pieces.variant_count("row_dot", 25, 24), ["25 variants", "MANY_VARIANTS", "run-time"]),
    "the op": (lambda: pieces.host_call("f", "no_such_op", ()), ["bench/rows/<family>/no_such_op.py"]),
}  # fmt: skip


@pytest.mark.parametrize("piece", MISSING)
def test_a_missing_piece_is_named_with_its_file(piece: str) -> None:
    check, named = MISSING[piece]
    message = check()
    assert [words for words in named if words not in message] == [], message
    assert "<object" not in message and "0x" not in message


def test_complete_ops_have_nothing_to_be_told() -> None:
    launched = {(kernel.unit, kernel.name) for kernel in OP.kernels}
    for problem in (
        pieces.samples(OP, [(torch_op, ()) for torch_op in OP.torch_ops]),
        pieces.tests_of(OP),
        pieces.bench_rows(OP, ["a 4x4", "a 8x8"]),
        pieces.host_call("row_dot", "row_dot", {"row_dot"}),
        pieces.documentation("complete", complete),
        pieces.out_parameter("complete", complete),
        pieces.out_parameter("bare_", bare),
        pieces.call("row_dot", "row_dot", {"row_dot"}),
        pieces.overwriting("row_dot_", "row_dot", {"row_dot_"}),
        pieces.emulated(OP, launched),
        pieces.table_of_names({"row_dot": "ops.reduce.row_dot"}, ["row_dot"]),
        pieces.parameters(KERNEL, ["const T* x", "i64 rows", "double eps"]),
        pieces.variant_count("row_dot", 24, 24),
    ):
        assert problem == ""


def test_every_contract_of_pieces_is_provoked() -> None:
    own = {name: value for name, value in vars(pieces).items() if getattr(value, "__module__", "") == pieces.__name__}
    contracts = {name for name, value in own.items() if callable(value)}
    text = Path(__file__).read_text(encoding="utf-8")
    assert {name for name in contracts - {"family_of"} if not name.startswith("_")} <= {
        name for name in contracts if f"lambda: pieces.{name}(" in text
    }


def test_the_table_of_names_keeps_its_order() -> None:
    from docs import make_public

    listed = {"b": "ops.act.b", "gone": "ops.act.gone", "z": "ops.norm.z", "a": "ops.act.a", "y": "ops.moe.y"}
    public = {name: module for name, module in listed.items() if name != "gone"}
    public |= {"a": "ops.act.other", "new": "ops.act.new", "q": "ops.q.q"}
    made = make_public.table(listed, public)
    assert list(made.items()) == [
        ("b", "ops.act.b"), ("z", "ops.norm.z"), ("a", "ops.act.a"), ("new", "ops.act.new"), ("y", "ops.moe.y"),
        ("q", "ops.q.q"),
    ]  # fmt: skip
    assert make_public.text() == make_public.PATH.read_text(encoding="utf-8")
