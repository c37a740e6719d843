"""A contract of all functions that replay calls: what a call depends on is changed between two otherwise equal calls.

Each item of ``rtkernels.runtime.depends.ITEMS`` is changed, for public functions and for overrides of aten, on the
stand-in CUDA device, whose kernels are emulated. The call after the change must do what it does in a process that has
made no call before; so must the call as it was, afterwards. A run takes a sample, ``--full`` takes everything.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreter import environment, run_python
from support.places import emulated

from contracts.depends import planted
from contracts.fuzz.planted import Defect, edited
from rtkernels import _public
from rtkernels.runtime import depends

TESTS = Path(__file__).parents[1]
PARTS = 8
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of a GPU")


def _run(*options: str) -> dict[str, Any]:
    env = environment(TESTS, TESTS.parent, OMP_NUM_THREADS="1")
    done = run_python("-m", "contracts.depends", *options, env=env, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _check(found: dict[str, Any]) -> None:
    assert not found["failures"], f"{len(found['failures'])} failures:\n" + "\n".join(found["failures"][:20])
    assert found["replayed"] >= 0.6 * found["changes"]  # of nearly all functions, but not of every option


def test_the_page_has_every_item() -> None:
    table = depends.__doc__.split("=\n")[2]
    assert tuple(re.findall(r"^(\w+(?: \w+)*)  ", table, re.M)) == depends.ITEMS


def test_every_public_function_has_a_call() -> None:
    from contracts.depends import calls

    assert {name.partition("(")[0] for name in calls.public()} == {*_public.OPS} - calls.NO_CALLS


@emulated
@without_cuda
@pytest.mark.one_in(1000)
def test_public_functions() -> None:
    found = _run("--count=5", "--each=1", "--seed=3", "--fresh=3")
    _check(found)
    assert set(found["items"]) == set(depends.ITEMS)
    assert found["compared"] == 3


@emulated
@without_cuda
@pytest.mark.one_in(1000)
def test_overloads_of_aten() -> None:
    found = _run("--kind=aten", "--count=5", "--each=1", "--seed=3", "--fresh=2")
    _check(found)
    assert set(found["items"]) == set(depends.ITEMS) - {"emulation"}  # see tests/aten


@emulated
@without_cuda
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_overloads_of_aten(part: int) -> None:
    _check(_run("--kind=aten", f"--part={part}/{PARTS}"))


@emulated
@without_cuda
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_public_functions(part: int) -> None:
    _check(_run(f"--part={part}/{PARTS}"))


@emulated
@without_cuda
@pytest.mark.slow
@pytest.mark.parametrize(("call", "change"), [("rope()", "mscale 0.0 -0.0"), ("topk()", "k 3 3.0")])
def test_plans_tell_equal_numbers_apart(call: str, change: str) -> None:
    _check(_run(f"--calls={call}", "--items=other arguments", f"--changes={change}", "--old-plans"))


# ---- defects that must be found -------------------------------------------------------------------------------------


@emulated
@without_cuda
@pytest.mark.slow
@pytest.mark.parametrize("defect", planted.DEFECTS, ids=lambda d: d.name.replace(" ", "_"))
def test_planted_defects_are_found(defect: Defect) -> None:
    """What is found here is not found without the defect: the tests above make the same changes."""
    where = (
        f"--kind={defect.kinds}",
        f"--calls={defect.only}",
        f"--items={defect.place}",
        f"--changes={defect.variation}",
    )
    assert _run(*where, f"--plant={defect.name}")["failures"]


def test_every_item_has_a_planted_defect() -> None:
    for defect in planted.DEFECTS:
        edited(defect)
    assert {defect.place for defect in planted.DEFECTS} == set(depends.ITEMS)
