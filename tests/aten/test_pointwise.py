"""The pointwise and copy families by their kernels, in the emulator: classes of layouts, odd sizes, NaN, aliasing.

tests/conformance checks what operators compute; this checks how elements are addressed.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.overrides import taken
from support.places import emulated

import rtkernels
from rtkernels.aten import strides, table
from rtkernels.runtime.launch.plans import Plans

pytestmark = emulated
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _counters():
    rtkernels.aten.reset()


def check(function, *args, ours: bool = True, device: str = "cpu"):
    """Compare a function of torch ops with itself on our kernels: values, dtypes, strides; return the result."""
    args = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]  # keeps strides of dense ones
    want = function(*[arg.clone() if isinstance(arg, torch.Tensor) and arg._base is None else arg for arg in args])
    limits = dict(table.MIN_ELEMENTS)
    table.MIN_ELEMENTS.update(dict.fromkeys(limits, 0))
    try:
        if device == "cpu":
            with rtkernels.emulate("sm_80"), rtkernels.use(["ew", "copy"]):
                got = function(*args)
        else:
            with rtkernels.use(["ew", "copy"]):
                got = function(*args)
    finally:
        table.MIN_ELEMENTS.update(limits)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got.dtype == want.dtype and got.stride() == want.stride()
    if ours:
        left = [row for row in rtkernels.report(as_rows=True) if row["torch"]]
        assert not left, left
    return got


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", (1, 3, 4, 2047, 2048, 2049, 4099))
def test_flat_sizes(size: int, device: str) -> None:
    check(torch.add, torch.randn(size), torch.randn(size), device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_layouts(device: str) -> None:
    x = torch.randn(6, 37, device=device)
    views = {
        "row broadcast": (x, torch.randn(37, device=device)),
        "row broadcast, vectors": (torch.randn(5, 8, device=device), torch.randn(8, device=device)),
        "column broadcast": (x, torch.randn(6, 1, device=device)),
        "misaligned": (torch.randn(101, device=device)[1:], torch.randn(103, device=device)[3:]),
        "stepped": (torch.randn(12, 74, device=device)[::2, ::2], x),
        "transposed": (torch.randn(35, 40, device=device).t(), torch.randn(40, 35, device=device)),
        "transposed batches": (torch.randn(3, 35, 40, device=device).mT, torch.randn(3, 40, 35, device=device)),
        "expanded": (torch.randn(1, 37, device=device).expand(6, 37), x),
        "channels last": (torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last),) * 2,
        "permuted": (torch.randn(4, 5, 6, device=device).permute(2, 0, 1), torch.randn(6, 4, 5, device=device)),
        "0-d": (torch.tensor(2.0, device=device), x),
        "both 0-d": (torch.tensor(2.0, device=device), torch.tensor(3.0, device=device)),
        "empty": (x[:0], x[:0]),
        "five dimensions": (torch.randn(2, 3, 2, 3, 4).to(device)[:, :, ::2].transpose(0, 3), x[0, :4]),
    }
    for name, (a, b) in views.items():
        try:
            check(lambda a, b: torch.add(a, b, alpha=2), a, b, device=device)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_squares(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that exist in part, batches, constants beside the operand, copies and conversions."""
    monkeypatch.setattr(strides, "_MIN_SQUARES", 0)
    Plans.forget_all()
    x, y = torch.randn(152, 72, device=device).to(dtype), torch.randn(72, 152, device=device).to(dtype).t()
    check(torch.add, x, y, device=device)
    if dtype == torch.float32:
        batches = torch.randn(3, 72, 24, device=device).mT
        check(torch.add, x[:24], batches, device=device)
        check(torch.add, x[:24, :1], batches.contiguous().mT.contiguous().mT, device=device)
        check(lambda y: y.contiguous(), y, device=device)
    else:
        check(lambda x, y: torch.addcmul(x, x, y, value=2), x, y, device=device)
        check(lambda y: torch.empty(152, 72, device=device).copy_(y), y, device=device)
    Plans.forget_all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "dim"), [((6, 32), 1), ((4, 6, 8), 1), ((3, 2064), -1), ((7, 30), 1)], ids=str)
