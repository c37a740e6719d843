"""qk_norm_rope: autograd, errors, torch.compile, arrays, order of threads, and what only a GPU shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from contracts.samples import samples_of
from support.compare import assert_same_bits, poisoned, running_on
from support.places import at, error_tests, meta_on, order_test
from support.qk_norm_rope_cases import CASES, Inputs, check, qk_norm_rope
from support.ways import assert_equal_bits, captured
from torch import Tensor

from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.rope import qk_norm_rope as module

# ---- autograd -------------------------------------------------------------------------------------------------------


def test_only_the_gradients_that_are_wanted() -> None:
    inputs = Inputs("plain", torch.float32, "cpu")
    q_weight, k_weight = inputs.weights
    k_weight.requires_grad_()
    q, k, v = qk_norm_rope(inputs.qkv, q_weight, k_weight, *inputs.tables, **inputs.options)
    (q.sum() + k.sum() + v.sum()).backward()
    assert k_weight.grad is not None and q_weight.grad is None and inputs.qkv.grad is None
    qkv = inputs.qkv.clone().requires_grad_()
    q, k, v = qk_norm_rope(qkv, q_weight, k_weight.detach(), *inputs.tables, **inputs.options)
    k.sum().backward()
    assert qkv.grad.any()


def test_second_order_is_refused() -> None:
    inputs = Inputs("plain", torch.float32, "cpu")
    qkv = inputs.qkv.clone().requires_grad_()
    q, _, _ = qk_norm_rope(qkv, *inputs.weights, *inputs.tables, **inputs.options)
    (first,) = torch.autograd.grad(q.square().sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_operators_pass_opcheck() -> None:
    for op, args in samples_of(module.OP.name, "cpu"):
        torch.library.opcheck(op.overload, args)


# ---- errors ---------------------------------------------------------------------------------------------------------


QKV, W, T = torch.ones(6, 2, 8 * 16), torch.ones(16), torch.ones(6, 8)
HEADS = {"q_heads": 4, "kv_heads": 2}
OPTIONS = (4, 2, True, "sbhd", 0, 0, False, 1e-6, 0.0)  # of the operators, before cos and sin
REST = (None, None, "", 0, 1, 1.0)  # and after them


def _run(qkv: Any = QKV, q_weight: Any = W, k_weight: Any = W, cos: Any = T, sin: Any = T, **options: Any) -> Any:
    return qk_norm_rope(qkv, q_weight, k_weight, cos, sin, **(HEADS | options))


def _backward(*gradients: Tensor, weights: tuple[Any, Any] = (W, W)) -> Any:
    return module.BACKWARD(*gradients, QKV, *weights, *OPTIONS, True, T, T, *REST)


DQ, DK = torch.ones(2, 6, 4, 16), torch.ones(2, 6, 2, 16)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: _run(QKV.double()), "qkv has dtype float64; expected one of bfloat16, float16, float32"),
    "dimensions": (lambda: _run(QKV[0, 0]), r"qkv has shape \(128,\); expected 3 dimensions \(sb\), or 2"),
    "layout": (lambda: _run(layout="bhsd"), "layout is 'bhsd'; expected 'sbhd' or 'bshd'"),
    "head order": (lambda: _run(head_order="qkv"), "head_order is 'qkv'; expected 'grouped' or 'plain'"),
    "no heads": (lambda: _run(kv_heads=0), "q_heads is 4 and kv_heads 0; expected at least 1 of each"),
    "groups": (lambda: _run(q_heads=5), "q_heads is 5; expected a multiple of kv_heads, 2, for the grouped order"),
    "columns": (
        lambda: _run(q_heads=3, kv_heads=1),
        r"qkv has 128 columns; expected a multiple of q_heads \+ 2 \* kv_heads, 3 \+ 2 \* 1",
    ),
    "q_weight shape": (lambda: _run(q_weight=W[:8]), r"q_weight has shape \(8,\); expected \(16,\), the size of"),
    "k_weight shape": (lambda: _run(k_weight=W[:8]), r"k_weight has shape \(8,\); expected \(16,\)"),
    "weight dtype": (lambda: _run(q_weight=W.half()), "q_weight has dtype float16; expected one of float32"),
    "one weight": (lambda: _run(k_weight=None), "got one of q_weight and k_weight; expected both or neither"),
    "weights differ": (
        lambda: _run(QKV.half(), W, W.half()),
        "k_weight has dtype float16; expected float32, that of q_weight",
    ),
    "weight device": (
        lambda: module.FORWARD.check(
            meta_on(0, QKV), meta_on(1, W), meta_on(1, W), *OPTIONS, meta_on(0, T), meta_on(0, T), *REST
        ),
        "q_weight has device index 1; expected 0, that of qkv",
    ),
    "odd rotary": (lambda: _run(rotary=7), "rotary is 7; expected an even number from 2 to the head size, 16"),
    "cos shape": (lambda: _run(cos=T[:, :4], sin=T[:, :4]), r"cos has shape \(6, 4\); expected \[positions, n\]"),
    "sin shape": (lambda: _run(sin=T[:, :4]), r"sin has shape \(6, 4\); expected \(6, 8\), that of cos"),
    "cos rows": (lambda: _run(cos=T[:4], sin=T[:4]), "cos has 4 rows; expected at least 6"),
    "cos gradient": (lambda: _run(cos=T.clone().requires_grad_()), "cos or sin requires a gradient"),
    "cu_seqlens dtype": (
        lambda: _run(QKV[:, 0], cu_seqlens=torch.zeros(2)),
        "cu_seqlens has dtype float32; expected one of int32, int64",
    ),
    "cu_seqlens batch": (lambda: _run(cu_seqlens=torch.tensor([0, 6])), "expected .* tokens without a batch dimension"),
    "positions shape": (lambda: _run(positions=torch.zeros(6, 2).int()), r"positions has shape \(6, 2\); expected \(2"),
    "cp rank": (lambda: _run(cp_rank=-1), "cp_rank is -1 and cp_size 1; expected 0 <= cp_rank < cp_size"),
    "not a tensor": (lambda: _run([1.0]), "expected a torch.Tensor or an array with __dlpack__"),
    "dq shape": (lambda: _backward(DK, DK, DK), r"dq has shape \(2, 6, 2, 16\); expected \(2, 6, 4, 16\)"),
    "dk shape": (lambda: _backward(DQ, DQ, DK), r"dk has shape \(2, 6, 4, 16\); expected \(2, 6, 2, 16\)"),
    "dv dtype": (lambda: _backward(DQ, DK, DK.half()), "dv has dtype float16; expected float32, that of qkv"),
    "weight_grad": (lambda: _backward(DQ, DK, DK, weights=(None, None)), "weight_grad is True but there are no"),
}  # fmt: skip

test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


@pytest.mark.gpu
def test_devices_must_match() -> None:
    with pytest.raises(ArgumentError, match="q_weight is on cpu; expected cuda:0"):
        _run(QKV.cuda(), cos=T.cuda(), sin=T.cuda())
    with pytest.raises(ArgumentError, match="cu_seqlens is on cpu; expected cuda:0"):
        _run(QKV[:, 0].cuda(), W.cuda(), W.cuda(), T.cuda(), T.cuda(), cu_seqlens=torch.tensor([0, 6]))


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = qk_norm_rope(qkv * 2, q_weight, k_weight, cos, sin, q_heads=2, kv_heads=2, rotary=8, silu=True)
        return q * k + v

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (5, 6):
        tensors = [torch.randn(length, 3, 6 * 16, device=place), *torch.randn(2, 16, device=place)]
        tables = torch.randn(2, 9, 4, device=place)
        torch.testing.assert_close(compiled(*tensors, *tables), block(*tensors, *tables))
        grads = []
        for function in (compiled, block):
            leaves = [t.clone().requires_grad_() for t in tensors]
            function(*leaves, *tables).square().sum().backward()
            grads.append([t.grad for t in leaves])
        torch.testing.assert_close(*grads)


def test_numpy_in_numpy_out() -> None:
    qkv = np.random.default_rng(0).standard_normal((6, 2, 128), dtype=np.float32)
    ones, cos = np.ones(16, "f4"), np.ones((6, 8), "f4")
    q, k, v = qk_norm_rope(qkv, ones, ones, cos, 0 * cos, **HEADS)
    assert all(isinstance(t, np.ndarray) for t in (q, k, v)) and q.shape == (2, 6, 4, 16)
    np.testing.assert_allclose((q**2).mean(-1), 1.0, rtol=1e-4)
    np.testing.assert_array_equal(v[:, :, 0], qkv.transpose(1, 0, 2)[..., 48:64])


def test_bench_rows_agree_with_torch() -> None:
    rows = {(row.name, row.shape): row for row in rows_of(module.OP.name)}
    four, eight = "s4096b2q32kv4d128", "s4096b2q32kv8d128"
    wanted = {four: (168_820_736, 244_318_208), eight: (202_375_168, 286_261_248)}
    for shape, (fwd, bwd) in wanted.items():
        assert rows["qk_norm_rope_fwd", shape].bytes == fwd and rows["qk_norm_rope_bwd", shape].bytes == bwd
    generator = torch.Generator().manual_seed(0)
    angle = torch.randn(5, 32, generator=generator)
    inputs = {
        "qkv": torch.randn(5, 2, 8 * 96, generator=generator),
        "q_weight": torch.randn(96, generator=generator),
        "k_weight": torch.randn(96, generator=generator),
        "tables": (angle.cos(), angle.sin()),
        **HEADS,
    }
    dy = tuple(torch.randn(2, 5, heads, 96, generator=generator) for heads in (4, 2, 2))
    forward, backward = rows["qk_norm_rope_fwd", four], rows["qk_norm_rope_bwd", four]
    torch.testing.assert_close(forward.ours(**inputs), forward.torch(**inputs))
    torch.testing.assert_close(backward.ours(dy=dy, **inputs), backward.torch(dy=dy, **inputs), rtol=1e-5, atol=1e-5)


# ---- order of threads, and the GPU ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ("bench", "odd", "many_tokens", "silu_odd"))
@at("sm_90", "cuda")
def test_equal_bits_twice(place: str, case: str) -> None:
    with running_on(place) as device:
        first, second = (check(Inputs(case, torch.bfloat16, device)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)


test_thread_order_does_not_matter = order_test(
    lambda case: check(Inputs(case, torch.bfloat16, "cpu")),
    *("plain", "odd", "fraction", "many_tokens", "split_chunks"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", (4, 8))
def test_bench_shapes(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"q_heads": 32, "kv_heads": kv_heads, "dim": 128, "rotary": 64, "length": 700, "rows": 700}
    monkeypatch.setitem(CASES, "large", case)
    with poisoned():
        check(Inputs("large", torch.bfloat16, "cuda"))


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31() -> None:
    length = 2**31 // (40 * 128) + 5
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("not enough free GPU memory")
    qkv = torch.ones(length, 1, 40 * 128, device="cuda", dtype=torch.bfloat16)
    qkv[-5:].normal_()
    weights, tables = torch.randn(2, 128, device="cuda").bfloat16(), torch.randn(2, length, 32, device="cuda")
    options = {"q_heads": 32, "kv_heads": 4, "rotary": 64}
    last = qkv[-5:].clone().requires_grad_()
    qkv.requires_grad_()
    whole = qk_norm_rope(qkv, *weights, *tables, **options)
    part = qk_norm_rope(last, *weights, *tables[:, -5:].contiguous(), **options)
    for a, b in zip(whole, part, strict=True):
        assert_same_bits(a[:, -5:].detach(), b.detach())
    torch.autograd.backward(whole, [torch.ones_like(t) for t in whole])
    torch.autograd.backward(part, [torch.ones_like(t) for t in part])
    assert_same_bits(qkv.grad[-5:], last.grad)


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    inputs = Inputs("sequences", torch.bfloat16, "cuda")
    qkv = inputs.qkv.clone()
    starts = inputs.options["cu_seqlens"]
    options = (4, 2, True, "sbhd", 0, 0, False, 1e-6, 0.0)
    angles = (*inputs.tables, None, starts, "", 0, 1, 1.0)

    def run() -> tuple[Tensor, ...]:
        results = module.FORWARD(qkv, *inputs.weights, *options, *angles)
        return *results, *module.BACKWARD(*inputs.gradients, qkv, *inputs.weights, *options, True, *angles)

    replay = captured(run)
    qkv.copy_(torch.randn_like(qkv))
    starts[1:3] = 6
    assert_equal_bits(replay(), run())
