"""Rotary embedding, also for latent attention: numerics at every place, gradients, errors, compilation, in place."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.places import DTYPES, at, short
from support.rope_cases import CASES, MLA_CASES, Maker, check, check_mla, rope, split

import rtkernels
from rtkernels.errors import ArgumentError


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_case(place: str, case: str) -> None:
    with running_on(place) as device:
        check(CASES[case](Maker(case, torch.bfloat16, device)))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=short)
@at()
def test_every_dtype(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for case in ("q_and_k", "full_interleaved", "narrow_tables", "half", "odd_interleaved", "sections", "zigzag",
                     "split_chunks", "split_narrow", "split_in_a_chunk", "across_warps"):  # fmt: skip
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
        for dim, rotary in ((64, 32), (15, 8), (88, 40), (80, 24)):
            m = Maker("beside", torch.bfloat16, device)
            x = m.normal(2, 3, 2, dim)
            x[..., rotary] = torch.nan
            x[..., rotary + 1] = torch.inf
            y = rope(x, **m.angles(3, rotary // 2), rotary=rotary)
            assert_same_bits(y[..., rotary:], x[..., rotary:])
            assert y[..., :rotary].isfinite().all()


# ---- in place, inverse ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ("plain", "q_and_k", "half_interleaved", "odd_sizes", "strided", "unaligned",
                                  "last_strided", "transposed", "sequences", "sections", "no_tokens", "split_chunks",
                                  "split_fraction", "split_in_a_chunk", "across_warps"))  # fmt: skip
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


@at("sm_90", "cuda")
def test_in_place_of_more_heads_than_a_block_has(place: str) -> None:
    """The last block of a token has a group without heads of its own, which must not rotate those of another one."""
    with running_on(place) as device:
        m = Maker("blocks", torch.bfloat16, device)
        x, k, tables = m.normal(1, 2, 88, 128), m.normal(1, 2, 16, 128), m.angles(2, 64)
        expected = rope(x, **tables, k=k)
        for y, wanted in zip(rope(x, **tables, k=k, in_place=True), expected, strict=True):
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
