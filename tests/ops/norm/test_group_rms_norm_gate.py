"""Gated group norm: numerics at every place it can run, layouts, gradients, errors, compilation, the GPU's own ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import ROUNDOFF, assert_close, assert_no_worse, assert_same_bits, poisoned, running_on
from support.places import DTYPES, at, error_tests, meta_on, order_test, short
from support.ways import assert_compiles, assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.ops.norm import group_rms_norm_gate as module
from rtkernels.ops.norm import group_rms_norm_gate_plan as plans
from rtkernels.runtime.operator.declared import Meta

gated = rtkernels.group_rms_norm_gate


def plain(x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, layout: str) -> Tensor:
    """The op in plain torch, rounding wherever torch rounds."""
    x = x.reshape(*x.shape[: gate.dim() - 1], groups, -1)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.view(-1, x.shape[-1])
    if layout == "sequence_first":
        normed = normed.transpose(0, 1)
    return normed.reshape(gate.shape) * torch.sigmoid(gate)


# ---- inputs: one list for every place -------------------------------------------------------------------------------


@dataclass
class Inputs:
    x: Tensor
    gate: Tensor
    groups: int
    weight: Tensor | None = None
    layout: str = "same"
    dy: Tensor | None = None  # like gate if None
    eps: float = 1e-6

    def leaves(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return x, gate and weight as leaves that want gradients; with a dtype, copies of it."""
        return tuple(
            t if t is None else (t.detach() if dtype is None else t.detach().to(dtype)).requires_grad_()
            for t in (self.x, self.gate, self.weight)
        )


Normal = Callable[..., Tensor]


