"""The wgmma kernels of attention in the emulator, against fp64."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from support.fresh_memory import fresh_memory
from torch import Tensor

import rtkernels
from rtkernels.emulator import recording
from rtkernels.errors import ResidencyError
from rtkernels.ops.attention import backends, sm90_backward_plan, sm90_forward_plan, sm90_plan
from rtkernels.ops.attention.problem import Attention, Bias, Strides, dense
from rtkernels.runtime.launch.device import device_info, emulate_features
from rtkernels.runtime.operator.plan import Memory, StepPlan

TOKENS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half of the distance between numbers next to 1


def strides_of(x: Tensor) -> Strides:
    batch, row, head, _ = x.stride() if x.dim() == 4 else (0, *x.stride())
    aligned = all(s % 8 == 0 for s in (batch, row, head)) and x.data_ptr() % 16 == 0
    return Strides(batch, row, head, aligned)


def describe(q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor], lq: int = 0, lkv: int = 0, **options: Any):
    """Return the problem of tensors as ``problem.py`` names them."""
    varlen = q.dim() == 3
    batch = extra["cu_q"].numel() - 1 if varlen else q.shape[0]
    lq, lkv = (lq, lkv) if varlen else (q.shape[1], k.shape[1])
    heads, d_v = q.shape[-2], v.shape[-1]
    if "sinks" in extra:
        options["sinks"] = TOKENS[extra["sinks"].dtype]
    if "bias" in extra:
        bias = extra["bias"].expand(batch, heads, lq, lkv)
        options["bias"] = Bias(TOKENS[bias.dtype], *bias.stride())
    if "kv_limit" in extra:
        options["kv_limit"] = lq if extra["kv_limit"].dim() == 2 else 0
    return Attention(
        batch, heads, k.shape[-2], lq, lkv, q.shape[-1], d_v, TOKENS[q.dtype],
        strides_of(q), strides_of(k), strides_of(v), dense(lq, heads, d_v, varlen),
        **{"scale": q.shape[-1] ** -0.5, **options}, lengths="lengths" in extra,
        varlen=varlen, total_q=q.shape[0] if varlen else 0, total_k=k.shape[0] if varlen else 0,
    )  # fmt: skip


INPUTS = ("q", "k", "v", "sinks", "bias", "lengths", "kv_limit", "cu_q", "cu_k")


def launch(steps: Any, tensors: dict[str, Tensor], outputs: dict[str, Memory], device: int) -> tuple[Tensor, ...]:
    names = list(tensors)
    with recording() if device < 0 else contextlib.nullcontext():
        plan = StepPlan("test", names, (), outputs, "tuple", steps, device)
        return plan.run(*(0 if t is None else t.data_ptr() for t in tensors.values()))


def forward(problem: Attention, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Run the kernel: out and lse."""
    p, device = problem, q.get_device()
    assert sm90_plan.unsupported(p, device_info(device).target) is None
    rows = (p.total_q,) if p.varlen else (p.batch, p.lq)
    lse = (p.heads_q, p.total_q) if p.varlen else (p.batch, p.heads_q, p.lq)
    outputs = {"out": Memory((*rows, p.heads_q, p.d_v), q.dtype), "lse": Memory(lse, torch.float32)}
    tensors = {"q": q, "k": k, "v": v, **{name: extra.get(name) for name in INPUTS[3:]}}
    return launch(sm90_plan.steps(p, device), tensors, outputs, device)


