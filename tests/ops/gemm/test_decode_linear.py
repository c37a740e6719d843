"""The linear layer of decoding steps: formats, sizes, norm, gate, residual."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at, emulated

import rtkernels
from rtkernels.errors import ArgumentError, RtkError
from rtkernels.ops.gemm import chunk_plan, decode_linear, decode_plan
from rtkernels.ops.gemm.decode_linear import FORWARD
from rtkernels.ops.gemm.product import Matrix, Product
from rtkernels.ops.quant import pack
from rtkernels.runtime import targets

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FORMATS = {
    "16bit": None, "e4m3_block": "block", "e4m3_row": "row", "e4m3_tensor": "tensor", "int8_row": "row",
    "int4_group": "group", "uint4_row": "row",
}  # fmt: skip


def weights(name: str, n: int, k: int, dtype: torch.dtype, g: torch.Generator):
    """Return codes, scales, `packed`, and the values in fp64."""
    kind = FORMATS[name]
    if kind is None:
        w = torch.randn(n, k, generator=g).to(dtype)
        return w, None, None, w.double()
    shapes = {"block": (-(-n // 128), -(-k // 128)), "row": (n,), "tensor": (), "group": (n, -(-k // 128))}
    scale = torch.rand(shapes[kind], generator=g) + 0.5
    if kind == "block":
        factor = scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    elif kind == "group":
        factor = scale.double().repeat_interleave(128, 1)[:, :k]
    else:
        factor = scale.double()[:, None] if kind == "row" else scale.double()
    if name.startswith("e4m3"):
        codes = torch.randn(n, k, generator=g).to(torch.float8_e4m3fn)
        return codes, scale, None, codes.double() * factor
    if name.startswith("int8"):
        codes = torch.randint(-128, 128, (n, k), generator=g).to(torch.int8)
        return codes, scale, None, codes.double() * factor
    packed = name.split("_")[0]
    codes = torch.randint(0, 256, (n, k // 2), generator=g).to(torch.uint8)
    return codes, scale, packed, pack.nibble_values(codes, packed, torch.float64) * factor


def case(name: str, m: int, n: int, k: int, dtype: torch.dtype = BF16, norm: bool = False, act: str | None = None,
         gated: bool = False, add: bool = False, bias: bool = False, factor: float = 1.0,
         lead: tuple[int, ...] = ()):  # fmt: skip
    """Return arguments of the operator, the exact result and the error that fp32 sums and one rounding may have."""
    g = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(*lead, m, k, generator=g).to(dtype)
    codes, scale, packed, values = weights(name, 2 * n if gated else n, k, dtype, g)
    norm_weight = (torch.rand(k, generator=g) + 0.5).to(dtype) if norm else None
    residual = torch.randn(*lead, m, n, generator=g).to(dtype) if add else None
    biases = torch.randn(values.shape[0], generator=g) if bias else None
    exact = x.double()
    if norm:
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + norm_weight.double())
        exact = exact.to(dtype).double()
    magnitude = exact.abs() @ values.abs().t()
    exact = exact @ values.t() + (0 if biases is None else biases.double())
    # `chunk_plan` rounds x (offset + gain) instead of the norm's result.
    roundings = 0.5 if 8 < m <= 16 and dtype == BF16 else 0.02
    slack = magnitude * 2.0**-21 + (magnitude * torch.finfo(dtype).eps * roundings if norm else 0.0)
    if gated:
        (gate, up), (e_gate, e_up) = exact.chunk(2, -1), slack.chunk(2, -1)
        act_of = {
            "silu": torch.nn.functional.silu,
            "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        }
        slack = e_gate * up.abs() * 1.2 + e_up * gate.abs() + gate.abs() * up.abs() * 2.0**-20
        exact = act_of[act](gate) * up
    elif act == "relu":
        exact = exact.relu()
    exact, slack = exact * factor, slack * abs(factor)
    exact = exact if residual is None else exact + residual.double()
    arguments = (x, codes, scale, biases, residual, norm_weight, None, packed, act, gated, False, 1e-6, 1.0, factor)
    return arguments, exact, slack + exact.abs() * torch.finfo(dtype).eps * 0.51 + 1e-30


def checked(given, target: str = "sm_90", **options) -> torch.Tensor:
    arguments, exact, error = given
    with rtkernels.emulate(target, **options):
        out = FORWARD.call(*arguments)
    wrong = ((out.double() - exact).abs() > error) | out.isnan()
    assert not wrong.any(), ((out.double() - exact).abs() / error).max()
    return out


@pytest.mark.parametrize("target", ("sm_80", "sm_90"))
@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, dtype: torch.dtype, target: str) -> None:
    checked(case(name, 3, 45, 352, dtype), target)


@pytest.mark.parametrize("m", (1, 2, 4, 5, 8, 9, 16))
def test_rows(m: int) -> None:
    checked(case("16bit", m, 37, 776, norm=True, add=True))


@pytest.mark.parametrize("name", ("16bit", "e4m3_block", "int4_group"))
@pytest.mark.parametrize(("m", "n", "k"), ((1, 2, 64), (11, 150, 1088), (2, 9, 32), (1, 1100, 160), (16, 8, 2048)))
def test_sizes(name: str, m: int, n: int, k: int) -> None:
    checked(case(name, m, n, k))


def test_passes_that_are_no_multiple_of_the_warps_along_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows, whose sums of 25 octets fit: warps go on where they stopped, wherever a pass ends."""
    own = decode_plan._shape

    def shape(*given):
        return own(*given)._replace(octets=30, row_shift=1, shared=200000)

    monkeypatch.setattr(decode_plan, "_shape", shape)
    monkeypatch.setattr(decode_plan, "_together", lambda m, along_k, octets: 7)
    checked(case("16bit", 5, 400, 64))
    checked(case("e4m3_block", 5, 400, 256))


