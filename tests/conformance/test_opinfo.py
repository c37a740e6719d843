"""Every aten overload that we claim, on torch's own sample inputs: values, gradients, dtypes, strides, errors.

By default some cases, chosen by a hash of their names, in the emulator, with two samples each; ``--full`` runs all of
them with twelve. A GPU gets all cases and all samples.
"""

from __future__ import annotations

import zlib

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's OpInfos need it: pip install expecttest")

from support.places import emulated

import rtkernels
from conformance import harness
from rtkernels.aten import report, table

_ONE_IN = 200
CASES = [pytest.param(case, id=harness.case_name(case)) for case in harness.cases("cpu")]
SAMPLED = [case for case in CASES if zlib.crc32(case.id.encode()) % _ONE_IN == 0]
OTHERS = [pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for case in CASES if case not in SAMPLED]


@emulated
@pytest.mark.parametrize("case", SAMPLED + OTHERS)
def test_as_torch(case, request: pytest.FixtureRequest) -> None:
    full = request.config.getoption("--full")
    harness.check(*case, "cpu", limit=12 if full else 2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=harness.case_name(c)) for c in (harness.cases("cuda") if torch.cuda.is_available() else [])],
)
def test_as_torch_on_the_gpu(case) -> None:
    harness.check(*case, "cuda")


@emulated
@pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.name, marks=[] if op.name in ("add", "cat") else [pytest.mark.slow])
           for op in harness.operators() if op.error_inputs_func is not None and not op.variant_test_name],
)  # fmt: skip
def test_errors_are_torchs(op) -> None:
    for error in op.error_inputs("cpu"):
        sample = error.sample_input
        try:
            op(sample.input, *sample.args, **sample.kwargs)
        except Exception as torchs:
            with pytest.raises(type(torchs)), harness.overridden("cpu"):
                op(sample.input, *sample.args, **sample.kwargs)


@emulated
@pytest.mark.slow
def test_every_claimed_overload_is_taken() -> None:
    """After all samples of all operators every row with an OpInfo was taken by our kernel at least once."""
    report.reset()
    for op in harness.operators():
        for dtype in (torch.float32, torch.int32):
            if dtype in op.supported_dtypes("cpu"):
                harness.check(op, dtype, "cpu", limit=3)
    taken = {row["overload"] for row in rtkernels.report(as_rows=True) if row["ours"]}
    forms = ("_", ".out", "out", "Scalar", "_mode", "Tensor")  # reached by explicit calls, in tests/aten
    missed = {
        name for name, row in table.table().items()
        if row.opinfo and name not in taken and not any(part in name for part in forms)
    }  # fmt: skip
    assert not missed