def test_gradient_of_glu(shape: tuple[int, ...], dim: int, device: str) -> None:
    x = torch.randn(shape, device=device)
    dy = torch.randn_like(x.chunk(2, dim)[0], memory_format=torch.contiguous_format)
    check(lambda dy, x: torch.ops.aten.glu_backward(dy, x, dim), dy, x, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_in_place_and_out(device: str) -> None:
    x, y = torch.randn(6, 8, device=device), torch.randn(8, device=device)
    check(lambda x, y: x.add_(y), x.clone(), y, device=device)
    check(lambda x, y: x.t().add_(y[:, None]), x.clone(), y, device=device)
    out = torch.empty(8, 6, device=device).t()
    assert check(lambda x, y: torch.add(x, y, out=out), x, y, device=device) is out
    with rtkernels.emulate("sm_80"), rtkernels.use(["add"]):
        z = torch.randn(9, device=device)
        assert z.add_(1) is z
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.zeros(1, device=device).expand(5).add_(1)
        with pytest.raises(RuntimeError, match="result type Float can't be cast"):
            torch.arange(3, device=device).add_(1.5)
    shared = torch.arange(9.0, device=device)
    with rtkernels.emulate("sm_80"), rtkernels.use(["add"]):
        with pytest.raises(RuntimeError, match="memory"):
            shared[1:].add_(shared[:-1])
    wrong = iter([torch.empty(3, device=device) for _ in range(2)])
    with pytest.warns(UserWarning, match="resized"):
        check(lambda x: torch.add(x, 1, out=next(wrong)), x, ours=False, device=device)


def test_nan_infinities_and_numbers() -> None:
    special = torch.tensor([0.0, -0.0, 1.5, -1.5, math.nan, math.inf, -math.inf])
    check(torch.maximum, special, special.flip(0).clone())
    check(lambda x: x * 0.1, special.bfloat16())
    check(lambda x: x + True, torch.arange(5, dtype=torch.int32), ours=False)
    check(lambda x: x == 0.1, torch.full((5,), 0.1).bfloat16(), ours=False)
    check(lambda x: x + 300, torch.arange(5, dtype=torch.uint8), ours=False)  # torch wraps


def test_gradient_of_a_chain() -> None:
    x = torch.randn(5, 7, requires_grad=True)

    def gradient(x):
        return torch.autograd.grad(((x * 2 + x) * torch.arange(7.0)).sum(), x)[0]

    check(gradient, x, ours=False)


@pytest.mark.parametrize("device", DEVICES)
def test_copies(device: str) -> None:
    x = torch.randn(5, 36, device=device)
    doubles = torch.randn(3, 4, dtype=torch.float64, device=device)
    for function in (
        lambda x: x.t().contiguous(),
        lambda x: x[:, ::3].clone(),
        lambda x: x.repeat(2, 3, 1),
        lambda x: x.flip(1),
        lambda x: torch.cat([x, x[:2], x[:0]]),
        lambda x: torch.cat([x, x[:, :7].contiguous()], 1),
        lambda x: torch.cat([x.t(), x.t()], 1),
        lambda x: torch.cat([x] * 11),
        lambda x: torch.stack([x, x], -1),
        lambda x: torch.triu(x, 2),
        lambda x: torch.triu(x[:, :33], -1),
        lambda x: torch.nn.functional.pad(x, (1, 2, -1, 3), value=2.5),
        lambda x: torch.slice_scatter(x, torch.ones(5, 2, device=x.device), 1, 3, 7, 2),
        lambda x: torch.empty_like(x).copy_(x[0]),
    ):
        check(function, x, device=device)
    y, longer = x + 1, torch.cat([x, x])
    for _ in range(2):  # the second call is a replay
        check(lambda x, y: torch.cat([x, y]), x, y, device=device)
        check(lambda x, y: torch.cat([x, y], 1), x, y, device=device)
        check(lambda x, y: torch.stack([x, y], 1), x, y, device=device)
        check(lambda x, y: torch.cat([y, x]), longer, x, device=device)
    check(lambda x: torch.cat([x]), x, device=device)
    one = x.clone()
    with taken("sm_80" if device == "cpu" else "cuda", "cat"):
        assert torch.cat([one]).data_ptr() != one.data_ptr()
    check(torch.clone, doubles.t(), device=device)
    check(lambda x: torch.empty_like(x).copy_(2.5), x, ours=False, device=device)
    check(lambda z: z.conj().clone(), torch.randn(3, dtype=torch.complex64), ours=False, device=device)
    check(lambda z: z.conj().imag.clone(), torch.randn(3, dtype=torch.complex64), ours=False, device=device)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_torch_has_kernels_for(device: str) -> None:
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    dropped, of_squares = torch.ops.aten.native_dropout_backward.default, torch.ops.aten.mse_loss_backward.default
    check(lambda g, mask: dropped(g, mask, 2.0), x, y > 0, device=device)
    for reduction in (0, 1, 2):
        grad = y * 2 if reduction == 0 else y[0, 0].clone()
        check(lambda g, x, y, how=reduction: of_squares(g, x, y, how), grad, x, y, device=device)


def test_pointwise_from_an_expression() -> None:
    scaled = rtkernels.pointwise("test_scaled", "a * b + s0", backward={"a": "g * b", "b": "g * a"})
    assert rtkernels.pointwise("test_scaled", "a * b + s0", backward={"a": "g * b", "b": "g * a"}) is scaled
    x, y = torch.randn(5, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    result = scaled(x, y, 2.0)
    torch.testing.assert_close(result, x * y + 2)
    result.sum().backward()
    torch.testing.assert_close(x.grad, y.detach().expand(5, 7))
    torch.testing.assert_close(y.grad, x.detach().sum(0))
    torch.library.opcheck(torch.ops.rtkernels.test_scaled.default, (x.detach(), y.detach(), 1.0))
    for options, message in (
        ({"name": "9x", "expression": "a"}, "name is '9x'"),
        ({"name": "test_other", "expression": "s0"}, "names a tensor"),
        ({"name": "test_other", "expression": "b"}, "without gaps"),
        ({"name": "test_other", "expression": "a; b"}, "expected one C expression"),
        ({"name": "test_scaled", "expression": "a"}, "other expressions"),
        ({"name": "rms_norm_fwd", "expression": "a"}, "an operator of rtkernels already"),
        ({"name": "test_other", "expression": "a * b", "backward": "g"}, "for each of a, b"),
        ({"name": "test_other", "expression": "a", "backward": "a"}, "names the gradient g"),
        ({"name": "test_other", "expression": "a", "backward": "g * c"}, "names what expression does not"),
    ):
        with pytest.raises(rtkernels.ArgumentError, match=message):
            rtkernels.pointwise(**options)
    with pytest.raises(rtkernels.ArgumentError, match="got 2 arguments; expected a, b, s0"):
        scaled(x, y)
    with pytest.raises(rtkernels.ArgumentError, match="b is a float; expected a tensor"):
        scaled(x, 2.0, 2.0)


@pytest.mark.gpu
def test_a_captured_graph_replays_with_new_data() -> None:
    x, y = torch.randn(1 << 20, device="cuda"), torch.tensor(3.0, device="cuda")
    with taken("cuda", ["ew", "copy"]):
        for _ in range(2):
            torch.where(x > 0, x * y, x).masked_fill_(x < -1, y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = torch.where(x > 0, x * y, x).masked_fill_(x < -1, y)
    x.normal_()
    y.fill_(5.0)
    graph.replay()
    torch.testing.assert_close(z, torch.where(x > 0, x * y, x).masked_fill(x < -1, 5.0))


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_31_elements() -> None:
    x = torch.ones(2**31 + 5, dtype=torch.int8, device="cuda")
    rtkernels.aten.reset()
    with rtkernels.use("add"):
        flat, strided = x + 1, x[::2] + x[::2]
    assert torch.equal(flat[-5:], torch.full((5,), 2, dtype=torch.int8, device="cuda"))
    assert strided[-1] == 2
    assert [(row["overload"], row["ours"], row["torch"]) for row in rtkernels.report(as_rows=True)] == [
        ("add.Tensor", 2, 0)
    ]
