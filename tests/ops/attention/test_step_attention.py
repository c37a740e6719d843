"""Attention of a decoding step in one launch: heads, cache and attention, compared with fp64."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at, emulated

import rtkernels
from rtkernels.errors import ArgumentError, RtkError
from rtkernels.ops.attention import decode_heads, step_attention
from rtkernels.ops.attention.step_attention import FORWARD, MAX_KEYS, unsupported
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.operator.kinds import meta_of

BF16, FP16 = torch.bfloat16, torch.float16
FORMS = {
    "plain": {}, "no norm": {"norm": False}, "interleaved": {"interleaved": True, "whole": False},
    "partial": {"rotary": 20, "width": 128, "dtype": FP16}, "wide": {"width": 256, "group": 2},
    "table": {"table": True}, "sinks, cap": {"sinks": torch.float32, "softcap": 2.0, "group": 16},
    "16-bit sinks": {"sinks": BF16},
    "long": {"rows": 1100, "lengths": (1100, 1030, 17), "slots": (1099, 3, 16), "group": 2},
    "long, wide": {"rows": 1100, "lengths": (1100, 1030, 0), "slots": (1024, 3, 16), "group": 1, "width": 256},
}  # fmt: skip


def case(
    device="cpu", width=64, rotary=None, group=3, norm=True, whole=True, interleaved=False, dtype=BF16, rows=150,
    lengths=(150, 21, 1), slots=(149, 5, 0), table=False, sinks=False, softcap=0.0, constant=False,
):  # fmt: skip
    g = torch.Generator().manual_seed(width)
    batch, kv_heads = len(lengths), 2
    rotary = width if rotary is None else rotary
    draw = lambda *shape: torch.randn(*shape, generator=g).to(dtype).to(device)  # noqa: E731
    qkv = draw(batch, (group + 2) * kv_heads * width)
    weights = [draw(width), draw(width)] if norm else [None, None]
    angles = torch.rand(9 if table else batch, rotary // 2, generator=g) * 6
    if whole:
        angles = angles.repeat_interleave(2, 1) if interleaved else torch.cat([angles, angles], 1)
    positions = torch.tensor([4, 8, 0], device=device) if table else None
    caches = [draw(batch, rows, kv_heads, width) for _ in range(2)]
    for cache in caches:
        for b, length in enumerate(lengths):
            cache[b, length:] = torch.nan
    numbers = [torch.tensor(t, dtype=torch.int32, device=device) for t in (slots, lengths)]
    sink = torch.linspace(-1, 2, group * kv_heads, device=device).to(sinks) if sinks else None
    return (
        qkv, *weights, angles.cos().to(device), angles.sin().to(device), positions, *numbers, sink, *caches, rotary,
        interleaved, constant, 1e-6, 0.5, 0.2, softcap,
    )  # fmt: skip


def exact(arguments):
    """Return the result in fp64 from heads rounded to their dtype, and the caches."""
    qkv, qw, kw, cos, sin, positions, slots, lengths, sinks, k, v, rotary, interleaved, _, eps, offset, scale, cap = (
        arguments
    )
    k, v = k.clone(), v.clone()
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    q = decode_heads.heads_reference(qkv, qw, kw, cos, sin, slots, k, v, rotary, interleaved, eps, offset).double()
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[2]
    for b, length in enumerate(lengths.tolist()):
        for h in range(q.shape[1]):
            s = k[b, :length, h // group].double() @ q[b, h] * scale
            s = cap * torch.tanh(s / cap) if cap else s
            s = torch.cat([s, sinks[h : h + 1].double()]) if sinks is not None else s
            p = torch.softmax(s, 0)[:length]
            out[b, h] = p @ v[b, :length, h // group].double()
    return out, k, v


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("name", FORMS)
def test_values(name: str, place: str) -> None:
    wanted, k, v = exact(case(**FORMS[name]))
    with running_on(place) as device:
        for constant in (False, True):
            arguments = case(device, constant=constant, **FORMS[name])
            out = FORWARD.call(*arguments)
            torch.testing.assert_close(out.cpu().double(), wanted, rtol=0.02, atol=0.01)
            for found, own in zip(arguments[9:11], (k, v), strict=True):
                torch.testing.assert_close(found.cpu(), own, rtol=0.01, atol=0.01, equal_nan=True)


@emulated
@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("name", ["long", "sinks, cap", "table"])
def test_blocks_of_a_cluster(name: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence and a key head have as many blocks as leave no SM without one."""
    seen = []
    monkeypatch.setattr(step_attention, "_blocks", lambda pairs, sms: seen.append(pairs) or blocks)
    Plans.forget_all()
    test_values(name, "sm_90")
    Plans.forget_all()
    assert seen


