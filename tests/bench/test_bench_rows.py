"""Plain torch of every benchmark row has the shapes of our results: other peers would be no comparison."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.measure.run import tensors
from bench.rows import all_rows

FIRST = {row.name: row for row in reversed(list(all_rows()))}  # of each name, the first shape
# Their results depend on values, which fake tensors do not have.
DEPENDS_ON_NUMBERS = ("grouped_mm", "grouped_wgrad", "moe_index")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FIRST if name not in DEPENDS_ON_NUMBERS])
def test_shapes_agree(name: str) -> None:
    row, shapes = FIRST[name], []
    for function in (row.ours, row.torch):
        with FakeTensorMode(allow_non_fake_inputs=True):
            shapes.append([t.shape for t in tensors(function(**row.make("cpu", torch.Generator())))])
    ours, wanted = shapes
    assert wanted and ours[: len(wanted)] == wanted
