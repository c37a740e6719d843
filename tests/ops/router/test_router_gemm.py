"""Router GEMM: documented errors against fp64, layouts, gradients, non-finite values, error messages, GPU kernels."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support import device_probe
from support.compare import ROUNDOFF, assert_same_bits, relative_error, running_on
from support.places import ORDERS, at, emulated, error_tests, short
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError, RtkError
from rtkernels.ops.router import router_gemm as module
from rtkernels.ops.router import router_gemm_kernels as kernels
from rtkernels.ops.router import router_gemm_tiles as tiles
from rtkernels.runtime.launch import driver as launching
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.launch.tensor_map import TensorMap, tiled_map

router_gemm = rtkernels.router_gemm
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRECISIONS = ("fast", "high", "exact")
LOGITS = {"fast": 3e-3, "high": 5e-6, "exact": 1e-6}
INPUT = {"fast": 5e-3, "high": 1e-5, "exact": 1e-5}
INPUT_FP16 = 1e-5  # whatever the precision

Normal = Callable[..., Tensor]


@dataclass
class Inputs:
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    dy: Tensor | None = None


def _strided(n: Normal, rows: int, cols: int, *, every: int = 1, skip: int = 0, pad: int = 0) -> Tensor:
    return n(rows * every, skip + cols + pad)[::every, skip : skip + cols]


# The weight of a case is of fp32 unless its place says otherwise.
CASES: dict[str, Callable[[Normal], Inputs]] = {
    "one": lambda n: Inputs(n(1, 8), n(1, 8)),
    "plain": lambda n: Inputs(n(24, 64), n(16, 64)),
    "odd": lambda n: Inputs(n(5, 33), n(7, 33)),
    "several_tiles": lambda n: Inputs(n(130, 72), n(136, 72)),
    "deep": lambda n: Inputs(n(3, 520), n(5, 520)),
    "three_dimensions": lambda n: Inputs(n(2, 3, 40), n(12, 40)),
    "one_dimension": lambda n: Inputs(n(40), n(12, 40)),
    "strided_rows": lambda n: Inputs(_strided(n, 9, 40, every=2, pad=8), _strided(n, 12, 40, pad=16)),
    "unaligned": lambda n: Inputs(_strided(n, 9, 40, skip=1, pad=7), _strided(n, 12, 40, skip=3, pad=5)),
    "transposed": lambda n: Inputs(n(40, 9).t(), n(40, 12).t()),
    "expanded_rows": lambda n: Inputs(n(1, 40).expand(6, 40), n(12, 40)),
    "dy_expanded": lambda n: Inputs(n(6, 40), n(12, 40), dy=n(1).float().expand(6, 12)),
    "dy_strided": lambda n: Inputs(n(6, 40), n(12, 40), dy=_strided(n, 6, 12, every=2, skip=1).float()),
    "dy_transposed": lambda n: Inputs(n(6, 40), n(12, 40), dy=n(12, 6).float().t()),
    "bias": lambda n: Inputs(n(9, 40), n(12, 40), n(12)),
    "bias_deep": lambda n: Inputs(n(3, 520), n(6, 520), n(6)),
    "no_rows": lambda n: Inputs(n(0, 40), n(12, 40), n(12)),
    "no_experts": lambda n: Inputs(n(3, 40), n(0, 40)),
    "no_depth": lambda n: Inputs(n(3, 0), n(12, 0), n(12)),
}
# Each sums many numbers in one of the three products.
DEEP_CASES: dict[str, Callable[[Normal], Inputs]] = {
    "deep_logits": lambda n: Inputs(n(3, 328), n(5, 328)),
    "many_tokens": lambda n: Inputs(n(328, 16), n(5, 16)),
    "many_experts": lambda n: Inputs(n(3, 16), n(600, 16)),
}


def make(case: str, x_dtype: torch.dtype, w_dtype: torch.dtype, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    inputs = {**CASES, **DEEP_CASES}[case](normal)
    inputs.x, inputs.weight = inputs.x.to(x_dtype), (inputs.weight * 0.02).to(w_dtype)
    if inputs.dy is None:
        inputs.dy = normal(*inputs.x.shape[:-1], inputs.weight.shape[0]) * 1e-3
    return inputs


def within(got: Tensor, exact: Tensor, most: float, what: str) -> None:
    """Check a relative Frobenius error, in addition to one rounding of every element to the dtype of `got`."""
    assert got.shape == exact.shape
    limit = most * exact.norm() + ROUNDOFF[got.dtype] * exact.norm() * (got.dtype != FP32) + 1e-30
    error = (got.double() - exact).norm()
    assert error <= limit, f"{what}: relative error {(error / exact.norm()).item():.3g}, promised {most}"


def check(inputs: Inputs, precision: str) -> tuple[Tensor, ...]:
    """Run forward and backward and check the results against the docstring's bounds; return them."""
    x, weight = (t.detach().requires_grad_() for t in (inputs.x, inputs.weight))
    bias = None if inputs.bias is None else inputs.bias.detach().requires_grad_()
    y = router_gemm(x, weight, bias=bias, precision=precision)
    assert y.dtype == FP32 and y.is_contiguous()
    assert_same_bits(router_gemm(x.detach(), weight.detach(), bias=bias, precision=precision).detach(), y.detach())
    y.backward(inputs.dy)
    with torch.no_grad():
        count = math.prod(inputs.x.shape[:-1])
        rows, w = inputs.x.double().reshape(count, inputs.x.shape[-1]), weight.double()
        g = inputs.dy.double().reshape(count, weight.shape[0])
        exact = rows @ w.t() + (0.0 if bias is None else bias.double())
        within(y.detach().view(exact.shape), exact, LOGITS[precision], "logits")
        most = INPUT_FP16 if x.dtype == FP16 else INPUT[precision]
        within(x.grad.reshape(rows.shape), g @ w, most, "gradient of x")
        within(weight.grad, g.t() @ rows, LOGITS[precision], "gradient of weight")
        assert x.grad.dtype == x.dtype and weight.grad.dtype == weight.dtype
        if bias is not None:
            within(bias.grad, g.sum(0), 1e-6, "gradient of bias")
    return y, x.grad, weight.grad


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_layout(place: str, case: str) -> None:
    with running_on(place) as device:
        check(make(case, BF16, FP32, device), "high")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("w_dtype", (BF16, FP16, FP32), ids=short)
