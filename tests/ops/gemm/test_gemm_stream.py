"""Decoding products of up to four rows, eight of e2m1 codes: random shapes, launches; rows without room for rings."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from support.compare import poisoned
from support.places import compiled_for, emulated
from torch import Tensor

import rtkernels
from rtkernels.ops.gemm import decode_plan
from rtkernels.ops.gemm.decode_linear import FORWARD
from rtkernels.ops.gemm.product import Matrix, Product
from rtkernels.ops.quant import pack
from rtkernels.runtime import targets
from rtkernels.runtime.build import cache
from rtkernels.runtime.targets import Target

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
STEP = {"16bit": 8, "e4m3": 16, "int8": 16, "int4": 32, "uint4": 32, "e2m1": 256}  # that k is a multiple of
SCALES = {"16bit": ("", "tensor", "row"), "e2m1": ("nvfp4",), "e4m3": ("", "tensor", "row", "block", "group")}
ACTS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
}  # fmt: skip


def codes(kind: str, rows: int, k: int, dtype: torch.dtype, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return weights and their values."""
    if kind in ("16bit", "e4m3"):
        stored = torch.randn(rows, k, generator=g).to(dtype if kind == "16bit" else FP8)
        if kind == "e4m3":  # the largest codes, the smallest ones, and zeros of both signs
            special = torch.tensor([0x7E, 0xFE, 0x01, 0x81, 0x00, 0x80], dtype=torch.uint8)
            at = torch.rand(rows, k, generator=g) < 0.02
            stored.view(torch.uint8)[at] = special[torch.randint(0, 6, (int(at.sum()),), generator=g)]
        return stored, stored.double()
    stored = torch.randint(0, 256, (rows, k if kind == "int8" else k // 2), generator=g).to(torch.uint8)
    if kind == "int8":
        return stored.view(torch.int8), stored.view(torch.int8).double()
    return stored, pack.nibble_values(stored, kind, torch.float64)


def scales(kind: str, rows: int, k: int, g: torch.Generator, wide: bool) -> tuple[Tensor | None, Tensor]:
    """Return scales and the factor of every weight; `wide`: NVFP4's are of any size."""
    if rows == 1 and kind in ("block", "group"):  # one row of them could be either
        kind = "row"
    if kind == "nvfp4":
        scale = torch.rand(rows, k // 16, generator=g) * 2
        scale *= 2.0 ** torch.randint(-9, 8, scale.shape, generator=g) if wide else 1.0
        scale = scale.masked_fill(torch.rand(rows, k // 16, generator=g) < 0.02, 0.0).to(FP8)
        return inside(scale, 16), scale.double().repeat_interleave(16, 1)
    if not kind:
        return None, torch.ones(rows, k, dtype=torch.float64)
    row, deep = {"tensor": (rows, k), "row": (1, k), "block": (128, 128), "group": (1, 128)}[kind]
    shape = (-(-rows // row), -(-k // deep))
    scale = torch.rand(shape[::-1], generator=g).t() + 0.5  # rows are strided
    factor = scale.double().repeat_interleave(row, 0)[:rows].repeat_interleave(deep, 1)[:, :k]
    return scale.reshape(shape[0] if kind == "row" else ()) if kind in ("tensor", "row") else scale, factor


def inside(t: Tensor, more: int) -> Tensor:
    """Return the same rows, `more` elements apart, in the middle of memory that is NaN, or all ones for integers."""
    memory = torch.empty(t.shape[0] + 2, t.shape[1] + more, dtype=t.dtype)
    memory.view(torch.uint8).fill_(0xFF)
    memory[1:-1, : t.shape[1]] = t
    return memory[1:-1, : t.shape[1]]


def random_shape(rng: random.Random) -> Callable[[Product, Target, int, bool], decode_plan.Shape]:
    """Return a stand-in of the plan's choice: any shape that the kernel's description allows."""

    def shape(p: Product, target: Target, sms: int, normed: bool) -> decode_plan.Shape:
        granules, granule = decode_plan._steps_of(p)
        all_octets = -(-p.n // (4 if p.gate else 8))
        while True:
            parts = rng.choice([n for n in (1, 1, 2, 4, 8) if n <= granules]) if "cluster" in target.features else 1
            octets, row_shift = rng.randint(-(-all_octets // 4), all_octets), rng.randint(0, 3)
            streams = rng.random() < 0.8 or p.b.token == "e2m1"
            steps = granule * rng.randint(1, decode_plan._slot_steps(p, streams) // granule)
            own = -(-granules // parts) * granule
            shared = decode_plan._shared(p, octets, own, row_shift, parts, normed, steps if streams else 0)
            if shared <= decode_plan.largest(target):
                return decode_plan.Shape(parts, octets, row_shift, steps, shared, streams)

    return shape


@emulated
@pytest.mark.parametrize("target", ("sm_80", "sm_90"))
@pytest.mark.parametrize("seed", range(24))
def test_random_products(seed: int, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, g = random.Random(f"{seed} {target}"), torch.Generator().manual_seed(seed)
    kind, dtype = rng.choice(list(STEP)), rng.choice((BF16, FP16))
    m, k = rng.randint(1, 8 if kind == "e2m1" else 4), STEP[kind] * rng.randint(1, rng.choice((3, 1536 // STEP[kind])))
    gated, normed = rng.random() < 0.3, rng.random() < 0.4
    act = rng.choice(("relu", "silu", "gelu") if gated else (None, None, "silu", "gelu"))
    n = rng.randint(1, rng.choice((9, 150)))
    rows = 2 * n if gated else n
    order = rng.choice(("forward", "reverse", seed))

    x = (torch.randn(m, k, generator=g) * (1.0 if dtype == BF16 else 2.0**-6)).to(dtype)
    if kind != "16bit" and dtype == BF16 and not normed and not gated:  # rows of any size
        x *= 2.0 ** torch.randint(-60, 60, (m, 1), generator=g)
    x = x[:1].expand(m, k) if rng.random() < 0.1 else inside(x, 8 * rng.randint(0, 2))
    stored, values = codes(kind, rows, k, dtype, g)
    scale, factor = scales(rng.choice(SCALES.get(kind, SCALES["e4m3"])), rows, k, g, dtype == BF16)
    whole = torch.full((), 0.75) if kind == "e2m1" and rng.random() < 0.7 else None
    factor = factor if whole is None else factor * whole
    values = values * factor
    bias = torch.randn(rows, generator=g).to(rng.choice((BF16, FP16, torch.float32))) if rng.random() < 0.4 else None
    residual = torch.randn(m, n, generator=g).to(dtype) if rng.random() < 0.4 else None
    if residual is not None:
        residual = residual[:1].expand(m, n) if rng.random() < 0.2 else inside(residual, rng.randint(0, 3))
    gain = (torch.randn(k, generator=g) * 0.01 - 0.98).to(dtype) if normed else None  # so that fp16 holds products
    times = rng.choice((1.0, 0.5))

    exact = x.double()
    if normed:
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + gain.double())
    # A norm's results near the middle of two numbers may be rounded either way, and here all of them count.
    magnitude = exact.abs() @ values.abs().t()
    slack = magnitude * (2.0**-19 + (torch.finfo(dtype).eps if normed else 0.0))
    exact = exact @ values.t()
    if bias is not None:
        exact = exact + bias.double()
        slack = slack + (exact.abs() + bias.double().abs()) * 2.0**-21
    if gated:
        (gate, up), (e_gate, e_up) = exact.chunk(2, -1), slack.chunk(2, -1)
        slack = 1.2 * e_gate * (up.abs() + e_up) + e_up * gate.abs() + gate.abs() * up.abs() * 2.0**-19
        exact = ACTS[act](gate) * up
    else:
        exact, slack = ACTS[act](exact), 1.2 * slack + exact.abs() * 2.0**-19
    exact, slack = exact * times, slack * times
    if residual is not None:
        exact = exact + residual.double()
    slack = slack + exact.abs() * torch.finfo(dtype).eps * 0.51 + torch.finfo(dtype).tiny * 2.0**-8

    stored = inside(stored, 16 // stored.element_size() * rng.randint(0, 2))
    monkeypatch.setattr(decode_plan, "_shape", random_shape(rng))
    own = decode_plan._together
    less = rng.choice((1, 3, 7, 32, 32))
    monkeypatch.setattr(decode_plan, "_together", lambda m, along_k, octets: min(less, own(m, along_k, octets)))
    packed = kind if kind in ("int4", "uint4", "e2m1") else None
    with poisoned(), rtkernels.emulate(target, order=order):
        out = FORWARD.call(x, stored, scale, bias, residual, gain, whole, packed, act, gated, False, 1e-6, 1.0, times)
    wrong = ~((out.double() - exact).abs() <= slack)
    assert not wrong.any(), (kind, dtype, m, n, k, (out.double() - exact)[wrong][:4], slack[wrong][:4])


@emulated
@pytest.mark.parametrize("parts", (2, 4))
def test_blocks_that_share_k_in_several_passes(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others sent in a pass is read before they send what belongs to the next one."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 520, generator=g).to(BF16) for rows in (3, 61))

    def shape(p: Product, target: Target, sms: int, normed: bool) -> decode_plan.Shape:
        granules, _ = decode_plan._steps_of(p)
        shared = decode_plan._shared(p, 8, -(-granules // parts), 1, parts, normed, 3)
        return decode_plan.Shape(parts, 8, 1, 3, shared, True)

    monkeypatch.setattr(decode_plan, "_shape", shape)
    monkeypatch.setattr(decode_plan, "_together", lambda m, along_k, octets: 3)
    exact, magnitude = x.double() @ w.double().t(), x.double().abs() @ w.double().abs().t()
    for order in ("forward", "reverse", 5):
        with poisoned(), rtkernels.emulate("sm_90", order=order):
            out = rtkernels.decode_linear(x, w)
        assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-8 + magnitude * 2.0**-19).all()


@emulated
@pytest.mark.parametrize("norm", (False, True))
def test_rows_that_leave_no_room_for_rings(norm: bool) -> None:
    """On GPUs with 99 KB: weights are loaded into registers; with a norm, its weights do not fit either."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 11008, generator=g).to(BF16) for rows in (4, 19))
    target = targets.parse("sm_89")
    p = Product(4, 19, 11008, Matrix("bf16", 11008), Matrix("bf16", 11008), Matrix("bf16", 19))
    assert decode_plan.unsupported(p, target, 4) is None and not decode_plan._shape(p, target, 4, False).streams
    assert decode_plan._shape(p._replace(m=1), target, 4, True).streams
    assert decode_plan.unsupported(p, target, 4, norm=True) == "too little shared memory"
    exact = x.double()
    if norm:
        exact = (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True))).to(BF16).double()
    magnitude = exact.abs() @ w.double().abs().t()
    exact = exact @ w.double().t()
    with poisoned(), rtkernels.emulate("sm_89"):
        gain = torch.zeros(11008, dtype=BF16) if norm else None
        out = rtkernels.decode_linear(x, w, norm_weight=gain, eps=0.0, offset=1.0)
    assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-8 + magnitude * (2.0**-9 if norm else 2.0**-18)).all()


def test_static_shared_memory_is_what_plans_assume() -> None:
    """Two blocks are to fit on an SM, so plans count it; the driver takes 1024 bytes of each block."""
    for kernel, streams in ((decode_plan.KERNEL, False), (decode_plan.STREAM, True)):
        expression = kernel.expression(kernel.variants(targets.parse("sm_90a"))[0])
        entry = cache.load(kernel.unit, [expression], compiled_for("sm_90a"), kernel.flags, op=kernel.op)
        assert entry.meta["resources"][expression]["shared"] + 1024 <= decode_plan._STATIC[streams]
