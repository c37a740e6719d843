"""``grouped_mm``, ``grouped_mm_masked``, ``grouped_wgrad``: against fp64 group by group, empty groups, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import running_on
from support.places import at
from support.product_cases import assert_product, codes, exact, packed_for, scale, spread
from torch import Tensor

from rtkernels import explain, grouped_mm, grouped_mm_masked, grouped_wgrad

# Rows of each group, and rows behind the last one.
CUTS = {
    "some empty": ([10, 0, 20, 1, 0, 14], 5),
    "one": ([17], 0),
    "all empty": ([0, 0, 0], 4),
    "no rows": ([0, 0], 0),
    "aligned": ([128, 256, 0, 100], 28),
    "many": ([3, 0, 1] * 40, 0),
}


def _device(place: str) -> str:
    return "cuda" if place == "cuda" else "cpu"


def _run(place: str, function: Any, *args: Any, **options: Any) -> Any:
    with running_on(place):
        return function(*args, **options)


def _cut(name: str, device: str) -> tuple[list[slice], Tensor, Tensor]:
    """Return the rows of each group, ``offs`` and ``m_indices``."""
    counts, rest = CUTS[name]
    ends = torch.tensor(counts).cumsum(0)
    places = [slice(int(end) - count, int(end)) for end, count in zip(ends, counts, strict=True)]
    labels = torch.full((int(ends[-1]) + rest,), -1)
    for group, rows in enumerate(places):
        labels[rows] = group
    return places, ends.int().to(device), labels.int().to(device)


def _check(got: Tensor, a: Tensor, b: Tensor, places: list[slice], codes: Tensor | None = None) -> None:
    for group, rows in enumerate(places):
        assert_product(got[rows], *exact(a[rows], b[group]), what=f"group {group}", codes=codes)


# ---- rows -----------------------------------------------------------------------------------------------------------


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("kind", ["bf16", "e4m3", "int8"])
def test_groups_of_rows(kind: str, name: str, place: str) -> None:
    device = _device(place)
    places, offs, labels = _cut(name, device)
    rows, n, k = len(labels), 40, 160
    a, b = codes(kind, rows, k, device=device), codes(kind, len(places), n, k, device=device, seed=1)
    align = 128 if name == "aligned" else 1
    got = _run(place, grouped_mm, a.codes, b.codes, offs=offs, align=align)
    _check(got, a.values, b.values, places, a.codes)
    _check(_run(place, grouped_mm, a.codes, b.codes, offs=offs.long()), a.values, b.values, places, a.codes)
    _check(
        _run(place, grouped_mm, a.codes, b.codes, m_indices=labels, align=align), a.values, b.values, places, a.codes
    )
    _check(_run(place, grouped_mm, a.codes, b.codes.transpose(1, 2), offs=offs), a.values, b.values, places, a.codes)
    zeroed = _run(place, grouped_mm, a.codes, b.codes, offs=offs, zero_padding=True)
    assert (zeroed[int(offs[-1]) :] == 0).all()
    _check(zeroed, a.values, b.values, places, a.codes)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("recipe", ["tensor", "row", "block_1x128_128x128", "mx32", "nvfp4"])
def test_scales(recipe: str, place: str) -> None:
    device = _device(place)
    places, offs, _ = _cut("some empty", device)
    rows, n, k, groups = 50, 136, 320, len(places)
    kind = "e2m1" if recipe == "nvfp4" else "e4m3"
    a, b = codes(kind, rows, k, device=device), codes(kind, groups, n, k, device=device, seed=1)
    if recipe == "tensor":
        sa, sb = scale(device=device), scale(groups, device=device)
        per_a, per_b = sa.double(), sb.double().view(-1, 1, 1)
    elif recipe == "row":
        sa, sb = scale(rows, device=device), scale(groups, n, device=device)
        per_a, per_b = sa.double()[:, None], sb.double()[..., None]
    else:
        kinds = {"mx32": ("e8m0", 1, 32), "nvfp4": ("ue4m3", 1, 16)}
        token, tall, depth = kinds.get(recipe, ("fp32", 128, 128))
        sa = scale(rows, -(-k // depth), kind=token, device=device)
        sb = scale(groups, -(-n // tall), -(-k // depth), kind=token, device=device)
        per_a = spread(sa, 1, depth, (rows, k))
        per_b = torch.stack([spread(part, tall, depth, (n, k)) for part in sb])
    got = _run(place, grouped_mm, a.codes, b.codes, sa, sb, recipe=recipe, offs=offs)
    assert got.dtype == torch.bfloat16
    _check(got, a.values * per_a, b.values * per_b, places, a.codes)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_out_accumulate_and_act(place: str) -> None:
    device = _device(place)
    places, offs, _ = _cut("some empty", device)
    a, b = codes("bf16", 50, 64, device=device), codes("bf16", len(places), 24, 64, device=device, seed=1)
    out = torch.ones(50, 24, device=device)
    assert _run(place, grouped_mm, a.codes, b.codes, offs=offs, out=out, accumulate=True) is out
    for group, rows in enumerate(places):
        wanted, magnitude = exact(a.values[rows], b.values[group])
        assert_product(out[rows], wanted + 1, magnitude + 1)
    assert (out[45:] == 1).all()
    got = _run(place, grouped_mm, a.codes, b.codes, offs=offs, act="silu")
    for group, rows in enumerate(places):
        wanted, magnitude = exact(a.values[rows], b.values[group])
        assert_product(got[rows], F.silu(wanted), magnitude)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_weights_of_few_bits(place: str) -> None:
    device = _device(place)
    places, offs, _ = _cut("some empty", device)
    a, b = codes("bf16", 50, 128, device=device), codes("int4", len(places), 24, 128, device=device, seed=1)
    sb = scale(len(places), 24, 2, device=device)
    got = _run(place, grouped_mm, a.codes, b.codes, None, sb, offs=offs, packed=packed_for("bf16", "int4"))
    _check(got, a.values, b.values * torch.stack([spread(part, 1, 64, (24, 128)) for part in sb]), places)


# ---- rooms for rows -------------------------------------------------------------------------------------------------


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_masked(kind: str, place: str) -> None:
    device = _device(place)
    counts = [0, 16, 3, 1, 9]
    a, b = codes(kind, 5, 16, 192, device=device), codes(kind, 5, 40, 192, device=device, seed=1)
    sa, sb = scale(5, 16, 2, device=device), scale(5, 1, 2, device=device)
    per_a = torch.stack([spread(part, 1, 128, (16, 192)) for part in sa])
    per_b = torch.stack([spread(part, 128, 128, (40, 192)) for part in sb])
    scales, factors = ((), (1, 1)) if kind == "bf16" else ((sa, sb), (per_a, per_b))
    sizes = torch.tensor(counts, dtype=torch.int32, device=device)
    got = _run(place, grouped_mm_masked, a.codes, b.codes, *scales, masked_m=sizes, expected_m=6)
    out = torch.full((5, 16, 40), 7.0, device=device)
    _run(place, grouped_mm_masked, a.codes, b.codes, *scales, masked_m=sizes, out=out)
    for group, count in enumerate(counts):
        wanted = exact((a.values * factors[0])[group, :count], (b.values * factors[1])[group])
        assert_product(got[group, :count], *wanted, codes=a.codes)
        assert_product(out[group, :count], *wanted, codes=a.codes)
        assert (out[group, count:] == 7).all()


def test_expected_rows_choose_the_tile() -> None:
    a, b, sizes = torch.zeros(32, 256, 512).bfloat16(), torch.zeros(32, 512, 512).bfloat16(), torch.zeros(32).int()
    chosen = {
        rows: str(explain(grouped_mm_masked, a, b, None, None, sizes, expected_m=rows, target="sm_90a"))
        for rows in (0, 20, 256)
    }
    assert "64 x 128 tiles" in chosen[20] and "128 x 256 tiles" in chosen[0] and chosen[256] == chosen[0]


# ---- gradients of the matrices --------------------------------------------------------------------------------------


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", CUTS)
def test_wgrad(name: str, place: str) -> None:
    device = _device(place)
    places, offs, labels = _cut(name, device)
    dy, x = codes("bf16", len(labels), 24, device=device), codes("bf16", len(labels), 40, device=device, seed=1)
    out = torch.ones(len(places), 24, 40, device=device)
    assert _run(place, grouped_wgrad, dy.codes, x.codes, offs=offs, out=out) is out
    fresh = _run(place, grouped_wgrad, dy.codes, x.codes, offs=offs, out_dtype=torch.bfloat16)
    assert fresh.dtype == torch.bfloat16
    for group, rows in enumerate(places):
        wanted, magnitude = exact(dy.values[rows].t(), x.values[rows].t())
        assert_product(out[group], wanted + 1, magnitude + 1)
        assert_product(fresh[group], wanted, magnitude)


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_wgrad_of_fp8(kind: str, place: str) -> None:
    device = _device(place)
    places, offs, labels = _cut("aligned", device)
    rows = len(labels)
    dy, x = codes("e4m3", 24, rows, device=device), codes("e5m2", 40, rows, device=device, seed=1)
    if kind == "blocks":
        sa, sb = scale(-(-rows // 128), 24, device=device).t(), scale(40, -(-rows // 128), device=device)
        per = spread(sa, 1, 128, (24, rows)), spread(sb, 1, 128, (40, rows))
    else:
        sa, sb = scale(24, device=device), scale(40, device=device)
        per = sa.double()[:, None], sb.double()[:, None]
    got = _run(place, grouped_wgrad, dy.codes, x.codes, sa, sb, offs=offs)
    for group, cut in enumerate(places):
        assert_product(got[group], *exact((dy.values * per[0])[:, cut], (x.values * per[1])[:, cut]), codes=x.codes)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_gradients(layout: str, place: str) -> None:
    device = _device(place)
    places, offs, labels = _cut("some empty", device)
    a, w = codes("bf16", len(labels), 40, device=device), codes("bf16", len(places), 24, 40, device=device, seed=1)
    b = w.codes if layout == "nk" else w.codes.transpose(1, 2).contiguous()
    a, b = a.codes.clone().requires_grad_(), b.clone().requires_grad_()
    dout = torch.randn(len(labels), 24, device=device).bfloat16()
    with running_on(place):
        grouped_mm(a, b, offs=offs, b_layout=layout).backward(dout)
    a64, b64 = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    for group, rows in enumerate(places):
        matrix = b64[group].t() if layout == "nk" else b64[group]
        (a64[rows] @ matrix).backward(dout.double()[rows])
    assert (a.grad[int(offs[-1]) :] == 0).all()
    for t, twin in ((a, a64), (b, b64)):
        assert (t.grad.double() - twin.grad).norm() <= 1e-2 * twin.grad.norm()


def test_compiled_without_graph_breaks() -> None:
    _, offs, labels = _cut("some empty", "cpu")
    a, b = torch.randn(len(labels), 32).bfloat16(), torch.randn(6, 16, 32).bfloat16()

    def block(a: Tensor, b: Tensor) -> Tensor:
        return grouped_mm(a, b, offs=offs)[:45] + grouped_wgrad(a[:, :16], a, offs=offs).sum()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b), block(a, b))