@pytest.mark.parametrize("x_dtype", (BF16, FP16), ids=short)
@at()
def test_every_dtype(place: str, x_dtype: torch.dtype, w_dtype: torch.dtype, precision: str) -> None:
    with running_on(place) as device:
        check(make("strided_rows", x_dtype, w_dtype, device), precision)
        check(make("odd", x_dtype, w_dtype, device), precision)


def emulated_coverage() -> None:
    """Run every kernel that can be emulated; test_registry.py checks that it does."""
    with running_on("sm_80") as device:
        check(make("odd", BF16, BF16, device), "high")
        check(make("odd", BF16, FP32, device), "high")
    with running_on("sm_90") as device:
        check(make("plain", BF16, BF16, device), "high")
        check(make("plain", BF16, BF16, device), "fast")


@pytest.mark.parametrize("case", DEEP_CASES)
@pytest.mark.parametrize("target", ("sm_80", "sm_90"))
@emulated
def test_sums_that_leave_the_tensor_cores_several_times(target: str, case: str) -> None:
    """In "exact" every 128 of what is summed (256 experts in router_dx): three times here, without splits."""
    with running_on(target) as device:
        check(make(case, BF16, FP32, device), "exact")


@pytest.mark.parametrize("w_dtype", (BF16, FP16, FP32), ids=short)
@pytest.mark.parametrize("magnitude", (1e-9, 1.0, 1e7))
@at()
def test_gradient_of_fp16_is_as_precise_as_fp16(place: str, magnitude: float, w_dtype: torch.dtype) -> None:
    """In "fast" too, for gradients that fp16 cannot hold; the weight makes dx fit."""
    with running_on(place) as device:
        inputs = make("odd", FP16, FP32, device)
        weight = (inputs.weight * min(1.0, 1e3 / magnitude)).to(w_dtype)
        dy = (inputs.dy * 1e3 * magnitude).to(FP32)
        dx, _ = module.BACKWARD(dy, inputs.x, weight, kernels.FAST, True, False)
        exact = dy.double() @ weight.double()
        limit = ROUNDOFF[FP16] * exact.abs() + 2.0**-25 + 2e-5 * exact.abs().max()
        assert bool(((dx.double() - exact).abs() <= limit).all())


