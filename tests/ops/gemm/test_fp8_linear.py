"""fp8_linear against products of its dequantised operands (rounding), and against exact arithmetic (noise of fp8)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.compare import FP8_SUMS, ROUNDOFF, assert_same_bits, poisoned, relative_error, running_on
from support.places import DTYPES, at, error_tests, short
from torch import Tensor

import rtkernels
from rtkernels.ops.gemm import fp8_linear as module
from rtkernels.ops.gemm.fp8_linear import RECIPES, fp8_linear, fp8_weight
from rtkernels.ops.quant.quantize_fp8 import QuantizedBoth

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Root mean square of one rounding, relative: of a mantissa of 3 bits (e4m3) and of 2 bits (e5m2).
NOISE = {E4M3: 0.0265, E5M2: 0.053}
SHAPES = {
    "no tokens": (0, 64, 64),
    "one token": (1, 128, 64),
    "77 tokens": (77, 192, 320),
    "whole blocks": (128, 256, 128),
    "no multiple of 128": (33, 2880, 64),
    "no multiple of 16": (130, 100, 50),
}
RECIPE_NAMES = (*RECIPES, "smooth")


def noise(*kinds: torch.dtype) -> float:
    """Return the accepted relative error of a product of operands of these types: 1.15 times the expected one."""
    return 1.15 * sum(NOISE[kind] ** 2 for kind in kinds) ** 0.5


class Case:
    """Inputs of a call, drawn in fp32 from a seed."""

    def __init__(
        self, shape: str, dtype: torch.dtype, device: str, recipe: str, weight_dtype: torch.dtype = torch.float32
    ) -> None:
        self.tokens, self.k, self.n = SHAPES[shape]
        generator = torch.Generator().manual_seed(len(shape))

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        self.x = normal(self.tokens, self.k).to(dtype).to(device)
        self.weight = (normal(self.n, self.k) * self.k**-0.5).to(weight_dtype).to(device)
        self.bias = normal(self.n).to(device)
        self.dy = normal(self.tokens, self.n).to(dtype).to(device)
        self.recipe = recipe
        self.options: dict[str, Any] = {"recipe": recipe}
        if recipe == "smooth":
            self.options["smooth"] = (torch.rand(self.k, generator=generator) + 0.5).to(device)
        self.possible = recipe != "hadamard" or not (self.k % 64 or self.n % 64)

    def run(self, **more: Any) -> dict[str, Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (self.x, self.weight, self.bias)]
        y = fp8_linear(*leaves, **self.options, **more)
        y.backward(self.dy)
        return dict(zip(("y", "dx", "dweight", "dbias"), (y.detach(), *(leaf.grad for leaf in leaves)), strict=True))


def restored(x: Tensor, granularity: str, dtype: torch.dtype = E4M3) -> Tensor:
    """Return the dequantised x, in fp64."""
    if x.numel() == 0:
        return x.double()
    q, scale = rtkernels.quantize_fp8(x, granularity=granularity, dtype=dtype)
    return rtkernels.dequantize_fp8(q, scale, granularity=granularity, dtype=torch.float32).double()


def rotated(x: Tensor, transposed: bool) -> Tensor:
    """Return the dequantised rotated rows (of x, or of its columns), in fp64."""
    if x.numel() == 0:
        return x.t().double() if transposed else x.double()
    q, scale = rtkernels.quantize_fp8_hadamard(x, 64, transposed=transposed)
    return q.double() * scale[:, None]


def emulated_products(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each product's operands, ``[m, k]`` and ``[n, k]``, quantised and dequantised step by step."""
    x, w, dy = case.x, case.weight, case.dy
    if case.recipe == "block":
        rows, columns = "group", "group_t"
        return {
            "y": (restored(x, rows), restored(w, "block")),
            "dx": (restored(dy, rows), restored(w, "block").t()),
            "dweight": (restored(dy, columns).t(), restored(x, columns).t()),
        }
    if case.recipe == "row":
        return {
            "y": (restored(x, "row"), restored(w, "row")),
            "dx": (restored(dy, "row"), restored(w, "channel").t()),
            "dweight": (restored(dy, "channel").t(), restored(x, "channel").t()),
        }
    if case.recipe == "tensor":
        x, w, dy = restored(x, "tensor"), restored(w, "tensor"), restored(dy, "tensor", E5M2)
        return {"y": (x, w), "dx": (dy, w.t()), "dweight": (dy.t(), x.t())}
    if case.recipe == "hadamard":
        return {
            "y": (rotated(x, False), rotated(w, False)),
            "dx": (rotated(dy, False), rotated(w, True)),
            "dweight": (rotated(dy, True), rotated(x, True)),
        }
    smooth = case.options["smooth"]
    x_q, x_scale, _ = rtkernels.quantize_fp8_smooth(x, smooth)
    w_q, w_scale, _ = rtkernels.quantize_fp8_smooth(w, smooth, divide=True)
    dx_q, dx_scale, _ = rtkernels.quantize_fp8_smooth(dy, w_scale)
    dw_q, dw_scale, _ = rtkernels.quantize_fp8_smooth(dy, row_factor=x_scale, granularity="channel")
    return {
        "y": (x_q.double() * x_scale[:, None], w_q.double() * w_scale[:, None]),
        "dx": (dx_q.double() * dx_scale[:, None], (w_q.double() * smooth).t()),
        "dweight": (dw_q.double() * dw_scale[:, None], (x_q.double() / smooth).t()),
    }


