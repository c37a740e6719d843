"""Inputs of rotary embeddings, and what their results must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rtkernels
from support import rope_reference as reference
from support.compare import ROUNDOFF, assert_close, assert_same_bits

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
    "split_chunks": lambda m: {"x": m.normal(2, 5, 14, 88), "k": m.normal(2, 5, 2, 88), **m.angles(5, 88)},
    "split_narrow": lambda m: {"x": m.normal(2, 3, 9, 40), **m.angles(3, 20, dtype=m.dtype)},
    "split_interleaved": lambda m: {"x": m.normal(2, 3, 4, 88), **m.angles(3, 44), "interleaved": True},
    "split_full_interleaved": lambda m: {"x": m.normal(2, 3, 4, 24), **m.angles(3, 24), "interleaved": True},
    "split_fraction": lambda m: {"x": m.normal(2, 3, 4, 88), **m.angles(3, 20), "rotary": 40},
    "split_in_a_chunk": lambda m: {"x": m.normal(2, 3, 4, 80), **m.angles(3, 10), "rotary": 20, "interleaved": True},
    "split_sections": lambda m: {
        "x": m.normal(2, 3, 4, 88), **m.angles(30, 44), "sections": (14, 15, 15), "positions": m.integers(30, 3, 2, 3)
    },
    "split_positions": lambda m: {"x": m.normal(7, 3, 104), **m.angles(9, 52), "positions": m.integers(9, 7)},
    "across_warps": lambda m: {"x": m.normal(2, 3, 9, 160), "k": m.normal(2, 3, 3, 160), **m.angles(3, 80)},
    "lanes_of_two_warps": lambda m: {"x": m.normal(1, 3, 9, 320), "k": m.normal(1, 3, 4, 320), **m.angles(3, 160)},
    "tokens_of_a_block": lambda m: {"x": m.normal(3, 800, 2, 24), "k": m.normal(3, 800, 1, 24), **m.angles(800, 12)},
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
    "to_halves": lambda m: {
        "x": m.normal(2, 5, 3, 64), "k": m.normal(2, 5, 1, 64), **m.angles(5, 32), "interleaved": True,
        "output_interleaved": False,
    },
    "to_halves_odd": lambda m: {
        "x": m.normal(2, 5, 3, 27), **m.angles(5, 14), "rotary": 14, "interleaved": True, "output_interleaved": False
    },
    "to_neighbours": lambda m: {"x": m.normal(2, 5, 3, 64), **m.angles(5, 32), "output_interleaved": True},
    "last_part": lambda m: {"x": m.normal(2, 5, 3, 64), **m.angles(5, 16), "rotary_start": 32, "interleaved": True},
    "inner_part": lambda m: {"x": m.normal(2, 5, 3, 29), **m.angles(5, 5), "rotary_start": 3, "rotary": 10},
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

    def heads_of(count: int, size: int) -> Tensor:
        if packed:
            return m.normal(7, count, size)
        order = {"sbhd": (length, batch, count), "bshd": (batch, length, count), "bhsd": (batch, count, length)}
        return m.normal(*order[layout], size)

    q, kv = heads_of(heads, nope + rotary), heads_of(heads, nope + value)
    pos = heads_of(1, rotary + 8)[..., 8:] if strided else heads_of(1, rotary)
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