def _same(n: Normal, *shape: int, groups: int, weight: str = "full", **more: Any) -> Inputs:
    sizes = {"full": shape[-1], "shared": shape[-1] // groups}
    return Inputs(n(*shape), n(*shape), groups, None if weight == "none" else n(sizes[weight]), **more)


def _turned(n: Normal, b: int, s: int, c: int, groups: int, **more: Any) -> Inputs:
    return Inputs(n(b, s, c), n(s, b, c), groups, n(c), "sequence_first", **more)


def _padded(n: Normal, *shape: int, skip: int = 0, pad: int = 0) -> Tensor:
    """A tensor out of one with wider rows: columns from `skip`, `pad` unused ones after."""
    return n(*shape[:-1], skip + shape[-1] + pad)[..., skip : skip + shape[-1]]


CASES: dict[str, Callable[[Normal], Inputs]] = {
    "plain": lambda n: _same(n, 2, 7, 64, groups=4),
    "one_group": lambda n: _same(n, 5, 64, groups=1),
    "one_dimension": lambda n: _same(n, 48, groups=3),
    "four_dimensions": lambda n: _same(n, 2, 2, 3, 32, groups=2),
    "shared": lambda n: _same(n, 2, 7, 64, groups=4, weight="shared"),
    "no_weight": lambda n: _same(n, 9, 64, groups=4, weight="none"),
    "weight_fp32": lambda n: Inputs(n(9, 64), n(9, 64), 2, n(64).float()),
    "weight_strided": lambda n: Inputs(n(3, 32), n(3, 32), 2, n(64)[::2]),
    "eps": lambda n: _same(n, 5, 64, groups=4, eps=0.5),
    "odd": lambda n: _same(n, 3, 5, 99, groups=3),
    "odd_shared": lambda n: _same(n, 11, 105, groups=7, weight="shared"),
    "odd_wide": lambda n: _same(n, 2, 2 * 1027, groups=2),
    "one_channel": lambda n: _same(n, 6, 5, groups=5),
    "one_element": lambda n: _same(n, 1, groups=1),
    "no_rows": lambda n: _same(n, 0, 16, groups=2),
    "no_channels": lambda n: _same(n, 4, 0, groups=3),
    "not_a_power_of_two": lambda n: _same(n, 9, 3 * 40, groups=3),
    "many_tokens": lambda n: _same(n, 530, 16, groups=2),
    "many_groups": lambda n: _same(n, 37, 8 * 24, groups=24),
    "two_warps": lambda n: _same(n, 6, 3 * 1024, groups=3),
    "two_warps_turned": lambda n: _turned(n, 2, 21, 2 * 512, 2),
    "two_warps_turned_unevenly": lambda n: _turned(n, 3, 15, 2 * 512, 2),
    "two_warps_apart": lambda n: Inputs(
        _padded(n, 2, 13, 1024, pad=16), _padded(n, 13, 2, 1024, pad=8), 2, n(512), "sequence_first"
    ),
    "two_warps_no_weight": lambda n: _same(n, 6, 3 * 512, groups=3, weight="none"),
    "two_warps_weight_fp32": lambda n: Inputs(n(6, 3 * 512), n(6, 3 * 512), 3, n(3 * 512).float()),
    "not_quite_two_warps": lambda n: _same(n, 9, 3 * 480, groups=3),
    "not_quite_four_warps": lambda n: _turned(n, 2, 5, 2 * 1016, 2),
    "slices": lambda n: _same(n, 9, 20 * 512, groups=20),
    "slices_shared": lambda n: _same(n, 9, 19 * 512, groups=19, weight="shared"),
    "rows_share_warps": lambda n: _same(n, 41, 2 * 384, groups=2),
    "four_rows_share_warps": lambda n: _same(n, 21, 3 * 320, groups=3),
    "eight_rows_share_warps": lambda n: _same(n, 43, 4 * 96, groups=4),
    "rows_share_warps_and_weights": lambda n: _same(n, 21, 5 * 192, groups=5, weight="shared"),
    "groups_not_equally_often": lambda n: _same(n, 25, 3 * 512, groups=3),
    "token_in_two_blocks": lambda n: _same(n, 9, 5 * 1280, groups=5),
    "widest": lambda n: _same(n, 2, 8192, groups=1),
    "wider": lambda n: _same(n, 2, 2 * 8208, groups=2),
    "turned": lambda n: _turned(n, 2, 9, 64, 4),
    "turned_odd": lambda n: _turned(n, 3, 5, 66, 2),
    "turned_many": lambda n: _turned(n, 3, 41, 32, 2),
    "turned_one_batch": lambda n: _turned(n, 1, 9, 64, 4),
    "turned_one_token": lambda n: _turned(n, 7, 1, 64, 4),
    "turned_more_batches": lambda n: _turned(n, 11, 3, 32, 2),
    "heads": lambda n: Inputs(n(2, 5, 8, 16), n(2, 5, 128), 4, n(128)),
    "heads_turned": lambda n: Inputs(n(2, 5, 8, 16), n(5, 2, 128), 4, n(32), "sequence_first"),
    "attention": lambda n: Inputs(n(2, 4, 9, 16).transpose(1, 2), n(2, 9, 64), 4, n(64)),
    "attention_turned": lambda n: Inputs(n(2, 4, 9, 16).transpose(1, 2), n(9, 2, 64), 4, n(64), "sequence_first"),
    "attention_copied": lambda n: Inputs(n(2, 4, 9, 16).transpose(1, 2), n(2, 9, 64), 2, n(64)),
    "attention_one_channel": lambda n: Inputs(n(2, 4, 9, 1).transpose(1, 2), n(2, 9, 4), 4, n(4)),
    "gate_transposed": lambda n: Inputs(n(3, 5, 32), n(5, 3, 32).transpose(0, 1), 2, n(32)),
    "gate_padded": lambda n: Inputs(n(3, 5, 32), _padded(n, 3, 5, 32, pad=8), 2, n(32)),
    "x_padded": lambda n: Inputs(_padded(n, 3, 5, 32, pad=16), n(5, 3, 32), 2, n(32), "sequence_first"),
    "x_unaligned": lambda n: Inputs(_padded(n, 3, 5, 32, skip=1, pad=7), n(3, 5, 32), 2, n(32)),
    "x_channels_strided": lambda n: Inputs(n(32, 6).t(), n(6, 32), 2, n(32)),
    "x_uneven": lambda n: Inputs(n(2, 4, 3, 32)[:, :3].transpose(1, 2), n(2, 3, 3, 32), 2, n(32)),
    "x_expanded": lambda n: Inputs(n(1, 1, 32).expand(3, 4, -1), n(3, 4, 32), 2, n(32)),
    "dy_expanded": lambda n: _same(n, 6, 64, groups=4, dy=n(1).expand(6, 64)),
    "dy_rows_expanded": lambda n: _turned(n, 2, 6, 64, 4, dy=n(1, 1, 64).expand(6, 2, 64)),
    "dy_transposed": lambda n: _turned(n, 2, 6, 64, 4, dy=n(2, 6, 64).transpose(0, 1)),
    "dy_unaligned": lambda n: _same(n, 6, 64, groups=4, dy=_padded(n, 6, 64, skip=3, pad=5)),
}


def make(case: str, dtype: torch.dtype, device: str) -> Inputs:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 2).to(dtype).to(device)

    inputs = CASES[case](normal)
    if inputs.dy is None:
        inputs.dy = normal(*inputs.gate.shape)
    return inputs


