"""Gated linear units with smoothed columns and one fp8 scale per row, and their backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.compare import ROUNDOFF, assert_close, assert_same_bits, running_on
from support.glu_cases import ACTS
from support.glu_fp8_cases import Inputs, counts, gradients, judge_rows, make
from support.places import DTYPES, at, order_test, short
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError


def _spread(line: Tensor, inputs: Inputs, rows: int) -> Tensor:
    """The factor of each element, from one number per column, or per expert and column."""
    if inputs.counts is None:
        return line.expand(rows, -1)
    return line.repeat_interleave(inputs.counts.cpu(), 0)


def _random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(9)) + 0.25


def check_smooth(inputs: Inputs, act: str = "silu", *, pow2: bool = False) -> tuple:
    """Run both directions and check all results."""
    shape = inputs.x.shape if inputs.up is not None else (*inputs.x.shape[:-1], inputs.x.shape[-1] // 2)
    rows, cols, device = torch.Size(shape[:-1]).numel(), shape[-1], inputs.x.device
    lead = () if inputs.counts is None else (len(inputs.counts),)
    smooth, smooth2, factor = _random(*lead, cols), _random(*lead, 2 * cols), _random(*shape[:-1])
    common = {"act": act, "weight": inputs.weight, "counts": inputs.counts, "pow2_scale": pow2}
    got = rtkernels.glu_smooth_fp8(inputs.x, smooth.to(device), inputs.up, with_maxima=True, **common)
    y, error = Inputs(inputs.x, inputs.up).exact(act)
    w = 1.0 if inputs.weight is None else inputs.weight.cpu().double().reshape(rows, 1)
    z = y * w / _spread(smooth.double(), inputs, rows)

    def bits(q: Tensor, *size: int) -> np.ndarray:
        return q.cpu().view(torch.uint8).reshape(size).numpy()

    assert got.q.shape == shape and got.scale.shape == shape[:-1] and got.maxima.shape == smooth.shape
    scale = got.scale.cpu().reshape(rows, 1).numpy()
    judge_rows(z.numpy(), error.numpy() + 5e-7, bits(got.q, rows, cols), scale, pow2, "smooth", max(cols, 1))
    sizes = [rows] if inputs.counts is None else inputs.counts.tolist()
    most = [part.abs().amax(0) if len(part) else torch.zeros(cols).double() for part in y.split(sizes)]
    torch.testing.assert_close(got.maxima.cpu().double().reshape(len(most), cols), torch.stack(most), rtol=2e-4, atol=0)

    dy = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(inputs.x.dtype).to(device)
    dx, off, dweight, weight_error = gradients(inputs, dy, act)
    back = rtkernels.glu_smooth_fp8_backward(
        dy, inputs.x, smooth2.to(device), inputs.up, row_factor=factor.to(device), layout="both", keep="both", **common
    )
    assert_close(back.dx, dx, scale=dx.abs() + off / ROUNDOFF[inputs.x.dtype], c=1.01, what="dx")
    if dweight is not None:
        slack = 4 * weight_error / ROUNDOFF[back.dweight.dtype]
        assert_close(back.dweight, dweight, scale=dweight.abs() + slack, c=1.01, what="dweight")
    flat = dx.reshape(rows, 2 * cols)
    relative = (off / dx.abs().clamp(min=1e-300)).reshape(flat.shape).numpy() + 5e-7
    scale = back.scale.cpu().reshape(rows, 1).numpy()
    z = (flat * _spread(smooth2.double(), inputs, rows)).numpy()
    judge_rows(z, relative, bits(back.q, rows, 2 * cols), scale, pow2, "smooth gradient", max(2 * cols, 1))
    scaled, start, codes = (flat * factor.double().reshape(rows, 1)).numpy(), 0, bits(back.q_t, -1)
    scales = back.scale_t.cpu().reshape(len(sizes), 2 * cols, 1).numpy()
    for expert, size in enumerate(sizes):
        part, end = scaled[start : start + size].T, start + size
        q_t = codes[start * 2 * cols : end * 2 * cols].reshape(2 * cols, size)
        if size:
            what = f"expert {expert}, transposed"
            judge_rows(part, relative[start:end].T, q_t, scales[expert], pow2, what, size)
        else:
            assert not scales[expert].any()
        start = end
    return *got, *back


SMOOTH_CASES = ("merged_3d", "odd", "separate_strides", "weight", "experts", "many_experts")


@pytest.mark.parametrize("case", SMOOTH_CASES)
@at("cpu", "sm_90", "cuda")
def test_smooth(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, torch.bfloat16, device)
        check_smooth(inputs)
        if case == "experts":
            check_smooth(inputs, pow2=True)


@pytest.mark.parametrize("case", ("odd", "many_experts"))
@at("cpu", "sm_90", "cuda")
def test_transposed_codes_with_padding(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, torch.bfloat16, device)
        shape = inputs.x.shape if inputs.up is not None else (*inputs.x.shape[:-1], inputs.x.shape[-1] // 2)
        rows, cols = torch.Size(shape[:-1]).numel(), 2 * shape[-1]
        dy = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).to(device)
        given = (dy, inputs.x, None, inputs.up)
        options = {"weight": inputs.weight, "counts": inputs.counts, "layout": "transposed"}
        plain = rtkernels.glu_smooth_fp8_backward(*given, **options)
        padded = rtkernels.glu_smooth_fp8_backward(*given, **options, pad_to=32)
        assert_same_bits(padded.scale_t, plain.scale_t)
        sizes = [rows] if inputs.counts is None else inputs.counts.tolist()
        got, want = (t.view(torch.uint8).flatten().cpu() for t in (padded.q_t, plain.q_t))
        for size in sizes:
            room = -(-size // 32) * 32
            part, got = got[: cols * room].reshape(cols, room), got[cols * room :]
            assert torch.equal(part[:, :size], want[: cols * size].reshape(cols, size)) and not part[:, size:].any()
            want = want[cols * size :]
        assert not got.any()
        with pytest.raises(ArgumentError, match="pad_to is 0"):
            rtkernels.glu_smooth_fp8_backward(*given, **options, pad_to=0)
        for _ in range(3):
            with pytest.raises(ArgumentError, match="pad_to is a float; expected an integer"):
                rtkernels.glu_smooth_fp8_backward(*given, **(options | {"layout": "row"}), pad_to=1.0)


@at("sm_80")
def test_smooth_without_fp8_instructions(place: str) -> None:
    with running_on(place) as device:
        check_smooth(make("many_experts", torch.bfloat16, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at("sm_90", "cuda")
def test_smooth_of_every_activation(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for act in ACTS:
            check_smooth(make("weight_fp32", dtype, device), act)


test_smooth_thread_order_does_not_matter = order_test(
    lambda case: check_smooth(make(case, torch.bfloat16, "cpu")),
    "experts_odd",
)


@at("cpu", "sm_90", "cuda")
def test_smooth_parts(place: str) -> None:
    """Whatever is left out, the rest has the same bits."""
    with running_on(place) as device:
        x, dy = torch.randn(20, 2 * 24).bfloat16().to(device), torch.randn(20, 24).bfloat16().to(device)
        smooth, weight = _random(96).to(device)[::2], _random(40).to(device)[::2]
        assert rtkernels.glu_smooth_fp8(x, None).maxima is None
        run = rtkernels.glu_smooth_fp8_backward
        whole = run(dy, x, smooth, weight=weight, layout="both", keep="both")
        for layout, keep, asked in (
            ("row", "fp8", (0, 1)),
            ("transposed", "fp8", (2, 3)),
            ("both", "fp8", (0, 1, 2, 3)),
            ("both", "dense", (4,)),
        ):
            part = run(dy, x, smooth, weight=weight, layout=layout, keep=keep, weight_grad=keep == "dense")
            for i, (a, b) in enumerate(zip(part, whole, strict=True)):
                if i in asked or (i == 5 and keep == "dense"):
                    assert_same_bits(a, b)
                else:
                    assert a is None
        empty = run(dy[:0], x[:0], smooth[None], layout="both", keep="both", counts=counts(0).to(device))
        assert empty.q.shape == (0, 48) and empty.scale_t.shape == (1, 48) and not empty.scale_t.any()
        narrow = run(dy[:, :0], x[:, :0], None, weight=weight, keep="both")
        assert not narrow.dweight.any() and (narrow.scale == rtkernels.glu_smooth_fp8(x[:, :0], None).scale).all()


X = torch.ones(4, 8)
BAD = {
    "smooth has dtype bfloat16; expected float32": lambda: rtkernels.glu_smooth_fp8(X, X[0, :4].bfloat16()),
    r"smooth has shape \(8,\); expected \(4,\)": lambda: rtkernels.glu_smooth_fp8(X, X[0]),
    r"smooth has shape \(4,\); expected \(2, 4\)": lambda: rtkernels.glu_smooth_fp8(X, X[0, :4], counts=counts(2, 2)),
    r"row_factor has shape \(8,\); expected \(4,\)": lambda: rtkernels.glu_smooth_fp8_backward(
        X[:, :4], X, None, row_factor=X[0], layout="both"
    ),
    "row_factor is given; expected None without transposed codes": lambda: rtkernels.glu_smooth_fp8_backward(
        X[:, :4], X, None, row_factor=X[:, 0]
    ),
}


@pytest.mark.parametrize("message", BAD)
@at("cpu", "sm_90")
def test_errors(place: str, message: str) -> None:
    with running_on(place), pytest.raises(ArgumentError, match=message):
        BAD[message]()
