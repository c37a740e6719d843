"""qkv_split and rope_table: kernels, values, caches at positions of the device, gradients, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import running_on
from support.inference import EVERYWHERE, assert_captures, assert_like_reference, normal_numbers
from support.places import at, error_tests
from torch import Tensor

import rtkernels
from rtkernels import qkv_split, rope_table
from rtkernels.errors import ArgumentError
from rtkernels.ops.rope import rope_table as tables_module
from rtkernels.ops.rope.rope_scaling import Scaling

normal = normal_numbers(0)
COS, SIN = rope_table(32, 16)
TABLE = torch.stack((COS, SIN), -1).flatten(-2).bfloat16()  # cos and sin in alternating columns
POSITIONS = torch.tensor([1, 7], dtype=torch.int32)


def cached(qkv: Tensor, *tables: Tensor, pos: Any) -> tuple[Tensor, ...]:
    caches = [torch.zeros(2, 3, 9, 1, 16, dtype=qkv.dtype, device=qkv.device)[:, 1] for _ in range(2)]  # of a layer
    return qkv_split(qkv, 4, 1, rope=tables, k_cache=caches[0], v_cache=caches[1], pos=pos)


@EVERYWHERE
def test_kernels(where: str) -> None:
    qkv, weight = normal(2, 5, 6 * 16), normal(16, dtype=torch.float32)
    assert_like_reference(where, qkv_split, qkv, 4, 1)
    assert_like_reference(where, qkv_split, qkv, 2, 2, rope=(COS, SIN), q_norm=weight, k_norm=weight, pos=POSITIONS)
    assert_like_reference(
        where, qkv_split, qkv, 4, 1, rope=(TABLE[:, 0::2], TABLE[:, 1::2]), style="interleaved", pos=29
    )
    full = [torch.cat((t, t), -1).bfloat16() for t in (COS, SIN)]
    assert_like_reference(where, qkv_split, qkv[0], 4, 1, rope=tuple(full), k_norm=weight)
    assert_like_reference(where, cached, qkv, COS, SIN, pos=torch.tensor([3, 6], dtype=torch.int32))


def emulated_coverage() -> None:
    test_kernels("sm_90")


@pytest.mark.slow
@EVERYWHERE
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_kernels_of_any_head(where: str, dtype: torch.dtype) -> None:
    assert_like_reference(where, qkv_split, normal(3, 3 * 9, dtype=dtype), 1, 1)
    assert_like_reference(where, qkv_split, normal(3, 3 * 72, dtype=dtype), 1, 1, rope=rope_table(8, 72))
    for style in ("half", "interleaved"):
        assert_like_reference(
            where, qkv_split, normal(3, 4 * 20, dtype=dtype), 2, 1, rope=rope_table(8, 6), style=style,
            q_norm=normal(20, dtype=dtype),
        )  # fmt: skip
        assert_like_reference(
            where, qkv_split, normal(2, 10 * 256, dtype=dtype), 8, 1, rope=rope_table(4, 256), style=style
        )


def plain(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, first: int, interleaved: bool) -> Tensor:
    q, k, v = qkv.unflatten(-1, (-1, 16)).split((4, 1, 1), -2)

    def rotated(x: Tensor, weight: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
        c, s = (t[first : first + qkv.shape[-2], None] for t in (COS, SIN))
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        parts = a * c - b * s, b * c + a * s
        return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

    return torch.cat((rotated(q, q_norm), rotated(k, k_norm), v), -2)


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("lead", ((5,), (2, 5)))
def test_values_and_gradients(lead: tuple[int, ...], interleaved: bool) -> None:
    leaves = [normal(*shape, dtype=torch.float32).requires_grad_() for shape in ((*lead, 96), (16,), (16,))]
    qkv, q_norm, k_norm = leaves
    style = "interleaved" if interleaved else "half"
    for pos in (3, torch.tensor([3], dtype=torch.int32)):
        parts = qkv_split(qkv, 4, 1, rope=(COS, SIN), style=style, q_norm=q_norm, k_norm=k_norm, pos=pos)
        got, wanted = torch.cat(parts, -2), plain(qkv, q_norm, k_norm, 3, interleaved)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        dy = torch.randn(wanted.shape)
        for a, b in zip(*(torch.autograd.grad(t, leaves, dy) for t in (got, wanted)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_caches() -> None:
    qkv = normal(2, 5, 96)
    q, k, v = qkv_split(qkv, 4, 1, rope=(COS, SIN), pos=POSITIONS)
    q2, k_cache, v_cache = cached(qkv, COS, SIN, pos=POSITIONS)
    assert torch.equal(q, q2)
    for b, first in enumerate(POSITIONS.tolist()):
        fits = min(5, 9 - first)
        assert torch.equal(k_cache[b, first : first + fits], k[b, :fits])
        assert torch.equal(v_cache[b, first : first + fits], v[b, :fits])
        assert k_cache[b, :first].eq(0).all() and v_cache[b, first + fits :].eq(0).all()


def test_out_empty_and_beyond_the_table() -> None:
    qkv = normal(3, 96)
    out = [torch.empty(3, h, 16, dtype=qkv.dtype) for h in (4, 1, 1)]
    found = qkv_split(qkv, 4, 1, out=out)
    assert all(a is b for a, b in zip(found, out, strict=True))
    assert torch.equal(torch.cat(found, 1).flatten(1), qkv)
    assert qkv_split(qkv[:0], 4, 1)[0].shape == (0, 4, 16)
    q, _, v = qkv_split(qkv, 4, 1, rope=(COS, SIN), pos=31)
    assert q[0].isfinite().all() and q[1:].isnan().all() and v.isfinite().all()


@at("cpu", "sm_80", "cuda")
def test_tables(place: str) -> None:
    rates = 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    many = torch.randint(1 << 20, (3, 5), generator=torch.Generator().manual_seed(0))
    with running_on(place) as device:
        for positions in (0, 5, torch.tensor(7), many, many.int()[:, ::2], many / 3):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                given = positions if isinstance(positions, int) else positions.to(device)
                for _ in range(2):
                    tables = rope_table(given, 8, base=100.0, scaling=0.5, dtype=dtype, device=device)
                p = torch.arange(positions) if isinstance(positions, int) else positions
                angles = (p.double() * 0.5)[..., None] * rates
                for table, wanted in zip(tables, (angles.cos(), angles.sin()), strict=True):
                    torch.testing.assert_close(table.cpu(), wanted.to(dtype), rtol=0, atol=2e-7)
        assert torch.equal(rope_table(torch.tensor([[3, 1]]), 8)[0][0, 1], rope_table(2, 8)[0][1])
        positions = torch.ones(2, requires_grad=True, device=device)
        rope_table(positions, 8)[1].sum().backward()
        assert positions.grad.isfinite().all()


def test_a_graph_has_rates_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for later calls is given back when there is too much of it; a graph would still read it."""
    device, kept, result = torch.device("cuda", 0), torch.zeros(4), torch.ones(4)
    capturing, plain = [False], Scaling("default", 100.0)
    monkeypatch.setattr(tables_module, "current_stream", lambda index: 5)
    monkeypatch.setattr(tables_module, "is_capturing", lambda: capturing[0])
    monkeypatch.setattr(tables_module, "_compute_rates", lambda *_: result)
    monkeypatch.setattr(tables_module, "_rates", {(plain, 8, device, 5): kept})
    assert tables_module._rates_of(plain, 8, device) is kept
    capturing[0] = True
    assert tables_module._rates_of(plain, 8, device) is result
    assert tables_module._rates_of(plain, 16, device) is result and len(tables_module._rates) == 1
    capturing[0] = False
    assert tables_module._rates_of(plain, 16, device) is result and len(tables_module._rates) == 2