def check(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """Run forward and backward and hold every element to its error budget; return result and gradients."""
    options = {"groups": inputs.groups, "eps": inputs.eps, "layout": inputs.layout}
    wide = inputs.leaves(torch.float64)
    leaves = inputs.leaves()
    y = gated(*leaves, **options)
    assert y.dtype == inputs.x.dtype and y.is_contiguous() and y.shape == inputs.gate.shape
    quiet = gated(inputs.x.detach(), inputs.gate, inputs.weight, **options)
    assert_same_bits(quiet, y.detach(), "result without gradients")
    y.backward(inputs.dy)
    results = (y.detach(), *(leaf if leaf is None else leaf.grad for leaf in leaves))
    if y.numel() == 0:
        assert all(g is None or not g.any() for g in results)
        return results
    exact = plain(*wide, **options)
    exact.backward(inputs.dy.double())

    with torch.no_grad():
        swap = inputs.layout == "sequence_first"
        cols = inputs.gate.shape[-1] // inputs.groups

        def grouped(t: Tensor, turn: bool) -> Tensor:
            t = t.double().reshape(*t.shape[: inputs.gate.dim() - 1], inputs.groups, cols)
            return t.transpose(0, 1) if turn else t

        v, t, d = grouped(inputs.x, False), grouped(inputs.gate, swap), grouped(inputs.dy, swap)
        w = 1.0 if inputs.weight is None else inputs.weight.double().view(-1, cols)
        rstd = torch.rsqrt(v.square().mean(-1, keepdim=True) + inputs.eps)
        a = (d * w * torch.sigmoid(t)).abs()
        # The exponential's error grows with its argument; a sum's is relative to its terms.
        tail = 1 + t.abs()
        dx = (rstd * a + v.abs() * rstd**3 * (a * v.abs()).mean(-1, keepdim=True)) * tail.amax(-1, keepdim=True)
        dgate = wide[1].grad.abs() * (1 + inputs.gate.double().abs())
        dweight = (d * torch.sigmoid(t) * v * rstd).abs() * tail

        def close(what: str, got: Tensor, reference: Tensor, fp32_terms: Tensor) -> None:
            slack = 8 * ROUNDOFF[torch.float32] / ROUNDOFF[got.dtype]
            assert got.dtype == inputs.x.dtype or what == "dweight"
            assert_close(got, reference, scale=reference.abs() + slack * fp32_terms, what=what, c=1.01)

        close("y", y, exact, exact.abs() * (1 + inputs.gate.double().abs()))
        close("dx", leaves[0].grad, wide[0].grad, dx.reshape(inputs.x.shape))
        close("dgate", leaves[1].grad, wide[1].grad, dgate)
        if inputs.weight is not None:
            assert leaves[2].grad.dtype == inputs.weight.dtype
            close("dweight", leaves[2].grad, wide[2].grad, dweight.reshape(-1, inputs.weight.numel()).sum(0))
    return results


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
def test_backward_grid_covers_every_row(tokens: int, groups: int, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Any] = []
    monkeypatch.setattr(plans, "_BWD", SimpleNamespace(bind=lambda *args: bound.extend(args)))
    meta = _meta(tokens, groups * cols)
    plan = plans.plan_bwd(meta, meta, meta, _meta(groups * cols), groups, 1e-6, "same", True, -1)
    variant, _, blocks, block, shared = bound
    chunks, form = variant[1:]
    lanes, threads = plan.steps[0].arguments[-7:-5]
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


# ---- autograd -------------------------------------------------------------------------------------------------------


def test_only_the_gradients_that_are_wanted() -> None:
    x, gate, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    for wanted in range(3):
        leaves = [t.clone().requires_grad_(i == wanted) for i, t in enumerate((x, gate, weight))]
        gated(*leaves, groups=2).sum().backward()
        others = [t.clone().double().requires_grad_(i == wanted) for i, t in enumerate((x, gate, weight))]
        plain(*others, 2, 1e-6, "same").sum().backward()
        for i, (ours, exact) in enumerate(zip(leaves, others, strict=True)):
            assert (ours.grad is not None) == (i == wanted)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, exact.grad.float())