def exact(problem: Attention, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same in fp64, differentiable; one sequence at a time."""
    p = problem
    q, k, v = q.double(), k.double(), v.double()
    outs, lses = [], []
    for b in range(p.batch):
        if p.varlen:
            (q0, q1), (k0, k1) = extra["cu_q"][b : b + 2].tolist(), extra["cu_k"][b : b + 2].tolist()
            qb, kb, vb = q[q0:q1], k[k0:k1], v[k0:k1]
        else:
            qb, kb, vb = q[b], k[b], v[b]
        keys = kb.shape[0]
        if "lengths" in extra:
            keys = min(keys, int(extra["lengths"][b]))
        kb, vb = kb[:keys].repeat_interleave(p.group, 1), vb[:keys].repeat_interleave(p.group, 1)
        s = torch.einsum("ihd,jhd->hij", qb, kb) * p.scale
        if p.softcap:
            s = p.softcap * torch.tanh(s / p.softcap)
        lq, shift = qb.shape[0], keys - qb.shape[0]
        if "bias" in extra:
            s = s + extra["bias"].double().expand(p.batch, p.heads_q, p.lq, p.lkv)[b, :, :lq, :keys]
        i, j = torch.arange(lq, device=q.device)[:, None], torch.arange(keys, device=q.device)[None]
        seen = torch.ones(lq, keys, dtype=torch.bool, device=q.device)
        if p.right >= 0:
            seen &= j <= i + shift + p.right
        if p.left >= 0:
            seen &= j >= i + shift - p.left
        if "kv_limit" in extra:
            limit = extra["kv_limit"]
            seen &= j < (limit[b] if limit.dim() == 2 else limit)[:lq, None]
        s = s.masked_fill(~seen, -math.inf)
        scores = s
        if "sinks" in extra:
            sink = extra["sinks"].double()[:, None, None].expand(-1, lq, 1)
            scores = torch.cat([s, sink], -1)
        if scores.shape[-1] == 0:
            lse = s.new_full((p.heads_q, lq), -math.inf)
        else:
            lse = torch.logsumexp(scores, -1)
        weight = torch.where(torch.isinf(s), 0.0, torch.exp(s - lse.masked_fill(torch.isinf(lse), 0.0)[..., None]))
        outs.append(torch.einsum("hij,jhd->ihd", weight, vb))
        lses.append(lse)
    if p.varlen:
        return torch.cat(outs), torch.cat(lses, 1)
    return torch.stack(outs), torch.stack(lses)


def near(got: Tensor, want: Tensor, unit: float, factor: float = 4.0) -> None:
    """Errors of a few roundings of what was summed: relative to the largest element of a row."""
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    got, want = got.double().nan_to_num(), want.nan_to_num()
    scale = want.abs().amax(-1, keepdim=True).clamp(min=0.05)
    error = ((got - want).abs() / scale).max().item() if got.numel() else 0.0
    assert error <= factor * unit, f"error {error / unit:.2f} units"


def check_forward(q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor] | None = None, **options: Any) -> None:
    extra = extra or {}
    p = describe(q, k, v, extra, **options)
    out, lse = forward(p, q, k, v, extra)
    want, want_lse = exact(p, q, k, v, extra)
    near(out, want, UNIT[q.dtype])
    assert torch.equal(torch.isinf(lse), torch.isinf(want_lse))
    torch.testing.assert_close(lse.double().nan_to_num(neginf=0), want_lse.nan_to_num(neginf=0), rtol=1e-5, atol=1e-4)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(b: int, lq: int, lkv: int, hq: int, hkv: int, d: int, d_v: int = 0, dtype: torch.dtype = torch.bfloat16):
    return (
        random(b, lq, hq, d, dtype=dtype), random(b, lkv, hkv, d, dtype=dtype, seed=1),
        random(b, lkv, hkv, d_v or d, dtype=dtype, seed=2),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def emulated():
    with rtkernels.emulate("sm_90"):
        emulate_features(90)  # as an op would, and here is none
        yield


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 70, 300, 2, 1, 64), {}),
        ((1, 130, 130, 1, 1, 128), {"right": 0}),
        ((2, 5, 37, 2, 2, 128), {}),
        ((1, 300, 100, 1, 1, 64), {"right": 0}),  # the first 200 queries see nothing
        ((1, 33, 190, 1, 1, 72), {"right": 0}),
        ((1, 20, 200, 1, 1, 192, 128), {"left": 100, "right": 3}),
        ((1, 40, 150, 1, 1, 192), {}),
        ((1, 40, 90, 1, 1, 256), {"right": 0}),
    ],
)
def test_forward(shape: tuple[int, ...], options: dict[str, int]) -> None:
    check_forward(*qkv(*shape), **options)


def test_forward_fp16_strided_and_grouped() -> None:
    """Slices of a packed qkv, four query heads for each head of keys."""
    packed = random(1, 140, 6 * 64, dtype=torch.float16).unflatten(-1, (6, 64))
    check_forward(packed[:, :, :4], packed[:, :, 4:5], packed[:, :, 5:], right=0)


@pytest.mark.parametrize(
    ("shape", "options", "bundle"),
    [
        ((2, 5, 37, 6, 2, 40), {"right": 0}, 3),
        ((1, 53, 60, 41, 1, 152), {"right": 0}, 41),  # three queries of 41 heads, and five rows that nobody has
        ((1, 70, 90, 10, 1, 96), {"left": 20, "right": 0}, 5),
        ((1, 9, 400, 24, 1, 64), {}, 12),  # two bundles of the heads that share keys
        ((1, 3, 40, 8, 1, 128), {"right": 0}, 8),
        ((1, 4, 50, 6, 2, 256), {}, 1),
    ],
)
def test_forward_heads_that_share_keys_and_a_tile(shape: tuple[int, ...], options: dict[str, int], bundle: int) -> None:
    q, k, v = qkv(*shape)
    p = describe(q, k, v, {}, **options)
    assert sm90_forward_plan.bundle_of(p, sm90_forward_plan.forward_tile(p)[0]) == bundle
    check_forward(q, k, v, **options)
    q[0, 1, 1] = math.nan
    check_forward(q, k, v, **options)


@pytest.mark.parametrize(
    ("shape", "backward", "first"),
    [
        ((37, 37, 37, 62, 62, 40), False, "mma"),
        ((37, 37, 37, 62, 62, 40), True, "mma"),
        ((16, 13, 13, 48, 48, 160), False, "mma"),
        ((16, 13, 13, 8, 8, 64), False, "decode"),
        ((4, 40, 40, 32, 4, 64), False, "sm90"),  # heads share a tile
        ((4, 100, 100, 8, 8, 64), False, "sm90"),
        ((4, 40, 40, 8, 8, 128), True, "sm90"),
    ],
)
def test_backends_of_short_sequences(shape: tuple[int, ...], backward: bool, first: str) -> None:
    p = describe(*(x.expand(shape[0], -1, -1, -1) for x in qkv(1, *shape[1:])), {})._replace(backward=backward)
    chosen = backends.ATTENTION.choose(p, device_info(-90), "auto").backend
    assert chosen is not None and chosen.name == first


def test_forward_bundles_of_packed_sequences_and_lengths() -> None:
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 3, 3, 33, 50], [0, 50, 60, 90, 130]))
    q, k, v = random(50, 6, 72), random(130, 1, 72, seed=1), random(130, 1, 72, seed=2)
    check_forward(q, k, v, {"cu_q": cu_q, "cu_k": cu_k}, lq=30, lkv=50, right=0)
    lengths = {"lengths": torch.tensor([17, 0], dtype=torch.int32)}
    check_forward(*qkv(2, 6, 40, 5, 1, 104), lengths, right=0)


@pytest.mark.parametrize(
    ("width", "options"),
    [
        (64, {"softcap": 2.0}),
        (128, {"softcap": 5.0, "left": 40, "right": 0}),
        (256, {"softcap": 3.0}),
        (64, {"scale": -0.2}),
    ],
)
def test_forward_softcap_and_scale(width: int, options: dict[str, float]) -> None:
    check_forward(*qkv(1, 20, 150, 1, 1, width), **options)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_forward_bias_and_sinks(dtype: torch.dtype) -> None:
    bias = random(2, 1, 19, 70, dtype=dtype, seed=3)
    bias[0, 0, 2] = -math.inf
    extra = {"bias": bias, "sinks": random(2, dtype=dtype, seed=4)}
    check_forward(*qkv(2, 19, 70, 2, 1, 64), extra)


BIASES = {  # heads of queries and keys, width, queries, keys, shape of the bias, options
    "a matrix per sequence": (4, 2, 128, 70, 200, (2, 1, 70, 200), {}),
    "a matrix per head": (2, 2, 128, 131, 96, (1, 2, 131, 96), {}),
    "full, narrow heads": (2, 1, 64, 20, 264, (2, 2, 20, 264), {}),
    "a row per sequence": (2, 1, 64, 140, 136, (2, 1, 1, 136), {}),
    "a number per query": (1, 1, 128, 9, 104, (1, 1, 9, 1), {}),
    "fewer keys than a vector of a quad": (1, 1, 128, 3, 8, (1, 1, 3, 8), {}),
    "causal": (1, 1, 128, 40, 120, (2, 1, 40, 120), {"right": 0}),
    "soft-cap": (1, 1, 64, 40, 120, (2, 1, 40, 120), {"softcap": 2.0}),
    "odd keys": (2, 1, 128, 20, 201, (2, 1, 20, 201), {}),
}


@pytest.mark.parametrize("case", BIASES)
@pytest.mark.one_in(4)
def test_forward_bias(case: str) -> None:
    heads, heads_kv, width, queries, keys, shape, options = BIASES[case]
    bias = random(*shape, seed=3)
    bias[random(*shape, seed=5) > 1] = -math.inf
    bias[0, :, 2:3] = -math.inf  # a query that attends to nothing, if there is one for each
    check_forward(*qkv(2, queries, keys, heads, heads_kv, width), {"bias": bias}, **options)


@pytest.mark.parametrize("place", ("offset", "columns apart", "padded rows", "transposed", "fp16", "fp32"))
@pytest.mark.one_in(3)
def test_forward_bias_of_any_strides(place: str) -> None:
    """Vectors are loaded only from rows that begin at multiples of 16 bytes, of q's type, with contiguous keys."""
    queries, keys = 24, 104
    bias = {
        "offset": lambda: random(queries * keys + 1, seed=3)[1:].view(queries, keys),
        "columns apart": lambda: random(queries, 2 * keys, seed=3)[:, ::2],
        "padded rows": lambda: random(queries, keys + 4, seed=3)[:, :keys],
        "transposed": lambda: random(keys, queries, seed=3).T,
        "fp16": lambda: random(queries, keys, seed=3, dtype=torch.float16),
        "fp32": lambda: random(queries, keys, seed=3, dtype=torch.float32),
    }[place]()
    check_forward(*qkv(1, queries, keys, 2, 1, 64), {"bias": bias[None, None]})


def test_forward_bias_of_fp16() -> None:
    bias = random(1, 2, 20, 40, seed=3, dtype=torch.float16)
    check_forward(*qkv(1, 20, 40, 2, 1, 128, dtype=torch.float16), {"bias": bias})


def test_forward_bias_of_sequences_with_lengths() -> None:
    """A bias of keys behind the last one is not used, whatever it holds."""
    lengths = torch.tensor([130, 0, 7], dtype=torch.int32)
    bias = random(3, 1, 9, 200, seed=3)
    for b, n in enumerate(lengths.tolist()):
        bias[b, :, :, n:] = math.nan
    q, k, v = qkv(3, 9, 200, 1, 1, 128)
    p = describe(q, k, v, extra := {"lengths": lengths, "bias": bias})
    out, lse = forward(p, q, k, v, extra)
    want, want_lse = exact(p, q, k, v, extra)
    near(out, want, UNIT[q.dtype])
    assert torch.equal(torch.isinf(lse), torch.isinf(want_lse))


def test_forward_sinks_where_nothing_is_seen() -> None:
    check_forward(*qkv(1, 40, 30, 2, 2, 64), {"sinks": random(2, dtype=torch.float32)}, right=0)


def test_forward_device_lengths_hide_what_is_behind_them() -> None:
    q, k, v = qkv(3, 9, 200, 1, 1, 64)
    lengths = torch.tensor([130, 0, 7], dtype=torch.int32)
    clean = [x.clone() for x in (k, v)]
    for b, n in enumerate(lengths.tolist()):
        k[b, n:], v[b, n:] = math.nan, math.inf
        for x in clean:
            x[b, n:] = 0
    extra = {"lengths": lengths}
    p = describe(q, k, v, extra, right=0)
    out, lse = forward(p, q, k, v, extra)
    want, want_lse = exact(p, q, *clean, extra)
    near(out, want, UNIT[q.dtype])
    assert torch.equal(torch.isinf(lse), torch.isinf(want_lse))


def test_forward_limits_of_queries() -> None:
    q, k, v = qkv(2, 10, 140, 1, 1, 64)
    check_forward(q, k, v, {"kv_limit": torch.tensor([130] + 9 * [140], dtype=torch.int32)})
    check_forward(q, k, v, {"kv_limit": torch.arange(20, dtype=torch.int32).reshape(2, 10)})


def test_forward_packed_sequences() -> None:
    """Neighbours of a sequence do not leak into it, not even NaN."""
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 3, 3, 133, 150], [0, 50, 60, 190, 230]))
    q, k, v = random(150, 2, 64), random(230, 1, 64, seed=1), random(230, 1, 64, seed=2)
    v[60:190] = math.nan
    check_forward(q, k, v, {"cu_q": cu_q, "cu_k": cu_k}, lq=130, lkv=130, right=0)


