"""Permutation and quantisation in one pass: the bits of two passes."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_same_bits, poisoned, running_on
from support.fp8_cases import DEVICE_CODE, wild
from support.moe_permute_cases import numbers, on, routed
from support.places import DTYPES, ORDERS, at, emulated, error_tests
from support.ways import captured
from torch import Tensor

import rtkernels
from rtkernels.ops.moe.moe_index_layout import MoeIndex, build, max_rows
from rtkernels.ops.moe.moe_permute_fp8 import MoePermutedFp8
from rtkernels.ops.shared.fp8_layout import LAYOUTS

moe_permute, moe_permute_fp8 = rtkernels.moe_permute, rtkernels.moe_permute_fp8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# (tokens, experts, k, padding, columns): experts of more than a block, of none, of odd numbers of rows, one; of more
# rows than one run of transposed codes has.
CASES = {
    "blocks": (210, 3, 2, 16, 272),
    "no padding": (90, 7, 3, 1, 144),
    "one expert": (140, 1, 1, 8, 128),
    "many experts": (60, 40, 5, 4, 48),
    "long experts": (700, 2, 1, 16, 32),
    "long experts, no padding": (690, 2, 1, 1, 32),
}


def tiny(case: str) -> tuple[MoeIndex, int]:
    tokens, experts, top_k, pad, cols = CASES[case]
    return routed(tokens, experts, top_k, pad), cols


def composed(x: Tensor, index: MoeIndex, probs: Tensor | None = None, **options) -> tuple[Tensor | None, ...]:
    """The definition, on the CPU."""
    permuted = moe_permute(x, index) if probs is None else moe_permute(x, index, probs=probs)
    y, carried = (permuted, None) if probs is None else (permuted.y, permuted.probs)
    return *rtkernels.quantize_fp8_experts(y, index.offsets.diff(), **options), carried


def same(got: MoePermutedFp8, want: tuple[Tensor | None, ...], what: str) -> None:
    for name, a, b in zip(got._fields[:5], got[:5], want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            assert_same_bits(a.cpu(), b.cpu(), f"{name}, {what}")
            assert a.is_contiguous()


@at("cpu", *DEVICE_CODE)
@pytest.mark.parametrize("output", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_bits_of_permutation_then_quantisation(case: str, output: str, place: str):
    index, cols = tiny(case)
    tokens, top_k = index.rows.shape
    number = list(CASES).index(case) + LAYOUTS.index(output)
    fp8, pow2 = (E4M3, E5M2)[number % 2], bool(number // 2 % 2)
    x = wild(tokens, cols, torch.bfloat16)
    columns = len(index.counts) if number % 2 and top_k > 1 else top_k
    probs = None if top_k == len(index.counts) else numbers(tokens, columns, dtype=DTYPES[number % 3], seed=2)
    options = {"output": output, "dtype": fp8, "pow2_scale": pow2}
    want = composed(x, index, probs, **options)
    with running_on(place) as device:
        there = None if probs is None else probs.to(device)
        got = moe_permute_fp8(x.to(device), on(device, index), probs=there, **options)
    same(got, want, f"{case}, {output}")
    assert got.y is None


@at(*DEVICE_CODE)
def test_other_types_and_columns(place: str):
    # In two kernels, for cases without a fused variant.
    index = routed(40, 3, 2, 16)
    views = [wild(40, 136, torch.float32), wild(40, 136, torch.float16), wild(40, 131, torch.bfloat16)]
    views += [wild(40, 320, torch.bfloat16)[:, 1:137], wild(136, 40, torch.bfloat16).t()]
    for i, x in enumerate(views):
        options = {"output": LAYOUTS[(i + 2) % 3], "dtype": (E4M3, E5M2)[i % 2]}
        want = composed(x.contiguous(), index, **options)
        with running_on(place) as device:
            got = moe_permute_fp8(x.to(device), on(device, index), **options)
        same(got, want, f"view {i}")


@at("cpu", *DEVICE_CODE)
def test_rows_after_the_last_expert_are_zeros(place: str):
    choices = torch.arange(30)[:, None] % 3
    index = build(choices, 4, 16, 400)
    used = int(index.offsets[-1])
    for dtype in (torch.bfloat16, torch.float32):
        with running_on(place) as device:
            x, probs = torch.ones(30, 128, dtype=dtype, device=device), torch.ones(30, 1, device=device)
            got = moe_permute_fp8(x, on(device, index), probs=probs)
            alone = moe_permute_fp8(x, on(device, index), probs=probs, output="row")
        for name in ("q", "scale", "probs"):
            assert_same_bits(getattr(alone, name), getattr(got, name), name)
        for t, unit in ((got.q.view(-1), 128), (got.q_t, 128), (got.scale, 1), (got.probs, 1)):
            assert t[: used * unit].float().any() and not t[used * unit :].float().any()
        assert not got.scale_t[4:].any()


@at("cpu", *DEVICE_CODE)
def test_an_index_that_is_wrong_stays_inside(place: str):
    index = routed(60, 5, 2, 4)
    slots, offsets = index.slots.clone(), index.offsets.clone()
    slots[::7], slots[3] = 2**31 - 1, -9
    offsets[2], offsets[-1] = 2**31 - 1, -5
    with running_on(place) as device:
        bad = on(device, index._replace(slots=slots, offsets=offsets))
        for output, cols in (("both", 136), ("row", 144)):
            moe_permute_fp8(wild(60, cols, torch.bfloat16).to(device), bad, output=output)
        good = on(device, index._replace(slots=slots))
        got = moe_permute_fp8(torch.ones(60, 136, dtype=torch.bfloat16, device=device), good)
        if place != "cpu":  # where the slots are not read
            assert not got.q[::7].float().any()


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_threads_does_not_matter(order: str | int):
    index, cols = tiny("blocks")
    x, probs = wild(210, cols, torch.bfloat16), numbers(210, 2)
    for output in ("row", "both"):
        want = composed(x, index, probs, output=output)
        with rtkernels.emulate("sm_90", order=order), poisoned():
            same(moe_permute_fp8(x, index, probs=probs, output=output), want, f"order {order}")


@at("cpu", *DEVICE_CODE)
def test_gradients(place: str):
    index = routed(20, 4, 2, 8)
    with running_on(place) as device:
        there = on(device, index)
        x, probs = numbers(20, 128, dtype=torch.bfloat16), numbers(20, 4, seed=3)
        a, p = x.to(device).clone().requires_grad_(), probs.to(device).clone().requires_grad_()
        got = moe_permute_fp8(a, there, probs=p)
        assert not any(t.requires_grad for t in got[:4]) and got.y.shape == (len(index.slots), 128)
        dy = numbers(len(index.slots), 128, dtype=torch.bfloat16, seed=4).to(device)
        dp = numbers(len(index.slots), seed=5).to(device)
        torch.autograd.backward([got.y, got.probs], [dy, dp])
        b, r = x.to(device).clone().requires_grad_(), probs.to(device).clone().requires_grad_()
        plain = moe_permute(b, there, probs=r)
        torch.autograd.backward([plain.y, plain.probs], [dy, dp])
        assert_same_bits(a.grad, b.grad)
        assert_same_bits(p.grad, r.grad)
        only = moe_permute_fp8(x.to(device), there, probs=p, output="row")
        assert only.y is None and only.probs.requires_grad and only.q_t is None


@at("cpu", *DEVICE_CODE)
def test_nothing_to_do(place: str):
    with running_on(place) as device:
        none = on(device, build(torch.zeros(0, 2, dtype=torch.int64), 3, 4, 8))
        got = moe_permute_fp8(torch.ones(0, 128, dtype=torch.bfloat16, device=device), none)
        assert got.q.shape == (8, 128) and not got.q.float().any() and not got.scale.any()
        index = on(device, build(torch.tensor([[0], [1]]), 2, 1, 0))
        got = moe_permute_fp8(torch.ones(2, 128, dtype=torch.bfloat16, device=device), index)
        assert got.q.shape == (0, 128) and got.q_t.shape == (0,)


INDEX, X = routed(4, 3, 2), torch.ones(4, 136)
BAD = {
    "output": (lambda: moe_permute_fp8(X, INDEX, output="column"), "layout is 'column'; expected one of 'row'"),
    "x": (lambda: moe_permute_fp8(X.to(E4M3), INDEX), "x has dtype float8_e4m3fn; expected one of"),
    "dtype": (lambda: moe_permute_fp8(X, INDEX, dtype=torch.float16), "the result has dtype float16; expected one of"),
    "tokens": (lambda: moe_permute_fp8(X[1:], INDEX), "index.rows has length 4; expected 3, that of x"),
    "offsets": (
        lambda: moe_permute_fp8(X, INDEX._replace(offsets=INDEX.offsets.long())),
        "index.offsets has dtype int64",
    ),
}
test_errors, test_errors_in_the_launchers = error_tests(BAD)


def test_compile():
    index = routed(12, 4, 2, 4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor, index: MoeIndex) -> tuple[Tensor, ...]:
        return tuple(t for t in moe_permute_fp8(x * 2, index) if t is not None)

    x = numbers(12, 128, dtype=torch.bfloat16)
    for a, b in zip(run(x, index), moe_permute_fp8(x * 2, index), strict=False):
        assert_same_bits(a, b)


@pytest.mark.gpu
def test_large_and_captured():
    g = torch.Generator("cuda").manual_seed(0)
    choices = torch.rand(3000, 64, device="cuda", generator=g).topk(6).indices
    index = build(choices, 64, 16, max_rows(3000, 6, 64, 16))
    x = torch.randn(3000, 1024, device="cuda", generator=g).bfloat16()
    replay = captured(lambda: moe_permute_fp8(x, index))
    x.normal_(generator=g)
    for ours, new in zip(index, build(choices.flip(0) % 9, 64, 16, len(index.slots)), strict=True):
        ours.copy_(new)
    same(replay(), composed(x.cpu(), on("cpu", index)), "replayed")


@pytest.mark.gpu
@pytest.mark.parametrize("output", LAYOUTS)
def test_more_codes_than_32_bits_count(output: str):
    # Every token goes to every expert, so each expert has the codes of all tokens.
    tokens, cols, experts = 4112, 2048, 256
    index = build(torch.arange(experts, device="cuda").expand(tokens, -1), experts, 16, tokens * experts)
    assert tokens * experts * cols > 2**31
    x = torch.randn(tokens, cols, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    with poisoned():  # the memory may still have the results of another case, which are the same
        got = moe_permute_fp8(x, index, output=output)
    want = rtkernels.quantize_fp8_experts(x, torch.tensor([tokens], device="cuda"), output=output)
    blocks = -(-tokens // 128)
    for expert in (0, experts // 2, experts - 1):
        for name, a, b in zip(got._fields[:4], got[:4], want, strict=True):
            assert (a is None) == (b is None), name
            if a is not None and b is not None:
                length = b.numel() if name != "scale_t" else blocks * cols
                part = a.view(-1)[expert * length : (expert + 1) * length]
                assert_same_bits(part, b.view(-1)[:length], f"{name} of expert {expert}")


def emulated_coverage() -> None:
    """Launch every kernel of the op in the emulator; the registry's test asks for it when this file has not run."""
    with rtkernels.emulate("sm_90"):
        moe_permute_fp8(X.bfloat16(), INDEX)
        for output in ("row", "both"):
            moe_permute_fp8(X.bfloat16()[:, :128].contiguous(), INDEX, output=output)
