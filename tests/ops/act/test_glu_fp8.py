"""Gated linear units with fp8 results: codes and scales at every place, experts, errors, compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import ROUNDOFF, assert_close, assert_same_bits, poisoned, running_on
from support.fp8_reference import E4M3, encode
from support.places import DTYPES, at, emulated, meta_on, order_test, short
from support.ways import assert_equal_bits, captured
from test_glu import ACTS, plain_glu
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from bench.rows.act import glu_fp8 as bench_rows
from rtkernels.errors import ArgumentError
from rtkernels.ops.act import glu_fp8 as module
from rtkernels.ops.act import glu_fp8_plan as plans
from rtkernels.runtime.launch.plans import Plans

glu_fp8, glu_fp8_backward = rtkernels.glu_fp8, rtkernels.glu_fp8_backward
Normal = Callable[..., Tensor]


@dataclass
class Inputs:
    x: Tensor
    up: Tensor | None = None
    weight: Tensor | None = None
    counts: Tensor | None = None

    def call(self, **options: Any) -> module.GluFp8:
        return glu_fp8(self.x, self.up, weight=self.weight, counts=self.counts, **options)

    def exact(self, act: str) -> tuple[Tensor, Tensor]:
        """The unquantised result in fp64, [rows, columns], and the relative error fp32 arithmetic may have."""
        wide = [t if t is None else t.cpu().double() for t in (self.x, self.up, self.weight)]
        y = plain_glu(*wide, act)
        gate = wide[0] if self.up is not None else wide[0].chunk(2, -1)[0]
        # It grows with the exponent in the tail of the activation; exponentials of 16-bit tensors are good to 2^-19.
        error = 2.0**-21 * (1 + gate.clamp(-20, 20).nan_to_num().square())
        if self.x.dtype != torch.float32:
            error = error + 2.0**-19
        shape = (y.shape[:-1].numel(), y.shape[-1])
        return y.reshape(shape), error.reshape(shape)


def counts(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


CASES: dict[str, Callable[[Normal], Inputs]] = {
    "merged": lambda n: Inputs(n(130, 2 * 136)),
    "several_tiles": lambda n: Inputs(n(300, 2 * 264)),
    "merged_3d": lambda n: Inputs(n(2, 3, 2 * 40)),
    "merged_1d": lambda n: Inputs(n(2 * 24)),
    "one_element": lambda n: Inputs(n(2)),
    "odd": lambda n: Inputs(n(131, 2 * 133)),
    "no_rows": lambda n: Inputs(n(0, 2 * 16)),
    "no_columns": lambda n: Inputs(n(4, 0)),
    "separate": lambda n: Inputs(n(16, 64), n(16, 64)),
    "separate_strides": lambda n: Inputs(n(20, 80)[:, 8:72], n(40, 64)[::2]),
    "unaligned": lambda n: Inputs(n(20, 2 * 64 + 8)[:, 1:129]),
    "transposed": lambda n: Inputs(n(2 * 24, 33).t()),
    "expanded": lambda n: Inputs(n(1, 2 * 24).expand(9, -1)),
    "weight": lambda n: Inputs(n(140, 2 * 64), weight=n(140)),
    "weight_fp32": lambda n: Inputs(n(2, 3, 64), n(2, 3, 64), weight=n(2, 3).float()),
    "weight_strided": lambda n: Inputs(n(6, 2 * 16), weight=n(12)[::2]),
    "experts": lambda n: Inputs(n(300, 2 * 136), weight=n(300).float(), counts=counts(0, 37, 130, 0, 5, 128)),
    "experts_of_16": lambda n: Inputs(n(176, 2 * 128), counts=counts(16, 0, 144, 16, dtype=torch.int32)),
    "experts_odd": lambda n: Inputs(n(140, 2 * 77), weight=n(140), counts=counts(139, 1)),
    "experts_3d": lambda n: Inputs(n(4, 20, 2 * 24), counts=counts(30, 50, 0)),
    "many_experts": lambda n: Inputs(n(150, 2 * 16), counts=torch.arange(75) % 5),
    "one_expert": lambda n: Inputs(n(129, 2 * 16), counts=counts(129)),
    "counts_strided": lambda n: Inputs(n(30, 2 * 16), counts=counts(10, 7, 20, 7)[::2]),
    "experts_without_rows": lambda n: Inputs(n(0, 2 * 16), counts=counts(0, 0, 0)),
}


def make(case: str, dtype: torch.dtype, device: str) -> Inputs:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 2).to(dtype).to(device)

    inputs = CASES[case](normal)
    if inputs.counts is not None:
        inputs.counts = _same_strides(inputs.counts, device)
    return inputs


def _same_strides(t: Tensor, device: str) -> Tensor:
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(device)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


# ---- judging codes and scales ---------------------------------------------------------------------------------------


def judge_rows(
    y: np.ndarray, error: np.ndarray, q: np.ndarray, scale: np.ndarray, pow2: bool, what: str, group: int = 128
) -> None:
    """Hold codes of `y` [rows, cols], `group` in a row sharing a scale, to what y's relative errors allow."""
    rows, cols = y.shape
    groups = -(-cols // group)
    assert q.shape == y.shape and scale.shape == (rows, groups), what
    if y.size == 0:
        return
    finite = np.where(np.isfinite(y), np.abs(y), 0.0)

    def scale_of(values: np.ndarray) -> np.ndarray:
        amax = np.pad(values, ((0, 0), (0, groups * group - cols))).reshape(rows, groups, group).max(2)
        return np.maximum(amax / 448, 1e-30)

    low, high = (scale_of(finite * (1 + sign * error)) for sign in (-1, 1))
    if pow2:
        low, high = 2.0 ** np.ceil(np.log2(low) - 1e-9), 2.0 ** np.ceil(np.log2(high) + 1e-9)
        assert (np.frexp(scale)[0] == 0.5).all(), what
    assert ((scale >= low * (1 - 3e-7)) & (scale <= high * (1 + 3e-7))).all(), f"{what}: scales"
    inverse = (np.float32(1) / scale).repeat(group, 1)[:, :cols]
    with np.errstate(invalid="ignore", over="ignore"):
        ends = [encode(y * (1 + sign * (error + 2e-7)) * inverse, E4M3) for sign in (-1, 1)]
    place, *ends = (np.where(codes < 128, codes, 128 - codes.astype(int)) for codes in (q, *ends))  # in order of value
    wrong = (place < np.minimum(*ends)) | (place > np.maximum(*ends))
    assert not wrong.any(), f"{what}: {wrong.sum()} of {q.size} codes, first at {np.argwhere(wrong)[0]}"


def judge(
    got: module.GluFp8,
    values: tuple[Tensor, Tensor],
    experts: Tensor | None,
    *,
    layout: str,
    pow2: bool,
    scales: str,
) -> None:
    """Check every code and scale of a result against the exact values, given with their errors."""
    y, error = values[0], values[1].numpy()
    rows, cols = y.shape
    sizes = [rows] if experts is None else experts.tolist()
    groups = -(-cols // 128)
    exact = y.float().double().numpy()  # an overflow of fp32 is one
    flat = [t if t is None else t.cpu() for t in got]
    assert [t is not None for t in flat] == [layout != "transposed"] * 2 + [layout != "row"] * 2
    codes = [None if t is None else t.view(torch.uint8).flatten().numpy() for t in flat[::2]]
    start = block = 0
    for expert, size in enumerate(sizes):
        part, off, what = exact[start : start + size], error[start : start + size], f"expert {expert}"
        if layout != "transposed":
            assert flat[0].dtype == E4M3 and flat[1].dtype == torch.float32
            scale = flat[1].flatten().numpy()[start * groups : (start + size) * groups]
            scale = scale.reshape(groups, size).T if scales == "column" else scale.reshape(size, groups)
            q = codes[0][start * cols : (start + size) * cols].reshape(size, cols)
            judge_rows(part, off, q, scale, pow2, what)
        if layout != "row":
            assert flat[2].dtype == E4M3 and flat[3].dtype == torch.float32
            blocks = -(-size // 128)
            q_t = codes[1][start * cols : (start + size) * cols].reshape(cols, size)
            scale_t = flat[3].numpy()[block : block + blocks]
            judge_rows(part.T, off.T, q_t, scale_t.T, pow2, f"{what}, transposed")
            block += blocks
        start += size
    if layout != "row":
        assert not flat[3][block:].any()


def check(inputs: Inputs, act: str = "silu", *, layout: str = "both", pow2: bool = False, scales: str = "row") -> tuple:
    """Run the op and judge everything it gives."""
    got = inputs.call(act=act, layout=layout, pow2_scale=pow2, scale_layout=scales)
    for t in got:
        assert t is None or (t.is_contiguous() and not t.requires_grad)
    judge(got, inputs.exact(act), inputs.counts, layout=layout, pow2=pow2, scales=scales)
    return got


# ---- forward --------------------------------------------------------------------------------------------------------


# Cases where every place and option is tried; the emulator runs the others with one activation per case.
MAIN = ("odd", "separate_strides", "experts", "experts_of_16", "no_rows")


@pytest.mark.parametrize("case", MAIN)
@at()
def test_every_layout(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, torch.bfloat16, device)
        both = check(inputs, scales="column")
        rows = check(inputs, layout="row", scales="column")
        columns = check(inputs, layout="transposed")
        for half, whole in ((rows[:2], both[:2]), (columns[2:], both[2:])):
            for a, b in zip(half, whole, strict=True):
                assert_same_bits(a, b)
        check(inputs, pow2=True)
        if case == "experts_of_16":
            check_backward(inputs)


@pytest.mark.parametrize("case", [case for case in CASES if case not in MAIN])
@at("cpu", "sm_90", "cuda")
def test_every_case(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, torch.bfloat16, device)
        check(inputs)
        check_backward(inputs, layout="transposed")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("act", ACTS)
@at("cpu", "sm_90", "cuda")
def test_every_activation(place: str, act: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        check(make("experts" if act == "silu" else "experts_odd", dtype, device), act)
        check_backward(make_backward("experts" if act == "silu" else "experts_of_16", dtype, device), act)


@at()
def test_special_values(place: str) -> None:
    special = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 300.0, -300.0, 3e38, -3e38, 1e-40]
    with running_on(place) as device:
        x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        for i, value in enumerate(special):
            x[3 * i, 5 + i] = x[3 * i + 1, 130 + i] = value
        x[33] = 0.0
        inputs = Inputs(x.to(device))
        check(inputs)
        zero = glu_fp8(torch.zeros(3, 64, device=device), layout="both")
        assert not zero.q.view(torch.uint8).any() and not zero.q_t.view(torch.uint8).any()
        assert (zero.scale == torch.tensor(1e-30, device=device)).all() and zero.scale.equal(
            zero.scale_t.flatten()[:3, None]
        )


@at()
def test_counts_that_do_not_add_up(place: str) -> None:
    """Rows beyond the sum belong to nobody; counts beyond the rows are cut; nothing else is touched."""
    with running_on(place) as device:
        for numbers, used in (([10, 20], [10, 20]), ([30, 200, 7], [30, 70, 0]), ([-4, 100], [0, 100])):
            x = torch.randn(100, 2 * 24, generator=torch.Generator().manual_seed(1)).to(device)
            got = glu_fp8(x, counts=counts(*numbers).to(device), layout="both", scale_layout="column")
            wanted = glu_fp8(x[: sum(used)], counts=counts(*used).to(device), layout="both", scale_layout="column")
            rows = sum(used)
            assert_same_bits(got.q[:rows], wanted.q)
            assert_same_bits(got.scale[:rows], wanted.scale)
            assert_same_bits(got.q_t[: rows * 24], wanted.q_t)
            blocks = sum(-(-u // 128) for u in used)
            assert_same_bits(got.scale_t[:blocks], wanted.scale_t[:blocks])
            assert not got.scale_t[blocks:].any()


test_thread_order_does_not_matter = order_test(lambda case: check(make(case, torch.bfloat16, "cpu")), "experts", "odd")


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    for place in ("sm_80", "sm_90"):  # which has kernels of its own
        with running_on(place) as device:
            check(make("experts", torch.bfloat16, device))
            check(Inputs(torch.ones(1, 2 * 24 * 128, dtype=torch.bfloat16, device=device)))  # many tiles
            check_backward(make("weight", torch.bfloat16, device), layout="transposed")
    with running_on("sm_90") as device:
        check(make("merged_1d", torch.bfloat16, device), "relu")
        __import__("test_glu_smooth_fp8").check_smooth(make("merged_1d", torch.bfloat16, device))


# ---- backward -------------------------------------------------------------------------------------------------------

BACKWARD_CASES = {
    "plain": lambda n: Inputs(n(150, 2 * 128)),
    "two_tiles": lambda n: Inputs(n(5, 2 * 256)),
    "separate": lambda n: Inputs(n(9, 160)[:, 8:136], n(18, 128)[::2]),
    "unaligned": lambda n: Inputs(n(20, 2 * 128 + 8)[:, 1:257]),
    "weight": lambda n: Inputs(n(2, 70, 2 * 128), weight=n(2, 70)),
    "experts": lambda n: Inputs(n(300, 2 * 256), weight=n(300).float(), counts=counts(0, 37, 130, 0, 5, 128)),
    "experts_of_16": lambda n: Inputs(n(176, 2 * 128), counts=counts(16, 0, 144, 16, dtype=torch.int32)),
    # Groups of 128 columns that have some of gate and some of up, and a last one that is short, or is not.
    "tail_of_64": lambda n: Inputs(n(150, 2 * 192), weight=n(150)),
    "tail_of_8": lambda n: Inputs(n(131, 2 * 136), weight=n(131).float()),
    "tail_of_3": lambda n: Inputs(n(20, 2 * 131), weight=n(20)),
    "tail_of_2": lambda n: Inputs(n(9, 146)[:, 8:138], n(18, 130)[::2]),
    "hidden_of_2880": lambda n: Inputs(n(3, 2 * 2880)),  # that of GPT-OSS
    "one_group": lambda n: Inputs(n(3, 2 * 64)),
    "one_column": lambda n: Inputs(n(2, 2), weight=n(2)),
    "tail_experts": lambda n: Inputs(n(300, 2 * 320), weight=n(300).float(), counts=counts(0, 37, 130, 0, 5, 128)),
    "tail_no_rows": lambda n: Inputs(n(0, 2 * 40), weight=n(0)),
}


def gradients(inputs: Inputs, dy: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Exact gradients of [gate | up], with the errors fp32 may leave, and of the weight, with its sum of magnitudes."""
    x, up, weight = (t if t is None else t.cpu().double() for t in (inputs.x, inputs.up, inputs.weight))
    x = (x if up is None else torch.cat((x, up), -1)).requires_grad_()
    weight = weight if weight is None else weight.requires_grad_()
    plain_glu(x, None, weight, act).backward(dy.cpu().double())
    gate, other = x.detach().chunk(2, -1)
    g, w = dy.cpu().double(), 1.0 if weight is None else weight.detach().unsqueeze(-1)
    value = plain_glu(gate, torch.zeros_like(gate) if act == "swiglu_oai" else torch.ones_like(gate), None, act)
    tail = 2.0**-21 * (1 + gate.square()) + (0.0 if inputs.x.dtype == torch.float32 else 2.0**-19)
    partner = other.clamp(-7, 7) + 1 if act == "swiglu_oai" else other
    # Absolute: where the slope crosses zero, its terms count.
    error = torch.cat(((g * w * partner).abs() * tail * (1 + gate.abs()), (g * w * value).abs() * tail), -1)
    if weight is None:
        return x.grad, error, None, None
    return x.grad, error, weight.grad, ((g * value * partner).abs() * tail).sum(-1)


def check_backward(
    inputs: Inputs,
    act: str = "silu",
    *,
    layout: str = "both",
    pow2: bool = False,
    scales: str = "row",
    keep: str = "both",
    dy: Tensor | None = None,
) -> tuple:
    """Run the backward and judge everything it gives."""
    shape = inputs.x.shape if inputs.up is not None else (*inputs.x.shape[:-1], inputs.x.shape[-1] // 2)
    if dy is None:
        dy = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(inputs.x.dtype).to(inputs.x.device)
    got = glu_fp8_backward(
        dy, inputs.x, inputs.up, act=act, weight=inputs.weight, counts=inputs.counts, layout=layout, pow2_scale=pow2,
        scale_layout=scales, keep=keep,
    )  # fmt: skip
    dx, error, dweight, weight_error = gradients(inputs, dy, act)
    if keep == "fp8":
        assert got.dx is None
    else:
        slack = error / ROUNDOFF[inputs.x.dtype]
        assert got.dx.dtype == inputs.x.dtype and got.dx.is_contiguous()
        assert_close(got.dx, dx, scale=dx.abs() + slack, c=1.01, what="dx")
    if dweight is None:
        assert got.dweight is None
    else:
        assert got.dweight.dtype == inputs.weight.dtype and got.dweight.is_contiguous()
        slack = 4 * weight_error / ROUNDOFF[got.dweight.dtype]
        assert_close(got.dweight, dweight, scale=dweight.abs() + slack, c=1.01, what="dweight")
    if keep == "dense":
        assert got[:4] == (None,) * 4
    else:
        flat = dx.reshape(dx.shape[:-1].numel(), dx.shape[-1])
        relative = (error / dx.abs().clamp(min=1e-300)).reshape(flat.shape)
        judge(module.GluFp8(*got[:4]), (flat, relative), inputs.counts, layout=layout, pow2=pow2, scales=scales)
    return got


def make_backward(case: str, dtype: torch.dtype, device: str) -> Inputs:
    CASES["backward"] = BACKWARD_CASES[case]
    try:
        return make("backward", dtype, device)
    finally:
        del CASES["backward"]


@pytest.mark.parametrize("case", BACKWARD_CASES)
@at("cpu", "sm_90", "cuda")
def test_backward_layouts(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make_backward(case, torch.bfloat16, device)
        whole = check_backward(inputs, scales="column")
        rows = check_backward(inputs, layout="row", scales="column", keep="fp8")
        columns = check_backward(inputs, layout="transposed", keep="fp8")
        dense = check_backward(inputs, keep="dense")
        check_backward(inputs, pow2=True, keep="fp8")
        of_whole = ((rows[:2], whole[:2]), (columns[2:4], whole[2:4]), (dense[4:5], whole[4:5]))
        if dense.dx.shape[-1] % 256:
            of_whole = of_whole[:1]  # a group across the halves takes another kernel, whose roundings are others
        for part, of in of_whole:
            for a, b in zip(part, of, strict=True):
                assert_same_bits(a, b)
        for other in (rows, columns, dense):
            if whole.dweight is not None and len(of_whole) > 1:
                assert_same_bits(other.dweight, whole.dweight)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("act", ("silu", "swiglu_oai", "sigmoid"))
@at("cpu", "sm_90", "cuda")
def test_backward_groups_across_the_halves(place: str, act: str, dtype: torch.dtype) -> None:
    """As quantize_fp8 would group the columns of the gradient: 2 * 136 of them are two groups of 128 and one of 16."""
    with running_on(place) as device:
        for case in ("tail_experts", "tail_of_3"):
            check_backward(make_backward(case, dtype, device), act, scales="column")
        inputs = make_backward("tail_of_8", dtype, device)
        got = check_backward(inputs, act)
        assert got.scale.shape == (131, 3)
        if dtype == torch.float32:
            wanted = rtkernels.quantize_fp8(got.dx, granularity="group")
            assert_same_bits(got.q, wanted[0])
            assert_same_bits(got.scale, wanted[1])


@at("cpu", "sm_90", "cuda")
def test_dy_of_any_strides(place: str) -> None:
    with running_on(place) as device:
        inputs = make_backward("two_tiles", torch.bfloat16, device)
        wide = torch.randn(10, 300, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
        for dy in (wide[::2, 3:259], wide[::2, 8:264], wide[:1, :256].expand(5, -1), wide.t()[:256, ::2].t()):
            check_backward(inputs, dy=dy)


def shrunk(monkeypatch: pytest.MonkeyPatch, shared: int, multiprocessors: int = 4) -> None:
    """Plan for a device with so much shared memory."""
    info = plans.device_info(-1)
    small = type(info)(info.name, info.target, multiprocessors, shared)
    monkeypatch.setattr(plans, "device_info", lambda device: small)
    Plans.forget_all()


@emulated
@pytest.mark.parametrize("stages", (0, 1, 2))
def test_any_shared_memory(monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    """With room for that many tiles of all inputs; with none, the kernel for everything takes over."""
    least = 2**16
    for inputs, run in ((2, check), (3, check_backward)):
        with monkeypatch.context() as patch, running_on("sm_90") as device:
            shrunk(patch, plans._STATIC_SHARED + 400 + (stages * inputs * 2**15 or least))
            run(make_backward("experts", torch.bfloat16, device))
    Plans.forget_all()


@emulated
def test_many_tiles_for_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the block works out the places of at a time."""
    x, numbers = torch.randn(76, 2 * 8, generator=torch.Generator().manual_seed(0)), torch.ones(70, dtype=torch.int64)
    numbers[::11] = 2
    numbers[0] = 1
    with running_on("sm_90") as device:
        shrunk(monkeypatch, plans._STATIC_SHARED + 4 * 2**15 + 1000, multiprocessors=1)
        inputs = Inputs(x.bfloat16().to(device), counts=numbers.to(device))
        check(inputs, scales="column")
        check(inputs, "relu", layout="row")
        check_backward(inputs, layout="transposed")
    Plans.forget_all()


@emulated
def test_one_tile_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with so many tiles for a block that the backward has a block for each."""
    with monkeypatch.context() as patch, running_on("sm_90") as device:
        patch.setattr(plans, "_MANY_TILES", 0)
        for case in ("two_tiles", "experts"):
            Plans.forget_all()
            inputs = make_backward(case, torch.bfloat16, device)
            check(inputs)
            check_backward(inputs)
    Plans.forget_all()


@at("cpu", "sm_90")
def test_counts_can_be_checked(place: str) -> None:
    x, dy = torch.ones(20, 2 * 128), torch.ones(20, 128)
    with running_on(place):
        for wide in (x, x.bfloat16()):
            glu_fp8(wide, counts=counts(3, 17), check_counts=True)
            for wrong in (counts(3, 16), counts(21, dtype=torch.int32), counts(-1, 21)):
                with pytest.raises((ArgumentError, rtkernels.emulator.EmulatorError), match=r"add up|trap"):
                    glu_fp8(wide, counts=wrong, check_counts=True)
                with pytest.raises((ArgumentError, rtkernels.emulator.EmulatorError), match=r"add up|trap"):
                    glu_fp8_backward(dy.to(wide.dtype), wide, counts=wrong, check_counts=True)


test_backward_thread_order_does_not_matter = order_test(
    lambda case: check_backward(make_backward(case, torch.bfloat16, "cpu")), "experts", "unaligned"
)


def test_through_autograd() -> None:
    """The documented way to train: a Function whose backward calls glu_fp8_backward."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, down):
            ctx.save_for_backward(x, down)
            y = glu_fp8(x)
            return rtkernels.dequantize_fp8(y.q, y.scale, granularity="group", dtype=x.dtype) @ down

        @staticmethod
        def backward(ctx, dz):
            x, down = ctx.saved_tensors
            return glu_fp8_backward(dz @ down.t(), x, keep="dense").dx, None

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2 * 128, generator=generator, requires_grad=True)
    down = torch.randn(128, 8, generator=generator)
    Layer.apply(x, down).sum().backward()
    wanted = x.detach().clone().requires_grad_()
    (plain_glu(wanted, None, None, "silu") @ down).sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)


# ---- errors ---------------------------------------------------------------------------------------------------------

X = torch.ones(4, 8)
BAD: dict[str, Callable[[], Any]] = {
    "x has dtype float64; expected one of bfloat16, float16, float32": lambda: glu_fp8(X.double()),
    "x has an odd last dimension, 7": lambda: glu_fp8(X[:, :7]),
    "act is 'swish'; expected one of silu": lambda: glu_fp8(X, act="swish"),
    "layout is 'column'; expected one of 'row', 'transposed', 'both'": lambda: glu_fp8(X, layout="column"),
    "scale_layout is 'T'; expected one of 'row', 'column'": lambda: glu_fp8(X, scale_layout="T"),
    "scale_layout 'column' is for the scales of rows": lambda: glu_fp8(X, layout="transposed", scale_layout="column"),
    "counts has dtype float32; expected one of int32, int64": lambda: glu_fp8(X, counts=torch.ones(2)),
    r"counts has shape \(2, 1\); expected one dimension": lambda: glu_fp8(X, counts=counts(2, 2)[:, None]),
    r"weight has shape \(8,\); expected \(4,\)": lambda: glu_fp8(X, weight=torch.ones(8)),
    r"up has shape \(4, 4\); expected \(4, 8\)": lambda: glu_fp8(X, X[:, :4]),
    "counts has device index 0; expected -1": lambda: module.FORWARD.check(
        meta_on(-1, X), None, None, meta_on(0, torch.ones(2, dtype=torch.int64)), "silu", "row", False, "row", False
    ),
    r"x has 2147483648 rows; expected fewer than 2\*\*31": lambda: plans.check_counts(None, 2**31),
    "expected a torch.Tensor or an array with __dlpack__": lambda: glu_fp8([1.0, 2.0]),
    r"dy has shape \(4, 8\); expected \(4, 4\), that of the result": lambda: glu_fp8_backward(X, X),
    "dy has dtype float16; expected float32": lambda: glu_fp8_backward(X[:, :4].half(), X),
    "keep is 'bf16'; expected one of 'fp8', 'dense', 'both'": lambda: glu_fp8_backward(X[:, :4], X, keep="bf16"),
    "weight_grad is True but there is no weight": lambda: glu_fp8_backward(
        X[:, :4], X, layout="transposed", weight_grad=True
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_errors(message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        BAD[message]()


@emulated
@pytest.mark.parametrize("message", BAD)
def test_launchers_raise_the_same_messages(message: str) -> None:
    with rtkernels.emulate(), pytest.raises(ArgumentError, match=message):
        BAD[message]()


# ---- torch and other libraries --------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        by_expert = glu_fp8(x * 2, counts=numbers, layout="both")
        plain = glu_fp8(x, act="gelu_tanh", scale_layout="column")
        return (*by_expert, plain.q, plain.scale)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (130, 140):
        x = torch.randn(rows, 2 * 136, device=place, requires_grad=True)
        numbers = counts(rows - 10, 10).to(place)
        for a, b in zip(compiled(x, numbers), block(x, numbers), strict=True):
            assert_same_bits(a, b)


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).standard_normal((3, 2 * 40), np.float32)
    got, wanted = glu_fp8(x, layout="both"), glu_fp8(torch.from_numpy(x), layout="both")
    assert isinstance(got, module.GluFp8)
    for a, b in zip(got, wanted, strict=True):
        assert isinstance(a, np.ndarray)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(torch.uint8).numpy())


def test_backward_compiled_and_numpy() -> None:
    def run(dy: Tensor, x: Tensor, weight: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        return tuple(glu_fp8_backward(dy, x * 2, weight=weight, counts=numbers, keep="both"))

    dy, x, weight = torch.randn(130, 128), torch.randn(130, 256), torch.rand(130)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(dy, x, weight, counts(30, 100)), run(dy, x, weight, counts(30, 100)), strict=True):
        assert_same_bits(a, b)
    got = glu_fp8_backward(dy.numpy(), (x * 2).numpy(), weight=weight.numpy(), counts=np.array([30, 100]), keep="both")
    for a, b in zip(got, run(dy, x, weight, counts(30, 100)), strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(torch.uint8).numpy())


def test_bench_rows() -> None:
    """Bytes are those of the issue's table; on a small shape the plain torch beside each row agrees with it."""
    bytes_of = {row.label: row.bytes for row in rows_of(module.OP.name)}
    assert bytes_of["glu_fp8_both 16384x1024"] == 50_855_936
    assert bytes_of["glu_fp8_bwd_both 16384x1024"] == 84_934_656
    assert bytes_of["expert_glu_fp8_both 116928x2048 32 experts"] == 726_416_128
    assert bytes_of["expert_glu_fp8_bwd_both 116928x2048 32 experts"] == 1_213_363_712
    for experts, rows in ((None, 300), ((16, 144, 0, 100), 260)):
        for row in bench_rows._pair("any", experts, rows, 256, module.FORWARD, module.BACKWARD):
            inputs = row.make("cpu", torch.Generator().manual_seed(0))
            for a, b in zip(row.ours(**inputs), row.torch(**inputs), strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a.float(), b.float())


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_graph_replays_with_other_counts() -> None:
    x = torch.randn(1000, 2 * 256, device="cuda", dtype=torch.bfloat16)
    weight, numbers = torch.rand(1000, device="cuda"), counts(100, 0, 900).cuda()

    def run() -> module.GluFp8:
        return glu_fp8(x, weight=weight, counts=numbers, layout="both", scale_layout="column")

    replay = captured(run)
    x.normal_()
    numbers.copy_(counts(317, 600, 83))
    assert_equal_bits(replay(), run())
    judge(replay(), Inputs(x, None, weight).exact("silu"), numbers, layout="both", pow2=False, scales="column")


@pytest.mark.gpu
def test_bench_shapes() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 700, (32,), generator=generator)
    rows = int(numbers.sum())
    x = torch.randn(rows, 2 * 1024, generator=generator).bfloat16().cuda()
    weight = torch.randn(rows, generator=generator).cuda()
    with poisoned():
        check(Inputs(x, weight=weight, counts=numbers.cuda()), pow2=True, scales="column")
        check(Inputs(x[:2048, :1024].contiguous()))
        check_backward(Inputs(x, weight=weight, counts=numbers.cuda()), pow2=True, scales="column")
        check_backward(Inputs(x[:2048, :1024].contiguous()))


@pytest.mark.gpu
def test_backward_twice_and_in_a_graph() -> None:
    inputs = make_backward("experts", torch.bfloat16, "cuda")
    first = check_backward(inputs)
    dy = torch.randn(300, 256, generator=torch.Generator().manual_seed(3)).bfloat16().cuda()

    def run() -> tuple[Tensor, ...]:
        return glu_fp8_backward(dy, inputs.x, weight=inputs.weight, counts=inputs.counts, keep="both")

    assert_equal_bits(captured(run)(), first)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    rows, cols = 2**20 + 128, 1024
    x = torch.randn(rows, 2 * cols, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    whole = glu_fp8_backward(dy, x)
    part = glu_fp8_backward(dy[-128:], x[-128:])
    assert_same_bits(whole.q[-128:], part.q)
    assert_same_bits(whole.q_t[:, -128:].contiguous(), part.q_t)
    assert_same_bits(whole.scale_t[-1:], part.scale_t)


@pytest.mark.gpu
def test_streams() -> None:
    x = torch.randn(1000, 2 * 256, device="cuda", dtype=torch.bfloat16)
    expected, stream = glu_fp8(x, layout="both"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = glu_fp8(x, layout="both")
    stream.synchronize()
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)
