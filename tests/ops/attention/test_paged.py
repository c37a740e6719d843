"""attention_varlen with a page table: packed queries over pages against fp64, masks, 8-bit caches, what is not read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.compare import running_on
from support.places import at, emulated, error_tests, order_test
from torch import Tensor

from rtkernels import attention_varlen, emulate
from rtkernels.errors import ArgumentError

BF16, FP16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
LARGEST = 2**31 - 1


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Batch:
    """Sequences of (queries, keys) in shuffled pages; unused entries of the table and unused slots are garbage."""

    def __init__(
        self, lengths: Any, page: int = 16, heads: tuple[int, int] = (2, 1), widths: tuple[int, int] = (64, 64),
        dtype: torch.dtype = BF16, cache: torch.dtype | None = None, padding: int = 0,
    ) -> None:  # fmt: skip
        self.lengths, self.dtype, self.heads = lengths, dtype, heads
        total = sum(queries for queries, _ in lengths)
        self.q = random(total + padding, heads[0], widths[0]).to(dtype)
        needed = [-(-keys // page) for _, keys in lengths]
        pages = sum(needed) + 2
        order = iter(torch.randperm(pages, generator=torch.Generator().manual_seed(3)).tolist())
        table = torch.tensor([-1, LARGEST, -(2**31)]).repeat(max(needed, default=0) + 1)[: max(needed, default=0) + 1]
        self.table = table.int().repeat(len(lengths), 1)
        self.scales: dict[str, Tensor] = {}
        stored = cache or dtype
        if stored in (E4M3, INT8):
            self.scales = {"k_scale": 0.05 * torch.arange(1.0, heads[1] + 1), "v_scale": torch.tensor(0.07)}
        self.pools, self.values = [], []
        for name, width, seed in (("k", widths[0], 1), ("v", widths[1], 2)):
            pool = random(pages, page, heads[1], width, seed=seed)
            if stored in (E4M3, INT8):
                pool = (pool * 12).round() if stored == INT8 else pool * 12
            self.pools.append(pool.to(stored))
            scale = self.scales.get(f"{name}_scale", torch.ones(()))
            self.values.append(self.pools[-1].double() * scale.double().reshape(-1, 1))
        used = torch.zeros(pages, page, dtype=torch.bool)
        self.rows = []
        for b, (_, keys) in enumerate(lengths):
            own = [next(order) for _ in range(needed[b])]
            self.table[b, : len(own)] = torch.tensor(own, dtype=torch.int32)
            rows = torch.tensor(own, dtype=torch.int64).repeat_interleave(page)[:keys] * page
            self.rows.append(rows + torch.arange(keys) % page)
            used.view(-1)[self.rows[-1]] = True
        for pool in self.pools:
            if stored.itemsize == 1:
                pool.view(torch.uint8)[~used] = 0x7F  # NaN of e4m3
            else:
                pool[~used] = math.nan
        self.ends = integers(0, *torch.tensor([n for n, _ in lengths]).cumsum(0).tolist())
        self.used = integers(*(keys for _, keys in lengths))

    def expected(self, left: int = -1, right: int = -1, softcap: float = 0.0, sinks: Tensor | None = None):
        heads, group = self.heads[0], self.heads[0] // self.heads[1]
        out = torch.zeros(*self.q.shape[:2], self.values[1].shape[-1], dtype=torch.float64)
        lse = torch.full((heads, self.q.shape[0]), -math.inf, dtype=torch.float64)
        for b, (queries, keys) in enumerate(self.lengths):
            rows = slice(int(self.ends[b]), int(self.ends[b]) + queries)
            k, v = (t.flatten(0, 1)[self.rows[b]].repeat_interleave(group, 1) for t in self.values)
            s = torch.einsum("ihd,jhd->hij", self.q[rows].double(), k) / math.sqrt(self.q.shape[-1])
            s = softcap * torch.tanh(s / softcap) if softcap else s
            own = torch.arange(queries).view(-1, 1) + keys - queries
            j = torch.arange(keys).view(1, -1)
            hidden = ((left >= 0) & (j < own - left)) | ((right >= 0) & (j > own + right))
            s = s.masked_fill(hidden, -math.inf)
            sink = (
                torch.full((heads, queries, 1), -math.inf)
                if sinks is None
                else sinks.view(-1, 1, 1).expand(-1, queries, 1)
            )
            lse[:, rows] = torch.logsumexp(torch.cat([s, sink.double()], -1), -1)
            p = torch.exp(s - lse[:, rows].unsqueeze(-1).masked_fill(lse[:, rows].unsqueeze(-1) == -math.inf, 0.0))
            out[rows] = torch.einsum("hij,jhd->ihd", p, v)
        return out, lse

    def call(self, device: Any = "cpu", max_q: int | None = None, **options: Any):
        tensors = {"seqused_k": self.used, "page_table": self.table, **self.scales}
        on = {name: t.to(device) for name, t in tensors.items()}
        if "sinks" in options:
            options["sinks"] = options["sinks"].to(device)
        max_q = max((n for n, _ in self.lengths), default=0) if max_q is None else max_q
        max_k = max((n for _, n in self.lengths), default=0)
        q, k, v = (t.to(device) for t in (self.q, *self.pools))
        return attention_varlen(q, k, v, self.ends.to(device), None, max_q, max_k, return_lse=True, **on, **options)


def check(batch: Batch, got: tuple[Tensor, Tensor], left: int = -1, right: int = -1, **options: Any) -> None:
    out, lse = (t.cpu() for t in got)
    expected, expected_lse = batch.expected(left, right, **options)
    unit = 2.0**-8 if batch.dtype == BF16 else 2.0**-11
    size = batch.values[1].abs().nan_to_num().max()
    assert out.dtype == batch.dtype and not out.isnan().any()
    assert ((out.double() - expected).abs() <= unit * (expected.abs() + 0.75 * size)).all()
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    limit = 2.0**-11 * (1.0 + expected_lse[finite].abs())
    assert ((lse.double()[finite] - expected_lse[finite]).abs() <= limit).all()


MIXED = ((5, 37), (1, 50), (0, 9), (33, 33), (1, 1), (7, 0), (3, 20))
# Batch, options.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"lengths": MIXED}, {"causal": True}),
    "all keys": ({"lengths": MIXED, "dtype": FP16}, {}),
    "window": ({"lengths": MIXED, "page": 32}, {"causal": True, "window": 11}),
    "window of both sides": ({"lengths": MIXED, "page": 48, "dtype": FP16}, {"window": (6, 3)}),
    "soft cap": ({"lengths": MIXED, "page": 64}, {"causal": True, "softcap": 1.5}),
    "sinks": ({"lengths": MIXED, "heads": (6, 2)}, {"causal": True, "sinks": random(6, seed=7)}),
    "pages of 128": ({"lengths": ((70, 300), (1, 129)), "page": 128, "widths": (128, 128)}, {"causal": True}),
    "8 heads of q": ({"lengths": ((21, 90), (2, 17)), "heads": (8, 1), "widths": (128, 64)}, {"causal": True}),
    "3 heads of q": ({"lengths": ((50, 60), (9, 70)), "heads": (6, 2), "widths": (72, 80)}, {"causal": True}),
    "no shared heads": ({"lengths": ((140, 150),), "heads": (2, 2), "widths": (64, 64)}, {"causal": True}),
    "256": ({"lengths": MIXED, "widths": (256, 256), "dtype": FP16, "heads": (4, 2)}, {"causal": True}),
    "more queries than keys": ({"lengths": ((9, 4), (20, 16), (2, 0))}, {"causal": True}),
    "padding": ({"lengths": MIXED, "padding": 5}, {"causal": True}),
    "e4m3": ({"lengths": MIXED, "cache": E4M3, "heads": (4, 2)}, {"causal": True}),
    "e4m3 of fp16": (
        {"lengths": MIXED, "cache": E4M3, "dtype": FP16, "widths": (128, 96)},
        {"causal": True, "softcap": 2.0},
    ),
    "e4m3 of 256": (
        {"lengths": ((5, 37), (1, 20)), "cache": E4M3, "widths": (256, 192)},
        {"causal": True, "window": 9},
    ),
    "int8": ({"lengths": MIXED, "cache": INT8, "page": 32, "heads": (4, 2), "widths": (112, 128)}, {"causal": True}),
    "int8 of fp16": ({"lengths": MIXED, "cache": INT8, "dtype": FP16}, {"window": (9, 0)}),
    "one query each": ({"lengths": ((1, 37), (1, 1), (1, 90)), "heads": (4, 2)}, {"causal": True}),
    "one query or none": (
        {"lengths": ((0, 8), (1, 37), (0, 0), (1, 20), (1, 0)), "padding": 2, "heads": (4, 2)},
        {"causal": True},
    ),
    "one query, e4m3": (
        {"lengths": ((1, 37), (0, 5), (1, 20)), "cache": E4M3, "page": 32},
        {"softcap": 2.0, "causal": True},
    ),
}


def _sides(options: dict[str, Any]) -> dict[str, Any]:
    window = options.get("window", -1)
    left, right = window if isinstance(window, tuple) else (window, -1)
    others = {name: value for name, value in options.items() if name in ("softcap", "sinks")}
    return {"left": left, "right": 0 if options.get("causal") else right, **others}


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_packed_queries_over_pages(name: str, place: str) -> None:
    given, options = CASES[name]
    batch = Batch(**given)
    with running_on(place) as device:
        check(batch, batch.call(device, **options), **_sides(options))


SM90_CASES = tuple(
    name for name in CASES if name not in ("3 heads of q", "sinks", "256", "e4m3 of 256")
)


@at("sm_90", "cuda")
@pytest.mark.parametrize(
    "name", (*SM90_CASES, "4 heads of q, sinks", "soft cap of 128", pytest.param("long", marks=pytest.mark.slow))
)
def test_the_wgmma_kernel(name: str, place: str) -> None:
    more = {
        "4 heads of q, sinks": ({"lengths": MIXED, "heads": (8, 2)}, {"causal": True, "sinks": random(8, seed=7)}),
        "soft cap of 128": ({"lengths": MIXED, "widths": (128, 96), "page": 80}, {"causal": True, "softcap": 1.5}),
        "long": (
            {"lengths": ((90, 700), (1, 400)), "heads": (4, 2), "page": 32, "widths": (128, 128)},
            {"causal": True},
        ),
    }
    given, options = CASES.get(name) or more[name]
    batch = Batch(**given)
    with running_on(place) as device:
        check(batch, batch.call(device, backend="sm90", **options), **_sides(options))


@emulated
def test_which_calls_the_wgmma_kernel_refuses() -> None:
    with emulate("sm_90"):
        for given, message in (
            ({"heads": (3, 1)}, "3 heads share keys; a power of two up to 64 is expected"),
            ({"widths": (64, 256)}, "heads have more than 128 elements"),
        ):
            with pytest.raises(ArgumentError, match=f"backend is 'sm90', which cannot run this: {message}"):
                Batch(((2, 5),), **given).call(backend="sm90")
    with emulate("sm_80"), pytest.raises(ArgumentError, match="no wgmma"):
        Batch(((2, 5),)).call(backend="sm90")


@at("cpu", "sm_80", "cuda")
def test_strides_of_caches_and_out(place: str) -> None:
    """Keys and values of a page lie side by side, as in a server's cache, and the result is a slice."""
    batch = Batch(MIXED, heads=(4, 2))
    with running_on(place) as device:
        both = torch.stack(batch.pools, 1).to(device)  # [pages, 2, page size, heads, width]
        wide = torch.full((batch.q.shape[0], 6, 64), 7.0, dtype=BF16, device=device)
        q = torch.cat([batch.q, batch.q], -1).to(device)[..., :64]
        given = q, both[:, 0], both[:, 1], batch.ends.to(device), None, 33, 50
        options = {"seqused_k": batch.used.to(device), "page_table": batch.table.to(device), "causal": True}
        out, lse = attention_varlen(*given, **options, out=wide[:, 1:5], return_lse=True)
        check(batch, (out, lse), right=0)
        assert (wide[:, [0, 5]] == 7.0).all()


