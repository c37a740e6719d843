"""Geometry of the kernels with rows loaded by TMA."""

from __future__ import annotations

from math import inf

import pytest

from rtkernels.ops.shared.bulk_ring import bulk_ring
from rtkernels.runtime import targets
from rtkernels.runtime.launch.device import DeviceInfo, shared_limit


def device(target: str) -> DeviceInfo:
    parsed = targets.parse(target)
    return DeviceInfo("test", parsed, 132, shared_limit(parsed))


@pytest.mark.parametrize("target", ("sm_90a", "sm_100a", "sm_120a"))
@pytest.mark.parametrize("rows", (1, 131, 265, 8192))
@pytest.mark.parametrize("helped", (0, inf))
@pytest.mark.parametrize(("pieces", "chunks"), ((17, 1), (32, 1), (64, 1), (192, 1), (512, 1), (640, 2), (1024, 2)))
def test_fits(target: str, rows: int, helped: float, pieces: int, chunks: int) -> None:
    info = device(target)
    for inputs in (2, 3):
        ring = bulk_ring(info, rows, pieces, chunks, inputs, 768 if chunks == 1 else 512, 64 << 10, helped)
        groups, workers = ring.groups, ring.groups * ring.threads
        assert ring.threads % 32 == 0 and ring.threads * chunks >= pieces and ring.block <= 768
        assert ring.block in ((workers, workers + 32 * groups) if helped and ring.threads > 32 else (workers,))
        assert groups <= 16 and (ring.threads == 32 or groups <= 15)
        assert ring.blocks == min(132, -(-rows // groups)) and 2 <= ring.stages <= 16
        assert ring.shared == ring.stages * workers * 16 * chunks * inputs + 128 * groups
        assert ring.shared <= info.shared_per_block - 2048


def test_helpers_for_few_rows() -> None:
    few, many = (bulk_ring(device("sm_90a"), rows, 512, 1, 2, 768, 64 << 10, 16) for rows in (1024, 8192))
    assert (few.block, few.groups, many.block, many.groups) == (544, 1, 512, 1)


def test_not_for_short_rows_or_other_gpus() -> None:
    assert bulk_ring(device("sm_90a"), 8192, 16, 1, 2, 768, 64 << 10, 0) is None
    assert bulk_ring(device("sm_89"), 8192, 512, 1, 2, 768, 64 << 10, 0) is None
    assert bulk_ring(device("sm_90a"), 2**30, 512, 1, 2, 768, 64 << 10, 0) is None
