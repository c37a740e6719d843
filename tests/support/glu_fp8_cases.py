"""Inputs of gated activations that write fp8 codes, and how codes and scales are judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rtkernels
from rtkernels.ops.act import glu_fp8 as module
from support.compare import ROUNDOFF, assert_close
from support.fp8_reference import E4M3, encode
from support.glu_cases import plain_glu

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
        inputs.counts = same_strides(inputs.counts, device)
    return inputs


def same_strides(t: Tensor, device: str) -> Tensor:
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(device)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


# ---- judging codes and scales ---------------------------------------------------------------------------------------


def judge_rows(
    y: np.ndarray, error: np.ndarray, q: np.ndarray, scale: np.ndarray, pow2: bool, what: str, group: int = 128
) -> None:
    """Check codes of `y` [rows, cols], `group` in a row sharing a scale, within y's relative errors."""
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
    """Run the op and check all results."""
    got = inputs.call(act=act, layout=layout, pow2_scale=pow2, scale_layout=scales)
    for t in got:
        assert t is None or (t.is_contiguous() and not t.requires_grad)
    judge(got, inputs.exact(act), inputs.counts, layout=layout, pow2=pow2, scales=scales)
    return got


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
    """Run the backward and check all results."""
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