@at("cpu", "sm_90", "cuda")
def test_lengths_beyond_the_pages_end_there(place: str) -> None:
    batch = Batch(((3, 32), (1, 32)), heads=(2, 1))
    batch.table = batch.table[:, :2].contiguous()
    batch.used = integers(900, 2**30)
    with running_on(place) as device:
        check(batch, batch.call(device, causal=True), right=0)


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("sequences", [0, 1, 70])
def test_numbers_of_sequences(sequences: int, place: str) -> None:
    batch = Batch(tuple((b % 3, 5 + b % 16) for b in range(sequences)), padding=2)
    with running_on(place) as device:
        check(batch, batch.call(device, max_q=2, causal=True), right=0)
        one = Batch(tuple((b % 2, 5 + b % 16) for b in range(sequences)), padding=2)
        check(one, one.call(device, max_q=1, causal=True), right=0)


def run(name: str) -> Any:
    given, options = CASES[name]
    return Batch(**given).call(**options)


test_every_order_of_threads = order_test(run, "causal", "e4m3", "one query or none")


def emulated_coverage() -> None:
    """Run every kernel in the emulator."""
    with emulate("sm_90"):
        check(Batch(MIXED), Batch(MIXED).call(causal=True), right=0)
        check(Batch(((1, 9),)), Batch(((1, 9),)).call(causal=True), right=0)