@emulated
@pytest.mark.parametrize("name", ["long", "sinks, cap"])
def test_result_does_not_depend_on_the_order_of_blocks(name: str) -> None:
    found = []
    for order in ("forward", "reverse", 3):
        given = case(**FORMS[name])
        with rtkernels.emulate("sm_90", order=order):
            found.append((FORWARD.call(*given), *given[9:11]))
    for others in found[1:]:
        for got, first in zip(others, found[0], strict=True):
            torch.testing.assert_close(got, first, rtol=0, atol=0, equal_nan=True)


def test_batch_invariance_is_refused() -> None:
    with rtkernels.batch_invariant(), pytest.raises(RtkError, match="as many blocks as fill the GPU"):
        FORWARD.call(*case())


def test_how_many_blocks() -> None:
    assert [step_attention._blocks(pairs, 132) for pairs in (1, 16, 17, 33, 66, 67, 500)] == [8, 8, 4, 4, 2, 1, 1]


def test_slots_outside_and_strided_caches() -> None:
    wanted, *_ = exact(case(slots=(150, -1, 0)))
    with rtkernels.emulate("sm_90"):
        arguments = list(case(slots=(150, -1, 0)))
        before = [t.clone() for t in arguments[9:11]]
        arguments[9:11] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in arguments[9:11]]
        torch.testing.assert_close(FORWARD.call(*arguments).double(), wanted, rtol=0.02, atol=0.01)
        for found, old in zip(arguments[9:11], before, strict=True):
            assert torch.equal(found[:2].nan_to_num(7.0), old[:2].nan_to_num(7.0))


@pytest.mark.parametrize(("place", "value", "message"), [
    (6, torch.zeros(3, dtype=torch.int64), "slots"), (7, torch.zeros(2, dtype=torch.int32), "lengths"),
    (5, torch.zeros(3, dtype=torch.int32), "positions"), (8, torch.zeros(5), "sinks"), (17, -1.0, "softcap"),
])  # fmt: skip
def test_wrong_arguments(place: int, value: object, message: str) -> None:
    arguments = list(case())
    arguments[place] = value
    with pytest.raises(ArgumentError, match=message):
        FORWARD.call(*arguments)


def test_what_is_unsupported() -> None:
    def reason(rows=64, width=64, q_heads=4) -> str | None:
        cache = meta_of(torch.empty(1, rows, 2, width, dtype=BF16))
        return unsupported(q_heads, cache, cache, -1)

    with rtkernels.emulate("sm_90"):
        FORWARD.call(*case())
        assert reason() is None and "keys" in reason(MAX_KEYS + 1) and "elements" in reason(width=80)
        assert "heads of queries" in reason(q_heads=40)
    with rtkernels.emulate("sm_80"):  # no clusters: computed in torch
        torch.testing.assert_close(FORWARD.call(*case()).double(), exact(case())[0], rtol=0.02, atol=0.01)
        assert "clusters" in reason()


def emulated_coverage() -> None:
    with rtkernels.emulate("sm_90"):
        for dtype in (BF16, FP16):
            for width in (64, 128, 256):
                FORWARD.call(*case(width=width, dtype=dtype))