@emulated
@pytest.mark.parametrize(("target", "case"), (("sm_80", "odd"), ("sm_90", "plain")))
def test_order_of_threads_does_not_matter(target: str, case: str) -> None:
    inputs = make(case, BF16, FP32, "cpu")
    results = []
    for order in ("forward", *ORDERS):
        with rtkernels.emulate(target, order=order):
            y = module.FORWARD(inputs.x, inputs.weight, None, 1)
            results.append((y, *module.BACKWARD(inputs.dy, inputs.x, inputs.weight.bfloat16(), 1, True, True)))
    for others in results[1:]:
        for a, b in zip(results[0], others, strict=True):
            assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes",
    ((8192, 256, 2048), (12289, 160, 6144), (4096, 512, 2880), (4096, 72, 7168),
     (300, 260, 520), (129, 1030, 192), (64, 8, 8192)),
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("wgmma", (True, False), ids=("wgmma", "mma"))
def test_promises_at_real_sizes(monkeypatch: pytest.MonkeyPatch, wgmma: bool, sizes: tuple[int, ...]) -> None:
    rows, experts, depth = sizes
    if not wgmma:
        monkeypatch.setattr(kernels, "uses_wgmma", lambda device: False)
        Plans.forget_all()
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, depth, device="cuda", generator=g)
    weight = torch.randn(experts, depth, device="cuda", generator=g) * 0.02
    dy = torch.randn(rows, experts, device="cuda", generator=g) * 1e-3
    for precision in PRECISIONS:
        for x_dtype in (BF16, FP16):
            for w_dtype in (x_dtype, FP32):
                with running_on("cuda"):
                    check(Inputs(x.to(x_dtype), weight.to(w_dtype), dy=dy), precision)
    within(router_gemm(x.bfloat16(), weight.bfloat16(), precision="fast"),
           x.bfloat16().double() @ weight.bfloat16().double().t(), 2e-5, "16-bit products")  # fmt: skip


# ---- tiles of the forward on sm_90 ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_plans_of_others():
    yield
    Plans.forget_all()


def _use_tile(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, splits: int) -> None:
    def chosen(size: tuple[int, int, int], terms: int, sms: int) -> tiles.Tile:
        return tiles.Tile(rows, columns, splits, tiles.ring_stages(rows, columns, terms), 0.0)

    monkeypatch.setattr(tiles, "forward_tile", chosen)
    Plans.forget_all()


@pytest.mark.parametrize(
    ("tile", "splits", "sizes"),
    (
        ((128, 64), 1, (130, 66, 72)),
        ((128, 64), 3, (7, 61, 200)),
        ((128, 96), 2, (20, 100, 130)),
        ((128, 128), 2, (20, 132, 130)),
        ((128, 160), 2, (3, 144, 136)),
        ((192, 96), 1, (9, 94, 72)),
        ((192, 128), 2, (150, 121, 136)),
    ),
    ids=str,
)
@at("sm_90", "cuda")
def test_every_tile(
    monkeypatch: pytest.MonkeyPatch, place: str, tile: tuple[int, int], splits: int, sizes: tuple[int, ...]
) -> None:
    rows, experts, depth = sizes
    _use_tile(monkeypatch, *tile, splits)
    with running_on(place) as device:
        g = torch.Generator().manual_seed(sum(sizes))
        x = torch.randn(rows, depth, generator=g).bfloat16().to(device)
        weight = torch.randn(experts, depth, generator=g).to(device)
        bias = torch.randn(experts, generator=g).to(device)
        y = router_gemm(x, weight, bias=bias, precision="exact")
        within(y, x.double() @ weight.double().t() + bias.double(), 1e-6, "logits")


@emulated
def test_splits_add_up_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    _use_tile(monkeypatch, 128, 64, 3)
    inputs = make("deep_logits", BF16, BF16, "cpu")
    results = []
    for order in ("forward", "reverse", 7):
        with rtkernels.emulate("sm_90", order=order):
            results.append(module.FORWARD(inputs.x, inputs.weight, None, 1))
    for other in results[1:]:
        assert_same_bits(results[0], other)


def _h200(rows: int, experts: int, depth: int, terms: int = 1) -> tiles.Tile:
    return tiles.forward_tile((rows, experts, depth), terms, 132)


EXPERTS = (1, 8, 60, 64, 72, 96, 128, 144, 160, 192, 256, 384, 512)