@emulated
def test_bits_do_not_depend_on_other_sequences() -> None:
    """A sequence alone has the bits that it has in a batch."""
    batch = Batch(((5, 37), (40, 50), (3, 20)), heads=(4, 2))
    with emulate("sm_80"):
        out, _ = batch.call(causal=True)
        for b in range(3):
            rows = slice(int(batch.ends[b]), int(batch.ends[b + 1]))
            alone = attention_varlen(
                batch.q[rows], *batch.pools, integers(0, rows.stop - rows.start), None, 40, 50, causal=True,
                seqused_k=batch.used[b : b + 1], page_table=batch.table[b : b + 1],
            )  # fmt: skip
            assert torch.equal(alone, out[rows])


def test_gradients_are_refused() -> None:
    batch = Batch(((2, 5),))
    batch.q.requires_grad_()
    with pytest.raises(ArgumentError, match="attention_varlen"):
        batch.call()
    with torch.no_grad():
        batch.call()


def test_a_length_beyond_the_pages_is_an_error_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTKERNELS_DEBUG", "1")
    batch = Batch(((2, 5),))
    batch.used = integers(33)
    with pytest.raises(ArgumentError, match="seqused_k"):
        batch.call()


def test_compiled() -> None:
    batch = Batch(((2, 5), (1, 20)))

    def call(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, used: Tensor, table: Tensor) -> Tensor:
        return attention_varlen(q, k, v, ends, None, 2, 20, causal=True, seqused_k=used, page_table=table) * 2

    given = batch.q, *batch.pools, batch.ends, batch.used, batch.table
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(*given), call(*given))


