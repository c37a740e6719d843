"""int8 codes and scales: bits at every layout, special values, and the error of what they restore."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.places import DTYPES, at
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.act import quantize_int8 as module
from rtkernels.ops.shared.block_formats import divided

granularities = pytest.mark.parametrize("granularity", module.GRANULARITIES)

LAYOUTS = {
    "vectors": lambda x: x,
    "odd": lambda x: x[:, :7],
    "one": lambda x: x[:1, :1],
    "vector": lambda x: x[0],
    "misaligned": lambda x: x.flatten()[1:641].view(10, 64),
    "strided": lambda x: x[::2, :32],
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(5, 64),
    "dimensions": lambda x: x.view(3, 2, 2, 64),
    "long": lambda x: x.repeat(1, 97)[:3],
    "longer than registers": lambda x: x.repeat(1, 260)[:2],
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[:, :0],
}


def normal(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(12, 64, generator=generator) * torch.logspace(-3, 3, 12)[:, None]).to(dtype)


def expected(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    """Return codes and scales from the definition."""
    v = x.cpu().float()
    magnitude = torch.where(v.isfinite(), v, 0.0).abs()
    if x.numel() == 0:
        amax = torch.zeros(x.shape[:-1] if granularity == "row" else ())
    else:
        amax = magnitude.amax(-1) if granularity == "row" else magnitude.amax()
    scale = divided(amax, 127.0).clamp(min=1e-30)
    scaled = v * (1.0 / (scale.unsqueeze(-1) if granularity == "row" else scale))
    return scaled.nan_to_num(0.0, 127.0, -127.0).round().clamp(-127, 127).to(torch.int8), scale


@at()
@granularities
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_and_scales(dtype: torch.dtype, layout: str, granularity: str, place: str) -> None:
    with running_on(place) as device:
        x = LAYOUTS[layout](normal(dtype).to(device))
        before = x.clone()
        q, scale = rtkernels.quantize_int8(x, granularity=granularity)
        assert q.is_contiguous() and scale.is_contiguous() and q.shape == x.shape and torch.equal(x, before)
        want = expected(x, granularity)
        assert_same_bits(q.cpu(), want[0], "codes")
        assert_same_bits(scale.cpu(), want[1], "scales")
        # Half a code, and the roundings of scale, reciprocal and product: at most 127 * 2^-22 of a code.
        factor = scale.double().unsqueeze(-1) if granularity == "row" else scale.double()
        assert ((q.double() * factor - x.double()).abs() <= factor * (0.5 + 2**-15)).all()


@at()
@granularities
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype, granularity: str, place: str) -> None:
    rows = [
        [0.0] * 8, [-0.0] * 8, [torch.nan] * 8, [torch.inf] * 8, [torch.nan, torch.inf, -torch.inf, 2, -1, 0, 1, 0.5],
        [1e-38] * 8, [3.4e38, -3.4e38, 1e38, 0, 0, 0, 0, 0],
    ]  # fmt: skip
    with running_on(place) as device:
        x = torch.tensor(rows, device=device).to(dtype)
        for part in (x, x[:, 1:], *x.split(1)):
            want = expected(part, granularity)
            q, scale = rtkernels.quantize_int8(part, granularity=granularity)
            assert_same_bits(q.cpu(), want[0], "codes")
            assert_same_bits(scale.cpu(), want[1], "scales")
        assert torch.equal(rtkernels.quantize_int8(x)[1][:4].cpu(), torch.full((4,), 1e-30))


@at()
def test_ties_go_to_even_codes(place: str) -> None:
    with running_on(place) as device:
        x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0], device=device)
        q, scale = rtkernels.quantize_int8(x)
        assert scale.item() == 1.0 and q.tolist() == [127, 0, 2, 2, 0, -2, -2, -127]


@at("cpu", "sm_80", "sm_90", "cuda")
def test_products_of_codes(place: str) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(n, 64, generator=generator) for n in (5, 16))
    with running_on(place) as device:
        (qa, sa), (qb, sb) = (rtkernels.quantize_int8(t.to(device)) for t in (a, b))
        got = rtkernels.scaled_mm(qa, qb, sa, sb, out_dtype=torch.float32).cpu().double()
        exact = a.double() @ b.double().t()
    assert (got - exact).norm() < 0.02 * exact.norm()


def test_results_have_no_gradient_and_may_be_given() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert not any(t.requires_grad for t in rtkernels.quantize_int8(x))
    out = torch.empty(4, 8, dtype=torch.int8), torch.empty(4)
    got = rtkernels.quantize_int8(x.detach(), out=out)
    assert got[0] is out[0] and got[1] is out[1] and torch.equal(out[1], rtkernels.quantize_int8(x)[1])


def test_torch_compile() -> None:
    run = torch.compile(lambda x: rtkernels.quantize_int8(x * 2), fullgraph=True, backend="aot_eager")
    for a, b in zip(run(x := torch.randn(4, 8)), rtkernels.quantize_int8(x * 2), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.ones(4).double(), {}, "x has dtype float64; expected one of bfloat16, float16, float32"),
        (torch.tensor(1.0), {}, "x has no dimensions; expected at least one"),
        (torch.ones(4), {"granularity": "block"}, "granularity is 'block'; expected one of 'row', 'tensor'"),
    ],
)
def test_errors(x: Tensor, options: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        rtkernels.quantize_int8(x, **options)


def test_bench_rows_agree_with_torch() -> None:
    x = torch.randn(16, 32).bfloat16()
    for row in rows_of(module.OP.name):
        for got, want in zip(row.ours(x=x), row.torch(x=x), strict=True):
            torch.testing.assert_close(got.float(), want.float(), rtol=1e-6, atol=1.0 if got.dtype == torch.int8 else 0)
