"""Cross entropy: bad input, torch.compile, arrays, processes, the same bits every time, and what only a GPU shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same_bits, poisoned, running_on
from support.cross_entropy_cases import MODES, Inputs, check, cross_entropy, labels_of, make
from support.places import DTYPES, ORDERS, at, emulated, meta_on, order_test
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import cross_entropy as module
from rtkernels.ops.loss import cross_entropy_operators as ops
from rtkernels.ops.loss import cross_entropy_parallel as parallel
from rtkernels.ops.loss import cross_entropy_plan as plans
from rtkernels.runtime import targets
from rtkernels.runtime.launch.device import DeviceInfo
from rtkernels.runtime.launch.plans import Plans

# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", (40, -1, 2**40))
@at("cpu", "sm_90")
def test_bad_labels_on_the_cpu(place: str, label: int) -> None:
    with running_on(place):
        for one_pass, cols in itertools.product((False, True), (40, 17003)):
            if label == 40 and cols != 40:
                continue
            labels = torch.tensor([1, 2, label, 4])
            with pytest.raises(ArgumentError, match=f"labels has {label} in row 2"):
                cross_entropy(torch.randn(4, cols, dtype=torch.bfloat16, requires_grad=True), labels, one_pass=one_pass)
        cross_entropy(torch.randn(4, 40).bfloat16(), torch.arange(4))  # and nothing is left over


@pytest.mark.gpu
@pytest.mark.parametrize("cols", (40, 20000))
@pytest.mark.parametrize("one_pass", (False, True))
def test_bad_labels_surface_later(one_pass: bool, cols: int) -> None:
    good = torch.arange(4, device="cuda")
    bad = torch.tensor([1, cols, 2, 3], device="cuda")
    leaf = torch.randn(4, cols, device="cuda", requires_grad=True)
    losses = cross_entropy(leaf, bad, reduction="none", one_pass=one_pass)
    with pytest.raises(ArgumentError, match=f"labels has {cols} in row 1"):
        rtkernels.check_labels()
    assert losses.isnan().tolist() == [False, True, False, False]
    losses[0].backward()
    assert (leaf.grad[1] == 0).all()
    cross_entropy(leaf, bad, one_pass=one_pass)
    torch.cuda.synchronize()
    with pytest.raises(ArgumentError, match=f"labels has {cols} in row 1"):
        cross_entropy(leaf, good)
    cross_entropy(leaf, good)
    rtkernels.check_labels("cuda")


X, LABELS = torch.randn(4, 8), torch.arange(4)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: cross_entropy(X.double(), LABELS), "logits has dtype float64; expected one of bfloat16"),
    "no dimensions": (lambda: cross_entropy(X[0, 0], LABELS), "logits has no dimensions"),
    "no columns": (lambda: cross_entropy(X[:, :0], LABELS), "logits has 0 columns; expected 1 to"),
    "labels dtype": (lambda: cross_entropy(X, LABELS.short()), "labels has dtype int16; expected one of int32"),
    "probabilities": (
        lambda: cross_entropy(X, LABELS.float()),
        r"labels has shape \(4,\); expected \(4, 8\), that of logits, as probabilities",
    ),
    "labels shape": (lambda: cross_entropy(X, LABELS[:3]), r"labels has shape \(3,\); expected \(4,\), that of logits"),
    "labels device": (
        lambda: ops.FORWARD.check(meta_on(0, X), meta_on(-1, LABELS), -100, 0.0, 0.0, 0.0, 0, False),
        "labels has device index -1; expected 0, that of logits",
    ),
    "smoothing": (lambda: cross_entropy(X, LABELS, label_smoothing=1.5), "label_smoothing is 1.5; expected 0 to 1"),
    "z_loss": (lambda: cross_entropy(X, LABELS, z_loss=float("nan")), "z_loss is nan; expected a finite number"),
    "softcap": (lambda: cross_entropy(X, LABELS, softcap=-1.0), "softcap is -1.0; expected a positive number, or None"),
    "softcap zero": (lambda: cross_entropy(X, LABELS, softcap=0.0), "softcap is 0.0; expected a positive number"),
    "reduction": (lambda: cross_entropy(X, LABELS, reduction="avg"), "reduction is 'avg'; expected one of 'none'"),
    "range alone": (lambda: cross_entropy(X, LABELS, vocab_size=8), "vocab_size are given without a group"),
    "one pass with a group": (
        lambda: cross_entropy(X, LABELS, one_pass=True, group=object()),
        "one_pass and group are both given",
    ),
    "half a range": (lambda: parallel.vocabulary_range(8, None, 0, None), "vocab_start and vocab_size go together"),
    "range": (lambda: parallel.vocabulary_range(8, None, 4, 10), "vocab_start is 4 and vocab_size 10; expected 8"),
    "overlap": (
        lambda: ops.ONE_PASS_IN_PLACE(X[:1].expand(4, 8), LABELS, -100, 0.0, 0.0, 0.0, 1, False),
        r"logits has strides \(0, 1\) for shape \(4, 8\); expected memory of its own for every element",
    ),
    "dloss": (
        lambda: ops.BACKWARD(X[:3, 0], X, LABELS, torch.zeros(2, 4), None, -100, 0.0, 0.0, 0.0, 0, 8),
        r"dloss has shape \(3,\); expected \(4,\), or one number",
    ),
    "not a tensor": (lambda: cross_entropy([1.0, 2.0], LABELS), "expected a torch.Tensor or an array with __dlpack__"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@at("cpu", "sm_90")
def test_error_messages(place: str, name: str) -> None:
    call, message = BAD[name]
    with running_on(place), pytest.raises(ArgumentError, match=message):
        call()


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, labels: Tensor) -> Tensor:
        first, lse = cross_entropy(x * 2, labels, return_lse=True, z_loss=0.01)
        return first + cross_entropy(x + 1, labels, one_pass=True, reduction="sum", in_place=True) + lse.sum()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 4):
        x, labels = torch.randn(rows, 16, device=place), torch.arange(rows, device=place)
        grads = []
        for function in (compiled, block):
            leaf = x.clone().requires_grad_()
            loss = function(leaf, labels)
            (loss * 1.5).backward()
            grads += [loss.detach(), leaf.grad]
        torch.testing.assert_close(grads[:2], grads[2:])


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).standard_normal((3, 8), dtype=np.float32)
    labels = np.array([0, 3, -100])
    loss, lse = cross_entropy(x, labels, reduction="none", return_lse=True)
    assert isinstance(loss, np.ndarray) and loss[2] == 0
    np.testing.assert_allclose(lse[:2], np.log(np.exp(x).sum(-1))[:2], rtol=1e-6)


def test_bench_rows_agree_with_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(4, 32, generator=generator), torch.arange(4)
    rows = {row.name: row for row in rows_of(module.OP.name)}
    forward, backward, both = (rows[f"cross_entropy_{name}"] for name in ("fwd", "bwd", "fwdbwd"))
    torch.testing.assert_close(forward.ours(logits=logits, labels=labels), forward.torch(logits=logits, labels=labels))
    torch.testing.assert_close(forward.ours(logits=logits, labels=labels), forward.fused(logits=logits, labels=labels))
    stats = ops.FORWARD(logits, labels, -100, 0.0, 0.0, 0.0, plans.NONE, False)[2]
    inputs = {"dy": torch.rand(4), "logits": logits, "labels": labels, "stats": stats}
    torch.testing.assert_close(backward.ours(**inputs), backward.torch(**inputs))
    torch.testing.assert_close(both.ours(logits=logits, labels=labels), both.torch(logits=logits, labels=labels))


LONG_ROWS = (
    (157184, 8192, 1, 1), (151936, 8192, 1, 1), (128256, 8192, 1, 1), (65536, 8192, 2, 1), (50257, 8192, 3, 1),
    (32768, 8192, 4, 1), (20000, 8192, 6, 1), (32000, 200, 2, 1), (262144, 8192, 1, 2), (151936, 66, 1, 2),
    (151936, 133, 2, 2), (8200, 8192, 6, 1), (8200, 300, 6, 1),
)  # fmt: skip


@pytest.mark.parametrize(("cols", "rows", "blocks", "row_blocks"), LONG_ROWS)
def test_long_rows_fit_the_sms(
    cols: int, rows: int, blocks: int, row_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of today's vocabularies are held whole: shorter rows by several blocks, longer ones by two."""
    info = DeviceInfo("H200", targets.parse("sm_90a"), 132, 227 * 1024)
    monkeypatch.setattr(plans, "device_info", lambda device: info)
    layout = plans.long_layout(cols // 8, rows, 0)
    assert layout.grid == min(132 * blocks, rows * row_blocks) and layout.blocks == row_blocks
    pieces = cols / 8 / (layout.threads * row_blocks)
    assert layout.in_registers < pieces <= layout.in_registers + layout.slots
    assert (layout.shared + plans._STATIC_SHARED + 1024) * blocks <= 228 * 1024


def test_few_rows_are_for_all_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    info = DeviceInfo("H200", targets.parse("sm_90a"), 132, 227 * 1024)
    monkeypatch.setattr(plans, "device_info", lambda device: info)

    def blocks(cols: int, rows: int, sums: bool = True) -> int:
        return plans.few_rows_blocks(cols // 8, rows, 0, 1024, sums)

    for cols, rows, wanted in ((1000, 1, 1), (4096, 66, 1), (16384, 1, 4), (32000, 64, 8), (32000, 128, 1)):
        assert blocks(cols, rows) == wanted, (cols, rows)
    for cols, rows in ((1000, 100), (32000, 133), (157184, 32), (300000, 1)):
        assert blocks(cols, rows) == 0, (cols, rows)
    assert blocks(8192, 1, False) == 0 and blocks(16384, 1, False) == 4 and blocks(262144, 1) == 8
    assert plans.few_rows_blocks(5000, 1, -1, 1024, True) == 0  # the emulated GPU is not given clusters


@at("sm_90", "cuda")
def test_reductions_of_many_rows(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks add up the rows, and the last one their sums."""
    monkeypatch.setattr(plans, "_REDUCE_ALONE", 100)
    monkeypatch.setattr(plans, "_REDUCE_ROWS", 64)
    Plans.forget_all()
    with running_on(place) as device:
        for mode, reduction in itertools.product(("two_pass", "one_pass"), ("mean", "sum")):
            check(make("many_rows", torch.float32, device), reduction, mode)


@at("sm_90", "cuda")
@pytest.mark.parametrize("largest", (3000.0, 1047552.0, 1048576.0, -1048576.0, 1e30, -3e38))
def test_logits_of_any_size(largest: float, place: str) -> None:
    """Where the base of the exponentials changes, and where the largest logit times log2(e) would overflow."""
    generator = torch.Generator().manual_seed(0)
    below = torch.randint(0, 3, (2, 2100), generator=generator) * 2.0**-8
    logits = (largest * (1 - below if largest > 0 else 1 + below / 8)).bfloat16()
    labels = torch.tensor([0, 3])
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf, labels, reduction="none")
    expected.sum().backward()
    with running_on(place) as device:
        for one_pass in (False, True):
            x = logits.to(device, copy=True).requires_grad_()
            loss = rtkernels.cross_entropy(x, labels.to(device), reduction="none", one_pass=one_pass)
            loss.sum().backward()
            torch.testing.assert_close(loss.detach().cpu().double(), expected.detach(), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(x.grad.cpu().double(), leaf.grad, rtol=2**-8, atol=1e-7)


# ---- the same bits every time ---------------------------------------------------------------------------------------


test_thread_order_does_not_matter = order_test(
    lambda case: check(make(case[0], torch.bfloat16, "cpu"), "mean", case[1]),
    *itertools.product(("odd", "long_odd", "many_rows"), ("two_pass", "one_pass_in_place")),
)


@emulated
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("blocks", (2, 8))
def test_few_rows_in_clusters(blocks: int, order: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row in several blocks, which write their sums to each other."""
    monkeypatch.setattr(plans, "few_rows_blocks", lambda *shape: blocks)
    Plans.forget_all()
    with rtkernels.emulate("sm_90", order):
        for case, mode in (("odd_wide", "two_pass"), ("smoothing_long", "one_pass")):
            check(make(case, torch.bfloat16, "cpu"), "mean", mode)
    Plans.forget_all()


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_long_rows_in_clusters(order: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks hold a row, and claim the next one together."""
    monkeypatch.setattr(plans, "few_rows_blocks", lambda *shape: 0)
    layout = plans.LongLayout(grid=4, threads=64, shared=10 * 64 * 16, slots=10, blocks=2, in_registers=9)
    monkeypatch.setattr(plans, "long_layout", lambda *shape: layout)
    Plans.forget_all()
    with rtkernels.emulate("sm_90", order):
        for mode in ("one_pass", "one_pass_in_place"):
            check(make("smoothing_long", torch.bfloat16, "cpu"), "mean", mode)
    Plans.forget_all()


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("cols", (1000, 16384, 32000, 50257, 65536, 128256, 151936, 157184, 262144))
def test_bench_shapes(cols: int) -> None:
    for dtype, rows in zip(DTYPES, (300, 40, 40), strict=True):
        generator = torch.Generator("cuda").manual_seed(cols)
        logits = torch.randn(rows, cols, generator=generator, device="cuda").to(dtype)
        with poisoned():
            for mode in MODES:
                check(Inputs(logits, labels_of(logits)), "mean", mode)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "cols"), ((1, 32000), (5, 50257), (3, 157184), (64, 32003), (200, 1003), (70, 128257), (133, 151937))
)
def test_rows_shared_by_several_blocks(rows: int, cols: int) -> None:
    """Clusters of two to eight blocks, and the kernel for a few more rows."""
    generator = torch.Generator("cuda").manual_seed(cols)
    logits = torch.randn(rows, cols, generator=generator, device="cuda").bfloat16()
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-3}):
        with poisoned():
            for mode, reduction in itertools.product(MODES, ("mean", "sum", "none")):
                check(Inputs(logits, labels_of(logits), options), reduction, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("one_pass", (False, True))
@pytest.mark.parametrize("cols", (1003, 151936))
def test_equal_bits_twice_and_on_two_streams(cols: int, one_pass: bool) -> None:
    x = torch.randn(512, cols, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, cols, (512,), device="cuda")

    def run() -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        loss = cross_entropy(leaf, labels, one_pass=one_pass)
        loss.backward()
        return loss.detach(), leaf.grad

    wanted = run()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    torch.cuda.synchronize()
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run())
    torch.cuda.synchronize()
    for result in results:
        for a, b in zip(result, wanted, strict=True):
            assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", (1000, 20001, 151936))
def test_graph_capture_and_replay(cols: int) -> None:
    x = torch.randn(64, cols, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, cols, (64,), device="cuda")
    dloss = torch.full((), 2.0, device="cuda")

    def run() -> tuple[Tensor, ...]:
        loss, _, stats, factor = ops.FORWARD(x, labels, -100, 0.0, 0.0, 0.0, plans.MEAN, False)
        dx = ops.BACKWARD(dloss, x, labels, stats, factor, -100, 0.0, 0.0, 0.0, 0, cols)
        other, _, _, dlogits = ops.ONE_PASS(x, labels, -100, 0.0, 0.0, 0.0, plans.MEAN, True)
        ops.SCALE(dlogits, dloss)
        return loss, dx, other, dlogits

    replay = captured(run)
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), run())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", ((70_000, 2**15 + 1), (2**28 + 1, 8), (2, 2**30 + 8)), ids=str)
def test_beyond_two_to_the_31(shape: tuple[int, ...]) -> None:
    if torch.cuda.mem_get_info()[0] < 9 * torch.Size(shape).numel():
        pytest.skip("not enough free GPU memory")
    x = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
    labels = torch.full(shape[:1], shape[1] - 1, device="cuda")
    loss, _, _ = ops.ONE_PASS_IN_PLACE(x, labels, -100, 0.0, 0.0, 0.0, plans.SUM, False)
    each = torch.tensor(float(shape[1])).log().item()
    assert loss.item() == pytest.approx(shape[0] * each, rel=1e-3)
    share = torch.tensor(1 / shape[1]).bfloat16().item()
    assert (x[-1, :-1] == share).all() and x[-1, -1] == torch.tensor(1 / shape[1] - 1).bfloat16() and x[0, 0] == share
