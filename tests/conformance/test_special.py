"""Every aten overload that we claim, on special values, three times with different values: see ``special.py``.

By default some overloads and dtypes, chosen by a hash, in the emulator, one call each; ``--full`` runs all. A GPU gets
all overloads, dtypes and calls, also replayed in CUDA graphs.
"""

from __future__ import annotations

import zlib

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's OpInfos need it: pip install expecttest")

from support.places import emulated

from conformance import calls, harness, special
from rtkernels.aten import table

_ONE_IN = 220
NAMES = sorted(table.table())
CASES = [(name, dtype) for name in NAMES for dtype in harness.DTYPES]
SAMPLED = [case for case in CASES if zlib.crc32(f"special {case}".encode()) % _ONE_IN == 0]


def _id(value: object) -> str:
    return str(value).removeprefix("torch.")


@emulated
@pytest.mark.parametrize(("name", "dtype"), SAMPLED, ids=_id)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    with special.emulate():
        assert not special.check(name, dtype, "cpu", calls.calls_of(name, dtype, "cpu")[:1])


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_special_values_of_all(name: str) -> None:
    found = []
    with special.emulate():
        for dtype in harness.DTYPES:
            given = calls.calls_of(name, dtype, "cpu")
            found += special.check(name, dtype, "cpu", [*given[:3], *calls.with_numbers(name, given)])
    assert not found, "\n".join(found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES if torch.cuda.is_available() else [])
def test_special_values_on_the_gpu(name: str) -> None:
    found = []
    for dtype in harness.DTYPES:
        given = calls.calls_of(name, dtype, "cuda")
        found += special.check(name, dtype, "cuda", given, graphs=True)
        found += special.check(name, dtype, "cuda", calls.with_numbers(name, given))
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_there_are_calls(name: str) -> None:
    """Every overload has a call that torch itself accepts, so that the comparison is not empty."""
    for dtype in (torch.float32, torch.int32, torch.bool):
        for call in calls.calls_of(name, dtype, "cpu"):
            if name in table.ONLY_ON_CUDA or not special.run(name, call).error:
                return
    pytest.fail(f"no call of {name}")


def test_a_difference_is_seen() -> None:
    """A result that is off in one respect, each of those that are compared."""
    x = torch.tensor([1.0, float("nan"), float("inf"), 0.0])
    call = calls.Call((x,), {})
    want = special.run("abs", call)

    def off(result: torch.Tensor) -> str:
        return special.difference("abs", want._replace(result=[result]), want, call, "cpu")

    y = want.result[0]
    assert not off(y.clone())
    assert "strides" in off(torch.stack([y, y], 1)[:, 0])
    assert "torch's" in off(y.double())
    for i, value in ((0, 1.0 + 1e-5), (1, 0.0), (2, float("nan")), (2, -float("inf")), (3, -0.0), (3, 1e-38)):
        changed = y.clone()
        changed[i] = value
        assert "1 of 4 elements" in off(changed)
    for other in (want._replace(versions=[1, 0]), want._replace(aliases=[(0, 0)]), want._replace(error="ValueError")):
        assert special.difference("abs", other, want, call, "cpu")
    written = want._replace(arguments=[x + 1])
    assert "argument 0" in special.difference("abs", written, want, call, "cpu")


def test_ties_may_be_in_any_order_and_nothing_else() -> None:
    x = torch.tensor([[3.0, 0.0, -0.0, float("nan"), 3.0]])
    call = calls.Call((x,), {})
    want = special.run("sort", call)

    def off(indices: list[int], values: torch.Tensor | None = None) -> str:
        order = torch.tensor([indices])
        result = [x.gather(1, order) if values is None else values, order]
        return special.difference("sort", want._replace(result=result), want, call, "cpu")

    assert not off([1, 2, 0, 4, 3]) and not off([2, 1, 4, 0, 3])
    assert "occurs twice" in off([1, 2, 0, 0, 3])
    assert "2 of 5 indices name other elements" in off([2, 1, 0, 4, 3], want.result[0])  # zeros of the other sign
    assert "2 of 5" in off([1, 2, 3, 0, 4], want.result[0])
    assert "indices from 0 to 5" in off([1, 2, 0, 5, 3], want.result[0])
    assert "result 0" in off([0, 1, 2, 4, 3])  # named rightly, in a wrong order
