"""fp8 of rows sorted by expert: each expert's part holds the bits its rows give by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from support.compare import assert_same_bits, poisoned, running_on
from support.fp8_cases import DEVICE_CODE, same_strides, wild
from support.fp8_reference import E4M3, E5M2, slow
from support.places import DTYPES, ORDERS, at, emulated, meta_on
from support.ways import captured
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.quant import quantize_fp8_experts as module
from rtkernels.ops.shared import tile_stream as stream
from rtkernels.ops.shared.fp8_layout import LAYOUTS, row_blocks_of
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.operator.declared import Meta

quantize_fp8_experts = rtkernels.quantize_fp8_experts
NAMES = ("q", "scale", "q_t", "scale_t")
# (counts, columns): experts of less than a block, of whole blocks, of none, of odd numbers of rows.
CASES = [
    ([5, 0, 130, 128, 1], 136),
    ([0, 0, 300, 0], 128),
    ([16, 144, 32], 264),
    ([7], 40),
    ([0, 0], 8),
    ([1] * 70, 33),
    ([129, 127], 257),
]


@pytest.fixture(autouse=True)
def by_the_copy_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small inputs, too, go to the kernel for large ones, wherever it can be used."""
    with kernels(monkeypatch, streams=True):
        yield


@contextmanager
def kernels(patch: pytest.MonkeyPatch, *, streams: bool, draws: bool = False) -> Iterator[None]:
    with patch.context() as inner:
        inner.setattr(module, "_STREAM_TILES", 0 if streams else 2**31)
        inner.setattr(stream, "_DRAW_TILES_PER_BLOCK", 0 if draws else 2**31)
        Plans.forget_all()
        yield
    Plans.forget_all()