def test_forward_nan_stays_in_its_row() -> None:
    q, k, v = qkv(1, 70, 80, 1, 1, 64)
    q[0, 5] = math.nan
    check_forward(q, k, v)


def test_what_is_not_served() -> None:
    target = device_info(-1).target
    q, k, v = qkv(1, 4, 4, 1, 1, 64)
    p = describe(q, k, v, {})
    assert sm90_plan.unsupported(p._replace(d_qk=60), target)
    assert sm90_plan.unsupported(p._replace(token="fp32"), target)
    assert sm90_plan.unsupported(p._replace(lkv=0), target)
    assert sm90_plan.unsupported(p._replace(q=p.q._replace(aligned=False)), target)


# ---- backward -------------------------------------------------------------------------------------------------------


def backward(
    problem: Attention, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor], dout: Tensor, dlse: Tensor | None
) -> dict[str, Tensor]:
    """Run forward and backward kernels: out, lse and gradients by name."""
    p, device = problem, q.get_device()
    out, lse = forward(p, q, k, v, extra)
    p = p._replace(dout=strides_of(dout), dlse=dlse is not None, wants="qkvs" if p.sinks else "qkv", backward=True)
    assert sm90_plan.unsupported(p, device_info(device).target) is None
    outputs = {
        **{name: Memory(tuple(x.shape), x.dtype) for name, x in (("dq", q), ("dk", k), ("dv", v))},
        "dsinks": Memory((p.heads_q,), torch.float32) if p.sinks else None,
    }  # fmt: skip
    tensors = {"q": q, "k": k, "v": v, **{name: extra.get(name) for name in INPUTS[3:]}}
    tensors |= {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    made = launch(sm90_plan.steps(p, device), tensors, outputs, device)
    return {"out": out, "lse": lse, **dict(zip(outputs, made, strict=True))}


def check_backward(q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Tensor] | None = None, **options: Any) -> None:
    extra = dict(extra or {})
    p = describe(q, k, v, extra, **options)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=torch.Generator().manual_seed(7)).to(q)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact_extra = dict(extra)
    if "sinks" in extra:
        exact_extra["sinks"] = extra["sinks"].double().requires_grad_()
    out, lse = exact(p, *leaves, exact_extra)
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(8)).to(q.device)
    seen = torch.where(torch.isinf(lse), 0.0, lse)
    wanted = [*leaves, *([exact_extra["sinks"]] if "sinks" in extra else [])]
    want = torch.autograd.grad((out * dout.double()).sum() + (seen * dlse.double()).sum(), wanted)
    got = backward(p, q, k, v, extra, dout, dlse)
    for name, gradient in zip(("dq", "dk", "dv"), want, strict=False):
        scale = gradient.abs().max().clamp(min=1e-3)
        error = ((got[name].double() - gradient).abs().max() / scale).item()
        assert error <= 4 * UNIT[q.dtype], f"{name}: error {error / UNIT[q.dtype]:.2f} units"
    if "sinks" in extra:
        torch.testing.assert_close(got["dsinks"].double(), want[3], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 70, 150, 2, 1, 64), {}),
        ((1, 130, 130, 1, 1, 128), {"right": 0}),
        ((2, 20, 37, 4, 2, 96), {}),
        ((1, 300, 100, 1, 1, 64), {"right": 0}),  # the first 200 queries see nothing
        ((1, 70, 300, 1, 1, 72), {"left": 100, "right": 3}),
    ],
)
def test_backward(shape: tuple[int, ...], options: dict[str, int]) -> None:
    check_backward(*qkv(*shape), **options)


