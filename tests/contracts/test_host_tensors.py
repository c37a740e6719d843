"""Ops make no tensors on the host for a device: the copy synchronises, and a CUDA graph that is captured refuses it.

References run on CUDA tensors, too, where there is no kernel for a call. A number is ``constants.constant``, a table of
few entries is computed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rtkernels.ops.gemm import decode_linear
from rtkernels.ops.shared import block_formats
from rtkernels.ops.shared.constants import constant

OPS = Path(__file__).resolve().parents[2] / "rtkernels/ops"
COPIES = {"torch.tensor", "torch.as_tensor", "torch.asarray", "torch.scalar_tensor"}
ALLOWED = {
    ("attention/attention.py", "attention"): "a list of the caller",
    ("rope/rope_scaling.py", "_vector"): "not in a capture",
}


def _found(tree: ast.AST, function: str) -> Iterator[tuple[str, int]]:
    """Yield functions and lines with a call that copies from the host to a device."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            device = next((ast.unparse(k.value) for k in node.keywords if k.arg == "device"), None)
            if (called in COPIES and device != "'cpu'") or called.endswith(".new_tensor"):
                yield inside, node.lineno
        yield from _found(node, inside)


def test_no_op_copies_a_tensor_from_the_host() -> None:
    bad, used = [], set()
    for path in sorted(OPS.rglob("*.py")):
        name = path.relative_to(OPS).as_posix()
        for function, line in _found(ast.parse(path.read_text(encoding="utf-8")), ""):
            if (name, function) in ALLOWED:
                used.add((name, function))
            else:
                bad.append(f"rtkernels/ops/{name}:{line}: {function} copies from the host; see {constant.__module__}")
    assert not bad, "\n".join(bad)
    assert used == set(ALLOWED), f"allowed for nothing: {set(ALLOWED) - used}"


class _FromLists(TorchDispatchMode):
    """Raises where a tensor is made of numbers on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() != "aten::lift_fresh", "made of numbers on the host"
        return func(*args, **(kwargs or {}))


def test_products_of_e2m1_codes_make_no_tensor_on_the_host() -> None:
    """As of 16 to 64 tokens, which no kernel computes."""
    g = torch.Generator().manual_seed(0)
    x, codes = torch.randn(16, 64, generator=g).bfloat16(), torch.randint(0, 256, (8, 32), generator=g).byte()
    scales = torch.rand(8, 4, generator=g).to(torch.float8_e4m3fn)
    given = (x, codes, scales, None, None, None, torch.ones(()), "e2m1", None, False, False, 0.0, 0.0, 1.0)
    wanted = decode_linear.FORWARD.reference(*given)
    with _FromLists():
        assert torch.equal(decode_linear.FORWARD.reference(*given), wanted)
        with pytest.raises(AssertionError, match="on the host"):
            torch.tensor([1.0])


def test_values_of_e2m1_codes() -> None:
    """All sixteen, with the sign of zero."""
    values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    wanted = torch.tensor([*values, *(-v for v in values)])
    got = block_formats.e2m1_values(torch.arange(16, dtype=torch.uint8))
    assert torch.equal(got.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [0.1, -0.0, 1 / 3, 1e-42, 1e40, float("-inf"), float("nan")])
def test_constants_are_those_of_torch(value: float, dtype: torch.dtype) -> None:
    def bits(x: Tensor) -> Tensor:
        return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])

    got, wanted = constant(value, dtype, torch.device("cpu")), torch.tensor(value, dtype=dtype)
    assert got.shape == () and got.dtype == dtype
    assert torch.equal(bits(got), bits(wanted)) or (got.isnan() and wanted.isnan())
