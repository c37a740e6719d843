"""Inputs of qk_norm_rope, and what its results must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rtkernels
from support import rope_reference as reference
from support.compare import ROUNDOFF, assert_close, assert_same_bits

qk_norm_rope = rtkernels.qk_norm_rope

# Fields of a case; the rest follows from them. `length` tokens of `batch` sequences ([length, batch, columns]).
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
        self.gradients = [gradient_like(shape, given.get("gradients"), normal).to(dtype).to(device) for shape in shapes]
        if given.get("gradients") in ("bhsd", "strided", "unaligned", "expanded"):
            self.gradients = [restride(g, given["gradients"]) for g in self.gradients]

    @property
    def layout(self) -> str:
        return self.options.get("layout", "sbhd")


def gradient_like(shape: tuple[int, ...], kind: str | None, normal: Callable[..., Tensor]) -> Tensor:
    return normal(*shape[:-2], 1, shape[-1]).expand(shape).clone() if kind == "expanded" else normal(*shape)


def restride(g: Tensor, kind: str) -> Tensor:
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
