"""The number conversions all kernels share, on the inputs that matter: hardware and software give the same bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import device_probe, probe
from support.compare import assert_same_bits, running_on
from support.fp8_reference import E4M3, E5M2, FP8, encode, fp8_table
from support.places import CEILINGS_ARE_FOR, at, compiled_for
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime import targets
from rtkernels.runtime.build import nvrtc

device_code = at("sm_80", "sm_90", "cuda")


def sweep(low_bits: int) -> Tensor:
    """All fp32 bit patterns of the upper bits, each with a few patterns below: ties and their neighbours."""
    upper = torch.arange(2 ** (32 - low_bits), dtype=torch.int64) << low_bits
    half = 1 << (low_bits - 1)
    lower = torch.tensor([0, 1, half - 1, half, half + 1, 2 * half - 1])
    bits = (upper[:, None] | lower).flatten()
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def every(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@device_code
def test_conversions_from_fp32(place: str):
    values = torch.cat(
        [sweep(11 if place == "cuda" else 16), every(torch.bfloat16).float(), every(torch.float16).float()]
    )
    with running_on(place) as device:
        x = values.to(device)
        for fp8 in FP8:
            expected = torch.from_numpy(encode(values.numpy(), fp8)).view(fp8)
            assert_same_bits(probe.convert(x, fp8).cpu(), expected, f"{fp8}, best way")
            assert_same_bits(probe.convert(x, fp8, software=True).cpu(), expected, f"{fp8}, software")
        for dtype in (torch.bfloat16, torch.float16):
            got = probe.convert(x, dtype).cpu().view(torch.int16)
            expected = torch.where(values.isnan(), 0x7FFF, values.to(dtype).view(torch.int16))
            assert_same_bits(got, expected, str(dtype))


@device_code
def test_conversions_to_fp32(place: str):
    with running_on(place) as device:
        for dtype in (torch.bfloat16, torch.float16):
            x = every(dtype)
            got = probe.convert(x.to(device), torch.float32).cpu()
            assert torch.equal(got.nan_to_num(7.0, 1e39, -1e39), x.float().nan_to_num(7.0, 1e39, -1e39))
        for fp8 in FP8:
            table = fp8_table(fp8)
            rest = [math.nan] if fp8 == E4M3 else [math.inf] + [math.nan] * 3
            expected = np.concatenate([table, rest, -table, np.negative(rest)]).astype(np.float32)
            codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(fp8)
            for software in (False, True)[: 2 if fp8 == E4M3 else 1]:
                got = probe.convert(codes.to(device), torch.float32, software=software).cpu().numpy()
                np.testing.assert_array_equal(got, expected)
                assert (np.signbit(got) == np.signbit(expected))[~np.isnan(expected)].all()


def test_probe_says_what_it_cannot_do():
    with pytest.raises(ArgumentError, match=r"no software conversion from torch.float8_e5m2 to torch.float32"):
        probe.convert(torch.zeros(4).to(E5M2), torch.float32, software=True)
    with pytest.raises(ArgumentError, match="pass a CUDA tensor, or call it inside"):
        probe.convert(torch.zeros(4), E5M2)


@pytest.mark.parametrize("name", targets.CI_TARGETS)
def test_probe_compiles(name: str):
    target = compiled_for(name)
    for kernel in (*probe.KERNELS, *device_probe.KERNELS):
        if not (expressions := [kernel.expression(variant) for variant in kernel.variants(target)]):
            continue
        compiled = nvrtc.compile_unit(kernel.unit, expressions, target)
        for used in compiled.resources.values():
            assert used.spill_stores == used.spill_loads == 0
            assert used.registers <= kernel.max_registers or nvrtc.version() != CEILINGS_ARE_FOR
