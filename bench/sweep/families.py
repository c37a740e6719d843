"""What a draw of each family is: a row of ``bench/rows`` at random sizes."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.rows.act import glu
from bench.rows.attention import attention, decode
from bench.rows.gemm import gated_mm, grouped_mm, scaled_mm
from bench.rows.loss import cross_entropy
from bench.rows.moe import moe_permute
from bench.rows.norm import layer_norm, rms_norm
from bench.rows.reduce import row_dot, softmax
from bench.rows.rope import qk_norm_rope, rope
from bench.rows.router import router_gemm, topk_router
from bench.rows.row import Row
from bench.sweep import sizes

# Operations of an attention forward: 3 ms at 700 TFLOP/s.
MAX_FLOPS = 2 << 40
MAX_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Draw:
    """One row of a family at random sizes.

    Attributes:
        row: What is measured.
        forward: The forward row, where torch's backward is timed through autograd.
        leave_out: Peers that are never the fastest, and take long or much memory.
        ours: Context in which ours is called.
    """

    row: Row
    forward: Row | None = None
    leave_out: frozenset[str] = frozenset()
    ours: Callable[[], AbstractContextManager[Any]] = field(default=contextlib.nullcontext)


def _product(kind: str) -> Callable[[random.Random], Draw]:
    def draw(rng: random.Random) -> Draw:
        m, n, k = sizes.rows(rng), sizes.hidden(rng), sizes.hidden(rng)
        acc = rng.choice(("auto", "fast")) if kind in ("fp8_tensor", "fp8_row") else "auto"
        # Plain torch converts operands of 8 bits first; its product with padded operands is faster.
        return Draw(scaled_mm.product(kind, m, n, k, acc), leave_out=frozenset({"torch"}))

    return draw


def _gated(rng: random.Random) -> Draw:
    return Draw(gated_mm.at(sizes.rows(rng), sizes.hidden(rng), sizes.hidden(rng)))


def _attention(backward: bool) -> Callable[[random.Random], Draw]:
    def draw(rng: random.Random) -> Draw:
        (batch, length), (heads, heads_kv), width = sizes.sequences(rng), sizes.heads(rng), sizes.head_size(rng)
        causal = rng.random() < 0.5
        flops = 4 * batch * heads * length**2 * width // (2 if causal else 1)
        limit = MAX_FLOPS // (5 if backward else 2)
        if flops > limit:
            length = max(1, int(length * math.sqrt(limit / flops)))
        rows = attention.pair(batch, heads, heads_kv, length, width, causal)
        row, forward = (rows[1], rows[0]) if backward else (rows[0], None)
        return Draw(row, forward, frozenset({"torch"}))  # which holds all scores

    return draw


def _decode(rng: random.Random) -> Draw:
    batch, length = sizes.log_uniform(rng, 1, 256), sizes.log_uniform(rng, 16, 65536)
    (heads, heads_kv), width = sizes.heads(rng), sizes.head_size(rng)
    page = rng.choice((None, None, 16, 64, 128))
    of_a_key = 4 * batch * heads_kv * width
    step = page or 1
    length = max(step, min(length, MAX_CACHE_BYTES // of_a_key) // step * step)
    return Draw(decode.at(batch, length, heads, heads_kv, width, torch.bfloat16, page))


def _dense(pair: Callable[[int, int], tuple[Row, Row]], direction: str) -> Callable[[random.Random], Draw]:
    """Return draws of rows of a hidden size; `direction` is fwd, bwd, or both for either."""

    def draw(rng: random.Random) -> Draw:
        cols = sizes.hidden(rng)
        return _directed(pair(sizes.rows(rng, 2 * cols), cols), direction, rng)

    return draw


def _directed(rows: tuple[Row, Row], direction: str, rng: random.Random) -> Draw:
    backward = rng.random() < 0.5 if direction == "both" else direction == "bwd"
    return Draw(rows[1], rows[0]) if backward else Draw(rows[0])


def _softmax(rng: random.Random) -> Draw:
    cols = sizes.hidden(rng) if rng.random() < 0.5 else sizes.vocabulary(rng)
    return _directed(softmax.pair(sizes.rows(rng, cols), cols), "both", rng)


def _cross_entropy(rng: random.Random) -> Draw:
    cols = sizes.vocabulary(rng)
    forward, backward, both = cross_entropy.at(sizes.rows(rng, cols), cols)
    which = rng.randrange(3)
    return Draw(backward, forward) if which == 1 else Draw((forward, None, both)[which])


def _rope(rng: random.Random) -> Draw:
    (batch, length), (heads, heads_kv) = sizes.sequences(rng), sizes.heads(rng)
    return Draw(rope.forward(batch, length, heads, heads_kv, sizes.head_size(rng)))


def _qk_norm_rope(rng: random.Random) -> Draw:
    (batch, length), (heads, heads_kv) = sizes.sequences(rng), sizes.heads(rng)
    return _directed(qk_norm_rope.pair(length, batch, heads, heads_kv, sizes.head_size(rng)), "both", rng)


def _router_gemm(rng: random.Random) -> Draw:
    name = rng.choice(sorted(router_gemm.FORWARD_VARIANTS))
    at = (sizes.rows(rng), sizes.experts(rng), sizes.hidden(rng))
    return Draw(router_gemm.forward_row(at, name, *router_gemm.FORWARD_VARIANTS[name]))


def _topk_router(rng: random.Random) -> Draw:
    return Draw(topk_router.softmax_row(sizes.rows(rng), sizes.experts(rng), rng.randint(1, 8)))


def _moe_permute(rng: random.Random) -> Draw:
    cols, count, top_k = sizes.hidden(rng), sizes.experts(rng), rng.randint(1, 8)
    tokens = sizes.rows(rng, 2 * top_k * cols)
    case = moe_permute.Case(tokens, cols, count, top_k, count)
    return Draw(rng.choice(list(moe_permute.permute_rows(case))))


def _grouped_mm(rng: random.Random) -> Draw:
    n, k, experts = sizes.hidden(rng), sizes.hidden(rng), sizes.experts(rng)
    experts = max(1, min(experts, sizes.MAX_ELEMENTS // (n * k)))
    pairs = sizes.rows(rng, max(n, k)) * rng.randint(1, 8)  # of tokens and experts
    pairs = min(pairs, sizes.MAX_ELEMENTS // max(n, k))
    chosen = Counter(rng.choices(range(experts), [rng.expovariate(1.0) for _ in range(experts)], k=pairs))
    return Draw(grouped_mm.uneven(tuple(chosen[i] for i in range(experts)), n, k))


_REDUCTIONS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "sum.dim_IntList": lambda x, dim: x.sum(dim),
    "mean.dim": lambda x, dim: x.mean(dim),
    "amax": lambda x, dim: x.amax(dim),
    "argmax": lambda x, dim: x.argmax(dim),
    "var.correction": lambda x, dim: x.var(dim),
}


def _reduction(rng: random.Random) -> Draw:
    cols, name = sizes.hidden(rng), rng.choice(("row_dot", *_REDUCTIONS))
    rows = sizes.rows(rng)
    if name == "row_dot":
        return _directed(row_dot.pair(rows, cols), "both", rng)
    dim, dtype = rng.randrange(2), rng.choice((torch.bfloat16, torch.float32))

    def reduced(x: torch.Tensor) -> Any:
        return _REDUCTIONS[name](x, dim)

    def overridden() -> AbstractContextManager[Any]:
        import rtkernels

        return rtkernels.use(name)

    row = Row(
        name=f"reduction_{name.partition('.')[0]}",
        shape=f"{rows}x{cols} dim {dim} {dtype}".replace("torch.", ""),
        make=lambda device, g: {"x": torch.randn(rows, cols, device=device, generator=g).to(dtype)},
        ours=reduced,
        torch=reduced,
        bytes=rows * cols * dtype.itemsize,
    )
    return Draw(row, ours=overridden)


FAMILIES: dict[str, Callable[[random.Random], Draw]] = {
    "mm_bf16": _product("bf16"),
    "mm_fp8_tensor": _product("fp8_tensor"),
    "mm_fp8_row": _product("fp8_row"),
    "mm_fp8_block": _product("fp8_block"),
    "mm_int8": _product("int8"),
    "gated_mm": _gated,
    "attention_fwd": _attention(False),
    "attention_bwd": _attention(True),
    "attention_decode": _decode,
    "rms_norm_fwd": _dense(rms_norm.pair, "fwd"),
    "rms_norm_bwd": _dense(rms_norm.pair, "bwd"),
    "layer_norm_fwd": _dense(layer_norm.pair, "fwd"),
    "layer_norm_bwd": _dense(layer_norm.pair, "bwd"),
    "glu": _dense(glu.pair, "both"),
    "rope": _rope,
    "qk_norm_rope": _qk_norm_rope,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "router_gemm": _router_gemm,
    "topk_router": _topk_router,
    "moe_permute": _moe_permute,
    "grouped_mm": _grouped_mm,
    "reduction": _reduction,
}


def draw(family: str, seed: int, index: int) -> Draw:
    """Return a draw of a family, which depends on these three alone."""
    return FAMILIES[family](random.Random(f"{seed} {family} {index}"))
