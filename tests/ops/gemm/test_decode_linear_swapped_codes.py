"""Linear layers of decoding steps by the kernel of ``swapped_codes_plan``: codes, scales, tails, norms, epilogues."""

from __future__ import annotations

import pytest
import torch
from ops.gemm.test_decode_linear import BF16, case
from support.compare import running_on
from support.inference import assert_captures
from support.places import at, emulated

import rtkernels
from rtkernels.ops.gemm import swapped_codes_plan, swapped_plan
from rtkernels.ops.gemm.decode_linear import FORWARD
from rtkernels.ops.gemm.product import Matrix, Product, Scales
from rtkernels.ops.quant import pack
from rtkernels.runtime import targets
from rtkernels.runtime.launch.plans import Plans

FORMATS = ("e4m3_block", "e4m3_row", "e4m3_tensor", "int8_row", "int4_group", "uint4_row")
# m, n, k, blocks of a cluster, warpgroups: every tile of tokens, tails of n and k, blocks without a step.
SIZES = ((12, 70, 1184, 2, 1), (16, 40, 224, 4, 2), (17, 150, 288, 1, 2), (40, 33, 160, 1, 2), (64, 130, 544, 2, 2))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """The products that the kernel computes, those with few weights, too."""
    monkeypatch.setattr(swapped_plan, "_SMALL", 0)
    Plans.forget_all()
    own, products = swapped_codes_plan.launches, []

    def launches(p: Product, *given, **options):
        products.append(p)
        return own(p, *given, **options)

    monkeypatch.setattr(swapped_codes_plan, "launches", launches)
    return products


def cut(monkeypatch: pytest.MonkeyPatch, parts: int, consumers: int) -> None:
    own = swapped_codes_plan.shape_of
    monkeypatch.setattr(
        swapped_codes_plan, "shape_of", lambda p, sms: own(p, sms)._replace(parts=parts, consumers=consumers)
    )
    Plans.forget_all()


def checked(given, place: str, constant: bool = False) -> torch.Tensor:
    arguments, exact, error = given
    arguments = (*arguments[:10], constant, *arguments[11:])
    with running_on(place) as device:
        out = FORWARD.call(*(t.to(device) if isinstance(t, torch.Tensor) else t for t in arguments)).cpu()
    wrong = ((out.double() - exact).abs() > error) | out.isnan()
    assert not wrong.any(), ((out.double() - exact).abs() / error).max()
    return out


