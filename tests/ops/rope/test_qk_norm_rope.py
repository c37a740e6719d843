"""Split, norm and rotary embedding of a qkv projection: numerics at every place, gradients, errors, compilation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from contracts.samples import samples_of
from support import rope_reference as reference
from support.compare import ROUNDOFF, assert_close, assert_same_bits, poisoned, running_on
from support.places import DTYPES, at, error_tests, meta_on, order_test, short
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.rope import qk_norm_rope as module
from rtkernels.ops.rope import qk_norm_rope_bulk_plan as bulk
from rtkernels.ops.rope import qk_norm_rope_plan as plans

qk_norm_rope = rtkernels.qk_norm_rope


# What a case says; the rest is made from it. `length` tokens of `batch` sequences ([length, batch, columns]).
DEFAULTS: dict[str, Any] = {
    "length": 5, "batch": 2, "q_heads": 4, "kv_heads": 2, "dim": 64, "rotary": None, "full": False, "rows": 24,
    "weights": "same", "narrow": False, "packed": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bench": {"q_heads": 32, "kv_heads": 4, "dim": 128, "rotary": 64, "length": 3},
    "bench_8": {"q_heads": 32, "kv_heads": 8, "dim": 128, "rotary": 64, "length": 2},
    "all": {"dim": 128},
    "interleaved": {"interleaved": True},
    "half_interleaved": {"interleaved": True, "rotary": 32},
    "fraction": {"dim": 80, "rotary": 32},
    "fraction_interleaved": {"dim": 80, "rotary": 32, "interleaved": True},
    "padded_lanes": {"dim": 96},
    "split_chunks": {"dim": 80, "rotary": 40, "q_heads": 10},
    "split_chunks_interleaved": {"dim": 72, "rotary": 36, "interleaved": True, "full": True},
    "split_chunks_sections": {"positions": (24, 3, 2, 5), "sections": (4, 8, 8), "dim": 40},
    "split_words": {"dim": 80, "rotary": 42},
    "split_many_tokens": {"dim": 72, "rotary": 36, "length": 61, "batch": 3, "rows": 61, "q_heads": 2, "kv_heads": 1},
    "head_order": {"head_order": "plain"},
    "odd_groups": {"q_heads": 7, "kv_heads": 3, "head_order": "plain"},
    "many_to_one": {"q_heads": 9, "kv_heads": 1},
    "no_grouping": {"q_heads": 5, "kv_heads": 5},
    "thirteen": {"q_heads": 26, "kv_heads": 2, "length": 3},
    "one_token": {"length": 1, "batch": 1},
    "many_tokens": {"length": 61, "batch": 3, "rows": 61},
    "long_batch": {"length": 2, "batch": 47},
    "batch_first": {"layout": "bshd"},
    "silu": {"silu": True},
    "silu_interleaved": {"silu": True, "interleaved": True, "rotary": 32},
    "silu_odd": {"silu": True, "dim": 10},
    "offset": {"offset": 1.0, "eps": 1e-3},
    "mscale": {"mscale": 1.3},
    "full_tables": {"full": True},
    "full_half": {"full": True, "rotary": 32},
    "full_interleaved": {"full": True, "interleaved": True},
    "narrow_tables": {"narrow": True},
    "wide_weights": {"weights": "fp32"},
    "no_weights": {"weights": "none"},
    "odd": {"dim": 13, "rotary": 6},
    "odd_interleaved": {"dim": 13, "rotary": 6, "interleaved": True, "full": True},
    "wide_head": {"dim": 600},
    "small_head": {"dim": 16},
    "smallest_head": {"dim": 2},
    "rows_apart": {"pad": 16},
    "rows_unaligned": {"pad": 1},
    "rows_transposed": {"transposed": True},
    "gradients_transposed": {"gradients": "bhsd"},
    "gradients_expanded": {"gradients": "expanded"},
    "gradients_unaligned": {"gradients": "unaligned"},
    "gradients_strided": {"gradients": "strided"},
    "positions": {"positions": (24, 2, 5)},
    "positions_shared": {"positions": (24, 5)},
    "packed": {"packed": True, "length": 11},
    "sequences": {"packed": True, "length": 11, "cu_seqlens": (0, 3, 3, 11)},
    "sequences_odd": {"packed": True, "length": 11, "cu_seqlens": (0, 3, 3, 11), "dim": 6},
    "zigzag": {"length": 4, "cp_rank": 2, "cp_size": 3},
    "zigzag_sequences": {"packed": True, "length": 10, "cu_seqlens": (0, 8, 20), "cp_rank": 1, "cp_size": 2},
    "sections": {"positions": (24, 3, 2, 5), "sections": (8, 12, 12)},
    "sections_interleaved": {"positions": (24, 3, 5), "sections": (12, 10, 10), "sections_interleaved": True},
    "no_tokens": {"length": 0},
}


class Inputs:
    """The tensors of a case: the same numbers on every device."""

    def __init__(self, case: str, dtype: torch.dtype, device: str) -> None:
        given = DEFAULTS | CASES[case]
        generator = torch.Generator().manual_seed(sum(map(ord, case)))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.dim, self.packed = given["dim"], given["packed"]
        self.heads = given["q_heads"], given["kv_heads"]
        length, batch = given["length"], 1 if self.packed else given["batch"]
        self.options = {
            name: given[name]
            for name in ("q_heads", "kv_heads", "head_order", "layout", "rotary", "interleaved", "silu", "eps",
                         "offset", "sections", "sections_interleaved", "cp_rank", "cp_size", "mscale")
            if given.get(name) is not None
        }  # fmt: skip
        columns = (self.heads[0] + 2 * self.heads[1]) * self.dim
        outer = (length,) if self.packed else (length, batch) if self.layout == "sbhd" else (batch, length)
        pad = given.get("pad", 0)
        qkv = (normal(*outer, columns + pad) * 2)[..., : columns + pad].to(dtype).to(device)[..., pad // 2 :]
        self.qkv = qkv[..., :columns]
        if given.get("transposed"):
            self.qkv = self.qkv.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        self.weights: list[Tensor | None] = [None, None]
        if given["weights"] != "none":
            kind = torch.float32 if given["weights"] == "fp32" else dtype
            self.weights = [normal(self.dim).to(kind).to(device) for _ in range(2)]
        rotary = given["rotary"] or self.dim
        angle = normal(given["rows"], rotary if given["full"] else rotary // 2) * 3
        kind = dtype if given["narrow"] else torch.float32
        self.tables = angle.cos().to(kind).to(device), angle.sin().to(kind).to(device)
        if "positions" in given:
            high, *shape = given["positions"]
            self.options["positions"] = torch.randint(high, shape, generator=generator).to(device)
        if "cu_seqlens" in given:
            self.options["cu_seqlens"] = torch.tensor(given["cu_seqlens"], dtype=torch.int32, device=device)
        shapes = [((length,) if self.packed else (batch, length)) + (h, self.dim) for h in (*self.heads, self.heads[1])]
        self.gradients = [_gradient(shape, given.get("gradients"), normal).to(dtype).to(device) for shape in shapes]
        if given.get("gradients") in ("bhsd", "strided", "unaligned", "expanded"):
            self.gradients = [_restride(g, given["gradients"]) for g in self.gradients]

    @property
    def layout(self) -> str:
        return self.options.get("layout", "sbhd")


def _gradient(shape: tuple[int, ...], kind: str | None, normal: Callable[..., Tensor]) -> Tensor:
    return normal(*shape[:-2], 1, shape[-1]).expand(shape).clone() if kind == "expanded" else normal(*shape)


def _restride(g: Tensor, kind: str) -> Tensor:
    """The same numbers in other memory."""
    if kind == "bhsd":
        return g.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "expanded":
        return g[:, :, :1].expand(g.shape)
    if kind == "strided":
        return g.transpose(2, 3).contiguous().transpose(2, 3)
    wide = g.new_empty(*g.shape[:-1], g.shape[-1] + 3)
    wide[..., 1:-2] = g
    return wide[..., 1:-2]


def exact(qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, inputs: Inputs) -> tuple[Tensor, ...]:
    """The op in fp64, head by head."""
    options, dim = inputs.options, inputs.dim
    q_heads, kv_heads = inputs.heads
    x = qkv[None] if inputs.packed else qkv.transpose(0, 1) if inputs.layout == "sbhd" else qkv
    heads = list(x.split(dim, -1))
    if options.get("head_order", "grouped") == "grouped":
        group, q, k, v = q_heads // kv_heads, [], [], []
        for i in range(kv_heads):
            mine = heads[i * (group + 2) : (i + 1) * (group + 2)]
            q, k, v = q + mine[:-2], k + mine[-2:-1], v + mine[-1:]
    else:
        q, k, v = heads[:q_heads], heads[q_heads : q_heads + kv_heads], heads[q_heads + kv_heads :]
    half = (options.get("rotary") or dim) // 2
    adjacent = options.get("interleaved", False)
    tables = reference.tables(*inputs.tables, x.shape[0], x.shape[1], half, adjacent, options)
    results = []
    for part, weight in ((q, q_weight), (k, k_weight), (v, None)):
        u = torch.stack(part, 2)
        if options.get("silu"):
            u = u * torch.sigmoid(u)
        if part is not v:
            gain = 1.0 if weight is None else weight + options.get("offset", 0.0)
            u = u / (u.square().mean(-1, keepdim=True) + options.get("eps", 1e-6)).sqrt() * gain
            u = reference.rotated(u, tables, 0, adjacent, adjacent)
        results.append(u[0] if inputs.packed else u)
    return tuple(results)


def close(what: str, got: Tensor, wanted: Tensor, terms: Tensor | float) -> None:
    """One rounding to the stored type and fp32 arithmetic relative to `terms`."""
    slack = ROUNDOFF[torch.float32] / ROUNDOFF[got.dtype]
    assert_close(got, wanted, scale=wanted.abs() + slack * torch.as_tensor(terms), what=what, c=1.01)


def check(inputs: Inputs) -> list[Tensor]:
    """Run forward and backward of a case and hold every element to its error budget; return all results."""
    given = (inputs.qkv, *inputs.weights)
    wide = [t if t is None else t.detach().double().requires_grad_() for t in given]
    leaves = [t if t is None else t.detach().requires_grad_() for t in given]
    wanted = exact(*wide, inputs)
    got = qk_norm_rope(*leaves, *inputs.tables, **inputs.options)
    quiet = qk_norm_rope(*given, *inputs.tables, **inputs.options)
    torch.autograd.backward(wanted, [g.double() for g in inputs.gradients])
    torch.autograd.backward(got, inputs.gradients)
    scale = inputs.options.get("mscale", 1.0)
    for name, y, same, reference_y in zip("qkv", got, quiet, wanted, strict=True):
        assert y.dtype == inputs.qkv.dtype and y.is_contiguous() and y.shape == reference_y.shape
        assert_same_bits(y.detach(), same, "result without gradients")
        largest = reference_y.detach().abs().amax().item() if y.numel() else 0.0
        close(name, y.detach(), reference_y.detach(), 16 * scale * largest)
    results = [y.detach() for y in got]
    for name, leaf, wide_leaf in zip(("dqkv", "dq_weight", "dk_weight"), leaves, wide, strict=True):
        if leaf is None:
            continue
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape
        count = inputs.qkv.numel() // max(inputs.dim, 1) if name != "dqkv" else 1
        largest = wide_leaf.grad.abs().amax().item() if leaf.numel() else 0.0
        close(name, leaf.grad, wide_leaf.grad, 32 * largest + 8 * count**0.5 + 8)
        results.append(leaf.grad)
    return results


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