@pytest.mark.parametrize("k", (8, 24, 40, 520))
def test_odd_depths(k: int) -> None:
    checked(case("16bit", 2, 19, k, norm=True))


@pytest.mark.parametrize("name", ("16bit", "e4m3_block", "int4_group"))
@pytest.mark.parametrize("target", ("sm_80", "sm_90"))
def test_norm_gate_and_bias(name: str, target: str) -> None:
    checked(case(name, 2, 66, 320, norm=True, gated=True, act="silu", bias=True), target)
    checked(case(name, 10, 5, 320, FP16, gated=True, act="gelu_tanh", add=True), target)
    checked(case(name, 1, 7, 128, bias=True, act="relu", add=True), target)
    checked(case(name, 2, 9, 128, factor=0.22, bias=True, add=True), target)


@pytest.mark.parametrize("target", ("sm_80", "sm_90"))
def test_a_modulated_norm_and_a_gate(target: str) -> None:
    """The layer of an action expert: ``x + gate * (b @ (norm(x) * (1 + scale) + shift))``."""
    g = torch.Generator().manual_seed(0)
    m, n, k = 10, 40, 256
    x, b, add = (torch.randn(*shape, generator=g).to(BF16) for shape in ((m, k), (n, k), (m, n)))
    scale, shift = (0.5 * torch.randn(k, generator=g).to(BF16) for _ in range(2))
    gate = torch.randn(n, generator=g)
    y = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * (1 + scale.double())
    exact = add.double() + gate.double() * ((y.to(BF16).double() + shift.double()) @ b.double().t())
    error = (
        gate.double().abs() * ((y.abs() + shift.double().abs()) @ b.double().abs().t()) * 2.0**-9
        + exact.abs() * 2.0**-8
    )
    given = {"bias": gate * (b.float() @ shift.float()), "norm_weight": scale, "offset": 1.0, "add": add}
    with rtkernels.emulate(target):
        out = rtkernels.decode_linear(x, b, gate, constant=True, **given)
    assert ((out.double() - exact).abs() <= error).all()
    assert (out.double() - exact).norm() < 4e-3 * exact.norm()
    assert ((rtkernels.decode_linear(x, b, gate, **given).double() - exact).abs() <= error).all()


@pytest.mark.parametrize("name", ("16bit", "e4m3_row", "e4m3_tensor"))
@pytest.mark.parametrize(("m", "n", "k"), ((10, 70, 1088), (9, 33, 64), (16, 40, 2112), (13, 16, 144)))
def test_nine_to_16_rows(name: str, m: int, n: int, k: int) -> None:
    given = case(name, m, n, k, add=True, bias=True, factor=0.5)
    assert chunk_plan.unsupported(_described(given[0]), targets.parse("sm_90a")) is None
    checked(given)
    checked(case(name, m, n, k, gated=True, act="gelu_tanh", bias=True))
    checked(case(name, m, n, k, norm=True, add=True))


def _described(arguments) -> Product:
    return decode_linear._describe(decode_linear.DecodeLinear(*arguments).metas).product


def test_scales_of_16_bit_weights() -> None:
    """A factor for each row or one for all; along k only codes have scales."""
    for count in (37, 1):
        arguments, _, _ = case("16bit", 3, 37, 64)
        scale = torch.rand(count) + 0.5
        exact = (arguments[0].double() @ arguments[1].double().t()) * scale.double()
        for target in ("sm_80", "sm_90"):
            with rtkernels.emulate(target):
                out = rtkernels.decode_linear(arguments[0], arguments[1], scale)
            assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-4).all()


