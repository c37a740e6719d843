"""Rotary embeddings: autograd, errors, torch.compile, arrays, order of threads, and what only a GPU shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from contracts.samples import samples_of
from support.compare import assert_same_bits, poisoned, running_on
from support.places import ORDERS, at, emulated, error_tests
from support.rope_cases import CASES, MLA_CASES, Maker, check, check_mla, mla_rope, rope
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.rope import mla_rope as mla_rope_module
from rtkernels.ops.rope import rope as module
from rtkernels.ops.rope import rope_operators
from rtkernels.ops.rope.angles import Rotations

# ---- autograd -------------------------------------------------------------------------------------------------------


def test_only_the_gradients_that_are_wanted() -> None:
    m = Maker("wanted", torch.float32, "cpu")
    x, k, tables = m.normal(1, 3, 2, 8), m.normal(1, 3, 2, 8).requires_grad_(), m.angles(3, 4)
    y, ky = rope(x, **tables, k=k)
    ky.sum().backward()
    assert x.grad is None
    torch.testing.assert_close(k.grad, rope(torch.ones_like(k), **tables, inverse=True).detach())
    x.requires_grad_()
    y, ky = rope(x, **tables, k=k.detach())
    y.sum().backward()
    torch.testing.assert_close(x.grad, rope(torch.ones_like(x), **tables, inverse=True).detach())


def test_second_order_is_refused() -> None:
    m = Maker("second", torch.float32, "cpu")
    x = m.normal(1, 3, 2, 8).requires_grad_()
    (first,) = torch.autograd.grad(rope(x, **m.angles(3, 4)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_operators_pass_opcheck() -> None:
    for op, args in samples_of(module.OP.name, "cpu"):
        torch.library.opcheck(op.overload, args)


# ---- errors ---------------------------------------------------------------------------------------------------------


X, T = torch.ones(2, 6, 4, 16), torch.ones(6, 8)
PACKED = torch.ones(6, 4, 16)


def _meta(t: Tensor, device: int) -> tuple[Any, ...]:
    return t.dtype, t.shape, t.stride(), device


def _on_devices(**devices: int) -> Callable[[], Any]:
    index = {"positions": torch.ones(2, 6, dtype=torch.int32), "cu_seqlens": torch.ones(2, dtype=torch.int32)}
    given = {name: _meta(index[name], devices[name]) for name in index if name in devices}

    def call() -> None:
        k = _meta(X, devices["k"]) if "k" in devices else None
        turned = rope_operators.Turned(_meta(X, 0), k, "bshd", 0, 0, 0, False, "bshd")
        tables = (_meta(T, devices.get(name, 0)) for name in ("cos", "sin"))
        index = (given.get(name) for name in ("positions", "cu_seqlens"))
        rope_operators._check(turned, Rotations(*tables, *index, "", 0, 1, 1.0))

    return call


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: rope(X.double(), T, T), "x has dtype float64; expected one of bfloat16, float16, float32"),
    "dimensions": (lambda: rope(X[0, 0], T, T), r"x has shape \(4, 16\); expected 4 dimensions \(bshd\), or 3"),
    "layout": (lambda: rope(X, T, T, layout="bsdh"), "layout is 'bsdh'; expected one of bshd, sbhd, bhsd"),
    "k dtype": (lambda: rope(X, T, T, k=X.half()), "k has dtype float16; expected float32"),
    "k shape": (lambda: rope(X, T, T, k=X[:, :3]), r"k has shape \(2, 3, 4, 16\); expected that of x"),
    "k head": (lambda: rope(X, T, T, k=X[..., :8]), r"k has shape \(2, 6, 4, 8\); expected that of x"),
    "k device": (_on_devices(k=1), "k has device index 1; expected 0, that of x"),
    "odd rotary": (lambda: rope(X, T, T, rotary=7), "rotary is 7; expected an even number from 2 to the head size, 16"),
    "odd head": (lambda: rope(X[..., :15], T, T), "rotary is 15; expected an even number"),
    "large rotary": (lambda: rope(X, T, T, rotary=18), "rotary is 18; expected an even number"),
    "cos width": (
        lambda: rope(X, T[:, :6], T[:, :6]),
        r"cos has shape \(6, 6\); expected \[positions, n\] or \[batch, length, n\], where n is 8 .* or 16",
    ),
    "cos dimensions": (lambda: rope(X, T[0], T[0]), r"cos has shape \(8,\); expected \[positions, n\]"),
    "cos batch": (
        lambda: rope(X, T.expand(3, 6, 8), T.expand(3, 6, 8)),
        r"cos has shape \(3, 6, 8\); expected \(2, 6, 8\), a row for each token",
    ),
    "cos rows": (lambda: rope(X, T[:5], T[:5]), "cos has 5 rows; expected at least 6, one for each position"),
    "cos rows cp": (lambda: rope(X, T, T, cp_size=2), "cos has 6 rows; expected at least 12"),
    "cos dtype": (lambda: rope(X, T.half(), T.half()), "cos has dtype float16; expected one of float32"),
    "sin shape": (lambda: rope(X, T, T[:, :4]), r"sin has shape \(6, 4\); expected \(6, 8\), that of cos"),
    "sin dtype": (lambda: rope(X.half(), T, T.half()), "sin has dtype float16; expected float32, that of cos"),
    "cos device": (_on_devices(cos=-1), "cos has device index -1; expected 0, that of x"),
    "sin device": (_on_devices(sin=-1), "sin has device index -1; expected 0, that of x"),
    "cos gradient": (lambda: rope(X, T.clone().requires_grad_(), T), "cos or sin requires a gradient"),
    "positions dtype": (lambda: rope(X, T, T, positions=T[:2, :6]), "positions has dtype float32; expected one of"),
    "positions shape": (
        lambda: rope(X, T, T, positions=torch.ones(6, 2, dtype=torch.int32)),
        r"positions has shape \(6, 2\); expected \(2, 6\) or one row for all",
    ),
    "positions device": (_on_devices(positions=-1), "positions has device index -1; expected 0, that of x"),
    "positions and tables": (
        lambda: rope(X, T.expand(2, 6, 8), T.expand(2, 6, 8), positions=torch.ones(2, 6, dtype=torch.int32)),
        "a row for each token, and then neither positions nor cu_seqlens",
    ),
    "positions and cu_seqlens": (
        lambda: rope(PACKED, T, T, positions=torch.zeros(6).int(), cu_seqlens=torch.tensor([0, 6])),
        "got positions and cu_seqlens; expected one of them",
    ),
    "cu_seqlens dtype": (
        lambda: rope(PACKED, T, T, cu_seqlens=torch.zeros(2)),
        "cu_seqlens has dtype float32; expected one of int32, int64",
    ),
    "cu_seqlens device": (_on_devices(cu_seqlens=-1), "cu_seqlens has device index -1; expected 0, that of x"),
    "cu_seqlens batch": (
        lambda: rope(X, T, T, cu_seqlens=torch.tensor([0, 6])),
        r"cu_seqlens has shape \(2,\); expected \[sequences \+ 1\], and tokens without a batch dimension",
    ),
    "cu_seqlens shape": (
        lambda: rope(PACKED, T, T, cu_seqlens=torch.tensor([[0, 6]])),
        r"cu_seqlens has shape \(1, 2\); expected \[sequences \+ 1\]",
    ),
    "sections sum": (
        lambda: rope(X, T, T, sections=(1, 2, 3), positions=torch.zeros(3, 2, 6).int()),
        r"sections is \(1, 2, 3\); expected a sum of 8",
    ),
    "sections count": (lambda: rope(X, T, T, sections=(4, 4)), r"sections is \(4, 4\); expected three sizes"),
    "sections positions": (
        lambda: rope(X, T, T, sections=(4, 2, 2), positions=torch.zeros(2, 6).int()),
        r"positions has shape \(2, 6\); expected \(3, 2, 6\)",
    ),
    "sections alone": (lambda: rope(X, T, T, sections=(4, 2, 2)), r"sections need positions of shape \[3, ...\]"),
    "cp rank": (lambda: rope(X, T, T, cp_rank=2, cp_size=2), "cp_rank is 2 and cp_size 2; expected 0 <= cp_rank"),
    "cp length": (lambda: rope(X[:, :5], T, T, cp_size=2), "the length is 5; expected an even one"),
    "cp positions": (
        lambda: rope(X, T, T, cp_size=2, positions=torch.zeros(6).int()),
        "cp_size applies to positions that the op works out itself",
    ),
    "expanded": (
        lambda: rope(X[:1].expand(2, 6, 4, 16), T, T, in_place=True),
        "x has strides .*; expected memory of its own for every element",
    ),
    "not a tensor": (lambda: rope([1.0, 2.0], T, T), "expected a torch.Tensor or an array with __dlpack__"),
    "mla pos": (lambda: mla_rope(X, X, torch.ones(2, 6, 1, 18), T, T), "k_pos has 18 elements; expected at most 16"),
    "mla kv": (
        lambda: mla_rope(X, X[..., :5], X[:, :, :1, :4], T[:, :2], T[:, :2]),
        "q has 12 elements of a head beside the rotary part and kv 5 in all",
    ),
    "mla heads": (
        lambda: mla_rope(X, X, X[..., :4], T[:, :2], T[:, :2]),
        r"k_pos has shape \(2, 6, 4, 4\); expected the batch and length of kv and one head",
    ),
    "mla layouts": (
        lambda: mla_rope(X, X, X[:, :, :1, :4], T[:, :2], T[:, :2], output_layout="bshd", in_place=True),
        "output_layout is 'bshd'; expected 'sbhd', that of q, with in_place",
    ),
    "mla odd": (lambda: mla_rope(X, X, X[:, :, :1, :3], T, T), "rotary is 3; expected an even number"),
    "mla gradient": (
        lambda: mla_rope(X, X, X[:, :, :1, :4], T[:, :2].clone().requires_grad_(), T[:, :2]),
        "cos or sin requires a gradient",
    ),
}  # fmt: skip

test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


@pytest.mark.gpu
def test_devices_must_match() -> None:
    with pytest.raises(ArgumentError, match="cos is on cpu; expected cuda:0"):
        rope(X.cuda(), T, T)
    with pytest.raises(ArgumentError, match="cu_seqlens is on cpu; expected cuda:0"):
        rope(PACKED.cuda(), T.cuda(), T.cuda(), cu_seqlens=torch.tensor([0, 6]))


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = rope(q * 2, cos, sin, k=k, rotary=8, interleaved=True)
        y, kk, v = mla_rope(q, k, k[:, :, :1, :8].contiguous(), cos, sin)
        return (q * k).sum(-1) + (y * kk).sum(-1) + v.sum(-1)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (5, 6):
        m = Maker("compile", torch.float32, place)
        q, k, tables = m.normal(length, length, 3, 16), m.normal(length, length, 3, 16), m.angles(9, 4)
        torch.testing.assert_close(compiled(q, k, **tables), block(q, k, **tables))
        grads = []
        for function in (compiled, block):
            leaves = [t.clone().requires_grad_() for t in (q, k)]
            function(*leaves, **tables).square().sum().backward()
            grads.append([t.grad for t in leaves])
        torch.testing.assert_close(*grads)


@at("cpu", "cuda")
def test_torch_compile_in_place(place: str) -> None:
    def block(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = q * 2
        rope(q, cos, sin, in_place=True)
        return q + 1

    m = Maker("compile", torch.float32, place)
    q, tables = m.normal(2, 5, 3, 16), m.angles(5, 8)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, **tables), block(q, **tables))


def test_numpy_in_numpy_out() -> None:
    x, cos = np.random.default_rng(0).standard_normal((2, 3, 4, 8), dtype=np.float32), np.ones((3, 4), "f4")
    y, k = rope(x, cos, 0 * cos, k=x)
    assert isinstance(y, np.ndarray)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(k, x)


def test_bench_rows_agree_with_torch() -> None:
    (row,) = rows_of(module.OP.name)
    assert row.bytes == 169_869_312 and row.label == "rope_fwd b2s4096q32kv8d128"
    m = Maker("row", torch.float32, "cpu")
    inputs = {"q": m.normal(2, 5, 4, 32), "k": m.normal(2, 5, 2, 32), "tables": tuple(m.angles(5, 16).values())}
    torch.testing.assert_close(row.ours(**inputs), row.torch(**inputs))


# ---- order of threads, and the GPU ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ("many_heads", "odd_sizes", "sections"))
@at("sm_90", "cuda")
def test_equal_bits_twice(place: str, case: str) -> None:
    with running_on(place) as device:
        first, second = (check(CASES[case](Maker(case, torch.bfloat16, device))) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_thread_order_does_not_matter(order: str | int) -> None:
    for case in ("plain", "half", "odd_sizes", "sections"):
        with rtkernels.emulate("sm_90", order):
            check(CASES[case](Maker(case, torch.bfloat16, "cpu")))
    for case in ("plain", "odd", "many_heads"):
        with rtkernels.emulate("sm_90", order):
            check_mla(MLA_CASES[case], torch.bfloat16, "cpu")


@pytest.mark.gpu
def test_bench_shape() -> None:
    with poisoned():
        m = Maker("bench", torch.bfloat16, "cuda")
        check({"x": m.normal(2, 300, 32, 128), "k": m.normal(2, 300, 8, 128), **m.angles(300, 64)})


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31() -> None:
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("not enough free GPU memory")
    x = torch.ones(1, 2**31 // (32 * 128) + 3, 32, 128, device="cuda", dtype=torch.bfloat16)
    x[:, -3:].normal_()
    m = Maker("large", torch.bfloat16, "cuda")
    tables = m.angles(x.shape[1], 64)
    y = rope(x, **tables)
    wanted = rope(x[:, -3:].contiguous(), **{n: t[-3:].contiguous() for n, t in tables.items()})
    assert_same_bits(y[:, -3:], wanted)


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    m = Maker("graph", torch.bfloat16, "cuda")
    x, tables, starts = m.normal(64, 8, 128), m.angles(64, 64), m.starts(0, 20, 64)
    kv, pos = m.normal(64, 8, 256), m.normal(64, 1, 64)
    half = {n: t[:, :32].contiguous() for n, t in tables.items()}

    def run() -> tuple[Tensor, ...]:
        y = rope(x, **tables, cu_seqlens=starts)
        return y, *mla_rope(x, kv, pos, **half, cu_seqlens=starts)

    replay = captured(run)
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), run())


def test_mla_kernels_are_registered() -> None:
    assert set(mla_rope_module.KERNELS) <= set(module.OP.kernels)