@pytest.mark.parametrize("experts", EXPERTS)
def test_chosen_tiles_can_be_launched(experts: int) -> None:
    for rows in (1, 127, 4096, 8192, 12289, 10**6):
        for depth in (8, 64, 2048, 2880, 4096, 6144, 7168):
            for terms in (1, 2, 3):
                tile = _h200(rows, experts, depth, terms)
                assert (tile.rows, tile.columns) in tiles.TILES
                assert 1 <= tile.splits <= min(tiles.MAX_SPLITS, max(1, -(-depth // 64) // tiles.MIN_BLOCKS))
                ring = tile.stages * tiles.ROW_BYTES * (tile.rows + terms * tile.columns)
                assert tile.stages >= 2 and ring + 1024 + 16 * tile.stages <= 227 * 1024
                shares = -(-tile.columns // 8 // tile.splits) * tile.splits  # where the ring was
                assert tile.splits == 1 or shares * 32 * tile.rows <= ring
                assert 4 * tile.rows * tile.columns <= ring  # results staged for TMA


def test_the_model_finds_what_was_fastest() -> None:
    """Of an H200; docs/decisions/router.md has the times."""
    assert _h200(12289, 160, 6144)[:3] == (128, 160, 1)
    assert _h200(12289, 256, 7168)[:3] == _h200(12289, 512, 7168)[:3] == (192, 128, 1)
    assert _h200(8192, 256, 2048)[:3] == (128, 128, 1)
    assert _h200(8192, 128, 7168)[:3] == (128, 64, 1)
    assert _h200(4096, 256, 7168)[:3] == (128, 128, 2)
    assert _h200(12289, 192, 4096, 2)[:3] == (192, 96, 1)
    assert _h200(4096, 64, 7168).splits > 1  # SMs would be idle
    assert _h200(1, 8, 64).splits == 1


# ---- what is not finite, and ranges ---------------------------------------------------------------------------------


@pytest.mark.parametrize("w_dtype", (BF16, FP32), ids=short)
@at()
def test_what_is_not_finite_stays_where_it_is(place: str, w_dtype: torch.dtype) -> None:
    with running_on(place) as device:
        inputs = make("plain", BF16, w_dtype, device)
        x, weight, dy = inputs.x, inputs.weight, inputs.dy
        x[3, 5], x[9, 0] = torch.nan, torch.inf
        weight[7, 11], weight[2, 1] = torch.inf, torch.nan
        y = router_gemm(x, weight)
        assert torch.equal(y.isfinite(), (x.double() @ weight.double().t()).isfinite())
        clean = [i for i in range(x.shape[0]) if i not in (3, 9)]
        assert bool((y[clean, 7].abs() == torch.inf).all())
        dx, dweight = module.BACKWARD(dy, x, weight, 1, True, True)
        assert torch.equal(dx.isfinite(), (dy.double() @ weight.double()).isfinite())
        assert torch.equal(dweight.isfinite(), (dy.double().t() @ x.double()).isfinite())


@pytest.mark.parametrize("x_dtype", (BF16, FP16), ids=short)
@at()
def test_wide_ranges_of_weights(place: str, x_dtype: torch.dtype) -> None:
    """Rows of very different magnitudes keep their relative precision; the largest fp32 number is no infinity."""
    with running_on(place) as device:
        inputs = make("plain", x_dtype, FP32, device)
        inputs.x = inputs.x.abs().clamp(0.5, 1.0) * 2**-8
        factors = 10.0 ** torch.linspace(-30, 36, 16, device=device)
        weight = inputs.weight.abs().add(0.01) * factors[:, None]
        weight[15] = torch.finfo(FP32).max
        y = router_gemm(inputs.x, weight, precision="high")
        exact = inputs.x.double() @ weight.double().t()
        assert (((y.double() - exact) / exact).abs().max()) < 1e-5


# ---- gradients ------------------------------------------------------------------------------------------------------


@at()
def test_main_grad_is_added_to(place: str) -> None:
    with running_on(place) as device:
        inputs = make("plain", BF16, BF16, device)
        main_grad = torch.full(inputs.weight.shape, 0.25, dtype=FP32, device=device)
        weight = inputs.weight.requires_grad_()
        for _ in range(2):
            x = inputs.x.detach().requires_grad_()
            router_gemm(x, weight, main_grad=main_grad, precision="exact").backward(inputs.dy)
            assert weight.grad is None and x.grad is not None
        exact = 0.25 + 2 * (inputs.dy.double().t() @ inputs.x.double())
        assert relative_error(main_grad, exact) < 1e-6
        y = router_gemm(inputs.x, weight, main_grad=main_grad)
        before = main_grad.clone()
        y.backward(torch.zeros_like(y))
        assert torch.equal(main_grad, before)


def test_only_needed_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    backward = module.BACKWARD.call
    monkeypatch.setattr(module.BACKWARD, "call", lambda *args: asked.append(args[-2:]) or backward(*args))
    inputs = make("bias", BF16, FP32, "cpu")
    for needs in ((True, False, False), (False, True, False), (False, False, True), (True, True, True)):
        tensors = (inputs.x, inputs.weight, inputs.bias)
        leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        router_gemm(leaves[0], leaves[1], bias=leaves[2]).backward(inputs.dy)
        assert [leaf.grad is not None for leaf in leaves] == list(needs)
    assert asked == [(True, False), (False, True), (True, True)]


def test_bias_of_a_single_row() -> None:
    x, weight, bias = torch.randn(16).bfloat16(), torch.randn(4, 16), torch.zeros(4, requires_grad=True)
    router_gemm(x, weight, bias=bias).backward(torch.arange(4.0))
    assert torch.equal(bias.grad, torch.arange(4.0))


def test_differentiable_once_only() -> None:
    inputs = make("plain", BF16, FP32, "cpu")
    x = inputs.x.requires_grad_()
    (dx,) = torch.autograd.grad(router_gemm(x, inputs.weight), x, inputs.dy, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        dx.float().sum().backward()


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
def test_compiles_without_breaks(device: str) -> None:
    inputs = make("bias", BF16, FP32, device)
    leaves = [t.detach().requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias)]

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return router_gemm(x, weight, bias=bias).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    for got, exact in zip(torch.autograd.grad(compiled(*leaves), leaves), wanted, strict=True):
        assert_same_bits(got, exact)


# ---- terms ----------------------------------------------------------------------------------------------------------


def test_terms_and_their_products() -> None:
    assert [kernels.terms("fp32", "bf16", p) for p in (0, 1, 2)] == [1, 2, 3]
    assert [kernels.terms("fp32", "fp16", p) for p in (0, 1, 2)] == [1, 2, 2]
    assert kernels.terms("bf16", "fp16", 2) == 1 and kernels.terms("fp16", "bf16", 1) == 2
    assert kernels.term_pairs(2, 2) == [(0, 1), (1, 0), (0, 0)]
    assert kernels.term_pairs(1, 3) == [(0, 2), (0, 1), (0, 0)]
    assert kernels.packed_pairs([(0, 1), (1, 0), (0, 0)]) == 0x014


def test_tensor_maps_come_first_and_are_not_packed() -> None:
    assert [kind for _, kind in kernels.FWD.args[:4]] == ["tmap", "tmap", "tmap", "ptr"]
    with pytest.raises(ArgumentError, match=r"kernel x: tensor maps .* come before all other arguments"):
        Kernel("x.cu", "x", template="T", args="n:i64 x:tmap", variants=[], max_registers=1)


def test_launch_with_tensor_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver gets: the addresses of the maps, then pointers to eight bytes for each other argument."""
    seen = []

    def driver(config: ctypes.c_void_p, function: ctypes.c_void_p, pointers: ctypes.c_void_p, extra: None) -> int:
        words = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_uint64))
        values = [ctypes.cast(words[i], ctypes.POINTER(ctypes.c_int64))[0] for i in (2, 3)]
        columns = ctypes.cast(config, ctypes.POINTER(ctypes.c_uint32))[0]
        seen.append((function.value, words[0], words[1], *values, columns))
        return 0

    monkeypatch.setattr(launching, "_launch_kernel_ex", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    maps = TensorMap(), TensorMap()
    launch = launching.launcher(77, launching.Arguments(2, "qq"), 0, (5, 1, 1), 128, 0, overlap=True, cluster=1)
    launch(*maps, -3, 4)
    ended = launching.launcher(77, launching.Arguments(2, "qq", {1: 6}), 0, (5, 1, 1), 128, 0, overlap=True, cluster=1)
    ended(*reversed(maps), 5)
    first, second = (m.address for m in maps)
    assert seen == [(77, first, second, -3, 4, 5), (77, second, first, 5, 6, 5)]


# ---- errors ---------------------------------------------------------------------------------------------------------


def _call(x_shape=(4, 8), w_shape=(3, 8), x_dtype=BF16, w_dtype=FP32, **more):
    more = {name: value() if callable(value) else value for name, value in more.items()}
    return router_gemm(torch.zeros(x_shape, dtype=x_dtype), torch.zeros(w_shape, dtype=w_dtype), **more)


test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(
    {
        "x_dtype": (lambda: _call(x_dtype=FP32), "x has dtype float32; expected one of bfloat16, float16"),
        "weight_dtype": (lambda: _call(w_dtype=torch.float64), "weight has dtype float64; expected one of"),
        "weight_rank": (lambda: _call(w_shape=(3, 8, 1)), r"weight has shape \(3, 8, 1\); expected \[experts"),
        "columns": (lambda: _call(x_shape=(4, 9)), r"x has shape \(4, 9\); expected \[..., 8\]"),
        "scalar": (lambda: _call(x_shape=()), r"x has shape \(\); expected \[..., 8\]"),
        "precision": (lambda: _call(precision="best"), "precision is 'best'; expected one of 'fast', 'high', 'exact'"),
        "bias": (lambda: _call(bias=torch.zeros(4)), r"bias has shape \(4,\); expected \(3,\)"),
        "bias_dtype": (lambda: _call(bias=torch.zeros(3).long()), "bias has dtype int64; expected one of"),
        "main_grad": (lambda: _call(main_grad=torch.zeros(3, 9)), r"main_grad has shape \(3, 9\); expected \(3, 8\)"),
        "main_grad_dtype": (lambda: _call(main_grad=torch.zeros(3, 8).half()), "main_grad has dtype float16"),
        "main_grad_strides": (lambda: _call(main_grad=torch.zeros(8, 3).t()), "main_grad has strides .* contiguous"),
        "dy": (
            lambda: module.BACKWARD(torch.zeros(4, 2), torch.zeros(4, 8).half(), torch.zeros(3, 8), 1, True, True),
            r"dy has shape \(4, 2\); expected \(4, 3\)",
        ),
    }
)


# ---- the GPU's own ways ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_captured_in_a_graph() -> None:
    inputs = make("several_tiles", BF16, FP32, "cuda")
    main_grad = torch.zeros(inputs.weight.shape, device="cuda")

    def step() -> tuple[Tensor, ...]:
        y = module.FORWARD(inputs.x, inputs.weight, None, 1)
        module.BACKWARD_INTO(main_grad, inputs.dy, inputs.x, 1)
        return y, *module.BACKWARD(inputs.dy, inputs.x, inputs.weight, 1, True, True)

    replay = captured(step)
    inputs.x.copy_(torch.randn_like(inputs.x))
    main_grad.zero_()
    replayed = *replay(), main_grad.clone()
    main_grad.zero_()
    assert_equal_bits(replayed, (*step(), main_grad))


@pytest.mark.gpu
def test_streams_and_repeats_give_the_same_bits() -> None:
    inputs = make("several_tiles", BF16, FP32, "cuda")
    args = (inputs.dy, inputs.x, inputs.weight, 2, True, True)
    wanted = (module.FORWARD(*args[1:3], None, 2), *module.BACKWARD(*args))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            results.append((module.FORWARD(*args[1:3], None, 2), *module.BACKWARD(*args)))
    torch.cuda.synchronize()
    for got in results:
        for a, b in zip(got, wanted, strict=True):
            assert_same_bits(a, b)


@pytest.mark.gpu
def test_tensor_map_that_the_driver_refuses() -> None:
    memory = torch.zeros(64, 64, dtype=BF16, device="cuda")
    with pytest.raises(RtkError, match=r"cuTensorMapEncodeTiled failed with status \d+ for bf16 \[64, 64\]"):
        device_probe.matrix_map(memory.data_ptr() + 2, "bf16", 64, 64, 64, 64, 64)
    assert device_probe.matrix_map(memory.data_ptr(), "bf16", 64, 64, 64, 64, 64).address % 64 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("strides", [(0,), (128, 0), (0, 128), (128, 0, 16384)])
def test_tensor_map_of_an_expanded_dimension(strides: tuple[int, ...]) -> None:
    """0 is a multiple of 16: ``box_strides`` and the emulator rely on a driver that says so too."""
    memory = torch.zeros(256, 64, dtype=BF16, device="cuda")
    sizes, box = (64, 128, 4, 2)[: len(strides) + 1], (64, 64, 1, 1)[: len(strides) + 1]
    assert tiled_map(memory.data_ptr(), "bf16", sizes, strides, box).address % 64 == 0