def test_refused_arguments() -> None:
    x, w = torch.ones(2, 64).bfloat16(), torch.ones(8, 64).bfloat16()
    with pytest.raises(rtkernels.ArgumentError, match="not differentiable"):
        rtkernels.decode_linear(x, w.clone().requires_grad_())
    with pytest.raises(rtkernels.ArgumentError, match="two halves and an activation"):
        rtkernels.decode_linear(x, w, gated=True)
    with pytest.raises(rtkernels.ArgumentError, match="add has shape"):
        rtkernels.decode_linear(x, w, add=x)


def test_leading_dimensions() -> None:
    assert checked(case("16bit", 1, 24, 64, lead=(3,), add=True)).shape == (3, 1, 24)


def test_result_does_not_depend_on_the_order_of_blocks() -> None:
    given = case("e4m3_block", 5, 260, 1152, norm=True)
    first = checked(given)
    for order in ("reverse", 3):
        assert torch.equal(checked(given, order=order), first)


@pytest.mark.parametrize("constant", (False, True))
def test_behind_another_kernel(constant: bool) -> None:
    """Weights may be loaded while the kernel before is still running, nothing else."""
    arguments, exact, error = case("16bit", 2, 40, 256, norm=True, add=True)
    x, *others = arguments
    others[9] = constant
    with rtkernels.emulate("sm_90"):
        first = FORWARD.call(
            x, torch.eye(256).to(BF16), None, None, None, None, None, None, None, False, constant, 0.0, 0.0, 1.0
        )
        out = FORWARD.call(first, *others)
    assert ((out.double() - exact).abs() <= error).all()


@at()
def test_special_values(place: str) -> None:
    with running_on(place) as device:
        x = torch.ones(2, 64, dtype=BF16, device=device)
        x[1, 3] = torch.inf
        w = torch.zeros(9, 64, dtype=BF16, device=device)
        w[4, 5], w[0] = torch.nan, 1.0
        out = FORWARD.call(x, w, None, None, None, None, None, None, None, False, False, 0.0, 0.0, 1.0)
        assert out[0, 0] == 64 and out[1, 0] == torch.inf and out[0, 4].isnan()
        assert (out[0, [1, 2, 3, 5, 6, 7, 8]] == 0).all() and out[1, 1:].isnan().all()


@pytest.mark.parametrize("size", (1e-30, 1e-9, 1e30))
def test_codes_and_activations_beyond_fp16(size: float) -> None:
    """Rows of bf16 are moved into the range of fp16, each by its own power of two."""
    arguments, exact, _ = case("e4m3_row", 3, 24, 256)
    sizes = torch.tensor([size, 1.0, 1.0])[:, None]
    x = arguments[0] * sizes.to(BF16)
    x[2, 1:] *= 2.0**-20
    exact = x.double() @ arguments[1].double().t() * arguments[2].double()
    error = x.double().abs() @ arguments[1].double().abs().t() * arguments[2].double() * 2.0**-20
    for target in ("sm_80", "sm_90"):
        with rtkernels.emulate(target):
            out = FORWARD.call(x, *arguments[1:])
        assert ((out.double() - exact).abs() <= error + exact.abs() * 2.0**-8).all()


def test_codes_and_infinite_activations() -> None:
    arguments, _, _ = case("e4m3_row", 3, 24, 256)
    arguments[1][:, 5] = 1.0
    x = arguments[0].clone()
    x[1, 5] = torch.inf
    for target in ("sm_80", "sm_90"):
        with rtkernels.emulate(target):
            out, plain = (FORWARD.call(a, *arguments[1:]) for a in (x, arguments[0]))
        assert (out[1] == torch.inf).all() and torch.equal(out[[0, 2]], plain[[0, 2]])


def test_nan_codes() -> None:
    given = case("e4m3_row", 1, 16, 64)
    given[0][1][3, 7] = torch.nan
    for target in ("sm_80", "sm_90"):
        with rtkernels.emulate(target):
            out = FORWARD.call(*given[0])
        assert out[0, 3].isnan() and out.isnan().sum() == 1


