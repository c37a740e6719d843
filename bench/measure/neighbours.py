"""Ours and a copy over many shapes, without peers: where are the cliffs, and how much memory does a call take?

Efficiency is compared between neighbours: hidden sizes beside powers of two, few and many rows, short and long
vocabularies. Tests check correctness at such shapes; nothing is compared here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bench.measure.timing import Timer, copy_calls
from rtkernels.runtime.progress import Bar

HIDDEN = (1024, 1536, 2048, 4096, 5120, 7168, 8192)  # powers of two on both sides of every other size
ROWS = (1024, 2048, 4096, 16384, 32768, 65536)  # beside the 8192 of all hidden sizes
VOCABULARY = (1000, 4096, 16384, 32000, 50257, 65536, 128256, 151936, 157184, 262144)
BATCHES = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
ELEMENTS = 1 << 28
COPIES, ROTATED_BYTES = 3, 2 << 30


class Point(NamedTuple):
    """One op at one shape; `make` gives a call, `nbytes` is the minimum it must move."""

    name: str
    rows: int
    cols: int
    nbytes: int
    make: Callable[[], Callable[[], Any]]


def _data(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: function(*args, **options)


def _norms(rows: int, cols: int, device: str) -> Iterator[Point]:
    from rtkernels.ops.norm import group_rms_norm_gate as gates
    from rtkernels.ops.norm import layer_norm as layers
    from rtkernels.ops.norm import rms_norm as rms

    def x() -> torch.Tensor:
        return _data(rows, cols, device=device)

    def w() -> torch.Tensor:
        return _data(cols, device=device)

    def gated(op: Callable[..., Any], *more: Any) -> Callable[[], Any]:
        tensors = [x().view(1, rows, cols) for _ in range(2 + len(more))]
        return _call(op, *tensors, w(), 4, 1e-6, "same", "sigmoid", False, *more)

    n = 2 * rows * cols
    yield Point("rms_norm_fwd", rows, cols, 2 * n, lambda: _call(rms.FORWARD, x(), w(), 1e-6, 0.0))
    yield Point("rms_norm_bwd", rows, cols, 3 * n, lambda: _call(rms.BACKWARD, x(), x(), w(), None, 1e-6, 0.0, True))
    yield Point("layer_norm_fwd", rows, cols, 2 * n, lambda: _call(layers.layer_norm, x(), w(), w()))
    yield Point(
        "layer_norm_bwd", rows, cols, 3 * n,
        lambda: _call(layers.BACKWARD, x(), x(), w(), w(), None, 1e-5, 0.0, True),
    )  # fmt: skip
    yield Point("gate_fwd", rows, cols, 3 * n, lambda: gated(gates.FORWARD))
    yield Point("gate_bwd", rows, cols, 5 * n, lambda: gated(gates.BACKWARD, True))


def _rows(rows: int, cols: int, device: str) -> Iterator[Point]:
    import rtkernels as rtk
    from rtkernels.ops.act import glu
    from rtkernels.ops.reduce import softmax

    def x(times: int = 1) -> torch.Tensor:
        return _data(rows, times * cols, device=device)

    n, scales = 2 * rows * cols, rows * cols // 32
    yield from _norms(rows, cols, device)
    yield Point("softmax_fwd", rows, cols, 2 * n, lambda: _call(rtk.softmax, x()))
    yield Point("softmax_bwd", rows, cols, 3 * n, lambda: _call(softmax.BACKWARD, x(), x(), None, 1.0, False))
    yield Point("glu_fwd", rows, cols, 3 * n, lambda: _call(rtk.glu, x(2)))
    yield Point("glu_bwd", rows, cols, 5 * n, lambda: _call(glu.BACKWARD, x(), x(2), None, None, "silu", False))
    group = {"granularity": "group"}
    yield Point("quantize_fp8_group", rows, cols, n + n // 2 + scales, lambda: _call(rtk.quantize_fp8, x(), **group))
    both = {**group, "with_transposed": True}
    yield Point("quantize_fp8_both", rows, cols, 2 * n + 2 * scales, lambda: _call(rtk.quantize_fp8, x(), **both))
    for layout, moved in (("row", n + n // 2 + scales), ("both", 2 * n + 2 * scales)):
        yield Point(
            f"rms_norm_fp8_{layout}", rows, cols, moved,
            lambda layout=layout: _call(rtk.rms_norm_fp8, x(), _data(cols, device=device), layout=layout),
        )  # fmt: skip
    yield Point("glu_fp8_both", rows, cols, 3 * n + 2 * scales, lambda: _call(rtk.glu_fp8, x(2), layout="both"))


def _losses(rows: int, cols: int, device: str) -> Iterator[Point]:
    """Yield cross entropy, forward for each row, and loss and gradient in one call, as a training step makes it."""
    from rtkernels.ops.loss import cross_entropy as losses
    from rtkernels.ops.loss.cross_entropy_plan import NONE

    def make(op: Callable[..., Any], reduction: int) -> Callable[[], Any]:
        inputs = _logits(rows, cols, device)
        return lambda: op(*inputs, -100, 0.0, 0.0, 0.0, reduction, False)

    n = 2 * rows * cols
    yield Point("cross_entropy_fwd", rows, cols, n, lambda: make(losses.FORWARD, NONE))
    yield Point("cross_entropy_fwdbwd", rows, cols, 2 * n, lambda: make(losses.ONE_PASS, losses.MEAN))


def _autograd(rows: int, cols: int, device: str) -> Iterator[Point]:
    """Yield the same through autograd: also torch's fill of the loss gradient, and the kernel that checks it."""
    import rtkernels as rtk

    def make() -> Callable[[], Any]:
        logits, labels = _logits(rows, cols, device)
        logits.requires_grad_()
        return lambda: torch.autograd.grad(rtk.cross_entropy(logits, labels, one_pass=True), logits)

    yield Point("cross_entropy_autograd", rows, cols, 4 * rows * cols, make)


