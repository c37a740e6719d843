"""Gated linear units with fp8 results: codes and scales at every place, experts, errors, compilation."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.glu_cases import ACTS
from support.glu_fp8_cases import CASES, Inputs, check, check_backward, counts, glu_fp8, make, make_backward
from support.places import DTYPES, at, order_test, short

# ---- forward --------------------------------------------------------------------------------------------------------


# Cases where every place and option is tried; the emulator runs the others with one activation per case.
MAIN = ("odd", "separate_strides", "experts", "experts_of_16", "no_rows")


@pytest.mark.parametrize("case", MAIN)
@at()
def test_every_layout(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, torch.bfloat16, device)
        both = check(inputs, scales="column")
        rows = check(inputs, layout="row", scales="column")
        columns = check(inputs, layout="transposed")
        for half, whole in ((rows[:2], both[:2]), (columns[2:], both[2:])):
            for a, b in zip(half, whole, strict=True):
                assert_same_bits(a, b)
        check(inputs, pow2=True)
        if case == "experts_of_16":
            check_backward(inputs)


@pytest.mark.parametrize("case", [case for case in CASES if case not in MAIN])
@at("cpu", "sm_90", "cuda")
def test_every_case(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, torch.bfloat16, device)
        check(inputs)
        check_backward(inputs, layout="transposed")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("act", ACTS)
@at("cpu", "sm_90", "cuda")
def test_every_activation(place: str, act: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        check(make("experts" if act == "silu" else "experts_odd", dtype, device), act)
        check_backward(make_backward("experts" if act == "silu" else "experts_of_16", dtype, device), act)


@at()
def test_special_values(place: str) -> None:
    special = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 300.0, -300.0, 3e38, -3e38, 1e-40]
    with running_on(place) as device:
        x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        for i, value in enumerate(special):
            x[3 * i, 5 + i] = x[3 * i + 1, 130 + i] = value
        x[33] = 0.0
        inputs = Inputs(x.to(device))
        check(inputs)
        zero = glu_fp8(torch.zeros(3, 64, device=device), layout="both")
        assert not zero.q.view(torch.uint8).any() and not zero.q_t.view(torch.uint8).any()
        assert (zero.scale == torch.tensor(1e-30, device=device)).all() and zero.scale.equal(
            zero.scale_t.flatten()[:3, None]
        )


@at()
def test_counts_that_do_not_add_up(place: str) -> None:
    """Rows past the sum belong to no expert; counts past the rows are clamped; nothing else is touched."""
    with running_on(place) as device:
        for numbers, used in (([10, 20], [10, 20]), ([30, 200, 7], [30, 70, 0]), ([-4, 100], [0, 100])):
            x = torch.randn(100, 2 * 24, generator=torch.Generator().manual_seed(1)).to(device)
            got = glu_fp8(x, counts=counts(*numbers).to(device), layout="both", scale_layout="column")
            wanted = glu_fp8(x[: sum(used)], counts=counts(*used).to(device), layout="both", scale_layout="column")
            rows = sum(used)
            assert_same_bits(got.q[:rows], wanted.q)
            assert_same_bits(got.scale[:rows], wanted.scale)
            assert_same_bits(got.q_t[: rows * 24], wanted.q_t)
            blocks = sum(-(-u // 128) for u in used)
            assert_same_bits(got.scale_t[:blocks], wanted.scale_t[:blocks])
            assert not got.scale_t[blocks:].any()


test_thread_order_does_not_matter = order_test(lambda case: check(make(case, torch.bfloat16, "cpu")), "experts", "odd")


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    for place in ("sm_80", "sm_90"):  # which has kernels of its own
        with running_on(place) as device:
            check(make("experts", torch.bfloat16, device))
            check(Inputs(torch.ones(1, 2 * 24 * 128, dtype=torch.bfloat16, device=device)))  # many tiles
            check_backward(make("weight", torch.bfloat16, device), layout="transposed")
    with running_on("sm_90") as device:
        check(make("merged_1d", torch.bfloat16, device), "relu")
        __import__("test_glu_smooth_fp8").check_smooth(make("merged_1d", torch.bfloat16, device))
