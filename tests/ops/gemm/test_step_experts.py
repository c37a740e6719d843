"""Experts of decoding steps: sizes, choices of experts, norm, residual."""

from __future__ import annotations

import pytest
import torch

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm.step_experts import FORWARD

BF16, FP16 = torch.bfloat16, torch.float16


def case(m: int, experts: int, top_k: int, width: int, inner: int, dtype: torch.dtype = BF16, norm: bool = False,
         residual: bool = False, act: str = "silu"):  # fmt: skip
    """Return arguments of the operator and the exact result."""
    g = torch.Generator().manual_seed(m + width + inner)
    x = torch.randn(m, width, generator=g).to(dtype)
    gate_up = (torch.randn(experts, 2 * inner, width, generator=g) * width**-0.5).to(dtype)
    down = (torch.randn(experts, width, inner, generator=g) * inner**-0.5).to(dtype)
    chosen = torch.rand(m, experts, generator=g).argsort(-1)[:, :top_k].to(torch.int32)
    probs = torch.rand(m, top_k, generator=g)
    weight = (torch.rand(width, generator=g) + 0.5).to(dtype) if norm else None
    added = torch.randn(m, width, generator=g).to(dtype) if residual else None
    return (x, gate_up, down, chosen, probs, added, weight, act, False, 1e-6, 0.0), exact(
        x, gate_up, down, chosen, probs, added, weight, act
    )


def exact(x, gate_up, down, chosen, probs, added, weight, act):
    rows = x.double()
    if weight is not None:
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        rows = rows.to(x.dtype).double()
    out = torch.zeros_like(rows)
    apply = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[act]
    for t, j in ((t, j) for t in range(x.shape[0]) for j in range(chosen.shape[1])):
        e = int(chosen[t, j])
        if 0 <= e < gate_up.shape[0]:
            gate, up = (gate_up[e].double() @ rows[t]).chunk(2)
            out[t] += probs[t, j].double() * (down[e].double() @ (apply(gate) * up))
    return out if added is None else out + added.double()


def checked(given, target: str = "sm_90", **options) -> torch.Tensor:
    arguments, wanted = given
    with rtkernels.emulate(target, **options):
        out = FORWARD.call(*arguments)
    assert (out.double() - wanted).norm() <= 6e-3 * wanted.norm()
    return out


@pytest.mark.parametrize("target", ("sm_80", "sm_90"))
@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
@pytest.mark.parametrize("m", (1, 3, 8))
def test_rows(m: int, dtype: torch.dtype, target: str) -> None:
    checked(case(m, 6, 2, 96, 40, dtype, norm=True, residual=True), target)


@pytest.mark.parametrize(
    ("m", "experts", "top_k", "width", "inner"),
    ((1, 1, 1, 8, 8), (1, 16, 8, 520, 72), (8, 40, 8, 64, 24), (2, 5, 5, 64, 600), (5, 3, 1, 200, 8)),
)
def test_sizes(m: int, experts: int, top_k: int, width: int, inner: int) -> None:
    checked(case(m, experts, top_k, width, inner, act="gelu"))


def test_experts_that_do_not_exist_and_repeated_ones() -> None:
    arguments, _ = case(3, 4, 3, 64, 32, residual=True)
    chosen = torch.tensor([[4, -1, 2], [1, 1, 0], [-1, 4, 9]], dtype=torch.int32)
    arguments = (*arguments[:3], chosen, *arguments[4:])
    out = checked((arguments, exact(*arguments[:8])))
    assert torch.equal(out[2], arguments[5][2])


def test_rows_without_an_expert_do_not_see_its_values() -> None:
    arguments, _ = case(2, 2, 1, 64, 32)
    arguments[2][1] = torch.inf
    chosen = torch.tensor([[0], [1]], dtype=torch.int32)
    with rtkernels.emulate("sm_90"):
        out = FORWARD.call(*arguments[:3], chosen, *arguments[4:])
    assert out[0].isfinite().all() and not out[1].isfinite().any()


def test_result_does_not_depend_on_the_order_of_blocks() -> None:
    given = case(4, 8, 3, 128, 64, norm=True, residual=True)
    first = checked(given)
    for order in ("reverse", 3):
        assert torch.equal(checked(given, order=order), first)


def test_probabilities_are_rounded_if_asked_for() -> None:
    arguments, _ = case(2, 4, 2, 64, 32)
    rounded = (*arguments[:4], arguments[4].bfloat16().float(), *arguments[5:])
    with rtkernels.emulate("sm_90"):
        assert torch.equal(FORWARD.call(*arguments[:8], True, 1e-6, 0.0), FORWARD.call(*rounded))


def test_what_the_kernels_do_not_take_runs_in_torch() -> None:
    checked(case(9, 4, 2, 64, 32))
    checked(case(2, 4, 2, 20, 12))


def test_wrong_arguments_are_named() -> None:
    arguments, _ = case(2, 4, 2, 64, 32)
    x, gate_up, down, chosen, probs, *rest = arguments
    with pytest.raises(ArgumentError, match=r"experts is torch\.int64"):
        FORWARD.call(x, gate_up, down, chosen.long(), probs, *rest)
    with pytest.raises(ArgumentError, match="down"):
        FORWARD.call(x, gate_up, down[:, :8], chosen, probs, *rest)


def emulated_coverage() -> None:
    with rtkernels.emulate("sm_90"):
        for dtype in (BF16, FP16):
            FORWARD.call(*case(2, 4, 2, 64, 32, dtype)[0])