def _nvfp4(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(m + n + k)
    x, w = torch.randn(m, k, generator=g).to(BF16), torch.randn(n, k, generator=g)
    return x, *pack.quantize_nvfp4(w)


@at()
@pytest.mark.parametrize("m", (1, 4, 5, 8, 9))  # two kernels; torch
@pytest.mark.parametrize("k", (256, 768, 96))  # torch
def test_nvfp4(m: int, k: int, place: str) -> None:
    x, codes, scale, whole = _nvfp4(m, 24, k)
    values = pack.nibble_values(codes, "e2m1", torch.float64) * scale.double().repeat_interleave(16, 1) * whole.double()
    exact, magnitude = x.double() @ values.t(), x.double().abs() @ values.abs().t()
    gate, up = exact.chunk(2, -1)
    with running_on(place) as device:
        given = [t.to(device) for t in (x, codes, scale)]
        options = {"packed": "e2m1", "global_scale": whole.to(device)}
        out = rtkernels.decode_linear(*given, **options).cpu()
        gated = rtkernels.decode_linear(*given, act="silu", gated=True, **options).cpu()
    assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-8 + magnitude * 2.0**-20).all()
    wanted = torch.nn.functional.silu(gate) * up
    assert ((gated.double() - wanted).abs() <= wanted.abs() * 2.0**-8 + magnitude.amax() ** 2 * 2.0**-18).all()


@emulated
def test_nvfp4_as_a_backend() -> None:
    """``scaled_mm(backend="decode")`` has the same kernel; blocks of scales are refused."""
    x, codes, scale, whole = _nvfp4(3, 40, 512)
    options = {"packed": (None, "e2m1"), "global_scale": whole, "backend": "decode"}
    with rtkernels.emulate("sm_90"):
        out = rtkernels.scaled_mm(x, codes, None, scale, **options)
        assert torch.equal(out, rtkernels.decode_linear(x, codes, scale, packed="e2m1", global_scale=whole))
        with pytest.raises(RtkError, match="e2m1 codes without e4m3 scales of 16"):
            rtkernels.scaled_mm(x, codes, None, pack.swizzle_scales(scale), recipe="nvfp4", **options)


@emulated
@pytest.mark.parametrize("m", (2, 12))
def test_global_scales_of_other_weights(m: int) -> None:
    """Kernels do not read them, so plain torch runs."""
    arguments, *_ = case("e4m3_row", m, 24, 256)
    x, codes, scale, *_ = arguments
    with rtkernels.emulate("sm_90"):
        out = rtkernels.decode_linear(x, codes, scale, global_scale=torch.full((), 4.0))
        torch.testing.assert_close(out, rtkernels.decode_linear(x, codes, scale * 4.0), rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("wrong", (torch.ones(2), torch.ones((), dtype=torch.float64)))
def test_wrong_global_scales(wrong: torch.Tensor) -> None:
    x, codes, scale, _ = _nvfp4(1, 8, 256)
    with pytest.raises(ArgumentError, match=r"global_scale has dtype .*; expected one number of float32"):
        rtkernels.decode_linear(x, codes, scale, packed="e2m1", global_scale=wrong)


def test_what_the_kernel_does_not_take_runs_in_torch() -> None:
    checked(case("16bit", 3, 5, 13))
    checked(case("16bit", 17, 5, 64))


def _product(m: int, n: int, k: int, **more) -> Product:
    return Product(m, n, k, Matrix("bf16", k), Matrix("bf16", k), Matrix("bf16", n), **more)


def test_shapes_of_launches() -> None:
    """On 132 SMs, no more blocks than fit, and none much busier than the others."""
    target = targets.parse("sm_90a")
    for n, k, gate in ((4096, 4096, None), (28672, 4096, "silu"), (4096, 14336, None), (2048, 2048, None),
                       (151936, 1536, None), (2560, 1536, None), (1536, 1536, None), (4608, 1536, "silu"),
                       (1536, 4608, None)):  # fmt: skip
        for m in (1, 8, 16):
            p = _product(m, n, k, gate=gate)
            shape = decode_plan._shape(p, target, 132, True)
            assert shape is not None, (m, n, k)
            octets = -(-n // (4 if gate else 8))
            blocks = 264 if decode_plan._STREAM_ROWS < m <= 8 else 132
            busiest = shape.octets / shape.parts * blocks / octets
            assert -(-octets // shape.octets) * shape.parts <= blocks and busiest < 1.7, (n, k, shape)


def emulated_coverage() -> None:
    for target in ("sm_90",):
        with rtkernels.emulate(target):
            for name in ("16bit", "e4m3_row", "int8_row", "int4_group"):
                for dtype in (BF16, FP16):
                    for m in (1, 8, 9):
                        FORWARD.call(*case(name, m, 8, 64, dtype)[0])
            for name in ("16bit", "e4m3_row"):
                FORWARD.call(*case(name, 9, 8, 64)[0])
            for m in (1, 8):
                x, codes, scale, whole = _nvfp4(m, 8, 256)
                rtkernels.decode_linear(x, codes, scale, packed="e2m1", global_scale=whole)
            FORWARD.call(*case("int4_group", 17, 8, 128)[0])
