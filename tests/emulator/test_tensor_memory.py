"""Tensor memory in the emulator: what a product of tcgen05 gives, and reports of accesses that come too early."""

from __future__ import annotations

import pytest
import torch
from support.emulator_harness import ORDERS, needs_compiler, run

import rtkernels
from rtkernels.emulator import EmulatorError

pytestmark = needs_compiler


def _multiply(bug: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = torch.randn(128, 16).bfloat16(), torch.randn(32, 16).bfloat16()
    out = torch.empty(128, 32, dtype=torch.float32)
    run(
        "tensor_memory.cu",
        "multiply",
        variant=(str(bug),),
        arch=100,
        block=128,
        shared=128 * 128 + 32 * 128 + 32,
        a=a,
        b=b,
        out=out,
    )
    return out, a.float() @ b.float().T


@pytest.mark.parametrize("order", ORDERS)
def test_a_product(order: str | int) -> None:
    with rtkernels.emulate("sm_100", order=order):
        torch.testing.assert_close(*_multiply(0))


@pytest.mark.parametrize(
    ("bug", "kind", "words"),
    [
        (1, "race", "read before the product that writes it is done"),
        (2, "race", "freed before its products are done"),
        (3, "missing_fence", "wgmma"),
        (4, "out_of_bounds", "warp 1 reads lane 0"),
        (5, "out_of_bounds", "of which 32 are allocated"),
    ],
)
def test_reports(bug: int, kind: str, words: str) -> None:
    with rtkernels.emulate("sm_100"), pytest.raises(EmulatorError, match=words) as found:
        _multiply(bug)
    assert found.value.kind == kind