def test_second_order_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(gated(x, x, groups=2).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# ---- errors ---------------------------------------------------------------------------------------------------------


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (
        lambda: gated(_ones(4, 8, dtype=torch.float64), _ones(4, 8), groups=2),
        "x has dtype float64; expected one of bfloat16, float16, float32",
    ),
    "no dimensions": (
        lambda: gated(torch.tensor(1.0), torch.tensor(1.0), groups=1),
        "x or gate has too few dimensions; expected at least one",
    ),
    "layout": (
        lambda: gated(_ones(4, 8), _ones(4, 8), groups=2, layout="bshd"),
        "layout is 'bshd'; expected one of same, sequence_first",
    ),
    "sequence_first dimensions": (
        lambda: gated(_ones(4, 8), _ones(4, 8), groups=2, layout="sequence_first"),
        r"x has shape \(4, 8\); layout 'sequence_first' takes \[batch, sequence, channels\]",
    ),
    "gate shape": (
        lambda: gated(_ones(4, 8), _ones(4, 6), groups=2),
        r"gate has shape \(4, 6\); expected \(4, 8\) for x of shape \(4, 8\) and layout 'same'",
    ),
    "gate shape sequence_first": (
        lambda: gated(_ones(2, 3, 4, 8), _ones(2, 3, 32), groups=2, layout="sequence_first"),
        r"gate has shape \(2, 3, 32\); expected \(3, 2, 32\) for x of shape \(2, 3, 4, 8\)",
    ),
    "gate dtype": (
        lambda: gated(_ones(4, 8), _ones(4, 8, dtype=torch.float16), groups=2),
        "gate has dtype float16; expected float32, that of x",
    ),
    "gate device": (
        lambda: module.FORWARD.check(meta_on(0, _ones(4, 8)), meta_on(1, _ones(4, 8)), None, 2, 1e-6, "same"),
        "gate has device index 1; expected 0, that of x",
    ),
    "groups": (lambda: gated(_ones(4, 8), _ones(4, 8), groups=3), "groups is 3; expected a number that divides the 8"),
    "no groups": (lambda: gated(_ones(4, 8), _ones(4, 8), groups=0), "groups is 0; expected a number that divides"),
    "weight shape": (
        lambda: gated(_ones(4, 8), _ones(4, 8), _ones(2), groups=2),
        r"weight has shape \(2,\); expected \(8,\), one number for each channel, or \(4,\), shared by the groups",
    ),
    "weight dtype": (
        lambda: gated(_ones(4, 8), _ones(4, 8), _ones(8, dtype=torch.float16), groups=2),
        "weight has dtype float16; expected one of float32",
    ),
    "weight device": (
        lambda: module.FORWARD.check(
            meta_on(0, _ones(4, 8)), meta_on(0, _ones(4, 8)), meta_on(-1, _ones(8)), 2, 1e-6, "same"
        ),
        "weight has device index -1; expected 0, that of x",
    ),
    "not a tensor": (
        lambda: gated([1.0, 2.0], _ones(2), groups=1),
        "expected a torch.Tensor or an array with __dlpack__",
    ),
    "dy shape": (
        lambda: module.BACKWARD(_ones(4, 4), _ones(4, 8), _ones(4, 8), None, 2, 1e-6, "same", False),
        r"dy has shape \(4, 4\); expected \(4, 8\), that of gate",
    ),
    "dy dtype": (
        lambda: module.BACKWARD(_ones(4, 8).half(), _ones(4, 8), _ones(4, 8), None, 2, 1e-6, "same", False),
        "dy has dtype float16; expected float32",
    ),
    "weight_grad": (
        lambda: module.BACKWARD(_ones(4, 8), _ones(4, 8), _ones(4, 8), None, 2, 1e-6, "same", True),
        "weight_grad is True but there is no weight",
    ),
}


