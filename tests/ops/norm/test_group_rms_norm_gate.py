"""Gated group norm: numerics at every place it can run, layouts, gradients, errors, compilation, the GPU's own ways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.attention_exact import assert_near
from support.compare import assert_close, assert_no_worse, running_on
from support.group_rms_norm_gate_cases import CASES, check, gated, make, plain
from support.places import DTYPES, at, short
from torch import Tensor

from rtkernels.ops.norm import group_rms_norm_gate_plan as plans
from rtkernels.runtime.operator.declared import Meta


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_layout(place: str, case: str) -> None:
    with running_on(place) as device:
        check(make(case, torch.bfloat16, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    "case", ("plain", "shared", "odd", "turned", "many_groups", "two_warps", "two_warps_no_weight", "attention_turned")
)
@at("cpu", "sm_90", "cuda")
def test_every_dtype(place: str, case: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        check(make(case, dtype, device))


FORMS = {"silu": ("silu", False), "silu first": ("silu", True), "sigmoid first": ("sigmoid", True)}
SHAPES = {
    "heads": (5, 3, 128, True), "odd": (6, 2, 33, False), "wide": (2, 1, 4104, False), "quads": (9, 2, 384, False),
    "warps": (5, 1, 1280, True), "two_warps": (4, 3, 512, False), "four_warps": (3, 2, 1024, False),
    "too wide": (2, 1, 8200, False),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
@at("cpu", "sm_90", "cuda")
def test_forms_of_the_gate(place: str, form: str, shape: str, dtype: torch.dtype) -> None:
    (act, gate_first), (rows, groups, cols, shared) = FORMS[form], SHAPES[shape]

    def exact(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        s = torch.sigmoid(gate) * (gate if act == "silu" else 1.0)
        h = (x * s if gate_first else x).view(rows, groups, cols)
        normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight.view(-1, cols)
        return normed.view(x.shape) * (1.0 if gate_first else s)

    with running_on(place) as device:
        generator = torch.Generator().manual_seed(1)
        sizes = ((rows, groups * cols), (rows, groups * cols), (cols if shared else groups * cols,))
        tensors = [torch.randn(*size, generator=generator).to(dtype).to(device) for size in sizes]
        dy = torch.randn(sizes[0], generator=generator).to(dtype).to(device)
        results = []
        for function, wide in (
            (lambda *t: gated(*t, groups=groups, act=act, gate_first=gate_first), dtype),
            (exact, torch.float64),
        ):
            leaves = [t.to(wide).detach().clone().requires_grad_() for t in tensors]
            y = function(*leaves)
            results.append((y.detach(), *torch.autograd.grad(y, leaves, dy.to(wide))))
        for what, ours, want in zip(("y", "dx", "dgate", "dweight"), *results, strict=True):
            assert_near(ours, want, {torch.float32: 1e-5}.get(dtype, 2.0**-7), what)


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    for case in ("plain", "odd", "two_warps"):
        with running_on("sm_90") as device:
            check(make(case, torch.bfloat16, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at("sm_90", "cuda")
def test_no_worse_than_torch(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        generator = torch.Generator().manual_seed(1)
        tensors = [torch.randn(*shape, generator=generator) for shape in ((2, 32, 256), (32, 2, 256), (256,))]
        dy = torch.randn(32, 2, 256, generator=generator).to(dtype).to(device)
        results = []
        for run, wide in ((gated, dtype), (plain, dtype), (plain, torch.float64)):
            leaves = [t.to(dtype).to(wide).to(device).detach().clone().requires_grad_() for t in tensors]
            y = run(*leaves, groups=4, eps=1e-6, layout="sequence_first")
            y.backward(dy.to(wide))
            results.append((y.detach(), *(leaf.grad for leaf in leaves)))
        for what, ours, theirs, exact in zip(("y", "dx", "dgate", "dweight"), *results, strict=True):
            # fp32 sums of 64 products: both are within two roundoffs, and chance decides which one is nearer.
            factor = 1.25 if (what, dtype) == ("dweight", torch.float32) else 1.05
            assert_no_worse(ours, theirs, exact, factor=factor, what=what)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=short)
@at("cpu", "sm_90", "cuda")
def test_extreme_gates(place: str, dtype: torch.dtype) -> None:
    special = [
        torch.inf,
        -torch.inf,
        torch.nan,
        0.0,
        -0.0,
        300.0,
        -300.0,
        1e4,
        -1e4,
        80.0,
        -80.0,
        20.0,
        -20.0,
        1,
        -1,
        9,
    ]
    with running_on(place) as device:
        gate = torch.tensor(special, dtype=dtype, device=device).requires_grad_()
        y = gated(torch.ones(16, dtype=dtype, device=device), gate, groups=1, eps=0.0)
        y.backward(torch.ones_like(y))
        wide = gate.detach().double()
        slope = torch.sigmoid(wide) * torch.sigmoid(-wide)
        for got, exact in ((y.detach(), torch.sigmoid(wide)), (gate.grad, slope)):
            assert_close(got, exact, c=2.0, scale=exact * (1 + wide.abs().clamp(max=100) / 8))


@at("cpu", "sm_90", "cuda")
def test_nan_and_infinity_stay_in_their_group(place: str) -> None:
    with running_on(place) as device:
        x = torch.randn(4, 64, device=device)
        x[1, 3], x[2, 40], x[3] = torch.nan, torch.inf, 0.0
        y = gated(x, torch.zeros_like(x), groups=4).view(4, 4, 16)
        assert y[1, 0].isnan().all() and not y[1, 1:].isnan().any()
        assert y[2, 2].isnan().sum() == 1 and not y[2, (0, 1, 3)].isnan().any()
        assert not y[3].any()


# ---- strides and geometry -------------------------------------------------------------------------------------------


def test_strided_inputs_are_not_copied() -> None:
    for case in ("attention", "attention_turned", "gate_transposed", "gate_padded", "x_padded", "x_expanded"):
        inputs = make(case, torch.bfloat16, "cpu")
        x, gate, dy = (Meta(t.dtype, t.shape, t.stride(), -1, 0) for t in (inputs.x, inputs.gate, inputs.dy))
        tensors = plans.Tensors(x, gate, None, dy, inputs.groups, inputs.layout)
        assert not tensors.copied and tensors.vec == 8, case


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Meta:
    return Meta(dtype, shape, tuple(torch.empty(shape, device="meta").stride()), -1, 0)


@pytest.mark.parametrize("tokens", (1, 3, 131, 8192))
@pytest.mark.parametrize(
    ("groups", "cols"),
    (
        (1, 8), (4, 512), (3, 40), (4, 96), (5, 320), (2, 384), (3, 768), (4, 1280), (2, 1536), (20, 512), (129, 64),
        (5, 2048), (2, 8192), (4, 480), (3, 1024),
    ),
)  # fmt: skip
@pytest.mark.parametrize("act", ("sigmoid", "silu"))
def test_backward_grid_covers_every_row(
    act: str, tokens: int, groups: int, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[Any] = []
    monkeypatch.setattr(plans, "_BWD", SimpleNamespace(bind=lambda *args: bound.extend(args)))
    meta = _meta(tokens, groups * cols)
    plan = plans.plan_bwd(meta, meta, meta, _meta(groups * cols), groups, 1e-6, "same", act, False, True, -1)
    variant, _, blocks, block, shared = bound
    chunks, form, sigmoid = variant[1:]
    assert sigmoid is (act == "sigmoid") and (sigmoid or chunks > 1 or block <= 384)
    lanes, threads = plan.steps[0].arguments[-8:-6]
    rows = block // threads
    assert block % 32 == 0 and block <= 512 and rows * threads == block and threads * chunks * 8 >= cols
    assert (threads in (1, 2, 4, 8, 16, 32), threads % 4 == 0, threads % 32 == 0, threads == 64, threads == 128)[form]
    team = max(1, 32 // (threads & -threads)) if form == 1 else 1  # rows that meet at one barrier
    assert rows % team == 0 and (form == 0 or rows // team <= 15)
    assert 1 <= lanes <= tokens and lanes * groups <= blocks * rows and (blocks <= 4 or blocks * rows < rows + groups)
    parts, width = plan.scratch["partial"].shape
    assert width == groups * cols and parts == (blocks if rows > groups else lanes)
    places = rows if rows % groups == 0 else groups * -(-(rows + groups - 1) // groups)
    sums = 4 * cols * places if rows > groups else 0
    assert max(sums, 96 * chunks * block if chunks > 1 else 0) <= shared <= 227 * 1024