def slow(*parameters: Any) -> Any:
    return pytest.param(*parameters, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        slow((1, 140, 150, 2, 1, 192, 128), {"right": 0}),
        slow((1, 70, 300, 1, 1, 192, 128), {"left": 100, "right": 3}),
        slow((2, 90, 137, 4, 2, 136), {}),
        slow((1, 70, 200, 2, 1, 256), {}),
        slow((1, 300, 100, 1, 1, 200, 256), {"right": 0}),  # the first 200 queries see nothing
        slow((1, 20, 150, 2, 1, 256), {"softcap": 2.0}),
    ],
)
def test_backward_of_large_heads(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    check_backward(*qkv(*shape), **options)


def test_backward_of_large_heads_in_packed_sequences() -> None:
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 3, 3, 13], [0, 5, 60, 90]))
    packed = random(13, 2, 192), random(100, 1, 192, seed=1), random(100, 1, 128, seed=2)
    packed[1][90:], packed[2][90:] = math.nan, math.inf
    p = describe(*packed, {"cu_q": cu_q, "cu_k": cu_k}, lq=10, lkv=55, right=0)
    dout = random(13, 2, 128, seed=5)
    leaves = [x.detach().double().requires_grad_() for x in packed]
    extra = {"cu_q": cu_q, "cu_k": cu_k}
    want = torch.autograd.grad((exact(p, *leaves, extra)[0] * dout.double()).sum(), leaves)
    got = backward(p, *packed, extra, dout, None)
    for name, gradient in zip(("dq", "dk", "dv"), want, strict=True):
        rows = slice(0, 13 if name == "dq" else 90)
        error = (got[name][rows].double() - gradient[rows]).abs().max() / gradient[rows].abs().max()
        assert error <= 4 * UNIT[torch.bfloat16], name


