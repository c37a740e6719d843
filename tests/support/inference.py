"""Calls of inference ops in several places: kernels against the reference in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import rtkernels
from support.places import emulated
from support.ways import captured

ROUND = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
# The emulator compiles a kernel for the host in seconds: the default run has one variant of each.
PLACES = [
    pytest.param("sm_90", marks=emulated),
    pytest.param("sm_80", marks=[emulated, pytest.mark.slow]),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
EVERYWHERE = pytest.mark.parametrize("where", PLACES)  # not "place": of those, conftest drops sm_90 for sm_80


def normal_numbers(seed: int) -> Callable[..., Tensor]:
    """Return a function that gives normal numbers: ``normal(*shape, dtype=torch.bfloat16)``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return normal


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, rtkernels.Quant):
        return value._replace(scale=_moved(value.scale, device))
    if isinstance(value, tuple | list):
        return type(value)(_moved(v, device) for v in value)
    return value


def results(call: Callable[..., Any], place: str, *args: Any, **options: Any) -> list[Any]:
    """Return the results of a call at a place, as a list on the CPU."""
    if place == "cuda":
        args = _moved(args, "cuda")
        options = {name: _moved(value, "cuda") for name, value in options.items()}
        found = call(*args, **options)
    elif place == "cpu":
        found = call(*args, **options)
    else:
        with rtkernels.emulate(place):
            found = call(*args, **options)
    found = found if isinstance(found, tuple | list) else [found]
    return [t.cpu() if isinstance(t, Tensor) else t for t in found]


def assert_like_reference(
    place: str, call: Callable[..., Any], *args: Any, codes: float = 0.01, **options: Any
) -> None:
    """Compare a call with the reference: within two roundings; at most a share `codes` of codes one step off."""
    wanted = results(call, "cpu", *args, **options)
    got = results(call, place, *args, **options)
    assert len(got) == len(wanted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if not isinstance(b, Tensor):
            assert (a is None) == (b is None)
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), i
        if a.itemsize == 1:
            differ = (a.view(torch.uint8) != b.view(torch.uint8)).sum().item()
            assert differ <= codes * a.numel(), f"result {i}: {differ} of {a.numel()} codes"
            continue
        off = (a.double() - b.double()).abs()
        slack = 1e-5 if a.dtype == torch.float32 else 1e-6  # terms of about 10 that cancel, with and without fma
        fits = (off <= 2 * ROUND[a.dtype] * b.double().abs() + slack) | (a.isnan() & b.isnan()) | (a == b)
        assert fits.all(), f"result {i} is off by {off.nan_to_num(0).max()}"


def _in_interval(magnitude: Tensor, codes: Tensor, values: list[float], slack: float) -> Tensor:
    """Say which magnitudes round to their codes, places in `values`, or would if off by a share `slack`."""
    ties = [(a + b) / 2 for a, b in pairwise(values)]
    lower, upper = (torch.tensor(v, dtype=torch.float64)[codes.long()] for v in ([0, *ties], [*ties, torch.inf]))
    return (magnitude >= lower * (1 - slack)) & (magnitude <= upper * (1 + slack))


def assert_nvfp4_of(y: Tensor, packed: Tensor, scales: Tensor, g: float, slack: float = 2.0**-20) -> None:
    """Codes and scales by rows are those of the float64 rows `y`, except for numbers within `slack` of a tie.

    A scale of the tensor that comes from the data makes real ties common: the factor of a row cancels, and what is
    left are quotients of 16-bit numbers. There, the last bit of a sum of squares decides.
    """
    sizes = (torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()).tolist()
    cols = y.shape[-1]
    blocks = torch.nn.functional.pad(y, (0, -cols % 16)).unflatten(-1, (-1, 16))
    found = scales.view(torch.uint8)
    fits = _in_interval(blocks.abs().amax(-1) / (6 * g), found, sizes, slack)
    assert fits.all(), f"scales: {(~fits).nonzero().tolist()[:8]}"
    steps = torch.tensor(sizes, dtype=torch.float64)[found.long()].repeat_interleave(16, -1)[..., :cols] * g
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    fits = _in_interval(y.abs() / steps, codes & 7, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], slack)
    fits &= (codes >> 3 == 1) == y.signbit()
    assert fits[steps > 0].all(), f"codes: {(~fits).nonzero().tolist()[:8]}"
    assert (codes[steps == 0] == 0).all()


def assert_captures(call: Callable[[], Any]) -> None:
    """A CUDA graph of the call gives the same bits as the call."""
    wanted = call()
    replay = captured(call)
    found = replay()
    wanted, found = (x if isinstance(x, tuple | list) else [x] for x in (wanted, found))
    for a, b in zip(found, wanted, strict=True):
        if isinstance(b, Tensor):
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
