"""Norm, codes and logits together: the bits of two separate ops, gradients, errors; the single kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.compare import assert_same_bits, poisoned, relative_error, running_on
from support.places import ORDERS, at, emulated, error_tests
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from rtkernels.ops.router import rms_norm_router as module
from rtkernels.ops.router import rms_norm_router_plan as plans
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.plans import Plans

rms_norm_router, rms_norm_fp8, router_gemm = rtkernels.rms_norm_router, rtkernels.rms_norm_fp8, rtkernels.router_gemm
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass
class Inputs:
    x: Tensor
    weight: Tensor | None
    router: Tensor
    offset: float = 0.0


Normal = Callable[..., Tensor]

CASES: dict[str, Callable[[Normal], Inputs]] = {
    "plain": lambda n: Inputs(n(24, 136).to(BF16), n(136).to(BF16), n(16, 136).to(BF16)),
    "odd": lambda n: Inputs(n(2, 3, 33).to(BF16), n(33), n(7, 33), 1.0),
    "fp16": lambda n: Inputs(n(5, 40).to(FP16), None, n(12, 40).to(FP16)),
    "strided": lambda n: Inputs(n(10, 48).to(BF16)[::2, 8:], n(80).to(BF16)[::2], n(12, 48).to(BF16)[:, 8:]),
    "no_rows": lambda n: Inputs(n(0, 40).to(BF16), n(40).to(BF16), n(12, 40)),
}


def make(case: Callable[[Normal], Inputs] | str, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(5)
    chosen = CASES[case] if isinstance(case, str) else case
    inputs = chosen(lambda *shape: torch.randn(*shape, generator=generator, device=device))
    inputs.router *= 0.05
    return inputs


def apart(inputs: Inputs, precision: str = "high", **options) -> module.NormRouter:
    """The two functions one after the other."""
    normed = rms_norm_fp8(inputs.x, inputs.weight, offset=inputs.offset, keep=True, **options)
    logits = router_gemm(normed.y, inputs.router, precision=precision)
    return module.NormRouter(logits, normed.y, normed.q, normed.scale, normed.rstd)


def together(inputs: Inputs, precision: str = "high", **options) -> module.NormRouter:
    return rms_norm_router(inputs.x, inputs.weight, inputs.router, offset=inputs.offset, precision=precision, **options)


@pytest.mark.parametrize("case", CASES)
@at()
def test_bits_of_the_two_apart(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, device)
        for precision, options in (("high", {}), ("exact", {"pow2_scale": True, "scale_layout": "column"})):
            for got, want in zip(
                together(inputs, precision, **options), apart(inputs, precision, **options), strict=True
            ):
                assert_same_bits(got, want)


def emulated_coverage() -> None:
    """Run the single kernel in the emulator; test_registry.py checks that it does."""
    with running_on("sm_90") as device:
        together(make(lambda n: Inputs(n(192, 1024).to(BF16), None, n(64, 1024).to(BF16)), device))


def gradients(function: Callable[..., module.NormRouter], inputs: Inputs, use: str) -> list[Tensor | None]:
    leaves = [t.detach().requires_grad_() for t in (inputs.x, inputs.weight, inputs.router)]
    result = function(Inputs(*leaves, inputs.offset))
    assert not (result.q.requires_grad or result.scale.requires_grad or result.rstd.requires_grad)
    generator = torch.Generator(inputs.x.device).manual_seed(6)
    total = 0.0
    for name, t in (("logits", result.logits), ("y", result.y)):
        if name in use:
            factors = torch.randn(t.shape, generator=generator, device=t.device)
            total = total + (t.float() * factors).sum()
    return list(torch.autograd.grad(total, leaves, allow_unused=True))


@pytest.mark.parametrize("use", ("logits", "y", "logits and y"))
@at("cpu", "cuda")
def test_gradients_of_the_two_apart(place: str, use: str) -> None:
    with running_on(place) as device:
        inputs = make("plain", device)
        for got, want in zip(gradients(together, inputs, use), gradients(apart, inputs, use), strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                assert_same_bits(got, want)


@emulated
def test_gradients_in_the_emulator() -> None:
    with running_on("sm_90") as device:
        inputs = make("plain", device)
        got, want = (gradients(f, inputs, "logits and y") for f in (together, apart))
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


def test_only_the_wanted_gradients() -> None:
    inputs = make("plain", "cpu")
    router = inputs.router.requires_grad_()
    result = together(inputs)
    assert result.logits.requires_grad
    result.logits.sum().backward()
    assert router.grad is not None and inputs.x.grad is None


def _bad(**changes) -> Callable[[], object]:
    def call() -> object:
        given = {"x": torch.randn(4, 40).to(BF16), "weight": torch.ones(40), "router_weight": torch.ones(12, 40)}
        return rms_norm_router(**{**given, **changes})

    return call


test_bad_arguments, test_bad_arguments_of_launchers = error_tests(
    {
        "x": (_bad(x=torch.randn(4, 40)), "x has dtype float32; expected one of bfloat16, float16"),
        "router_dtype": (_bad(router_weight=torch.ones(12, 40, dtype=torch.int32)), "router_weight has dtype int32"),
        "router_shape": (_bad(router_weight=torch.ones(12, 41)), r"router_weight has shape \(12, 41\); expected"),
        "router_rank": (_bad(router_weight=torch.ones(40)), r"router_weight has shape \(40,\); expected"),
        "weight": (_bad(weight=torch.ones(41)), "weight has shape"),
        "precision": (_bad(precision="best"), "precision is 'best'; expected one of 'fast', 'high', 'exact'"),
        "scale_layout": (_bad(scale_layout="diagonal"), "scale_layout is 'diagonal'"),
    }
)


# ---- the single kernel ----------------------------------------------------------------------------------------------


@pytest.fixture
def single(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Let the single kernel serve few rows and small weights too; gives a function that says how often it ran."""
    count = [0]
    bind = plans.KERNEL.bind

    def counted(*args, **options):
        launch = bind(*args, **options)

        def launch_and_count(*given):
            count[0] += 1
            launch(*given)

        return launch_and_count

    monkeypatch.setattr(plans.KERNEL, "bind", counted)
    monkeypatch.setattr(plans, "_BUSY", 0.0)
    monkeypatch.setattr(plans, "_EXPERTS", range(4, 257, 4))
    monkeypatch.setattr(plans, "_COLUMNS", range(8, 3073, 8))
    if request.node.get_closest_marker("gpu") and not plans.KERNEL.supports(device_info(0).target):
        pytest.skip("the single kernel is for sm_90a")
    Plans.forget_all()
    yield lambda: count[0]
    Plans.forget_all()