@pytest.mark.slow
def test_backward_of_large_heads_lengths_sinks_and_limits() -> None:
    lengths = torch.tensor([130, 7], dtype=torch.int32)
    q, k, v = qkv(2, 9, 140, 2, 1, 192, 128)
    for b, n in enumerate(lengths.tolist()):
        k[b, n:], v[b, n:] = math.nan, math.inf
    check_backward(q, k, v, {"lengths": lengths, "sinks": random(2, dtype=torch.float32)}, right=0)
    q, k, v = qkv(2, 10, 140, 1, 1, 256)
    check_backward(q, k, v, {"kv_limit": torch.arange(20, dtype=torch.int32).reshape(2, 10)})


@pytest.mark.parametrize("options", ({}, {"right": 0}))
def test_backward_gives_the_same_bits_in_any_order_of_blocks(options: dict[str, int]) -> None:
    q, k, v = qkv(1, 70, 300, 2, 1, 64)
    dout, p = random(1, 70, 2, 64, seed=5), describe(q, k, v, {}, **options)
    want = backward(p, q, k, v, {}, dout, None)
    with rtkernels.emulate("sm_90", order=3):
        got = backward(p, q, k, v, {}, dout, None)
    assert all(torch.equal(got[name], want[name]) for name in ("dq", "dk", "dv"))


