"""Norm, rotation and cache of a decoding step in one launch, compared with fp64."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_close, running_on
from support.places import at

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.decode_heads import HEADS

BF16 = torch.bfloat16
FORMS = {
    "halves": {}, "half_tables": {"whole": False}, "neighbours": {"interleaved": True, "whole": False},
    "neighbour_tables": {"interleaved": True}, "partial": {"rotary": 20}, "no_norm": {"norm": False},
    "wide": {"dim": 250, "rotary": 64}, "several_pairs_a_lane": {"dim": 130},
    "fp16": {"dtype": torch.float16, "table": BF16},
}  # fmt: skip


def _case(device, dim=48, rotary=None, norm=True, whole=True, interleaved=False, dtype=BF16, table=torch.float32):
    g = torch.Generator().manual_seed(dim)
    batch, q_heads, kv_heads, rows = 3, 6, 2, 7
    rotary = dim if rotary is None else rotary
    draw = lambda *shape: torch.randn(*shape, generator=g).to(dtype).to(device)  # noqa: E731
    qkv = draw(batch, (q_heads + 2 * kv_heads) * dim)
    weights = [draw(dim), draw(dim)] if norm else [None, None]
    angles = torch.rand(batch, rotary // 2, generator=g) * 6
    if whole:
        angles = angles.repeat_interleave(2, 1) if interleaved else torch.cat([angles, angles], 1)
    cos, sin = (t.to(table).to(device) for t in (angles.cos(), angles.sin()))
    slots = torch.tensor([2, rows, 0], dtype=torch.int32, device=device)
    caches = [draw(batch, rows, kv_heads, dim) for _ in range(2)]
    return (qkv, *weights, cos, sin, slots, *caches, rotary, interleaved, 1e-6, 0.5)


@at()
@pytest.mark.parametrize("name", FORMS)
def test_values(name: str, place: str) -> None:
    with running_on(place) as device:
        arguments = _case(device, **FORMS[name])
        before = [t.clone() for t in arguments[6:8]]
        q = HEADS.call(*arguments)
        exact = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in arguments]
        exact[6], exact[7] = (t.double() for t in before)
        qkv, *_ = exact
        x = qkv.view(3, -1, before[0].shape[-1])
        wanted = []
        for part, weight in ((x[:, :6], exact[1]), (x[:, 6:8], exact[2])):
            if weight is not None:
                part = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) * (0.5 + weight)
            rotary, interleaved, cos, sin = exact[8], exact[9], exact[3], exact[4]
            if cos.shape[1] != rotary:
                cos, sin = ((t.repeat_interleave(2, 1) if interleaved else torch.cat([t, t], 1)) for t in (cos, sin))
            turned = part[..., :rotary]
            if interleaved:
                other = torch.stack([-turned[..., 1::2], turned[..., 0::2]], -1).flatten(-2)
            else:
                other = torch.cat([-turned[..., rotary // 2 :], turned[..., : rotary // 2]], -1)
            wanted.append(torch.cat([turned * cos[:, None] + other * sin[:, None], part[..., rotary:]], -1))
        assert_close(q, wanted[0], c=2, scale=wanted[0].abs() + 0.1)
        for cache, old, new in zip(arguments[6:8], before, (wanted[1], x[:, 8:]), strict=True):
            old = old.double()
            old[0, 2], old[2, 0] = new[0], new[2]  # that of the second sequence does not fit
            assert_close(cache, old, c=2, scale=old.abs() + 0.1)


@at("cpu", "sm_90")
def test_strided_caches(place: str) -> None:
    with running_on(place) as device:
        arguments = list(_case(device))
        wanted = HEADS.call(*arguments)
        keys, values = (t.clone() for t in arguments[6:8])
        arguments[6], arguments[7] = (t.clone().transpose(1, 2).contiguous().transpose(1, 2) for t in arguments[6:8])
        assert torch.equal(HEADS.call(*arguments), wanted)
        assert torch.equal(arguments[6], keys) and torch.equal(arguments[7], values)


@pytest.mark.parametrize(("place", "value", "message"), [
    (5, torch.zeros(3, dtype=torch.int64), "slots"), (8, 50, "rotary"), (1, None, "k_weight"),
    (3, torch.zeros(3, 5), "cos"), (0, torch.zeros(3, 7, dtype=BF16), "qkv"),
])  # fmt: skip
def test_wrong_arguments(place: int, value: object, message: str) -> None:
    arguments = list(_case("cpu"))
    arguments[place] = value
    if place == 3:
        arguments[4] = value
    with pytest.raises(ArgumentError, match=message):
        HEADS.call(*arguments)


def emulated_coverage() -> None:
    with rtkernels.emulate("sm_90"):
        for dtype in (BF16, torch.float16):
            HEADS.call(*_case("cpu", dtype=dtype))
