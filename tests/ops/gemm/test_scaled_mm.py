"""``scaled_mm``: every operand and recipe against fp64, layouts, epilogues, gradients, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import product_cases as products
from support.compare import running_on
from support.places import at
from support.product_cases import Codes, assert_product, codes, exact, scale, spread
from torch import Tensor

import rtkernels
from rtkernels import scaled_mm
from rtkernels.errors import ArgumentError, UnsupportedDeviceError
from rtkernels.ops.quant import pack

SIZES = ((1, 8, 64), (33, 40, 96), (70, 130, 320), (5, 257, 128))


def _run(place: str, *args: Any, **options: Any) -> Any:
    with running_on(place):
        return scaled_mm(*args, **options)


def _device(place: str) -> str:
    return "cuda" if place == "cuda" else "cpu"


def emulated_coverage() -> None:
    """Run every kernel of every backend: few rows and many, groups, quantised results."""
    a, b = codes("bf16", 72, 64).codes, codes("bf16", 32, 64, seed=1).codes
    offs, labels = torch.tensor([8, 72], dtype=torch.int32), torch.tensor([0] * 8 + [1] * 64, dtype=torch.int32)
    stack = torch.stack([b, b])
    with rtkernels.emulate("sm_100"):
        scaled_mm(a, b, backend="tcgen05")
    for target in ("sm_80", "sm_90"):
        with rtkernels.emulate(target):
            for left in (a[:4], a):
                scaled_mm(left, b)
            scaled_mm(a[:4], b, backend="skinny")
            for kind in ("1x128", "row", "1x16"):
                scaled_mm(a, b, quant_out=kind)
            rtkernels.grouped_mm(a, stack, offs=offs)
            rtkernels.grouped_mm(a, stack, m_indices=labels)
            rtkernels.grouped_mm_masked(a.view(2, 36, 64), stack, masked_m=offs.clamp(max=36))
            rtkernels.grouped_wgrad(a[:, :32], a, offs=offs)
            scaled_mm(a[:, 1:], b[:, 1:], backend="pad")
    with rtkernels.emulate("sm_90"):
        scaled_mm(a, codes("e4m3", 32, 64, seed=1).codes, None, torch.ones(32), recipe="row", backend="unpack")
        scaled_mm(a[:16], b, backend="swapped")


# ---- operands and recipes -------------------------------------------------------------------------------------------

PAIRS = [
    ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"),
    ("int8", "int8"), ("uint8", "int8"), ("int4", "int4"), ("uint4", "int4"), ("int8", "int4"), ("e2m1", "e2m1"),
    ("bf16", "e4m3"), ("fp16", "int8"), ("bf16", "int4"), ("fp16", "e2m1"),
]  # fmt: skip


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("size", SIZES[1:3], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_operands(pair: tuple[str, str], size: tuple[int, int, int], place: str) -> None:
    if "fp32" in pair and place != "cpu":
        pytest.skip("plain torch only")
    m, n, k = size
    a, b = codes(pair[0], m, k, device=_device(place)), codes(pair[1], n, k, device=_device(place), seed=1)
    got = _run(place, a.codes, b.codes, packed=products.packed_for(*pair))
    floats = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    integers = all(kind.lstrip("u").startswith("int") for kind in pair)
    assert got.dtype == floats.get(pair[0], torch.int32 if integers else torch.bfloat16)
    assert_product(got, *exact(a.values, b.values), codes=a.codes)


def _recipe(name: str, m: int, n: int, k: int, device: str) -> tuple[Codes, Codes, Tensor, Tensor, Any, Any, dict]:
    """Return operands, scales, and the fp64 scale of each element of a and of b."""
    groups, wide_k = -(-k // 128), {"device": device}
    kinds = {"mx32": "e4m3", "nvfp4": "e2m1", "mxfp4": "e2m1", "int8 row": "int8", "int8 tile": "int8"}
    a, b = (codes(kinds.get(name, "e4m3"), rows, k, device=device, seed=i) for i, rows in enumerate((m, n)))
    recipe = {"mxfp4": "mx32", "int8 row": "row", "int8 tile": "tile"}.get(name, name)
    if recipe == "tensor":
        sa, sb = scale(**wide_k), scale(1, seed=2, **wide_k)
        return a, b, sa, sb, sa.double(), sb.double(), {"recipe": recipe}
    if recipe == "row":
        sa, sb = scale(m, 1, **wide_k), scale(1, n, seed=2, **wide_k)
        return a, b, sa, sb, sa.double(), sb.double().t(), {"recipe": recipe}
    if recipe in ("mx32", "nvfp4"):
        depth, kind = (32, "e8m0") if recipe == "mx32" else (16, "ue4m3")
        sa, sb = scale(m, -(-k // depth), kind=kind, **wide_k), scale(n, -(-k // depth), kind=kind, seed=2, **wide_k)
        return a, b, sa, sb, spread(sa, 1, depth, (m, k)), spread(sb, 1, depth, (n, k)), {"recipe": recipe}
    blocks = {
        "block_1x128_128x128": (1, 128, 128),
        "block_1x128_1x128": (1, 1, 128),
        "block_128x128_128x128": (128, 128, 128),
        "tile": (m, 1, 32),
    }[recipe]
    qm, qn, qk = blocks
    sa = scale(-(-m // qm), -(-k // qk), **wide_k)
    sb = scale(-(-n // qn), -(-k // qk), seed=2, **wide_k)
    if recipe == "block_1x128_128x128":  # contiguous along m, as the kernels prefer
        sa = F.pad(sa.t().contiguous(), (0, -m % 4))[:, :m].t()
        assert groups == sa.shape[1]
    return a, b, sa, sb, spread(sa, qm, qk, (m, k)), spread(sb, qn, qk, (n, k)), {"recipe": recipe}


RECIPES = (
    "tensor", "row", "block_1x128_128x128", "block_1x128_1x128", "block_128x128_128x128", "tile", "mx32", "mxfp4",
    "nvfp4", "int8 row", "int8 tile",
)  # fmt: skip


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str, size: tuple[int, int, int], place: str) -> None:
    a, b, sa, sb, per_a, per_b, options = _recipe(name, *size, _device(place))
    wanted = exact(a.values * per_a, b.values * per_b)
    got = _run(place, a.codes, b.codes, sa, sb, **options)
    assert got.dtype == torch.bfloat16
    assert_product(got, *wanted, codes=a.codes)
    if name not in ("tile", "int8 tile"):
        assert_product(_run(place, a.codes, b.codes, sa, sb), *wanted, codes=a.codes)  # recipe="auto"
    if options["recipe"] in ("mx32", "nvfp4"):
        blocks = (products.swizzled(sa), products.swizzled(sb))
        assert torch.equal(got, _run(place, a.codes, b.codes, *blocks, **options))
        assert torch.equal(got, _run(place, a.codes, b.codes, sa.view(torch.uint8), sb.view(torch.uint8), **options))
    if options["recipe"] in ("row", "block_1x128_128x128"):  # as torch._scaled_mm takes them
        assert torch.equal(got, _run(place, a.codes, b.codes.t(), sa, sb if sb.shape[0] == 1 else sb.t(), **options))


@at("cpu", "sm_80", "sm_90", "cuda")
def test_scales_of_each_operand_on_their_own(place: str) -> None:
    m, n, k, device = 9, 24, 256, _device(place)
    a, b = codes("e4m3", m, k, device=device), codes("e4m3", n, k, device=device, seed=1)
    one, rows = scale(device=device), scale(n, device=device)
    got = _run(place, a.codes, b.codes, one, rows)
    assert_product(got, *exact(a.values * one.double(), b.values * rows.double()[:, None]), codes=a.codes)
    x, w = codes("bf16", m, k, device=device), codes("int4", n, k, device=device, seed=1)
    groups = scale(n, k // 64, device=device)
    got = _run(place, x.codes, w.codes, None, groups, packed=(None, "int4"))
    assert_product(got, *exact(x.values, w.values * spread(groups, 1, 64, (n, k))))
    half = _run(place, x.codes, w.codes, None, groups.bfloat16(), packed=(None, "int4"))
    assert_product(half, *exact(x.values, w.values * spread(groups.bfloat16(), 1, 64, (n, k))))


def test_scales_of_rows_and_of_blocks_of_the_same_shape() -> None:
    a, b = codes("e4m3", 16, 1024), codes("e4m3", 8, 1024, seed=1)
    sb = scale(1, 8)
    wanted = exact(a.values, b.values * spread(sb, 128, 128, (8, 1024)))
    got = scaled_mm(a.codes, b.codes, scale(16, 8) * 0 + 1, sb, recipe="block_1x128_128x128")
    assert_product(got, *wanted)
    rows = exact(a.values, b.values * sb.double().t())
    for right in (b.codes, b.codes.t()):
        assert_product(scaled_mm(a.codes, right, 1.0, sb[0]), *rows)
        with pytest.raises(ArgumentError, match="scales of rows or of blocks of 128; pass the recipe"):
            scaled_mm(a.codes, right, 1.0, sb if right is b.codes else sb.t())
    assert_product(scaled_mm(a.codes, b.codes.t(), 1.0, sb), *rows)
    c, s = codes("e4m3", 32, 256, seed=2), scale(32, 1)
    a = codes("e4m3", 16, 256)
    for right in (c.codes, c.codes.t()):
        for each in (s, s.t(), s[:, 0]):
            assert_product(scaled_mm(a.codes, right, 1.0, each), *exact(a.values, c.values * s.double()))


@at("cpu", "sm_90", "cuda")
def test_numbers_as_scales_and_a_global_one(place: str) -> None:
    device = _device(place)
    a, b = codes("e4m3", 9, 64, device=device), codes("e4m3", 16, 64, device=device, seed=1)
    assert_product(_run(place, a.codes, b.codes, 0.5, 2.5), *exact(a.values * 0.5, b.values * 2.5), codes=a.codes)
    x, y = torch.randn(6, 64, device=device), torch.randn(10, 64, device=device)
    (qa, sa, ga), (qb, sb, gb) = pack.quantize_nvfp4(x), pack.quantize_nvfp4(y)
    got = _run(place, qa, qb, sa, sb, recipe="nvfp4", global_scale=ga * gb)
    assert F.cosine_similarity(got.double().flatten(), (x.double() @ y.double().t()).flatten(), 0) > 0.98


# ---- layouts --------------------------------------------------------------------------------------------------------


@at("cpu", "sm_80", "sm_90", "cuda")
def test_layouts(place: str) -> None:
    device = _device(place)
    a, b = codes("bf16", 12, 40, device=device), codes("bf16", 24, 40, device=device, seed=1)
    wanted = exact(a.values, b.values)
    for left in (a.codes, a.codes.t().contiguous().t(), F.pad(a.codes, (3, 5))[:, 3:-5], a.codes.repeat(1, 2)[:, :40]):
        for right, options in (
            (b.codes, {}), (b.codes.t(), {}), (b.codes.t().contiguous(), {"b_layout": "kn"}),
            (b.codes.t().contiguous().t(), {"b_layout": "nk"}), (F.pad(b.codes, (1, 0))[:, 1:], {}),
        ):  # fmt: skip
            assert_product(_run(place, left, right, **options), *wanted)
    odd = torch.stack([a.codes, a.codes], -1).flatten(-2)[:, ::2]
    assert_product(_run(place, odd, b.codes), *wanted)
    stacked = a.codes.view(3, 4, 40)
    assert_product(_run(place, stacked, b.codes), *(t.view(3, 4, 24) for t in wanted))
    assert_product(_run(place, stacked.transpose(0, 1), b.codes), *(t.view(3, 4, 24).transpose(0, 1) for t in wanted))
    one = a.codes[:1].expand(5, 40)
    assert_product(_run(place, one, b.codes), *(t[:1].expand(5, 24) for t in wanted))


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("token", ["e4m3", "int8"])
def test_codes_of_8_bits_across_k(token: str, place: str) -> None:
    device = _device(place)
    a, b = codes(token, 12, 48, device=device), codes(token, 24, 48, device=device, seed=1)
    scales = torch.rand(12, 1, device=device) + 0.5, torch.rand(24, 1, device=device) + 0.5
    wanted = _run(place, a.codes, b.codes, *scales)
    across = [t.codes.t().contiguous().t() for t in (a, b)]
    for left, right, layout in (
        (a.codes, across[1], "nk"), (across[0], b.codes, "auto"), (across[0], across[1], "nk"),
        (a.codes, b.codes.t().contiguous(), "kn"), (across[0], F.pad(b.codes.t(), (8, 8))[:, 8:-8], "kn"),
    ):  # fmt: skip
        of_b = scales[1].t() if layout == "kn" else scales[1]
        assert torch.equal(_run(place, left, right, scales[0], of_b, b_layout=layout), wanted)
    out = torch.empty_like(wanted)
    assert torch.equal(_run(place, a.codes, across[1], *scales, b_layout="nk", out=out), wanted)


def test_where_k_has_the_unit_stride_says_what_b_is() -> None:
    a, w = torch.randn(3, 8), torch.randn(8, 8)
    torch.testing.assert_close(scaled_mm(a, w), a @ w.t())
    torch.testing.assert_close(scaled_mm(a, w.t()), a @ w.t())
    torch.testing.assert_close(scaled_mm(a, w, b_layout="kn"), a @ w)
    torch.testing.assert_close(scaled_mm(a, w.t(), b_layout="nk"), a @ w)
    for n, k in ((1, 8), (8, 1), (1, 1)):
        a, w = torch.randn(3, k), torch.randn(n, k)
        torch.testing.assert_close(scaled_mm(a, w), a @ w.t())
        torch.testing.assert_close(scaled_mm(a, w.t()), a @ w.t())


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("size", [(0, 8, 16), (4, 0, 16), (4, 8, 0), (1, 1, 1)], ids=str)
def test_empty(size: tuple[int, int, int], place: str) -> None:
    m, n, k = size
    device = _device(place)
    a, b = torch.ones(m, k, device=device).bfloat16(), torch.ones(n, k, device=device).bfloat16()
    bias = torch.full((n,), 2.0, device=device)
    wanted = torch.full((m, n), k + 2.0, device=device).bfloat16()
    assert torch.equal(_run(place, a, b, bias=bias), wanted)
    out = torch.ones(m, n, device=device)
    assert torch.equal(_run(place, a, b, bias=bias, out=out, accumulate=True), wanted.float() + 1)


# ---- behind the product ---------------------------------------------------------------------------------------------


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("act", [None, "relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("kind", ["bf16", "e4m3", "int8"])
def test_bias_residual_and_activation(kind: str, act: str | None, place: str) -> None:
    m, n, k, device = 19, 48, 72, _device(place)
    a, b = codes(kind, m, k, device=device), codes(kind, n, k, device=device, seed=1)
    factor = {"bf16": 1.0, "e4m3": 1.0, "int8": 1e-4}[kind]
    sa, sb = scale(m, device=device) * factor, scale(n, device=device)
    scales = () if kind == "bf16" else (sa, sb)
    per_a, per_b = (1.0, 1.0) if kind == "bf16" else (sa.double()[:, None], sb.double()[:, None])
    bias, add = torch.randn(n, device=device).half(), torch.randn(m, n, device=device).bfloat16()
    plain, magnitude = exact(a.values * per_a, b.values * per_b)
    sums = plain + bias.double() + add.double()
    wanted = activated(sums, act)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        got = _run(place, a.codes, b.codes, *scales, bias=bias, add=add, act=act, out_dtype=dtype)
        assert got.dtype == dtype
        assert_product(got, wanted, magnitude + bias.double().abs() + add.double().abs(), codes=a.codes)


def activated(x: Tensor, act: str | None) -> Tensor:
    """Return an activation in fp64."""
    if act == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return {None: lambda x: x, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}[act](x)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_out_and_accumulate(dtype: torch.dtype, place: str) -> None:
    device = _device(place)
    a, b = codes("bf16", 20, 64, device=device), codes("bf16", 24, 64, device=device, seed=1)
    wanted, magnitude = exact(a.values, b.values)
    base = torch.full((21, 40), 7.0, device=device, dtype=dtype)
    out = base[:20, 8:32]
    assert _run(place, a.codes, b.codes, out=out) is out
    assert_product(out, wanted, magnitude)
    before = out.double().clone()
    _run(place, a.codes, b.codes, out=out, accumulate=True)
    assert_product(out, before + wanted, magnitude + before.abs())
    assert (base[20] == 7).all() and (base[:, :8] == 7).all() and (base[:, 32:] == 7).all()


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("kind", ["1x128", "row", "1x16"])
def test_quantised_results(kind: str, place: str) -> None:
    m, n, k, device = 11, 288, 64, _device(place)
    a, b = codes("bf16", m, k, device=device), codes("bf16", n, k, device=device, seed=1)
    q, s = _run(place, a.codes, b.codes, quant_out=kind, act="silu")
    wanted = F.silu(exact(a.values, b.values)[0])
    if kind == "1x16":
        assert q.dtype == torch.uint8 and q.shape == (m, n // 2) and s.shape == (m, n // 16)
        values = pack.nibble_values(q, "e2m1").double() * s.double().repeat_interleave(16, 1)
        limit = s.double().repeat_interleave(16, 1) * 1.1
    else:
        assert q.dtype == torch.float8_e4m3fn and q.shape == (m, n)
        assert s.shape == ((m,) if kind == "row" else (m, 3)) and (kind == "row" or s.stride() == (1, 12))
        per = s.double()[:, None] if kind == "row" else s.double().repeat_interleave(128, 1)[:, :n]
        values, limit = q.double() * per, wanted.abs() * 2**-4 + per * 2**-9
        assert (q.double().abs().amax(1) == 448).all() or kind == "1x128"
    assert ((values - wanted).abs() <= limit * 1.01).all()


def test_nan_and_infinity_go_through() -> None:
    a, b = torch.randn(4, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    a[1, 3], a[2, 5] = float("nan"), float("inf")
    got = scaled_mm(a, b)
    assert got[1].isnan().all() and got[2].isinf().all() and got[0].isfinite().all()


# ---- gradients ------------------------------------------------------------------------------------------------------


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("layout", ["nk", "kn", "nk t", "kn t"])
def test_gradients(layout: str, act: str | None, place: str) -> None:
    device = _device(place)
    a, w = codes("bf16", 18, 40, device=device), codes("bf16", 24, 40, device=device, seed=1)
    bias, add = torch.randn(24, device=device), torch.randn(3, 6, 24, device=device).bfloat16()
    b = w.codes if layout[:2] == "nk" else w.codes.t()
    b = b.t().contiguous().t() if layout.endswith("t") != (layout[:2] == "kn") else b.contiguous()
    given = [t.detach().clone(memory_format=torch.preserve_format) for t in (a.codes.view(3, 6, 40), b, bias, add)]
    given = [t.requires_grad_() for t in given]
    dout = torch.randn(3, 6, 24, device=device).bfloat16()
    with running_on(place):
        y = scaled_mm(given[0], given[1], bias=given[2], add=given[3], act=act, b_layout=layout[:2])
        y.backward(dout)
    twins = [t.detach().double().requires_grad_() for t in given]
    matrix = twins[1] if layout[:2] == "kn" else twins[1].t()
    activated(twins[0] @ matrix + twins[2] + twins[3], act).backward(dout.double())
    for t, twin in zip(given, twins, strict=True):
        assert t.grad.dtype == t.dtype and t.grad.shape == t.shape
        assert (t.grad.double() - twin.grad).norm() <= 1e-2 * twin.grad.norm()


def test_only_wanted_gradients_are_made() -> None:
    a, b = torch.randn(4, 8).requires_grad_(), torch.randn(6, 8)
    scaled_mm(a, b).sum().backward()
    assert a.grad is not None and b.grad is None
    with pytest.raises(RuntimeError, match="differentiable once"):
        (grad,) = torch.autograd.grad(scaled_mm(a, b).square().sum(), a, create_graph=True)
        grad.sum().backward()


# ---- ways to call it ------------------------------------------------------------------------------------------------


def test_compiled_without_graph_breaks() -> None:
    a, b, bias = torch.randn(7, 64).bfloat16(), torch.randn(24, 64).bfloat16(), torch.randn(24)
    qa, sa = rtkernels.quantize_fp8(a, granularity="row")
    qb, sb = rtkernels.quantize_fp8(b, granularity="row")

    def block(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        out = torch.zeros(7, 24)
        scaled_mm(qa, qb, sa, sb, out=out, accumulate=True)
        q, s = scaled_mm(a, b, quant_out="1x128")
        return scaled_mm(a, b, bias=bias, act="gelu_tanh") + out + q.float() * s

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b, bias), block(a, b, bias))
    grads = []
    for function in (lambda a, b: scaled_mm(a, b, act="silu"), None):
        call = function or torch.compile(lambda a, b: scaled_mm(a, b, act="silu"), fullgraph=True, backend="aot_eager")
        leaves = [t.clone().requires_grad_() for t in (a, b)]
        call(*leaves).float().square().sum().backward()
        grads.append([t.grad for t in leaves])
    torch.testing.assert_close(*grads)


def test_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    a, b = numpy.random.rand(3, 8).astype("float32"), numpy.random.rand(5, 8).astype("float32")
    numpy.testing.assert_allclose(scaled_mm(a, b), a @ b.T, rtol=1e-5)


def test_a_backend_by_name_does_not_fall_back_for_quantised_results() -> None:
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    with rtkernels.emulate("sm_80"):
        assert scaled_mm(a, b, quant_out="row")[0].dtype == torch.float8_e4m3fn
        with pytest.raises(UnsupportedDeviceError, match="sm90"):
            scaled_mm(a, b, quant_out="row", backend="sm90")