@at("sm_90", "cuda")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_codes_of_9_to_64_rows(
    name: str, size: tuple[int, ...], place: str, found: list[Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k, *cuts = size
    cut(monkeypatch, *cuts)
    checked(case(name, m, n, k, add=True, bias=True, factor=0.5), place, constant=m > 16)
    assert len(found) == 1


@at("sm_90", "cuda")
@pytest.mark.parametrize("constant", (False, True))
@pytest.mark.parametrize("name", ("e4m3_block", "int4_group"))
@pytest.mark.parametrize("size", ((9, 21, 1184, 4, 1), (16, 70, 224, 1, 2), (50, 40, 416, 2, 2)))
def test_norm_gate_and_residual(
    name: str, size: tuple[int, ...], constant: bool, place: str, found: list[Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k, *cuts = size
    cut(monkeypatch, *cuts)
    checked(case(name, m, n, k, norm=True, gated=True, act="silu", bias=True), place, constant)
    checked(case(name, m, n, k, gated=True, act="gelu_tanh", add=True, factor=2.0), place, constant)
    checked(case(name, m, n, k, norm=True, add=True), place, constant)
    assert len(found) == 3


def nvfp4(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    """Return tokens, codes, scales, and the global scale."""
    g = torch.Generator().manual_seed(m + n + k)
    x, w = torch.randn(m, k, generator=g).to(BF16), torch.randn(n, k, generator=g)
    codes, scale, whole = pack.quantize_nvfp4(w)
    return x, codes, scale, whole


def apart(scale: torch.Tensor, device: str) -> torch.Tensor:
    """Return scales on a device, their rows at multiples of 16 bytes (a copy to a device has dense rows)."""
    n, groups = scale.shape
    rows = torch.full((n, -(-groups // 16) * 16), torch.nan).to(scale.dtype)
    rows[:, :groups] = scale
    return rows.to(device)[:, :groups]


@at("sm_90", "cuda")
@pytest.mark.parametrize("size", ((9, 42, 768, 2, 1), (16, 20, 256, 1, 2), (30, 140, 288, 1, 2), (64, 70, 512, 4, 2)))
def test_nvfp4(size: tuple[int, ...], place: str, found: list[Product], monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k, *cuts = size
    cut(monkeypatch, *cuts)
    x, codes, scale, whole = nvfp4(m, n, k)
    values = pack.nibble_values(codes, "e2m1", torch.float64) * scale.double().repeat_interleave(16, 1) * whole.double()
    exact, magnitude = x.double() @ values.t(), x.double().abs() @ values.abs().t()
    with running_on(place) as device:
        given = (x.to(device), codes.to(device), apart(scale, device))
        out = rtkernels.decode_linear(*given, packed="e2m1", global_scale=whole.to(device)).cpu()
    assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-8 + magnitude * 2.0**-20).all() and len(found) == 1


@at("sm_90", "cuda")
@pytest.mark.parametrize("first", (0, 64))
def test_all_codes_are_exact_at_every_place(first: int, place: str, found: list[Product]) -> None:
    """Tokens are unit vectors, so results are weights: all finite codes, times all finite scales of e2m1 codes."""
    k = 128
    x = torch.eye(k).to(BF16)[first : first + 64]
    byte = torch.arange(256).to(torch.uint8)
    e4m3 = byte.view(torch.float8_e4m3fn)[torch.arange(40 * k).view(40, k) * 7 % 256]
    e4m3 = torch.where(e4m3.float().isnan(), 0.0, e4m3.float()).to(e4m3.dtype)
    int8 = byte.view(torch.int8)[torch.arange(40 * k).view(40, k) * 5 % 256]
    packed = byte[torch.arange(130 * k // 2).view(130, k // 2) * 3 % 256]
    scales = byte.view(e4m3.dtype)[(torch.arange(130)[:, None] + torch.arange(k // 16)) % 127]
    fine = pack.nibble_values(packed, "e2m1", torch.float32) * scales.float().repeat_interleave(16, 1)
    cases = [(codes, None, None, codes.float()) for codes in (e4m3, int8)]
    cases += [(packed, None, token, pack.nibble_values(packed, token, torch.float32)) for token in ("int4", "uint4")]
    with running_on(place) as device:
        for codes, scale, token, wanted in (*cases, (packed, scales, "e2m1", fine)):
            given = None if scale is None else apart(scale, device)
            out = rtkernels.decode_linear(x.to(device), codes.to(device), given, packed=token).cpu()
            assert torch.equal(out.float(), wanted[:, first : first + 64].t()), token or codes.dtype
    assert len(found) == 5


@emulated
def test_codes_and_scales_that_are_not_numbers_stay_in_their_columns(found: list[Product]) -> None:
    arguments = case("e4m3_row", 9, 40, 160)[0]
    arguments[1][7, 3] = torch.nan
    x, codes, scale, _ = nvfp4(9, 40, 256)
    scale[20, 2] = torch.nan
    with rtkernels.emulate("sm_90"):
        out = FORWARD.call(*arguments)
        fine = rtkernels.decode_linear(x, codes, scale, packed="e2m1")
    assert out[:, 7].isnan().all() and out.isnan().sum() == 9
    assert fine[:, 20].isnan().all() and fine.isnan().sum() == 9 and len(found) == 2


@emulated
def test_tokens_that_are_not_finite_stay_in_their_rows(found: list[Product]) -> None:
    arguments, _, _ = case("int4_group", 12, 24, 256)
    x = arguments[0].clone()
    x[1, 5], x[7, 200] = torch.inf, torch.nan
    with rtkernels.emulate("sm_90"):
        out, plain = (FORWARD.call(a, *arguments[1:]) for a in (x, arguments[0]))
    others = [i for i in range(12) if i not in (1, 7)]
    assert not out[[1, 7]].isfinite().any() and torch.equal(out[others], plain[others]) and found


@emulated
def test_results_do_not_depend_on_the_order_of_blocks(found: list[Product], monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, 4, 2)
    arguments = case("int4_group", 20, 150, 1184, norm=True)[0]
    results = []
    for order in ("forward", "reverse", 3):
        with rtkernels.emulate("sm_90", order=order):
            results.append(FORWARD.call(*arguments))
    assert all(torch.equal(out, results[0]) for out in results)


@at("sm_90", "cuda")
def test_rows_that_a_block_reads_twice(place: str, found: list[Product]) -> None:
    """The norm's kernel keeps the first 8192 elements of a row in registers."""
    checked(case("int4_group", 17, 8, 8480, norm=True), place)
    assert len(found) == 1


@emulated
@pytest.mark.parametrize(("name", "k"), (("int4_group", 288), ("e4m3_row", 300), ("int4_group", 302)))
def test_strides_and_poisoned_memory(name: str, k: int, found: list[Product]) -> None:
    """Rows end inside of a vector, and what lies behind them is not a number."""
    arguments, exact, error = case(name, 19, 40, k, add=True, norm=k % 8 > 0)
    x, codes, scale, bias, add, *others = arguments

    def apart(t: torch.Tensor, columns: int) -> torch.Tensor:
        filled = torch.full((t.shape[0], columns), 255 if t.dtype == torch.uint8 else torch.nan).to(t.dtype)
        filled[:, : t.shape[1]] = t
        return filled[:, : t.shape[1]]

    scale = scale if scale.dim() == 1 else apart(scale, 5)
    given = (apart(x, 320), apart(codes, 320 * codes.shape[1] // k), scale, bias, apart(add, 41), *others)
    with rtkernels.emulate("sm_90"):
        out = FORWARD.call(*given)
    assert ((out.double() - exact).abs() <= error).all() and len(found) == 1


def _product(m: int, n: int, k: int, token: str, **more) -> Product:
    return Product(m, n, k, Matrix("bf16", k), Matrix(token, k), Matrix("bf16", n), **more)


def test_what_it_does_not_compute() -> None:
    sm_90, good = targets.parse("sm_90a"), _product(16, 64, 256, "int4", scale_b=Scales(1, 128, 2, 1))
    refused = lambda **changed: swapped_codes_plan.unsupported(good._replace(**changed), sm_90)  # noqa: E731
    fine = Scales(1, 16, 16, 1, token="ue4m3")
    e2m1 = {"b": Matrix("e2m1", 256), "scale_b": fine}
    assert refused() is None and refused(**e2m1) is None
    assert refused(scale_b=None) is None and refused(scale_b=Scales(128, 128, 2, 1)) is None
    assert "wgmma" in swapped_codes_plan.unsupported(good, targets.parse("sm_89"))
    assert "9 to 64" in refused(m=8) and "9 to 64" in refused(m=65)
    assert "activations" in refused(a=Matrix("fp16", 256)) and "weights" in refused(b=Matrix("bf16", 256))
    assert "scales of b for 1 x 64" in refused(scale_b=Scales(1, 64, 4, 1))
    assert "summed" in refused(b=Matrix("int4", 256, True))
    assert "16 bytes" in refused(a=good.a._replace(aligned=False)) and "sums" in refused(accumulate=True)
    assert "global" in refused(global_scale=1) and refused(**e2m1, global_scale=1) is None
    assert "no such scales" in refused(**{**e2m1, "scale_b": None}) and "scales of b" in refused(b=e2m1["b"])
    assert "scales of b for 1 x 16" in refused(**{**e2m1, "scale_b": fine._replace(aligned=False)})
    assert "steps" in refused(k=0) and "results" in refused(out=Matrix("int32", 64))


def test_steps_that_take_the_kernel() -> None:
    chosen, sm_90 = swapped_codes_plan.serves_step, targets.parse("sm_90a")
    product = _product(32, 4096, 4096, "int4")
    assert chosen(product, sm_90) and not chosen(product._replace(m=65), sm_90)
    assert not chosen(product._replace(m=8), sm_90) and not chosen(product, targets.parse("sm_80"))


def test_how_launches_are_cut() -> None:
    """On 132 SMs: small tiles for few tokens; blocks share k where there are few tiles."""
    for product, tiles, parts in (
        (_product(16, 1536, 1536, "int4"), 24, 4), (_product(64, 1536, 1536, "int4"), 12, 4),
        (_product(64, 14336, 4096, "int4", gate="silu"), 224, 1), (_product(32, 4096, 14336, "e4m3"), 32, 4),
    ):  # fmt: skip
        shape = swapped_codes_plan.shape_of(product, 132)
        assert (shape.tiles(product), shape.parts) == (tiles, parts), shape
        assert swapped_codes_plan.shared(product, shape) <= 113 << 10  # of two blocks on an SM


@pytest.mark.gpu
@pytest.mark.parametrize("token", ("int4", "e4m3"))
def test_a_chain_of_steps_in_a_graph(token: str, found: list[Product]) -> None:
    g = torch.Generator().manual_seed(0)
    x, gain = (torch.randn(*s, generator=g).to(BF16).cuda() for s in ((32, 1024), (1024,)))
    if token == "int4":
        up, down = (torch.randint(0, 256, s, generator=g).to(torch.uint8).cuda() for s in ((8192, 512), (1024, 2048)))
        scales = [torch.rand(n, k // 128, generator=g).cuda() / 64 for n, k in ((8192, 1024), (1024, 4096))]
    else:
        up, down = (torch.randn(*s, generator=g).to(torch.float8_e4m3fn).cuda() for s in ((8192, 1024), (1024, 4096)))
        scales = [torch.rand(n, generator=g).cuda() / 64 for n in (8192, 1024)]
    packed = "int4" if token == "int4" else None

    def chain() -> torch.Tensor:
        y = x
        for _ in range(6):
            y = rtkernels.decode_linear(
                y, up, scales[0], norm_weight=gain, gated=True, act="silu", constant=True, packed=packed
            )
            y = rtkernels.decode_linear(y, down, scales[1], add=x, factor=0.01, constant=True, packed=packed)
        return y

    assert_captures(chain)
    assert found
