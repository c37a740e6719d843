"""Plain-integer helpers of the launchers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime import layout
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.launch.plans import Plans


@pytest.mark.parametrize(
    ("tensor", "wanted"),
    [
        (torch.empty(3, 4), 4),
        (torch.empty(7), 7),
        (torch.empty(2, 3, 4), 4),
        (torch.empty(6, 8)[::2], 16),
        (torch.empty(6, 8)[:, :4], 8),
        (torch.empty(2, 6, 8)[:, ::2], 16),
        (torch.empty(2, 6, 8)[:, :4], None),
        (torch.empty(4, 6).t(), None),
        (torch.empty(1, 4).expand(5, 4), 0),
        (torch.empty(5, 1).expand(5, 4), None),
        (torch.empty(3, 1, 4).transpose(0, 1), 4),
        (torch.empty(5, 6)[:, :1], 6),
        (torch.empty(0, 4), 4),
        (torch.empty(4, 0), 0),
    ],
    ids=lambda value: str(tuple(value.shape)) + str(value.stride()) if isinstance(value, torch.Tensor) else str(value),
)
def test_row_stride(tensor: torch.Tensor, wanted: int | None) -> None:
    assert layout.row_stride(tensor.shape, tensor.stride()) == wanted


@pytest.mark.parametrize(
    ("multiples", "wanted"),
    [((), 16), ((32, 48), 16), ((32, 8), 8), ((0, 2), 2), ((6,), 2), ((5,), 1), ((1 << 40,), 16)],
)
def test_vector_bytes(multiples: tuple[int, ...], wanted: int) -> None:
    assert layout.vector_bytes(*multiples) == wanted


@pytest.mark.parametrize(("vectors", "wanted"), [(0, 1), (1, 1), (2, 2), (3, 4), (31, 32), (33, 64), (999, 512)])
def test_group_threads(vectors: int, wanted: int) -> None:
    assert layout.group_threads(vectors, 512) == wanted


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (4, 0), (2, 1, 5), (2, 0, 3)], ids=str)
def test_dense_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert dense_strides(shape) == torch.empty(shape).stride()


def test_token_names_argument_and_choices() -> None:
    with pytest.raises(ArgumentError, match="gate has dtype int64; expected one of bfloat16, float16, float32"):
        layout.token("gate", torch.int64)


def test_check_same_names_both() -> None:
    with pytest.raises(ArgumentError, match=r"up has shape \(2,\); expected \(3,\), that of the gate"):
        layout.check_same("up", torch.Size([2]), torch.Size([3]), "shape", of="the gate")


def test_plans_build_once_and_stay_bounded() -> None:
    built = []
    plans = Plans(lambda *key: built.append(key) or key)
    for _ in range(2):
        assert plans[1, 2] == (1, 2)
    assert built == [(1, 2)]
    for i in range(10_000):
        plans[i,]
    assert len(plans) <= 4096


def test_expression_spells_template_arguments() -> None:
    kernel = Kernel("a/b.cu", "f", template="T W N FLAG ACT", args="x:ptr", variants=[], max_registers=1)
    wanted = "rtk::f<rtk::bf16, float, 8, true, rtk::Silu>"
    assert kernel.expression(("bf16", "fp32", 8, True, "Silu")) == wanted
    with pytest.raises(TypeError, match="takes template arguments"):
        kernel.expression(("bf16",))


@pytest.mark.parametrize("d", (1, 2, 3, 7, 10, 4095, 4096, 2**30 + 1, 2**31 - 1))
def test_divisor_gives_exact_quotients(d: int) -> None:
    shift, multiplier = divmod(layout.divisor(d), 2**32)
    for n in (0, 1, d - 1, d, d + 1, 2 * d - 1, 3 * d, 12345, 2**31 - 1):
        if n < 2**31:
            assert (2 * n * multiplier >> 32) >> shift == n // d  # as `divided` in common/abi.cuh


def test_two_numbers_in_an_argument() -> None:
    for lower, upper in ((0, 0), (1, 2), (2**32 - 1, 2**31), (2**31, 2**32 - 1)):
        both = layout.halves(lower, upper)
        assert -(2**63) <= both < 2**63 and (both & (2**32 - 1), both >> 32 & (2**32 - 1)) == (lower, upper)
    for lower, upper in ((1e-5, -1.0), (1e300, -1e300)):
        both = layout.float_halves(lower, upper).to_bytes(8, "little", signed=True)
        with np.errstate(over="ignore"):
            assert np.frombuffer(both, np.float32).tolist() == [np.float32(lower), np.float32(upper)]