@pytest.mark.gpu
def test_a_graph_reads_the_position_from_the_device() -> None:
    qkv, pos = normal(10, 10 * 256).cuda(), torch.zeros(1, dtype=torch.int32, device="cuda")
    tables = tuple(t.cuda() for t in rope_table(64, 256))
    caches = [torch.zeros(64, 1, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    assert_captures(lambda: qkv_split(qkv, 8, 1, rope=tables))
    qkv_split(qkv, 8, 1, rope=tables, k_cache=caches[0], v_cache=caches[1], pos=pos)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qkv_split(qkv, 8, 1, rope=tables, k_cache=caches[0], v_cache=caches[1], pos=pos)
    pos.fill_(20)
    graph.replay()
    assert torch.equal(caches[1][20:30], qkv[:, 9 * 256 :].view(10, 1, 256))
    assert caches[1][30:].eq(0).all()


QKV = torch.ones(3, 96)
CACHE = torch.zeros(9, 1, 16)
BAD = {
    "columns": (lambda: qkv_split(QKV, 5, 1), r"qkv has shape \(3, 96\); expected .* multiple of 7"),
    "heads": (lambda: qkv_split(QKV, 0, 1), "num_heads and num_kv_heads are 0 and 1; expected 1 or more"),
    "style": (lambda: qkv_split(QKV, 4, 1, style="neox"), "style is 'neox'; expected 'half' or 'interleaved'"),
    "norm": (lambda: qkv_split(QKV, 4, 1, q_norm=torch.ones(8)), r"q_norm has shape \(8,\); expected \(16,\)"),
    "rope": (lambda: qkv_split(QKV, 4, 1, rope=COS), "rope is a Tensor; expected .cos, sin."),
    "pairs": (lambda: qkv_split(QKV, 4, 1, rope=rope_table(4, 24)), r"rope\[0\] has shape \(4, 12\); expected"),
    "no positions": (
        lambda: qkv_split(QKV, 4, 1, rope=(COS[:0, :8], SIN[:0, :8])),
        r"rope\[0\] has shape \(0, 8\); expected one position or more",
    ),
    "one cache": (lambda: qkv_split(QKV, 4, 1, k_cache=CACHE), "k_cache and v_cache go together"),
    "cache": (lambda: qkv_split(QKV, 4, 1, k_cache=CACHE[..., 1:], v_cache=CACHE), "k_cache has dtype and shape"),
    "pos": (lambda: qkv_split(QKV, 4, 1, pos=torch.ones(1)), "pos is torch.float32 .1,.; expected int32"),
    "out": (lambda: qkv_split(QKV, 4, 1, out=(QKV,)), r"out\[0\] has shape \(3, 96\); expected \(3, 4, 16\)"),
    "gradient": (
        lambda: qkv_split(QKV.clone().requires_grad_(), 4, 1, k_cache=CACHE, v_cache=CACHE),
        "k_cache is given but a tensor needs gradients",
    ),
    "dim": (lambda: rtkernels.rope_table(4, 7), "dim is 7; expected a multiple of 2"),
}
test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(BAD)


@pytest.mark.parametrize("pos", (15, -1, torch.tensor([3, 15], dtype=torch.int32)))
def test_positions_beyond_a_cache_in_debug_mode(pos: torch.Tensor | int, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, cache = normal(2, 2, 3 * 8), torch.zeros(2, 2, 16, 1, 8, dtype=torch.bfloat16)
    rtkernels.qkv_split(qkv, 1, 1, k_cache=cache[0], v_cache=cache[1], pos=pos)  # left out
    monkeypatch.setenv("RTKERNELS_DEBUG", "1")
    with pytest.raises(ArgumentError, match=r"pos puts 2 tokens at positions .*; expected 0 to 15"):
        rtkernels.qkv_split(qkv, 1, 1, k_cache=cache[0], v_cache=cache[1], pos=pos)
    rtkernels.qkv_split(qkv, 1, 1, k_cache=cache[0], v_cache=cache[1], pos=14)
