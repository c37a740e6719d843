"""Split, norm and rotary embedding of a qkv projection: numerics at every place, gradients, errors, compilation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.places import DTYPES, at, short
from support.qk_norm_rope_cases import CASES, Inputs, check, qk_norm_rope

import rtkernels
from rtkernels.ops.rope import qk_norm_rope_bulk_plan as bulk
from rtkernels.ops.rope import qk_norm_rope_plan as plans


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_case(place: str, case: str) -> None:
    with running_on(place) as device:
        check(Inputs(case, torch.bfloat16, device))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=short)
@at()
def test_every_dtype(place: str, dtype: torch.dtype) -> None:
    cases = ["plain", "half_interleaved", "silu", "odd", "narrow_tables", "wide_weights", "padded_lanes"]
    with running_on(place) as device:
        for case in cases:
            check(Inputs(case, dtype, device))


# Sizes of a head in elements; half of a rotary part is no whole number of 16-byte chunks in many of them.
HEAD_SIZES = (32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 136, 144, 160, 168, 192, 208, 224, 248, 256)


@pytest.mark.parametrize("dim", HEAD_SIZES)
@at()
@pytest.mark.one_in(3)
def test_every_head_size(place: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a head, all of it or four elements are rotated; none of these take the kernels for any alignment."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a kernel for heads without alignment was chosen")

    for kernel in (plans.FWD_ANY, plans.BWD_ANY):
        monkeypatch.setattr(kernel, "bind", refuse)
    sizes = {"dim": dim, "length": 3, "q_heads": 10, "kv_heads": 2}
    for name, more in {
        "half": {"rotary": dim // 2},
        "all": {"interleaved": dim % 16 == 0, "full": True},
        "four": {"rotary": 4, "interleaved": dim % 16 != 0, "head_order": "plain", "kv_heads": 3},
        "silu": {"rotary": dim // 2, "silu": True, "weights": "fp32", "mscale": 1.2, "narrow": True},
    }.items():
        monkeypatch.setitem(CASES, f"{name}_{dim}", sizes | more)
        with running_on(place) as device:
            check(Inputs(f"{name}_{dim}", torch.bfloat16, device))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=short)
@at("sm_80", "sm_90", "cuda")
def test_head_sizes_of_every_dtype(place: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for dim, rotary, interleaved in ((80, 40, False), (72, 36, True), (36, 18, False), (100, 100, False)):
        case = {"dim": dim, "rotary": rotary, "interleaved": interleaved, "length": 3, "full": interleaved}
        monkeypatch.setitem(CASES, "size", case)
        with running_on(place) as device:
            check(Inputs("size", dtype, device))


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    for number in ("sm_80", "sm_90"):
        with rtkernels.emulate(number):
            for case in ("plain", "odd"):
                check(Inputs(case, torch.float32, "cpu"))


@at("cpu", "sm_90", "cuda")
def test_v_passes_through(place: str) -> None:
    with running_on(place) as device:
        for case in ("plain", "odd"):
            inputs = Inputs(case, torch.bfloat16, device)
            heads = inputs.qkv.unflatten(-1, (inputs.heads[1], -1, inputs.dim))
            heads[..., -1, 0] = torch.nan
            heads[..., -1, 1] = torch.inf
            qkv = inputs.qkv.clone().requires_grad_()
            _, _, v = qk_norm_rope(qkv, *inputs.weights, *inputs.tables, **inputs.options)
            same = {"rtol": 0, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(v.detach(), heads[..., -1, :].transpose(0, 1), **same)
            dv = inputs.gradients[2].clone()
            dv[..., 0] = torch.inf
            v.backward(dv)
            got = qkv.grad.unflatten(-1, (inputs.heads[1], -1, inputs.dim))
            torch.testing.assert_close(got[..., -1, :].transpose(0, 1), dv, **same)
            assert not got[..., :-1, :].any()


@pytest.mark.parametrize("case", ("plain", "split_chunks", "padded_lanes"))
@at()
def test_nan_stays_in_its_head(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = Inputs(case, torch.bfloat16, device)
        results = []
        for value in (1.0, torch.nan):
            qkv = inputs.qkv.clone()
            qkv[1, 0, inputs.dim + 3] = value  # of q's head 1
            qkv.requires_grad_()
            found = qk_norm_rope(qkv, *inputs.weights, *inputs.tables, **inputs.options)
            torch.autograd.backward(found, inputs.gradients)
            results.append([*(r.detach() for r in found), qkv.grad])
        heads = [r[0, 1] for r in results[1][:3]]
        assert heads[0][1].isnan().all() and not any(h.isnan().any() for h in (heads[0][0], heads[0][2:], *heads[1:]))
        for wanted, got in zip(*results, strict=True):
            broken = got.isnan()
            assert broken.sum() == (inputs.dim if got.shape != results[0][1].shape else 0)
            assert_same_bits(torch.where(broken, 0, got), torch.where(broken, 0, wanted))


@at("cpu", "sm_90", "cuda")
def test_zero_heads_stay_zero(place: str) -> None:
    with running_on(place) as device:
        inputs = Inputs("plain", torch.bfloat16, device)
        qkv = torch.zeros_like(inputs.qkv).requires_grad_()
        results = qk_norm_rope(qkv, *inputs.weights, *inputs.tables, **inputs.options)
        torch.autograd.backward(results, inputs.gradients)
        assert not any(r.any() for r in results) and qkv.grad.isfinite().all()


# ---- launch geometry ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silu", (False, True))
@pytest.mark.parametrize("limit", (99, 163, 227))
def test_backward_fits_in_shared_memory(limit: int, silu: bool) -> None:
    threads = plans._bwd_threads(limit * 1024, silu)
    assert threads % 32 == 0 and threads >= 160
    assert threads * 2 * plans._BWD_HEADS * 4 * 16 + threads <= limit * 1024


@pytest.mark.parametrize("lanes", (1, 2, 3, 5, 6, 7, 9, 16, 17, 32))
def test_warps_that_make_rotations_have_stages_of_their_own(lanes: int) -> None:
    """A barrier's parity tells neighbouring phases apart only: a warp has to see all phases of a stage it waits for."""
    for multiple, stages, limit in itertools.product((1, 2, 3, 4), (4, 6, 9, 12, 14, 16), (1, 2, 3)):
        stages -= stages % multiple
        warps, together, used = bulk.share_rotations(lanes, multiple, stages, limit)
        assert 1 <= warps <= limit and 1 <= together <= 32 // lanes and used % multiple == 0 and used <= stages
        assert warps * together <= used + 1 and (warps == 1 or used % (warps * together) == 0)


