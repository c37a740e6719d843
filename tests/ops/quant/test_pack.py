"""4-bit codes and block scales in plain torch."""

from __future__ import annotations

import pytest
import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.quant import pack


@pytest.mark.parametrize("nibble", ["low", "high"])
def test_bytes_hold_two_codes(nibble: str) -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(2, 8)
    packed = pack.pack_nibbles(codes, nibble)
    assert packed[0, 0] == (0x10 if nibble == "low" else 0x01)
    assert torch.equal(pack.unpack_nibbles(packed, nibble), codes)
    assert torch.equal(pack.unpack_nibbles(pack.swap_nibbles(packed), "low" if nibble == "high" else "high"), codes)
    signed = torch.arange(-8, 8).view(2, 8)
    assert torch.equal(pack.nibble_values(pack.pack_nibbles(signed, nibble), "int4", nibble=nibble), signed.float())


def test_fp4_codes_are_the_nearest_and_ties_go_to_even_ones() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, float("inf"), -5.0, 0.3, -0.0])
    values = pack.nibble_values(pack.pack_nibbles(pack.e2m1_codes(ties)), "e2m1")
    assert values.tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 6, -4, 0.5, 0]
    every = pack.nibble_values(torch.arange(16, dtype=torch.uint8) * 17, "e2m1")[::2]
    assert torch.equal(pack.e2m1_codes(every), torch.arange(16, dtype=torch.uint8))


def test_int4_rows_and_groups() -> None:
    w = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    for group, shape in ((0, (5,)), (64, (5, 4))):
        codes, scale = pack.quantize_int4(w, group)
        assert codes.shape == (5, 128) and codes.dtype == torch.int8 and scale.shape == shape
        spread = scale.view(5, -1).repeat_interleave(256 // scale.view(5, -1).shape[1], 1)
        values = pack.nibble_values(codes, "int4") * spread
        assert ((values - w).abs() <= spread / 2 * 1.001).all()


def test_nvfp4() -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    x[2] = 0
    codes, scale, g = pack.quantize_nvfp4(x)
    step = (scale.float() * g).repeat_interleave(16, 1)
    values = pack.nibble_values(codes, "e2m1") * step
    assert (values[2] == 0).all() and scale.shape == (7, 4) and codes.shape == (7, 32)
    assert ((values - x).abs() <= step * 1.2).all()
    assert torch.equal(pack.quantize_nvfp4(torch.zeros(2, 16))[2], torch.ones(()))


@pytest.mark.parametrize("rule", ["ocp", "nv"])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e2m1"])
def test_mx(kind: str, rule: str) -> None:
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)) * 100
    codes, scale = pack.quantize_mx(x, kind, rule=rule)
    values = pack.nibble_values(codes, "e2m1") if kind == "e2m1" else codes.float()
    step = pack.e8m0_values(scale).repeat_interleave(32, 1)
    clamped, rounded = {"e2m1": (2, 1), "e4m3": (64, 16), "e5m2": (8192, 4096)}[kind]
    assert ((values * step - x).abs() <= step * (clamped if rule == "ocp" else rounded)).all()
    assert torch.equal(
        pack.e8m0_values(torch.tensor([0, 127, 254], dtype=torch.uint8)), 2.0 ** torch.tensor([-127, 0, 127])
    )


def test_swizzled_scales() -> None:
    scale = torch.randint(0, 255, (200, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    flat = pack.swizzle_scales(scale)
    assert flat.numel() == pack.swizzled_size(200, 7) == 2 * 2 * 512
    for r, c in ((0, 0), (33, 3), (127, 6), (199, 5)):
        offset = (r // 128 * 2 + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        assert flat[offset] == scale[r, c]
    assert torch.equal(pack.unswizzle_scales(flat, 200, 7), scale)


def test_messages() -> None:
    with pytest.raises(ArgumentError, match="expected a multiple of 2, two codes in a byte"):
        pack.pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match="expected a multiple of 16"):
        pack.quantize_nvfp4(torch.zeros(2, 8))
    with pytest.raises(ArgumentError, match="nibble is 'up'; expected 'low' or 'high'"):
        pack.pack_nibbles(torch.zeros(2, 2, dtype=torch.uint8), "up")