def _logits(rows: int, cols: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, cols, (rows,), device=device)
    return torch.randn(rows, cols, device=device, dtype=torch.bfloat16), labels


def points(device: str) -> Iterator[Point]:
    """Yield all points, in the order in which neighbours are compared."""
    for cols in HIDDEN:
        yield from _rows(8192, cols, device)
    for rows in ROWS:
        yield from _rows(rows, 4096, device)
    for cols in VOCABULARY:
        yield from _losses(ELEMENTS // cols, cols, device)
    for rows in BATCHES:
        yield from _losses(rows, 32000, device)
        yield from _autograd(rows, 32000, device)


def measure(
    timer: Timer, device: str, log: Callable[[str], None], only: Callable[[str], bool], bar: Bar | None = None
) -> list[dict[str, Any]]:
    """Time every point and return rows in the form of a result file, with the most extra memory of a call."""
    found = []
    chosen = [point for point in points(device) if only(point.name)]
    log(f"{len(chosen)} points, about {estimate_s(chosen, timer):.0f} s")
    if bar is not None:
        bar.total = len(chosen)
    for point in chosen if bar is None else bar.over(chosen):
        copies = COPIES if point.nbytes <= ROTATED_BYTES // 2 else 1
        calls = [point.make() for _ in range(copies)]
        copy = timer.measure(copy_calls(point.nbytes, device, copies)).us
        ours = timer.measure(calls)
        row = {
            "row": point.name, "shape": f"{point.rows}x{point.cols}", "dtype": "bfloat16", "us": ours.us,
            "p20": ours.p20, "p80": ours.p80, "bytes": point.nbytes, "copy_us": copy, "floor_us": None,
            "efficiency": copy / ours.us, "error_ours": None, "error_torch": None, "peers": {}, "peer_errors": {},
            "peak_extra_bytes": _extra_bytes(calls[0]),
        }  # fmt: skip
        found.append(row)
        log(f"{point.name} {row['shape']}: {ours.us:.1f} µs, {row['efficiency']:.3f}, extra {row['peak_extra_bytes']}")
        del calls
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return found


_BYTES_PER_US, _FLUSH_US, _SPIN_US, _HOST_US, _MAKING_US = 4.0e6, 100.0, 500.0, 20.0, 8000.0  # of an H200, about


def estimate_s(chosen: Sequence[Point], timer: Timer) -> float:
    """Return an estimate of the time to measure these points and their copies, without compilation."""
    batches = timer.iterations / timer.batch
    fixed = (
        _MAKING_US + timer.warm_us + timer.iterations * _FLUSH_US + batches * (_SPIN_US + 2 * timer.batch * _HOST_US)
    )
    return sum(2 * (fixed + timer.iterations * point.nbytes / _BYTES_PER_US) for point in chosen) / 1e6


def _extra_bytes(call: Callable[[], Any]) -> int | None:
    """Return the peak memory of a call in addition to its results, None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    return max(0, min(extra, torch.cuda.max_memory_allocated() - before))