def check_single(inputs: Inputs, **options) -> module.NormRouter:
    """Check the kernel: rstd within roundings, everything else exact given rstd, logits as documented."""
    with poisoned():
        got = together(inputs, **options)
    want = apart(inputs, **options)
    same = torch.isfinite(want.rstd) & torch.isfinite(got.rstd)
    assert (torch.isfinite(want.rstd) == same).all()
    assert ((got.rstd - want.rstd).abs()[same] <= 4 * 2.0**-24 * want.rstd[same]).all()
    again = rms_norm_fp8(inputs.x, inputs.weight, offset=inputs.offset, keep=True, rstd=got.rstd, **options)
    for name in ("y", "q", "scale"):
        assert_same_bits(getattr(got, name), getattr(again, name))
    finite = torch.isfinite(got.y).all(-1)
    exact = got.y.double() @ inputs.router.double().t()
    assert relative_error(got.logits[finite], exact[finite]) <= 5e-6
    assert not torch.isfinite(got.logits[~finite]).any()
    return got


SHAPES = [
    (8192, 256, 2048),
    (1, 4, 8),
    (64, 256, 768),
    (200, 160, 1000),
    (65, 64, 1032),
    (300, 8, 3072),
    (130, 132, 904),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_single_kernel(single: Callable[[], int], shape: tuple[int, int, int]) -> None:
    rows, experts, cols = shape
    for weight, options in ((BF16, {}), (FP32, {"pow2_scale": True, "scale_layout": "column"}), (None, {})):
        inputs = make(
            lambda n, weight=weight: Inputs(
                n(rows, cols).to(BF16), None if weight is None else n(cols).to(weight), n(experts, cols).to(BF16), 0.5
            ),
            "cuda",
        )
        check_single(inputs, **options)
    assert single() == 3


@emulated
@pytest.mark.parametrize("order", ORDERS[:2])
def test_single_kernel_in_the_emulator(single: Callable[[], int], order: str | int) -> None:
    """Eight slabs in six slots, so that two are loaded twice; the last slab and the last rows are partial."""
    with rtkernels.emulate("sm_90", order):
        check_single(make(lambda n: Inputs(n(70, 904).to(BF16), n(904), n(20, 904).to(BF16), 0.5), "cpu"))
    assert single() == 1


@pytest.mark.gpu
def test_single_kernel_with_strided_rows_and_bad_numbers(single: Callable[[], int]) -> None:
    inputs = make(
        lambda n: Inputs(n(3, 50, 1536).to(BF16)[:, :, :1288], n(1288).to(BF16), n(200, 1288).to(BF16)), "cuda"
    )
    inputs.x[0, 3, 5], inputs.x[1, 7, 1000], inputs.x[2, 9] = float("nan"), float("inf"), 0.0
    check_single(inputs)
    assert single() == 1


@pytest.mark.gpu
def test_single_kernel_again_and_captured(single: Callable[[], int]) -> None:
    inputs = make(lambda n: Inputs(n(1000, 2048).to(BF16), n(2048).to(BF16), n(256, 2048).to(BF16)), "cuda")
    first = together(inputs)
    for _ in range(20):
        for got, want in zip(together(inputs), first, strict=True):
            assert_same_bits(got, want)
    assert_equal_bits(captured(lambda: together(inputs))(), first)


@pytest.mark.gpu
def test_single_kernel_compiled(single: Callable[[], int]) -> None:
    inputs = make(lambda n: Inputs(n(256, 1024).to(BF16), n(1024).to(BF16), n(256, 1024).to(BF16)), "cuda")
    compiled = torch.compile(lambda x, w, r: tuple(rms_norm_router(x, w, r)), fullgraph=True)
    for got, want in zip(compiled(inputs.x, inputs.weight, inputs.router), together(inputs), strict=True):
        assert_same_bits(got, want)
