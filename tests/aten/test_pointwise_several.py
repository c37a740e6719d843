"""``rtkernels.pointwise`` with several results, kinds of promotion and ``out=``."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

import rtkernels
from rtkernels.custom import several
from rtkernels.errors import ArgumentError


@functools.cache  # what is created while tests are collected would be taken for operators of the library
def rotate():
    return rtkernels.pointwise(
        "test_rotate", ["a * c - b * s0", "b * c + a * s0"],
        backward={"a": "g0 * c + g1 * s0", "b": "g1 * c - g0 * s0", "c": "g0 + g1"},
        reference=lambda a, b, c, s: (a * c - b * s, b * c + a * s),
    )  # fmt: skip


@functools.cache
def split():
    return rtkernels.pointwise("test_split", ["fmaxf(a, 0.0f)", "a > 0.0f", "a * s0"],
                               promotion=["default", "ALWAYS_BOOL", "int_to_float"])  # fmt: skip


@functools.cache
def scale():
    return rtkernels.pointwise("test_out_scale", "a * s0", reference=lambda a, s: a * s)


def operands(dtype: torch.dtype):
    base = torch.randn(6, 20, 24).to(dtype)
    yield "flat", (base, base + 1, base * 2)
    yield "odd", tuple(x.flatten()[1:-2] for x in (base, base + 1, base * 2))
    yield "broadcast", (base, (base + 1)[:, :1], (base * 2)[0, 0])
    yield "permuted", (base.transpose(0, 2), (base + 1).transpose(0, 2), (base * 2).transpose(0, 2))
    yield "transposed", (base[0], torch.randn(24, 20).to(dtype).t(), base[1])
    yield "steps", (base[:, ::2], (base + 1)[:, ::2], (base * 2)[:, 1::2].flip(2))
    yield "scalar", (base[0, 0, 0], base[0, 0, 1], base[0, 1, 0])
    yield "empty", (base[:0], base[:0], base[:0])


@pytest.mark.parametrize(
    ("dtype", "target"), [(torch.float32, "sm_80"), (torch.bfloat16, "sm_90"), (torch.float16, "sm_80")], ids=str
)
def test_several_results(dtype: torch.dtype, target: str) -> None:
    for name, (a, b, c) in operands(dtype):
        with rtkernels.emulate(target):
            results = rotate()(a, b, c, 0.5)
        wide = [x.double() for x in (a, b, c)]
        expected = wide[0] * wide[2] - wide[1] * 0.5, wide[1] * wide[2] + wide[0] * 0.5
        like = a + b + c
        for result, exact in zip(results, expected, strict=True):
            assert (result.dtype, result.shape) == (dtype, like.shape), name
            assert name == "transposed" or result.stride() == like.stride(), name
            torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6, msg=name)
        torch.testing.assert_close(rotate()(a, b, c, 0.5)[0].double(), expected[0], rtol=2e-2, atol=2e-2)


def test_one_launch_reads_operands_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "run", lambda *args, **named: pytest.fail("results were computed one by one"))
    x = torch.randn(33, 65)
    with rtkernels.emulate():
        for a in (x, x.t(), x[:, ::2], x.half()):
            high, positive, scaled = split()(a, 3.0)
            assert torch.equal(high, a.clamp_min(0)) and torch.equal(positive, a > 0) and torch.equal(scaled, a * 3)


def _same(a: torch.Tensor) -> torch.Tensor:
    return a


def test_promotion() -> None:
    ints = torch.arange(-3, 4)
    high, positive, scaled = split()(ints, 0.5)
    assert (high.dtype, positive.dtype, scaled.dtype) == (torch.int64, torch.bool, torch.float32)
    torch.testing.assert_close(scaled, ints * 0.5)
    assert torch.equal(positive, ints > 0) and torch.equal(high, ints.clamp_min(0))
    x, mask = torch.randn(5), torch.tensor([True, False, True, True, False])
    kinds = {
        "int_to_float": (ints, torch.float32), "always_bool": (ints, torch.bool), "bool_to_long": (mask, torch.int64),
        "no_opmath": (mask, torch.bool), "default": (ints.int(), torch.int32),
    }  # fmt: skip
    for kind, (given, dtype) in kinds.items():
        same = rtkernels.pointwise(f"test_kind_{kind}", "a", promotion=kind, reference=_same)
        assert same(given).dtype == dtype
        assert same(x).dtype == (torch.bool if kind == "always_bool" else torch.float32)
        with rtkernels.emulate():
            assert torch.equal(same(given), given.to(dtype))
        fake = torch.ops.rtkernels.__getattr__(f"test_kind_{kind}")(given.to("meta"))
        assert fake.dtype == dtype
    with pytest.raises(ArgumentError, match="no complex tensors"):
        rtkernels.pointwise("test_bad", "a", promotion="complex_to_float")
    with pytest.raises(ArgumentError, match=r"promotion is 'int_to_flaot'.*did you mean 'int_to_float'"):
        rtkernels.pointwise("test_bad", "a", promotion="int_to_flaot")
    with pytest.raises(ArgumentError, match="expected a kind, or a list of 1"):
        rtkernels.pointwise("test_bad", "a", promotion=["default", "default"])
    positive = rtkernels.pointwise("test_kind_always_bool", "a", promotion="always_bool", reference=_same)
    assert torch.equal(positive(x.requires_grad_()), x != 0)  # no gradient, as for torch's comparisons


@pytest.mark.parametrize("emulated", [False, True])
def test_gradients(emulated: bool) -> None:
    a, b = (torch.randn(4, 5, requires_grad=True) for _ in range(2))
    c = torch.randn(5, requires_grad=True)
    weights = torch.randn(2, 4, 5)
    with rtkernels.emulate() if emulated else contextlib.nullcontext():
        first, second = rotate()(a, b, c, 0.5)
        grads = torch.autograd.grad((first * weights[0] + second * weights[1]).sum(), (a, b))
        (alone,) = torch.autograd.grad(rotate()(a, b, c, 0.5)[1].sum(), a)
    x, y = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    exact = (x * c.double() - y * 0.5) * weights[0] + (y * c.double() + x * 0.5) * weights[1]
    for mine, wanted in zip(grads, torch.autograd.grad(exact.sum(), (x, y)), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(alone, torch.full_like(alone, 0.5))


@pytest.mark.parametrize("emulated", [False, True])
def test_out(emulated: bool) -> None:
    a, b, c = torch.randn(3, 16, 24)
    expected = a * c - b * 0.5, b * c + a * 0.5
    with rtkernels.emulate() if emulated else contextlib.nullcontext():
        into = torch.empty(24, 16).t(), None  # strides that no result has by itself
        first, second = rotate()(a, b, c, 0.5, out=into)
        assert first is into[0]
        for result, exact in zip((first, second), expected, strict=True):
            torch.testing.assert_close(result, exact)
        x, y = a.clone(), b.clone()
        version = x._version
        results = rotate()(x, y, c, 0.5, out=(x, y))  # in place
        assert results[0] is x and results[1] is y and x._version > version
        for result, exact in zip((x, y), expected, strict=True):
            torch.testing.assert_close(result, exact)
        z = a.clone()
        assert scale()(z, 2.0, out=z) is z and torch.equal(z, a * 2)
        wide = torch.zeros(20, 24)
        for out, message in (
            (wide, r"out is \[20, 24\] torch.float32 on cpu; expected \[16, 24\]"),
            (a.half(), "torch.float16"),
            (3, "out is a int; expected a tensor"),
            (torch.zeros(24).expand(16, 24), "expected each element in memory of its own"),
            (torch.zeros(16, 24, requires_grad=True), "requires a gradient"),
        ):
            with pytest.raises(ArgumentError, match=message):
                scale()(a, 2.0, out=out)
        with pytest.raises(ArgumentError, match="overlaps an operand"):
            scale()(wide[:16], 2.0, out=wide[4:])
        with pytest.raises(ArgumentError, match=r"out\[1\] overlaps another result"):
            rotate()(a, b, c, 0.5, out=(x, x.view(16, 24)))
        with pytest.raises(ArgumentError, match="expected a tuple of 2 tensors"):
            rotate()(a, b, c, 0.5, out=x)
        with pytest.raises(ArgumentError, match="out is given, and a tensor requires a gradient"):
            rotate()(a.requires_grad_(), b, c, 0.5, out=(x, y))


def test_numbers_keep_their_names() -> None:
    second = rtkernels.pointwise("test_second", "a * s1 + s2", backward="g * s1")
    x = torch.randn(5, requires_grad=True)
    result = second(x, 3.0, 2.0)
    torch.testing.assert_close(result, x * 3 + 2)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], torch.full((5,), 3.0))


def test_definitions() -> None:
    assert rtkernels.pointwise("test_split", ["fmaxf(a, 0.0f)", "a > 0.0f", "a * s0"],
                               promotion=["default", "always_bool", "int_to_float"]) is split()  # fmt: skip
    x = torch.randn(3, 4)
    torch.library.opcheck(torch.ops.rtkernels.test_rotate.default, (x, x + 1, x[0], 1.0))
    for options, message in (
        ({"expression": []}, "has 0 expressions; expected one to three"),
        ({"expression": ["a"] * 4}, "has 4 expressions"),
        ({"expression": ["a", "a; b"]}, r"expression\[1\] is 'a; b'"),
        ({"expression": ["a", "c"]}, "without gaps"),
        ({"expression": ["a", "2 * a"], "backward": "g"}, "names a gradient: g0, g1"),
        ({"expression": ["a", "a * b * c"], "backward": dict.fromkeys("abc", "g0 + g1 + a + b")}, "at most three"),
    ):
        with pytest.raises(ArgumentError, match=message):
            rtkernels.pointwise("test_bad", **options)
    wrong = rtkernels.pointwise("test_wrong_reference", ["a", "a + a"], reference=lambda a: (a,))
    with pytest.raises(ArgumentError, match="reference returned 1 results; expected 2"):
        wrong(x)


def test_compiles() -> None:
    function = rotate()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def both(a, b, c):
        first, second = function(a, b, c, 0.5)
        return first + second

    a, b, c = torch.randn(3, 4, 5)
    torch.testing.assert_close(both(a, b, c), a * c - b * 0.5 + b * c + a * 0.5)
