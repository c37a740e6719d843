"""What ``rtkernels.runtime.untried`` keeps from being chosen: the tests that run it on a GPU, and rows that time it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.rows.row import Row
from rtkernels.runtime.untried import Untried


class Trial(NamedTuple):
    """``switch``: name of the switch; ``tests``: functions with cases marked gpu; ``rows``: regex on 'name shape'."""

    switch: str
    tests: tuple[str, ...]
    rows: str


_SWAPPED = "tests/ops/gemm/test_decode_linear_swapped.py"
_DELTA = "tests/ops/attention/test_gated_delta_rule.py"
TRIALS = (
    Trial(
        "steps by gemm_swapped_sm90",
        (f"{_SWAPPED}::test_nine_to_64_rows_by_wgmma", f"{_SWAPPED}::test_a_chain_of_steps_of_many_rows_in_a_graph"),
        r"^decode_linear 32x.*_bf16$",
    ),
    Trial(
        "gated_delta_rule_grads_sm90",
        (
            f"{_DELTA}::test_gradients_by_wgmma", f"{_DELTA}::test_gradients_by_wgmma_of_packed_sequences",
            f"{_DELTA}::test_reflections",
        ),
        r"^gated_delta_rule_bwd ",
    ),
)  # fmt: skip
WITH = ", untried"  # behind the shape of a row with the switch turned on


def _turned(row: Row, switch: Untried, on: bool) -> Row:
    def ours(**inputs: Any) -> Any:
        switch.turn(on)  # costs nothing while it stays as it is
        return row.ours(**inputs)

    return dataclasses.replace(row, ours=ours, shape=row.shape + WITH * on)


def rows(pool: list[Row]) -> Iterator[Row]:
    """Yield each row of each trial twice: as it is chosen, and right behind it with the switch turned on."""
    for trial in TRIALS:
        switch = Untried.switches[trial.switch]
        for row in pool:
            if re.search(trial.rows, row.label):
                yield from (_turned(row, switch, on) for on in (False, True))