test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        turned = gated(x * 2, gate, weight, groups=2, layout="sequence_first")
        return turned + gated(turned.flip(-1), gate, groups=4)

    def inputs(tokens: int) -> list[Tensor]:
        return [torch.randn(shape, device=place) for shape in ((2, tokens, 4, 4), (tokens, 2, 16), (8,))]

    assert_compiles(block, map(inputs, (3, 4)), dynamic=dynamic)


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 8), dtype=np.float32)
    y = gated(x, x, np.ones(8, "f4"), groups=2)
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(y, gated(torch.from_numpy(x), torch.from_numpy(x), groups=2).numpy())


def test_bench_rows_agree_with_torch() -> None:
    rows = {(row.name, row.shape): row for row in rows_of(module.OP.name)}
    assert rows["gate_fwd", "b2s4096c2048g4"].bytes == 100_667_392
    assert rows["gate_bwd", "b2s4096c2048g4"].bytes == 167_784_448 - 2 * 2048  # dweight is bf16, as the weight
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "dy": torch.randn(5, 2, 32, generator=generator),
        "x": torch.randn(2, 5, 32, generator=generator),
        "gate": torch.randn(5, 2, 32, generator=generator),
        "weight": torch.randn(32, generator=generator),
        "groups": 4,
        "eps": 1e-6,
        "layout": "sequence_first",
    }
    bwd = rows["gate_bwd", "b2s4096c2048g4"]
    torch.testing.assert_close(bwd.ours(**inputs), bwd.torch(**inputs))
    del inputs["dy"]
    fwd = rows["gate_fwd", "b2s4096c2048g4"]
    torch.testing.assert_close(fwd.ours(**inputs), fwd.torch(**inputs))


# ---- order and the GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ("plain", "shared", "odd", "many_groups", "slices_shared", "turned_many"))
@at("sm_90", "cuda")
def test_equal_bits_twice(place: str, case: str) -> None:
    with running_on(place) as device:
        first, second = (check(make(case, torch.bfloat16, device)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)


test_thread_order_does_not_matter = order_test(
    lambda case: check(make(case, torch.bfloat16, "cpu")),
    *("plain", "odd", "two_warps", "many_groups", "slices_shared", "turned_many"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ("same", "sequence_first"))
@pytest.mark.parametrize(("channels", "groups"), ((2048, 4), (2048, 16), (4096, 4), (5120, 40), (8192, 1), (1536, 3)))
def test_bench_shapes(channels: int, groups: int, layout: str) -> None:
    with poisoned():
        generator = torch.Generator("cuda").manual_seed(channels)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        x, like = normal(2, 1027, channels), (2, 1027, channels) if layout == "same" else (1027, 2, channels)
        for weight in (normal(channels), normal(channels // groups)):
            check(Inputs(x, normal(*like), groups, weight, layout, normal(*like)))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    rows, channels = 2**20 + 3, 2048
    x = torch.zeros(rows, channels, device="cuda", dtype=torch.bfloat16)
    x[-1], x[0] = 2.0, 4.0
    y = gated(x, torch.zeros_like(x), groups=4)
    assert (y[-1] == 0.5).all() and (y[0] == 0.5).all() and not y[1:-1].any()
    _, dgate, dweight = module.BACKWARD(
        y, x, torch.zeros_like(x), torch.ones(channels, device="cuda"), 4, 1e-6, "same", True
    )
    assert (dgate[-1] == 0.125).all() and (dgate[0] == 0.125).all() and not dgate[1:-1].any()
    torch.testing.assert_close(dweight, torch.full_like(dweight, 0.5))


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    x, gate = (torch.randn(64, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, dy = torch.rand(32, device="cuda"), torch.randn_like(gate)

    def run() -> tuple[Tensor, ...]:
        options = (weight, 4, 1e-6, "same")
        return module.FORWARD(x, gate, *options), *module.BACKWARD(dy, x, gate, *options, True)

    replay = captured(run)
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), run())