@pytest.mark.parametrize("heads", ((1, 1), (7, 3), (32, 4), (32, 8), (64, 64), (128, 8)), ids=str)
@pytest.mark.parametrize("lanes", (1, 8, 32))
@pytest.mark.parametrize("memory", (99, 227))
def test_teams_of_the_bulk_backward(heads: tuple[int, int], lanes: int, memory: int) -> None:
    for stage in (512, 20_000, 45_000, 60_000, 120_000):
        shares = bulk.share_out(*heads, lanes, stage, memory * 1024)
        if shares is None:
            assert 2 * stage + 16 * max(heads) > memory * 1024 - 20_000
            continue
        assert shares.stages >= 2 and shares.stages % shares.consumers == 0
        assert shares.stages * stage + 16 * shares.max_heads * shares.groups(lanes) <= memory * 1024
        assert shares.consumers * shares.warps <= bulk._WARPS and 32 * (bulk._WARPS + bulk._HELPERS) <= 384
        assert shares.groups(lanes) >= shares.q_slots + 2 * shares.kv_slots
        assert shares.q_slots * shares.max_heads >= heads[0] and shares.kv_slots * shares.max_heads >= heads[1]


@pytest.mark.parametrize("group", (1, 2, 3, 5, 7, 8, 13, 64))
def test_group_magic_divides(group: int) -> None:
    qkv = plans.Qkv(1, 1, 0, 0, group * 100, 100, 8, True)
    magic, extra, step, k_first, v_first = qkv.head_order()
    for head in range(group * 100):
        assert (head * magic) >> 32 == head // group
    assert (extra, step, k_first, v_first) == (2, group + 2, group, group + 1)
