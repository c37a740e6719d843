"""Rotary embedding, also for latent attention: numerics at every place, gradients, errors, compilation, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from contracts.samples import samples_of
from support import rope_reference as reference
from support.compare import ROUNDOFF, assert_close, assert_same_bits, poisoned, running_on
from support.places import DTYPES, ORDERS, at, emulated, error_tests, short
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.rope import mla_rope as mla_rope_module
from rtkernels.ops.rope import rope as module
from rtkernels.ops.rope import rope_operators

rope, mla_rope = rtkernels.rope, rtkernels.mla_rope


class Maker:
    """Makes the tensors of a case: the same numbers on every device."""

    def __init__(self, name: str, dtype: torch.dtype, device: str) -> None:
        self.generator = torch.Generator().manual_seed(sum(map(ord, name)))
        self.dtype, self.device = dtype, device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(self.device)

    def angles(self, *shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        angle = torch.randn(*shape, generator=self.generator) * 3
        return {"cos": angle.cos().to(dtype).to(self.device), "sin": angle.sin().to(dtype).to(self.device)}

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, dtype=dtype).to(self.device)

    def starts(self, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


CASES: dict[str, Callable[[Maker], dict[str, Any]]] = {
    "plain": lambda m: {"x": m.normal(2, 5, 3, 64), **m.angles(5, 32)},
    "one_head": lambda m: {"x": m.normal(1, 1, 1, 16), **m.angles(1, 8)},
    "q_and_k": lambda m: {"x": m.normal(2, 5, 6, 64), "k": m.normal(2, 5, 2, 64), **m.angles(7, 32)},
    "many_heads": lambda m: {"x": m.normal(1, 3, 33, 128), "k": m.normal(1, 3, 5, 128), **m.angles(3, 64)},
    "full_tables": lambda m: {"x": m.normal(2, 5, 3, 64), **m.angles(5, 64)},
    "full_interleaved": lambda m: {"x": m.normal(2, 5, 3, 64), **m.angles(5, 64), "interleaved": True},
    "interleaved": lambda m: {
        "x": m.normal(2, 5, 6, 64), "k": m.normal(2, 5, 1, 64), **m.angles(5, 32), "interleaved": True
    },
    "narrow_tables": lambda m: {"x": m.normal(2, 5, 3, 64), **m.angles(5, 32, dtype=m.dtype)},
    "narrow_full": lambda m: {"x": m.normal(2, 5, 3, 64), **m.angles(5, 64, dtype=m.dtype), "interleaved": True},
    "half": lambda m: {"x": m.normal(2, 5, 5, 128), **m.angles(5, 32), "rotary": 64},
    "half_interleaved": lambda m: {"x": m.normal(2, 5, 5, 128), **m.angles(5, 32), "rotary": 64, "interleaved": True},
    "fraction": lambda m: {"x": m.normal(2, 3, 4, 80), **m.angles(3, 16), "rotary": 32},
    "odd_sizes": lambda m: {"x": m.normal(2, 3, 4, 27), **m.angles(3, 7), "rotary": 14},
    "odd_interleaved": lambda m: {"x": m.normal(2, 3, 4, 27), **m.angles(3, 14), "rotary": 14, "interleaved": True},
    "wide_head": lambda m: {"x": m.normal(2, 3, 2, 600), **m.angles(3, 300)},
    "two": lambda m: {"x": m.normal(3, 2, 5, 2), **m.angles(2, 1)},
    "sequence_first": lambda m: {
        "x": m.normal(5, 2, 6, 64), "k": m.normal(5, 2, 2, 64), **m.angles(5, 32), "layout": "sbhd"
    },
    "heads_first": lambda m: {
        "x": m.normal(2, 6, 5, 64), "k": m.normal(2, 2, 5, 64), **m.angles(5, 32), "layout": "bhsd"
    },
    "transposed": lambda m: {"x": m.normal(2, 5, 6, 64).transpose(1, 2), **m.angles(5, 32), "layout": "bhsd"},
    "strided": lambda m: {"x": m.normal(2, 5, 6, 96)[:, :, ::2, 16:80], **m.angles(5, 32)},
    "unaligned": lambda m: {"x": m.normal(2, 5, 3, 72)[..., 1:65], **m.angles(5, 32)},
    "last_strided": lambda m: {"x": m.normal(2, 64, 3, 5).permute(0, 3, 2, 1), **m.angles(5, 32)},
    "expanded": lambda m: {"x": m.normal(1, 5, 1, 64).expand(3, 5, 2, 64), **m.angles(5, 32)},
    "unaligned_tables": lambda m: {
        "x": m.normal(2, 5, 3, 64), **{n: t[:, 1:33] for n, t in m.angles(5, 35).items()}
    },
    "strided_tables": lambda m: {"x": m.normal(2, 5, 3, 64), **{n: t[:, ::2] for n, t in m.angles(5, 64).items()}},
    "tables_per_token": lambda m: {"x": m.normal(2, 5, 3, 64), **m.angles(2, 5, 64)},
    "tables_one_batch": lambda m: {"x": m.normal(2, 5, 3, 64), **m.angles(1, 5, 32)},
    "tables_megatron": lambda m: {"x": m.normal(5, 2, 3, 64), **m.angles(5, 1, 1, 64), "layout": "sbhd"},
    "positions": lambda m: {"x": m.normal(2, 5, 3, 64), **m.angles(90, 32), "positions": m.integers(90, 2, 5)},
    "positions_shared": lambda m: {
        "x": m.normal(2, 5, 3, 64), **m.angles(90, 32), "positions": m.integers(90, 5, dtype=torch.int32)
    },
    "positions_strided": lambda m: {
        "x": m.normal(5, 2, 3, 64), **m.angles(9, 32), "positions": m.integers(9, 5, 2).t(), "layout": "sbhd"
    },
    "packed": lambda m: {"x": m.normal(7, 3, 64), "k": m.normal(7, 1, 64), **m.angles(7, 32)},
    "packed_positions": lambda m: {"x": m.normal(7, 3, 64), **m.angles(9, 32), "positions": m.integers(9, 7)},
    "sequences": lambda m: {"x": m.normal(11, 3, 64), **m.angles(6, 32), "cu_seqlens": m.starts(0, 4, 4, 5, 11)},
    "sequences_wide": lambda m: {
        "x": m.normal(11, 3, 64), **m.angles(9, 32), "cu_seqlens": m.starts(0, 2, 11, dtype=torch.int64)
    },
    "sequences_padded": lambda m: {"x": m.normal(11, 3, 64), **m.angles(9, 32), "cu_seqlens": m.starts(0, 3, 9)},
    "sequences_odd": lambda m: {"x": m.normal(11, 3, 6), **m.angles(9, 3), "cu_seqlens": m.starts(0, 3, 11)},
    "zigzag": lambda m: {"x": m.normal(2, 6, 3, 64), **m.angles(24, 32), "cp_rank": 1, "cp_size": 4},
    "zigzag_sequences": lambda m: {
        "x": m.normal(10, 3, 64), **m.angles(12, 32), "cu_seqlens": m.starts(0, 8, 20), "cp_rank": 1, "cp_size": 2
    },
    "sections": lambda m: {
        "x": m.normal(2, 5, 3, 128), "k": m.normal(2, 5, 2, 128), **m.angles(30, 64), "sections": (16, 24, 24),
        "positions": m.integers(30, 3, 2, 5),
    },
    "sections_interleaved": lambda m: {
        "x": m.normal(2, 5, 3, 128), **m.angles(30, 128), "sections": (24, 20, 20), "sections_interleaved": True,
        "positions": m.integers(30, 3, 5),
    },
    "sections_adjacent": lambda m: {
        "x": m.normal(7, 3, 64), **m.angles(30, 64), "sections": (9, 11, 12), "interleaved": True,
        "positions": m.integers(30, 3, 7, dtype=torch.int32),
    },
    "sections_odd": lambda m: {
        "x": m.normal(7, 3, 14), **m.angles(30, 7), "sections": (1, 4, 2), "positions": m.integers(30, 3, 7)
    },
    "sections_tables": lambda m: {"x": m.normal(2, 5, 3, 64), **m.angles(3, 2, 5, 32), "sections": (8, 12, 12)},
    "mscale": lambda m: {"x": m.normal(2, 5, 3, 64), **m.angles(5, 32), "mscale": 1.37},
    "mscale_odd": lambda m: {"x": m.normal(2, 5, 3, 10), **m.angles(5, 5), "mscale": 0.5},
    "no_tokens": lambda m: {"x": m.normal(2, 0, 3, 64), **m.angles(5, 32)},
    "no_heads": lambda m: {"x": m.normal(2, 3, 0, 64), "k": m.normal(2, 3, 0, 64), **m.angles(5, 32)},
}  # fmt: skip


def split(inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor, Tensor, dict[str, Any]]:
    rest = dict(inputs)
    return rest.pop("x"), rest.pop("k", None), rest.pop("cos"), rest.pop("sin"), rest


def close(what: str, got: Tensor, exact: Tensor, terms: Tensor) -> None:
    """One rounding to the stored type and fp32 arithmetic relative to the terms that were added."""
    slack = 4 * ROUNDOFF[torch.float32] / ROUNDOFF[got.dtype]
    assert_close(got, exact, scale=exact.abs() + slack * terms, what=what, c=1.01)


def check(inputs: dict[str, Any]) -> list[Tensor]:
    """Run forward and backward of a case, hold every element to its error budget; return results and gradients."""
    x, k, cos, sin, options = split(inputs)
    results = []
    tensors = [t for t in (x, k) if t is not None]
    leaves = [t.detach().requires_grad_() for t in tensors]
    found = rope(leaves[0], cos, sin, **({"k": leaves[1]} if k is not None else {}), **options)
    found = found if k is not None else (found,)
    quiet = rope(x, cos, sin, k=k, **options)
    for y, q in zip(found, quiet if k is not None else (quiet,), strict=True):
        assert_same_bits(y.detach(), q, "result without gradients")
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(y.shape, generator=generator).to(y) for y in found]
    torch.autograd.backward(found, gradients)
    for t, leaf, y, dy in zip(tensors, leaves, found, gradients, strict=True):
        wide = t.detach().double().requires_grad_()
        exact = reference.rope(wide, cos, sin, **options)
        assert y.dtype == t.dtype and y.is_contiguous() and y.shape == t.shape
        limit = reference.rope(t.abs().double(), cos.abs(), -sin.abs(), **options).abs()
        limit = limit + reference.rope(t.abs().double(), cos.abs(), sin.abs(), **options).abs()
        close("y", y.detach(), exact.detach(), limit)
        (grad,) = torch.autograd.grad(exact, wide, dy.double())
        bound = torch.zeros_like(grad)
        if grad.numel():
            probe = torch.zeros_like(wide).requires_grad_()
            for sign in (1, -1):
                image = reference.rope(probe, cos.abs(), sign * sin.abs(), **options)
                bound = bound + torch.autograd.grad(image, probe, dy.abs().double())[0].abs()
        close("dx", leaf.grad, grad, bound)
        results += [y.detach(), leaf.grad]
    return results


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_case(place: str, case: str) -> None:
    with running_on(place) as device:
        check(CASES[case](Maker(case, torch.bfloat16, device)))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=short)
@at()
def test_every_dtype(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for case in ("q_and_k", "full_interleaved", "narrow_tables", "half", "odd_interleaved", "sections", "zigzag"):
            check(CASES[case](Maker(case, dtype, device)))


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    with rtkernels.emulate("sm_90"):
        for case in ("plain", "odd_sizes", "sections"):
            check(CASES[case](Maker(case, torch.float32, "cpu")))
        check_mla(MLA_CASES["plain"], torch.float32, "cpu")
        rtkernels.rope_table(3, 8)


@at("cpu", "sm_90", "cuda")
def test_position_outside_the_table_gives_nan(place: str) -> None:
    with running_on(place) as device:
        for dim in (64, 6):
            m = Maker("outside", torch.bfloat16, device)
            tables = m.angles(4, dim // 2)
            x = m.normal(1, 3, 2, dim)
            positions = torch.tensor([[1, 4, -1]], device=device)
            y = rope(x, **tables, positions=positions)
            assert not y[:, 0].isnan().any() and y[:, 1:].isnan().all()


@at("cpu", "sm_90", "cuda")
def test_elements_beside_the_rotary_part_keep_their_bits(place: str) -> None:
    with running_on(place) as device:
        for dim, rotary in ((64, 32), (15, 8)):
            m = Maker("beside", torch.bfloat16, device)
            x = m.normal(2, 3, 2, dim)
            x[..., rotary] = torch.nan
            x[..., rotary + 1] = torch.inf
            y = rope(x, **m.angles(3, rotary // 2), rotary=rotary)
            assert_same_bits(y[..., rotary:], x[..., rotary:])
            assert y[..., :rotary].isfinite().all()


# ---- in place, inverse ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ("plain", "q_and_k", "half_interleaved", "odd_sizes", "strided", "unaligned",
                                  "last_strided", "transposed", "sequences", "sections", "no_tokens"))  # fmt: skip
@at()
def test_in_place(place: str, case: str) -> None:
    with running_on(place) as device:
        x, k, cos, sin, options = split(CASES[case](Maker(case, torch.bfloat16, device)))
        expected = rope(x, cos, sin, k=k, **options)
        versions = x._version
        got = rope(x, cos, sin, k=k, in_place=True, **options)
        assert x._version > versions
        if k is None:
            expected, got = (expected,), (got,)
        for wanted, y, t in zip(expected, got, (x, k), strict=False):
            assert y is t
            assert_same_bits(y, wanted)


def test_in_place_gradients() -> None:
    m = Maker("in place", torch.float32, "cpu")
    x, k, tables = m.normal(2, 3, 4, 16), m.normal(2, 3, 2, 16), m.angles(3, 16)
    grads = []
    for in_place in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, k)]
        q, kk = rope(leaves[0] * 2, **tables, k=leaves[1] * 3, in_place=in_place)
        (q.square().sum() + kk.sum()).backward()
        grads.append([t.grad for t in leaves])
    torch.testing.assert_close(*grads)
    leaf = x.clone().requires_grad_()
    with pytest.raises(ArgumentError, match="x is a leaf that requires grad"):
        rope(leaf, **tables, in_place=True)
    assert_same_bits(leaf.detach(), x)
    square = (saved := leaf * 1).square()
    with torch.no_grad():
        rope(saved, **tables, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


@at("cpu", "sm_90", "cuda")
def test_inverse_is_the_adjoint_and_undoes_a_rotation(place: str) -> None:
    with running_on(place) as device:
        m = Maker("inverse", torch.float32, device)
        x, tables = m.normal(2, 3, 4, 32), m.angles(3, 16)
        for interleaved in (False, True):
            y = rope(x, **tables, interleaved=interleaved)
            back = rope(y, **tables, interleaved=interleaved, inverse=True)
            torch.testing.assert_close(back, x)
            full = m.angles(3, 32)
            z = m.normal(2, 3, 4, 32)
            left = (rope(x, **full, interleaved=interleaved) * z).sum()
            right = (x * rope(z, **full, interleaved=interleaved, inverse=True)).sum()
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
        leaf = x.clone().requires_grad_()
        rope(leaf, **full, inverse=True).backward(z)
        assert_same_bits(leaf.grad, rope(z, **full))


# ---- latent attention -----------------------------------------------------------------------------------------------

MLA_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "deepseek": {"nope": 128, "rotary": 64, "value": 128, "heads": 5},
    "other_split": {"nope": 24, "rotary": 16, "value": 40, "heads": 9},
    "odd": {"nope": 5, "rotary": 6, "value": 3},
    "no_nope": {"nope": 0, "rotary": 32, "value": 16},
    "no_value": {"nope": 16, "rotary": 32, "value": 0},
    "wide": {"nope": 16, "rotary": 132, "value": 8},
    "batch_first": {"layout": "bshd"},
    "heads_first": {"layout": "bhsd"},
    "to_batch_first": {"output_layout": "bshd"},
    "halves": {"interleaved": False},
    "adjacent": {"output_interleaved": True},
    "scatter": {"interleaved": False, "output_interleaved": True},
    "full": {"full": True},
    "full_scatter": {"interleaved": False, "output_interleaved": True, "full": True},
    "flat_pos": {"flat": True},
    "flat_pos_heads_first": {"flat": True, "layout": "bhsd"},
    "strided_pos": {"strided": True},
    "packed": {"packed": True},
    "packed_flat": {"packed": True, "flat": True},
    "zigzag": {"cp_rank": 1, "cp_size": 2, "mscale": 1.2},
    "many_heads": {"heads": 37},
}


def check_mla(case: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    options = dict(case)
    nope, rotary, value = options.pop("nope", 32), options.pop("rotary", 16), options.pop("value", 24)
    heads, packed, flat = options.pop("heads", 3), options.pop("packed", False), options.pop("flat", False)
    full, strided = options.pop("full", False), options.pop("strided", False)
    layout = options.get("layout", "sbhd")
    m = Maker(str(case), dtype, device)
    length, batch = 4, 2

    def made(count: int, size: int) -> Tensor:
        if packed:
            return m.normal(7, count, size)
        order = {"sbhd": (length, batch, count), "bshd": (batch, length, count), "bhsd": (batch, count, length)}
        return m.normal(*order[layout], size)

    q, kv = made(heads, nope + rotary), made(heads, nope + value)
    pos = made(1, rotary + 8)[..., 8:] if strided else made(1, rotary)
    if flat:
        pos = pos.squeeze(1 if packed or layout == "bhsd" else 2)
    tables = m.angles(16, rotary if full else rotary // 2)
    if packed:
        options["cu_seqlens"] = m.starts(0, 3, 7)
    adjacent_in, adjacent_out = options.get("interleaved", True), options.get("output_interleaved", False)

    def exact(q: Tensor, kv: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        whole = pos if not flat else pos.unsqueeze(1 if packed or layout == "bhsd" else 2)
        qh, kvh, ph = (reference.to_bshd(t, layout) for t in (q, kv, whole))
        found = reference.tables(*tables.values(), *qh.shape[:2], rotary // 2, adjacent_out, options)
        ph = reference.rotated(ph, found, 0, adjacent_in, adjacent_out)
        k = torch.cat((kvh[..., :nope], ph.expand(*kvh.shape[:3], -1)), -1)
        results = (reference.rotated(qh, found, nope, adjacent_in, adjacent_out), k, kvh[..., nope:])
        return tuple(reference.from_bshd(t, options.get("output_layout", layout), packed) for t in results)

    inputs = (q, kv, pos)
    wide = [t.double().detach().requires_grad_() for t in inputs]
    leaves = [t.detach().requires_grad_() for t in inputs]
    wanted, got = exact(*wide), mla_rope(*leaves, **tables, **options)
    gradients = [m.normal(*t.shape) for t in got]
    torch.autograd.backward(got, gradients)
    torch.autograd.backward(wanted, [g.double() for g in gradients])
    bounds = [8.0 * options.get("mscale", 1.0), 8.0 * options.get("mscale", 1.0), 0.0]
    for name, y, reference_y, bound in zip("qkv", got, wanted, bounds, strict=True):
        assert y.is_contiguous()
        close(name, y.detach(), reference_y.detach(), torch.full_like(reference_y, bound))
    for name, leaf, wide_leaf in zip(("dq", "dkv", "dk_pos"), leaves, wide, strict=True):
        bound = (8.0 if name == "dq" else 8.0 * heads) if name != "dkv" else 0.0
        close(name, leaf.grad, wide_leaf.grad, torch.full_like(wide_leaf.grad, bound * 1.5))
    for a, b in zip(inputs, leaves, strict=True):
        assert_same_bits(a, b.detach(), "input")
    if options.get("output_layout", layout) == layout:
        again = q.clone()
        results = mla_rope(again, kv, pos, **tables, **options, in_place=True)
        assert results[0] is again
        for y, z in zip(results, got, strict=True):
            assert_same_bits(y, z.detach(), "in place")


@pytest.mark.parametrize("case", MLA_CASES)
@at()
def test_mla(place: str, case: str) -> None:
    with running_on(place) as device:
        check_mla(MLA_CASES[case], torch.bfloat16, device)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=short)
@at("cpu", "sm_90", "cuda")
def test_mla_dtypes(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for case in ("plain", "odd", "scatter"):
            check_mla(MLA_CASES[case], dtype, device)


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
        rope_operators._check(
            _meta(X, 0), _meta(X, devices["k"]) if "k" in devices else None, "bshd", "bshd", 0, 0, 0, False,
            _meta(T, devices.get("cos", 0)), _meta(T, devices.get("sin", 0)), given.get("positions"),
            given.get("cu_seqlens"), "", 0, 1, 1.0,
        )  # fmt: skip

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
        "x has strides .*; expected no expanded dimension with in_place",
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
