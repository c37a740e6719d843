"""Shape, dtype and strides that the pointwise and copy families plan, on sample inputs of torch; nothing is launched.

Runs without a compiler: every operator of the two families, every dtype.
"""

from __future__ import annotations

import zlib

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's OpInfos need it: pip install expecttest")

from conformance import harness
from rtkernels.aten import concat, copy, functors, gradients, table
from rtkernels.runtime.launch.plans import Plans

_ONE_IN = 60
NAMES = {name for row in table.table().values() if row.family in ("ew", "copy") for name in row.opinfo}
CASES = [pytest.param(case, id=harness.case_name(case)) for case in harness.cases("cpu") if case[0].name in NAMES]


@pytest.fixture(scope="module", autouse=True)
def _no_launches():
    def nothing(*args: object, **kwargs: object) -> object:
        return lambda *arguments: None

    Plans.forget_all()
    patch = pytest.MonkeyPatch()
    for kernel in (*functors.KERNELS.all(), copy._TRIANGLE, concat._CONCAT, gradients._GLU_BACKWARD):
        patch.setattr(kernel, "bind", nothing)
    yield
    patch.undo()
    Plans.forget_all()


def check(case) -> None:
    """Compare metadata of results with torch's, in place and of ``out=`` included."""
    op, dtype = case
    compared = 0
    for sample in harness.samples(op, dtype, "cpu", limit=8):
        try:
            want, _ = harness.run(op, sample, False)
        except Exception:
            continue
        compared += 1
        with torch.no_grad(), harness.overridden("cpu", ("ew", "copy")):
            got, _ = harness.run(op, sample, False)
        for a, b in zip(harness.tensors(got), harness.tensors(want), strict=True):
            text = f"{harness.case_name(case)} {sample}"
            assert (a.dtype, a.shape) == (b.dtype, b.shape), text
            assert a.stride() == b.stride() or a.numel() <= 1, f"{a.stride()}, torch {b.stride()}: {text}"
    assert compared, f"{harness.case_name(case)}: torch itself runs none of the samples"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", [case for case in CASES if zlib.crc32(case.id.encode()) % _ONE_IN == 0])
def test_metadata(case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_metadata_of_all(case) -> None:
    check(case)