def bad(message: str, **changes: Any) -> tuple[Any, str]:
    def call() -> None:
        batch = Batch(((2, 5), (1, 20)))
        given = {
            "q": batch.q, "k": batch.pools[0], "v": batch.pools[1], "cu_seqlens_q": batch.ends, "cu_seqlens_k": None,
            "max_seqlen_q": 2, "max_seqlen_k": 20, "seqused_k": batch.used, "page_table": batch.table,
        }  # fmt: skip
        attention_varlen(**given | changes)

    return call, message


test_errors, test_errors_of_launchers = error_tests(
    {
        "no lengths": bad("seqused_k is None", seqused_k=None),
        "ends of keys": bad("cu_seqlens_k is given with a page_table", cu_seqlens_k=integers(0, 5, 20)),
        "no pages": bad("cu_seqlens_k", page_table=None),
        "size of pages": bad(
            "k has pages of 24 keys; expected a multiple of 16",
            k=torch.zeros(2, 24, 1, 64).bfloat16(),
            v=torch.zeros(2, 24, 1, 64).bfloat16(),
        ),
        "dimensions": bad("k has shape .*; expected 4 dimensions", k=torch.zeros(2, 16, 64).bfloat16()),
        "dtype": bad("k has dtype float32; expected one of bfloat16, float8_e4m3fn, int8", k=torch.zeros(2, 16, 1, 64)),
        "dtype of v": bad("v has dtype float16", v=torch.zeros(4, 16, 1, 64).half()),
        "width": bad("k has heads of 32 elements; expected 64", k=torch.zeros(5, 16, 1, 32).bfloat16()),
        "heads": bad("q has 2 heads", k=torch.zeros(5, 16, 3, 64).bfloat16(), v=torch.zeros(5, 16, 3, 64).bfloat16()),
        "table of int64": bad("page_table has dtype int64; expected int32", page_table=torch.zeros(2, 3).long()),
        "rows of the table": bad(
            r"page_table has shape \(3, 3\); expected \(2, pages\)", page_table=torch.zeros(3, 3).int()
        ),
        "lengths": bad(r"seqused_k has shape \(3,\); expected \(2,\)", seqused_k=integers(1, 2, 3)),
        "lengths of int64": bad("seqused_k has dtype int64", seqused_k=integers(1, 2).long()),
        "scale": bad("k_scale is given for a cache of q's dtype", k_scale=torch.ones(())),
        "scale without pages": bad(
            "k_scale is given without a page_table",
            page_table=None,
            k_scale=torch.ones(()),
            cu_seqlens_k=integers(0, 5, 20),
        ),
        "backend": bad("backend is 'cute'; expected 'auto', 'sm90' or 'mma'", backend="cute"),
        "sinks": bad("sinks has shape", sinks=torch.zeros(3)),
        "out": bad("out has shape", out=torch.zeros(3, 2, 32).bfloat16()),
        "max_seqlen_q": bad("max_seqlen_q is -1", max_seqlen_q=-1),
    }
)
