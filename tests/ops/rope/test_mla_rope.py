"""Rotary embeddings of latent attention."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import DTYPES, at, short
from support.rope_cases import MLA_CASES, check_mla


@pytest.mark.parametrize("case", MLA_CASES)
@at()
def test_mla(place: str, case: str) -> None:
    with running_on(place) as device:
        check_mla(MLA_CASES[case], torch.bfloat16, device)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=short)
@at("cpu", "sm_90", "cuda")
def test_mla_dtypes(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for case in ("plain", "odd", "scatter"):
            check_mla(MLA_CASES[case], dtype, device)