@pytest.mark.slow
def test_backward_without_chunks_where_blocks_are_not_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver refuses is made by blocks that wait for earlier ones only."""
    bind, tried = sm90_backward_plan.BACKWARD.bind, []

    def refused(*args: Any) -> None:
        raise ResidencyError("2 blocks of 384 threads must run at the same time")

    def bind_or_refuse(*args: Any, resident: bool = False, **options: Any) -> Any:
        tried.append(resident)
        return refused if resident else bind(*args, **options)

    monkeypatch.setattr(sm90_backward_plan.BACKWARD, "bind", bind_or_refuse)
    check_backward(*qkv(1, 256, 150, 1, 1, 128))
    assert tried == [True, False]


def test_backward_softcap_and_sinks() -> None:
    check_backward(*qkv(1, 20, 150, 2, 1, 64), {"sinks": random(2, dtype=torch.float32)}, softcap=2.0)


def test_backward_lengths_and_packed_sequences() -> None:
    lengths = torch.tensor([130, 7], dtype=torch.int32)
    q, k, v = qkv(2, 9, 140, 1, 1, 64)
    for b, n in enumerate(lengths.tolist()):
        k[b, n:], v[b, n:] = math.nan, math.inf
    check_backward(q, k, v, {"lengths": lengths}, right=0)
    # The statistics of the last one lie elsewhere than those of the fourth of four padded sequences.
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 70, 70, 130, 133], [0, 50, 60, 130, 140]))
    packed = random(133, 2, 64), random(140, 1, 64, seed=1), random(140, 1, 64, seed=2)
    sinks = random(2, dtype=torch.float32)
    with fresh_memory(0x3F):  # rows of scratch between sequences, which nobody writes, look like numbers
        check_backward(*packed, {"cu_q": cu_q, "cu_k": cu_k, "sinks": sinks}, lq=70, lkv=70, right=0)


def test_the_api_takes_these_kernels() -> None:
    leaves = [x.requires_grad_() for x in qkv(1, 20, 40, 2, 1, 64)]
    out = rtkernels.attention(*leaves, causal=True, backend="sm90")
    got = torch.autograd.grad(out, leaves, torch.ones_like(out))
    p = describe(*(x.detach() for x in leaves), {}, right=0)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    want_out = exact(p, *exact_leaves, {})[0]
    near(out.detach(), want_out.detach(), UNIT[torch.bfloat16])
    for g, w in zip(got, torch.autograd.grad(want_out.sum(), exact_leaves), strict=True):
        assert (g.double() - w).abs().max() <= 6 * UNIT[torch.bfloat16] * w.abs().max()
