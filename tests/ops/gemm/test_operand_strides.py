"""Codes without a unit stride along k: every other byte, as ``[n, k]`` and ``[k, n]``, one row and one column."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at
from support.product_cases import codes

from rtkernels import gated_mm, grouped_mm, scaled_mm
from rtkernels.errors import ArgumentError


def _spread(t: torch.Tensor) -> torch.Tensor:
    """Return the same elements with a stride of 2 along rows."""
    return torch.stack((t.view(torch.uint8),) * 2, -1).view(t.dtype).flatten(-2)[..., ::2]


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("token", ["e4m3", "int8", "int4"])
def test_codes_without_a_unit_stride(token: str, place: str) -> None:
    packed = {"packed": token} if token == "int4" else {}
    with running_on(place) as device:
        for m, n in ((5, 24), (1, 24), (5, 1)):
            a, b = (codes(token, r, 48, device=device, seed=i).codes for i, r in enumerate((m, n)))
            wanted, wide = scaled_mm(a, b, b_layout="nk", **packed), _spread(b.t())
            automatic = ((_spread(b), "auto"), (wide, "auto")) if n == 1 else ()
            for right, layout in (
                (_spread(b), "nk"), (_spread(b).t(), "kn"), (wide, "kn"), (wide.t(), "nk"), *automatic
            ):  # fmt: skip
                got = scaled_mm(_spread(a), right, b_layout=layout, **packed)
                assert torch.equal(got, wanted), (m, n, layout)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_gated_and_grouped_products(place: str) -> None:
    with running_on(place) as device:
        a, b = (codes("e4m3", r, 48, device=device, seed=i).codes for i, r in enumerate((5, 24)))
        assert torch.equal(gated_mm(_spread(a), _spread(b.t()), b_layout="kn"), gated_mm(a, b))
        experts, offs = torch.stack((b, b)), torch.tensor([2, 5], dtype=torch.int32, device=device)
        got = grouped_mm(_spread(a), _spread(experts.mT), offs=offs, b_layout="kn")
        assert torch.equal(got, grouped_mm(a, experts, offs=offs))


def test_a_wrong_k_names_the_other_layout() -> None:
    a, b = torch.zeros(3, 40).to(torch.int8), torch.zeros(40, 8).to(torch.int8).t()
    assert scaled_mm(a, b.t(), b_layout="kn").shape == (3, 8)
    with pytest.raises(ArgumentError, match=r"k = 8; expected k = 40, as a \(b_layout='nk' takes b as \[n, k\]"):
        scaled_mm(a, b)