def assert_rounded(got: Tensor, exact: Tensor, magnitude: Tensor, what: str) -> None:
    """Check one rounding to got's dtype, and the sums before it: in fp32, or those of fp8 on a GPU."""
    sums = FP8_SUMS if got.is_cuda else 2.0**-20
    budget = 1.01 * ROUNDOFF[got.dtype] * exact.abs() + sums * magnitude + 1e-7
    wrong = ~((got.double() - exact).abs() <= budget)
    assert got.shape == exact.shape and not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} elements"


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("shape", SHAPES)
@at("cpu", "cuda")
def test_products_of_dequantised_operands(place: str, shape: str, recipe: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        case = Case(shape, dtype, device, recipe)
        if not case.possible:
            pytest.skip("sizes are no multiples of the rotation")
        got = case.run()
        for what, (a, b) in emulated_products(case).items():
            exact, magnitude = a @ b.t(), a.abs() @ b.abs().t()
            if what == "y":
                exact = exact + case.bias.double()
            assert_rounded(got[what], exact, magnitude, what)
        torch.testing.assert_close(got["dbias"], case.dy.float().sum(0), rtol=1e-5, atol=1e-4)
        assert got["y"].dtype == got["dx"].dtype == dtype and got["dweight"].dtype == torch.float32


@pytest.mark.parametrize("recipe", ("block", "row"))
@at("sm_90")
def test_kernels_agree_with_plain_torch(place: str, recipe: str) -> None:
    """Quantisers followed by products, in the emulator: layouts of codes and scales fit."""
    case = Case("no multiple of 16", torch.bfloat16, "cpu", recipe)
    case.x, case.dy = case.x[:21], case.dy[:21]
    wanted = case.run()
    with running_on(place), poisoned():
        got = case.run()
    for what, value in wanted.items():
        assert relative_error(got[what], value) < 1e-3, what


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("outliers", (False, True), ids=("normal", "outliers"))
@at("cpu", "cuda")
def test_noise_against_exact_arithmetic(place: str, outliers: bool, recipe: str) -> None:
    with running_on(place) as device:
        case = Case("77 tokens", torch.bfloat16, device, recipe, torch.bfloat16)
        if outliers:
            case.x[:, ::37] *= 30
        got = case.run()
        x, w, dy = case.x.double(), case.weight.double(), case.dy.double()
        exact = {"y": x @ w.t() + case.bias.double(), "dx": dy @ w, "dweight": dy.t() @ x}
        of_dy = RECIPES[recipe].grad_dtype if recipe in RECIPES else E4M3
        for what, kinds in (("y", (E4M3, E4M3)), ("dx", (of_dy, E4M3)), ("dweight", (of_dy, E4M3))):
            assert relative_error(got[what], exact[what]) <= noise(*kinds), what
            cosine = torch.nn.functional.cosine_similarity(got[what].double().flatten(), exact[what].flatten(), dim=0)
            assert cosine >= (0.999 if E5M2 not in kinds else 0.997), what


@pytest.mark.parametrize("recipe", ("row", "hadamard", "smooth"))
def test_channels_a_thousand_times_larger(recipe: str) -> None:
    """Where a few channels take all of a row's range, rotations and factors keep what the others hold."""
    case = Case("77 tokens", torch.float32, "cpu", recipe)
    case.weight[:, 5] = 0  # the large channel itself adds nothing
    case.x[:, 5] *= 1e5
    if recipe == "smooth":
        case.options["smooth"] = rtkernels.smooth_factors(
            rtkernels.column_absmax(case.x), rtkernels.column_absmax(case.weight), floor=1e-3
        )
    exact = case.x.double() @ case.weight.double().t() + case.bias.double()
    error = relative_error(case.run()["y"], exact)
    assert error < 0.05 if recipe == "smooth" else error > 0.05


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_gradient_without_codes(recipe: str, dtype: torch.dtype) -> None:
    case = Case("77 tokens", dtype, "cpu", recipe)
    wanted, got = case.run(), case.run(wgrad="bf16")
    for what in ("y", "dx", "dbias"):
        assert_same_bits(got[what], wanted[what], what)
    kind = torch.bfloat16 if dtype == torch.float32 else dtype
    exact = case.dy.to(kind).double().t() @ case.x.to(kind).double()
    torch.testing.assert_close(got["dweight"].double(), exact, rtol=1e-5, atol=1e-4)
    main_grad, weight = torch.zeros(case.n, case.k), case.weight.requires_grad_()
    fp8_linear(case.x, weight, wgrad="bf16", recipe=recipe, main_grad=main_grad).backward(case.dy)
    torch.testing.assert_close(main_grad, got["dweight"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_scales_of_powers_of_two_and_gradients_in_e5m2(recipe: str) -> None:
    case = Case("77 tokens", torch.bfloat16, "cpu", recipe)
    x, w, dy = case.x.double(), case.weight.double(), case.dy.double()
    got = case.run(pow2_scale=True, grad_dtype=E5M2)
    assert relative_error(got["y"], x @ w.t() + case.bias.double()) <= noise(E4M3, E4M3)
    assert relative_error(got["dx"], dy @ w) <= noise(E5M2, E4M3)
    assert relative_error(got["dweight"], dy.t() @ x) <= noise(E5M2, E4M3)
    if recipe in RECIPES:
        codes = fp8_weight(case.weight, recipe=recipe, pow2_scale=True)
        assert torch.equal(codes.scale.log2().frac(), torch.zeros_like(codes.scale))


def test_arrays_of_other_libraries() -> None:
    numpy = pytest.importorskip("numpy")
    case = Case("77 tokens", torch.float32, "cpu", "block")
    y = fp8_linear(case.x.numpy(), case.weight.numpy())
    assert isinstance(y, numpy.ndarray)
    assert_same_bits(torch.from_numpy(y), fp8_linear(case.x, case.weight))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_leading_dimensions_strides_and_expanded_gradients(recipe: str) -> None:
    case = Case("77 tokens", torch.bfloat16, "cpu", recipe)
    x, w = case.x.view(7, 11, -1), case.weight
    strided = torch.cat((x, x), -1)[..., : case.k].requires_grad_()
    wanted = fp8_linear(case.x, w, **case.options)
    y = fp8_linear(strided, w, **case.options)
    assert_same_bits(y.detach().flatten(0, 1), wanted)
    y.sum().backward()
    other = case.x.clone().requires_grad_()
    fp8_linear(other, w, **case.options).backward(torch.ones_like(wanted))
    assert_same_bits(strided.grad.flatten(0, 1), other.grad)
    assert_same_bits(fp8_linear(case.x[0], w, **case.options), fp8_linear(case.x[:1], w, **case.options)[0])
    transposed = w.t().contiguous().t()
    assert_same_bits(fp8_linear(case.x, transposed, **case.options), wanted)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_same_bits_at_every_call(recipe: str) -> None:
    case = Case("77 tokens", torch.bfloat16, "cpu", recipe)
    first, second = case.run(), case.run()
    for what, value in first.items():
        assert_same_bits(value, second[what], what)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_nan_and_infinity_stay_in_their_rows(recipe: str) -> None:
    case = Case("77 tokens", torch.bfloat16, "cpu", recipe)
    wanted = fp8_linear(case.x, case.weight, **case.options)
    case.x[3, 7] = float("nan")
    y = fp8_linear(case.x, case.weight, **case.options)
    assert y[3].isnan().all()
    if recipe != "tensor":  # one scale for all
        assert_same_bits(y[4:], wanted[4:])


# ---- only what is needed --------------------------------------------------------------------------------------------


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Count the quantised operands: (rows of the matrix, by rows, transposed)."""
    result: Counter = Counter()
    operand = module.OPERAND

    def counting(x: Tensor, *options: Any) -> Any:
        result[(len(x), *options[3:5])] += 1
        return operand(x, *options)

    monkeypatch.setattr(module, "OPERAND", counting)
    return result


def test_every_matrix_is_quantised_one_time(quantised: Counter) -> None:
    x, w = torch.randn(40, 128, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    fp8_linear(x, w).sum().backward()
    assert quantised == {(40, True, True): 2, (64, True, True): 1}  # x and dy, w


def test_gradients_that_nobody_wants_are_not_computed(quantised: Counter) -> None:
    x, w = torch.randn(40, 128), torch.randn(64, 128)
    fp8_linear(x, w)
    assert quantised == {(40, True, False): 1, (64, True, False): 1}
    quantised.clear()
    fp8_linear(x.requires_grad_(), w).sum().backward()
    assert quantised == {(40, True, False): 2, (64, True, True): 1} and w.grad is None
    quantised.clear()
    fp8_linear(x.detach(), w.requires_grad_()).sum().backward()
    assert quantised == {(40, True, True): 1, (64, True, False): 1, (40, False, True): 1}
    with torch.no_grad():
        assert not fp8_linear(x, w).requires_grad


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_codes_are_saved_not_activations(recipe: str) -> None:
    case = Case("whole blocks", torch.bfloat16, "cpu", recipe, torch.bfloat16)
    x, w = case.x.requires_grad_(), case.weight.requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fp8_linear(x, w, **case.options)
    assert not any(t.dtype == torch.bfloat16 for t in saved)
    codes = sum(t.nbytes for t in saved if t.itemsize == 1)
    assert codes == x.numel() + w.numel()


def test_weight_codes_and_saved_weights_change_no_bits(quantised: Counter) -> None:
    for recipe in RECIPES:
        case = Case("77 tokens", torch.bfloat16, "cpu", recipe)
        wanted = case.run()
        codes = fp8_weight(case.weight, recipe=recipe)
        quantised.clear()
        for other in (case.run(weight_codes=codes), case.run(save_weight=True)):
            for what, value in wanted.items():
                assert_same_bits(other[what], value, f"{recipe} {what}")
        assert quantised[(case.n, True, True)] == 0 and quantised[(case.n, False, True)] == 1


# ---- main_grad ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_main_grad_is_added_to(recipe: str) -> None:
    case = Case("77 tokens", torch.bfloat16, "cpu", recipe)
    dw = case.run()["dweight"]
    weight, main_grad = case.weight.requires_grad_(), torch.randn(case.n, case.k)
    before = main_grad.clone()
    for _ in range(2):
        fp8_linear(case.x, weight, main_grad=main_grad, **case.options).backward(case.dy)
    assert weight.grad is None
    torch.testing.assert_close(main_grad, before + dw + dw, rtol=1e-6, atol=1e-5)


def test_main_grad_flag() -> None:
    case = Case("77 tokens", torch.bfloat16, "cpu", "block")
    weight = torch.nn.Parameter(case.weight)
    weight.grad_added_to_main_grad, main_grad = False, torch.zeros(case.n, case.k)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.abs().max().item()))
    fp8_linear(case.x, weight, main_grad=main_grad).backward(case.dy)
    assert weight.grad_added_to_main_grad and seen == [0.0] and main_grad.any()


# ---- codes as input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_layout", ("row", "column"))
@pytest.mark.parametrize("tokens", (77, 128))
def test_codes_as_input_are_the_tensor(tokens: int, scale_layout: str) -> None:
    x = torch.randn(tokens, 192).bfloat16()
    w = torch.randn(64, 192, requires_grad=True)
    both = rtkernels.quantize_fp8(x, granularity="group", layout="both", scale_layout=scale_layout)
    assert isinstance(both, QuantizedBoth)
    y = fp8_linear(both, w, scale_layout=scale_layout)
    y.sum().backward()
    dw, w.grad = w.grad, None
    wanted = fp8_linear(x, w)
    wanted.sum().backward()
    assert y.dtype == torch.bfloat16
    assert_same_bits(y.detach(), wanted.detach())
    assert_same_bits(dw, w.grad)


def test_gradient_of_codes_goes_to_the_norm_that_made_them() -> None:
    x = torch.randn(2, 64, 256, requires_grad=True)
    gain, w = torch.rand(256, requires_grad=True), (torch.randn(128, 256) / 16).requires_grad_()
    y = fp8_linear(rtkernels.rms_norm_fp8(x, gain, layout="both"), w)
    dy = torch.randn_like(y)
    y.backward(dy)
    got = [y.detach(), *(t.grad.clone() for t in (x, gain, w))]
    for t in (x, gain, w):
        t.grad = None
    other = fp8_linear(rtkernels.rms_norm(x, gain), w)
    other.backward(dy)
    for one, two in zip(got, (other.detach(), x.grad, gain.grad, w.grad), strict=True):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)


# ---- errors ---------------------------------------------------------------------------------------------------------

X, W = torch.randn(4, 64), torch.randn(32, 64)
BAD = {
    "recipe": (lambda: fp8_linear(X, W, recipe="nonsense"), "recipe is 'nonsense'; expected one of 'block', 'row'"),
    "x": (lambda: fp8_linear(X[:, :32], W), r"x has shape \(4, 32\); expected \[\.\.\., 64\], the columns of weight"),
    "x dtype": (lambda: fp8_linear(X.double(), W), "x has dtype float64; expected one of bfloat16, float16, float32"),
    "weight dtype": (lambda: fp8_linear(X, W.double()), "weight has dtype float64"),
    "weight": (lambda: fp8_linear(X, W[0]), r"weight has shape \(64,\); expected \[out features, in features\]"),
    "bias": (lambda: fp8_linear(X, W, X[0]), r"bias has shape \(64,\), expected \(32,\)|bias has shape \(64,\)"),
    "main_grad dtype": (lambda: fp8_linear(X, W, main_grad=W.half()), "main_grad has dtype float16; expected"),
    "main_grad shape": (lambda: fp8_linear(X, W, main_grad=torch.zeros(64, 32)), r"main_grad has shape \(64, 32\)"),
    "main_grad strides": (
        lambda: fp8_linear(X, W, main_grad=torch.zeros(64, 32).t()),
        r"main_grad has strides \(1, 32\); expected a contiguous tensor",
    ),
    "out_dtype": (lambda: fp8_linear(X, W, out_dtype=torch.int32), "out_dtype has dtype int32"),
    "grad_dtype": (lambda: fp8_linear(X, W, grad_dtype=torch.bfloat16), "grad_dtype has dtype bfloat16"),
    "wgrad": (lambda: fp8_linear(X, W, wgrad="fp32"), "wgrad is 'fp32'; expected 'fp8' or 'bf16'"),
    "wgrad, codes": (
        lambda: fp8_linear(rtkernels.rms_norm_fp8(X), W, wgrad="bf16"),
        "wgrad is 'bf16' and x is codes; expected 'fp8', or x as a tensor",
    ),
    "wgrad, smooth": (
        lambda: fp8_linear(X, W, recipe="smooth", smooth=X[0], wgrad="bf16"),
        "wgrad='bf16' cannot be combined with recipe 'smooth'",
    ),
    "no smooth": (lambda: fp8_linear(X, W, recipe="smooth"), "smooth is None with recipe 'smooth'"),
    "smooth": (lambda: fp8_linear(X, W, smooth=X[0]), "smooth is given with recipe 'block'"),
    "smooth shape": (
        lambda: fp8_linear(X, W, recipe="smooth", smooth=torch.ones(32)),
        r"smooth has shape \(32,\)",
    ),
    "rotation": (lambda: fp8_linear(X, W, recipe="hadamard", rotation=48), "rotation is 48; expected one of 32, 64"),
    "rotation, sizes": (
        lambda: fp8_linear(X, W, recipe="hadamard"),
        r"weight has shape \(32, 64\); recipe 'hadamard' expects multiples of the rotation, 64",
    ),
    "codes, recipe": (
        lambda: fp8_linear(rtkernels.quantize_fp8(X, granularity="group", layout="both"), W, recipe="row"),
        r"x is codes \(a QuantizedBoth\); expected a tensor for recipe 'row'",
    ),
    "codes, layout": (
        lambda: fp8_linear(rtkernels.rms_norm_fp8(X), W.clone().requires_grad_()),
        "x.q_t or x.scale_t is None; expected layout 'both', as weight requires grad",
    ),
    "codes, scales": (
        lambda: fp8_linear(rtkernels.rms_norm_fp8(X), W, scale_layout="column"),
        r"x.scale has shape \(4, 1\)",
    ),
    "codes of another weight": (
        lambda: fp8_linear(X, W, weight_codes=fp8_weight(W[:16])),
        r"weight_codes is codes of shape \(16, 64\); expected what fp8_weight gives for weight, \(32, 64\)",
    ),
    "codes of no weight": (lambda: fp8_linear(X, W, weight_codes=W), "weight_codes is a Tensor; expected what"),
    "codes by rows alone": (
        lambda: fp8_linear(X.clone().requires_grad_(), W, weight_codes=fp8_weight(W, transposed=False)),
        "weight_codes has no transposed codes and x requires grad; expected transposed=True",
    ),
    "weight of codes": (lambda: fp8_weight(W[0]), r"weight has shape \(64,\); expected \[out features"),
    "recipe of codes": (lambda: fp8_weight(W, recipe="smooth"), "recipe is 'smooth'; expected one of 'block'"),
}  # fmt: skip
test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(BAD)
