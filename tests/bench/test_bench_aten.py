"""Benchmark cases of torch's operators: every row of the table has one, and its arguments fit the schema."""

from __future__ import annotations

import torch

from bench.__main__ import main
from bench.measure import aten
from rtkernels.aten import table


def test_arguments_fit_the_schemas() -> None:
    without = []
    for row in table.table().values():
        given = aten.arguments(row, (8, 8), torch.float32, "cpu")
        if given is None:
            without.append(row.name)
            continue
        base, _, overload = row.name.partition(".")
        getattr(getattr(torch.ops.aten, base), overload or "default")(*given[0], **given[1])
    assert {name for name in without if "out" not in name} <= {"diagonal_backward"}


def test_cases_and_summary(capsys) -> None:
    names = {row.name for row, _, _ in aten.cases("^ew add")}
    assert {"add.Tensor", "addcmul"} <= names
    assert all(len(shape) == 2 for row, shape, _ in aten.cases("^copy cat"))
    times = {"torch": {"operator": 4.0}, "rtkernels": {"operator": 2.0}, "inductor": {"error": "no"}}
    found = [{"overload": "cat", "family": "copy", "shape": (2, 2), "dtype": "float32", **times}] * 2
    assert "| cat | 2.00 | 2.00 |  |  | |" in aten.summary(found)
    assert main(["aten", "--ways", "nobody"]) == 2
    assert "unknown ways nobody" in capsys.readouterr().err