def expected(x: Tensor, counts: list[int], dtype: torch.dtype, pow2: bool) -> tuple[np.ndarray, ...]:
    """The four results from the layouts' definition and the slow recipe."""
    rows, cols = x.shape
    groups = -(-cols // 128)
    q, scale = np.zeros((rows, cols), np.uint8), np.zeros(rows * groups, np.float32)
    q_t = np.zeros(rows * cols, np.uint8)
    scale_t = np.zeros((row_blocks_of(rows, len(counts)), cols), np.float32)
    first = block = 0
    for count in counts:
        part, end = x[first : first + count], first + count
        if count:
            q[first:end], scales = slow(part, "group", "column", dtype, pow2)
            scale[first * groups : end * groups] = scales.reshape(-1)
            codes, scales = slow(part, "group_t", "row", dtype, pow2)
            q_t[first * cols : end * cols] = codes.reshape(-1)
            scale_t[block : block + len(scales)] = scales
            block += len(scales)
        first = end
    return q, scale, q_t, scale_t


def same(got: tuple[Tensor | None, ...], want: tuple[Tensor | None, ...], what: str) -> None:
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            assert_same_bits(a.cpu(), b.cpu(), f"{name}, {what}")
            assert a.is_contiguous()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_is_the_recipe(dtype: torch.dtype):
    for i, (counts, cols) in enumerate(CASES):
        x, fp8, pow2 = wild(sum(counts), cols, dtype), (E4M3, E5M2)[i % 2], bool(i // 2 % 2)
        got = quantize_fp8_experts(x, torch.tensor(counts), dtype=fp8, pow2_scale=pow2)
        for name, tensor, array in zip(NAMES, got, expected(x, counts, fp8, pow2), strict=True):
            bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            np.testing.assert_array_equal(bits.numpy(), array, err_msg=f"{name} of {counts}")


@at(*DEVICE_CODE)
@pytest.mark.parametrize("output", LAYOUTS)
def test_device_code_gives_the_bits_of_the_reference(output: str, place: str):
    for i, (counts, cols) in enumerate(CASES):
        for k, dtype in enumerate(DTYPES):
            x, kind = wild(sum(counts), cols, dtype), (torch.int32, torch.int64)[(i + k) % 2]
            options = {"output": output, "dtype": (E4M3, E5M2)[k % 2], "pow2_scale": bool(i % 2)}
            want = quantize_fp8_experts(x, torch.tensor(counts), **options)
            with running_on(place) as device:
                got = quantize_fp8_experts(x.to(device), torch.tensor(counts, dtype=kind, device=device), **options)
            same(got, want, f"{counts}, {cols}, {dtype}")


@at(*DEVICE_CODE)
def test_strides(place: str):
    counts = [70, 0, 61]
    views = {
        "padded rows": wild(131, 320, torch.bfloat16)[:, :136],
        "misaligned": wild(131, 320, torch.bfloat16)[:, 1:137],
        "transposed": wild(136, 131, torch.bfloat16).t(),
        "expanded": wild(1, 136, torch.bfloat16).expand(131, 136),
    }
    for name, x in views.items():
        want = quantize_fp8_experts(x.contiguous(), torch.tensor(counts))
        with running_on(place) as device:
            spaced = torch.tensor([c for c in counts for _ in range(2)], device=device)[::2]
            same(quantize_fp8_experts(same_strides(x, device), spaced), want, name)


@at(*DEVICE_CODE)
def test_counts_that_do_not_sum_to_the_rows(place: str):
    # Nothing is read or written out of bounds, and what the counts cover is right.
    x = wild(200, 136, torch.bfloat16)
    with running_on(place) as device:
        short = quantize_fp8_experts(x.to(device), torch.tensor([50, -7, 30], device=device))
        long = quantize_fp8_experts(x.to(device), torch.tensor([150, 2**40, 9], device=device))
    want = quantize_fp8_experts(x[:80], torch.tensor([50, 0, 30]))
    for name, a, b in zip(NAMES, short, want, strict=True):
        assert_same_bits(a[: len(b)].cpu(), b, f"{name}, fewer")
    same(long, quantize_fp8_experts(x, torch.tensor([150, 50, 0])), "more")


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_threads_does_not_matter(monkeypatch: pytest.MonkeyPatch, order: str | int):
    counts, cols = CASES[0]
    x = wild(sum(counts), cols, torch.bfloat16)
    for streams, output in ((True, "both"), (True, "transposed"), *((False, output) for output in LAYOUTS)):
        want = quantize_fp8_experts(x, torch.tensor(counts), output=output)
        with kernels(monkeypatch, streams=streams, draws=True), rtkernels.emulate("sm_90", order=order), poisoned():
            same(quantize_fp8_experts(x, torch.tensor(counts), output=output), want, f"order {order}")


@pytest.mark.gpu
@pytest.mark.parametrize("draws", (False, True))
def test_both_kernels_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, draws: bool):
    for counts, cols in (([1000, 0, 7, 3333, 128, 20000], 1024), ([16] * 300, 264), ([4096, 4096], 7168)):
        x, numbers = torch.randn(sum(counts), cols, device="cuda"), torch.tensor(counts, device="cuda")
        x.view(-1)[::977], x.view(-1)[::1013] = float("inf"), float("nan")
        for dtype, output in ((torch.bfloat16, "both"), (torch.float16, "transposed")):
            with kernels(monkeypatch, streams=False):
                want = quantize_fp8_experts(x.to(dtype), numbers, output=output)
            with kernels(monkeypatch, streams=True, draws=draws), poisoned():
                for _ in range(3):
                    got = quantize_fp8_experts(x.to(dtype), numbers, output=output)
                    for name, a, b in zip(NAMES, got, want, strict=True):
                        if b is not None:
                            assert_same_bits(a, b, f"{name}, {counts}, {cols}")


@at("cpu", *DEVICE_CODE)
def test_nothing_to_do(place: str):
    with running_on(place) as device:
        counts = torch.zeros(3, dtype=torch.int32, device=device)
        got = quantize_fp8_experts(torch.ones(0, 40, device=device), counts)
        assert [tuple(t.shape) for t in got] == [(0, 40), (0,), (0,), (0, 40)]
        got = quantize_fp8_experts(torch.ones(4, 0, device=device), counts)
        assert [tuple(t.shape) for t in got] == [(4, 0), (0,), (0,), (3, 0)]


X, COUNTS = torch.ones(3, 130), torch.tensor([1, 2])
BAD = {
    "layout is 'column'; expected one of 'row', 'transposed', 'both'": lambda: quantize_fp8_experts(
        X, COUNTS, output="column"
    ),
    "x has dtype float64; expected one of": lambda: quantize_fp8_experts(X.double(), COUNTS),
    "the result has dtype float16; expected one of": lambda: quantize_fp8_experts(X, COUNTS, dtype=torch.float16),
    r"x has shape \(3,\); expected two dimensions": lambda: quantize_fp8_experts(X[:, 0], COUNTS),
    "counts has dtype float32; expected int32 or int64": lambda: quantize_fp8_experts(X, COUNTS.float()),
    r"counts has shape \(1, 2\); expected one dimension": lambda: quantize_fp8_experts(X, COUNTS[None]),
    r"counts has shape \(0,\); expected one dimension, the rows of 1 to 8192": lambda: quantize_fp8_experts(
        X, COUNTS[:0]
    ),
    "counts has device index 0; expected -1, that of x": lambda: module.QUANTIZE.check(
        meta_on(-1, X), meta_on(0, COUNTS), "row", E4M3, False
    ),
    "x has 2147483648 rows; expected less than": lambda: module._check(
        Meta(torch.float32, (2**31, 4), (4, 1), 0, 0), Meta(torch.int64, (2,), (1,), 0, 0), "row", E4M3
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_errors(message: str):
    with pytest.raises(ArgumentError, match=message):
        BAD[message]()


def test_compile_and_no_grad():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        return tuple(quantize_fp8_experts(x * 2, counts))

    x, counts = torch.randn(9, 136, requires_grad=True), torch.tensor([4, 5])
    got = run(x, counts)
    same(got, quantize_fp8_experts(x * 2, counts), "compiled")
    assert not any(t.requires_grad for t in got)


@pytest.mark.gpu
def test_graph_replays_with_other_counts():
    x = torch.randn(1000, 264, device="cuda", dtype=torch.bfloat16)
    counts = torch.tensor([100, 0, 900], device="cuda")
    replay = captured(lambda: quantize_fp8_experts(x, counts))
    for new in ([1000, 0, 0], [3, 500, 497], [333, 333, 334]):
        counts.copy_(torch.tensor(new))
        same(replay(), quantize_fp8_experts(x.cpu(), torch.tensor(new)), f"counts {new}")


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31_elements():
    rows, cols = 2**18 + 256, 8200
    tail = wild(257, cols, torch.bfloat16)
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-257:] = tail.cuda()
    with poisoned():
        got = quantize_fp8_experts(x, torch.tensor([rows - 257, 257], device="cuda"))
    want = quantize_fp8_experts(tail, torch.tensor([257]))
    assert_same_bits(got.q[-257:].cpu(), want.q, "q")
    assert_same_bits(got.q_t[-want.q_t.numel() :].cpu(), want.q_t, "q_t")
    assert_same_bits(got.scale[-want.scale.numel() :].cpu(), want.scale, "scale")
    assert not got.q_t[: 2**20].view(torch.uint8).any()


def emulated_coverage() -> None:
    """Launch every kernel of the op in the emulator; the registry's test asks for it when this file has not run."""
    with rtkernels.emulate("sm_90"):
        quantize_fp8_experts(X, COUNTS)
        quantize_fp8_experts(torch.ones(1, 2560, dtype=torch.bfloat16), COUNTS)  # 20 tiles
