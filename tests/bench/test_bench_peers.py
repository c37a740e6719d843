"""The benchmark's peers and ``check``, on the CPU: adapters, gradients of several outputs, nested inputs."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_bench import FakeTimer, backward_row, bench_with, measured, scale_row
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import __main__ as cli
from bench import peers
from bench.measure import run
from bench.measure.timing import Timing, TimingError
from bench.report import tables as report
from bench.rows import all_rows
from bench.rows.row import Row

ADAPTER_FILES = sorted(Path(peers.__file__).parent.glob("*.py"))
LIBRARIES = (
    "batch_invariant_ops",
    "liger_kernel",
    "quack",
    "linghe",
    "flag_gems",
    "flash_attn",
    "deep_gemm",
    "fla",
    "torchao",
    "trl",
    "verl",
)


def rows_by_adapter() -> dict[str, Row]:
    """One row for every entry of the adapters' table."""
    rows = {key: row for row in reversed(list(all_rows())) for key in (row.name, row.label)}
    assert not peers.ADAPTERS.keys() - rows.keys(), "adapters without a row"
    return {key: rows[key] for key in peers.ADAPTERS}


def test_package() -> None:
    expected = {"liger.py", "linghe.py", "quack.py", "fa4.py", "flaggems.py", "others.py", "heads.py", "torch.py"}
    assert expected <= {path.name for path in ADAPTER_FILES}
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < 400 for path in ADAPTER_FILES)
    assert set(peers.DISTRIBUTIONS) < set(peers.FAMILIES)
    assert issubclass(peers.Absent, Exception)
    for table in peers.ADAPTERS.values():
        for name in table:
            assert any(peers.selected(name, [family]) for family in peers.DISTRIBUTIONS)


def test_adapters_take_the_inputs_of_their_rows_and_only_import_when_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    for key, row in rows_by_adapter().items():
        assert peers.ADAPTERS[key].items() <= peers.adapters_of(row).items()
        with FakeTensorMode():
            inputs = row.make("cpu", torch.Generator())
        for peer, prepare in peers.ADAPTERS[key].items():
            inspect.signature(prepare).bind(**inputs)
            with pytest.raises((ImportError, peers.Absent)) as told:
                prepare(**inputs)
            # Not an error that disguises a wrong argument as a missing library.
            assert told.type is peers.Absent or any(name in str(told.value) for name in LIBRARIES), (key, peer)


def turn(a: Tensor, b: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    cos, sin = angles
    return a * cos - b * sin, a * sin + b * cos


def turn_back(dy: tuple[Tensor, Tensor], a: Tensor, b: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    cos, sin = angles
    return dy[0] * cos + dy[1] * sin, dy[1] * cos - dy[0] * sin


def turn_rows() -> tuple[Row, Row]:
    """A forward of two outputs and a pair of tables among its inputs, and its backward."""

    def make(device: str, generator: torch.Generator, backward: bool = False) -> dict[str, Any]:
        def normal() -> Tensor:
            return torch.randn(4, 8, generator=generator)

        angle = normal()
        inputs = {"a": normal(), "b": normal(), "angles": (angle.cos(), angle.sin())}
        return {"dy": (normal(), normal()), **inputs} if backward else inputs

    forward = Row("turn_fwd", "4x8", make, turn, turn, 1)
    make_backward = lambda device, generator: make(device, generator, True)  # noqa: E731
    return forward, Row("turn_bwd", "4x8", make_backward, turn_back, turn_back, 1)


def test_gradients_of_several_outputs() -> None:
    forward, backward = turn_rows()
    inputs = backward.make("cpu", torch.Generator().manual_seed(0))
    call = peers.torch_peers(backward, forward)["torch"](**inputs)
    for _ in range(2):
        for got, want in zip(call(), turn_back(**inputs), strict=True):
            torch.testing.assert_close(got, want)
    got = run.run([backward], bench_with(FakeTimer(), ["torch"]), pool=[forward, backward], peak_bytes=1 << 16)["rows"][
        0
    ]
    assert got["dtype"] == "float32" and got["error_ours"] < 1e-6 and got["peer_errors"]["torch"] < 1e-6
    # One gradient belongs to the first output; it takes on that output's dtype.
    one = peers.torch_peers(backward, forward)["torch"](**{**inputs, "dy": inputs["dy"][0].double()})
    assert torch.equal(one()[0], inputs["dy"][0] * inputs["angles"][0])
    with pytest.raises(ValueError, match="3 incoming gradients for 2 outputs"):
        peers.torch_peers(backward, forward)["torch"](**{**inputs, "dy": (*inputs["dy"], inputs["a"])})


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


def test_nested_inputs() -> None:
    x, ids = torch.ones(3), torch.arange(3)
    inputs = {"x": x, "many": [x, (ids, Pair(x, ids))], "named": {"deep": [x]}, "by": 2.0, "none": None}
    copied, wide = run._clone(inputs), run._double(inputs)
    assert copied["many"][1][1].one.data_ptr() != x.data_ptr() != copied["named"]["deep"][0].data_ptr()
    assert isinstance(wide["many"][1][1], Pair) and wide["many"][1][1].one.dtype == torch.float64
    assert wide["many"][1][0].dtype == torch.int64 and wide["named"]["deep"][0].dtype == torch.float64
    assert copied["by"] == 2.0 and copied["none"] is None and isinstance(copied["many"], list)


def doubled_(tensors: list[Tensor]) -> Tensor:
    for t in tensors:
        t.mul_(2)
    return tensors[0]


def test_rows_that_update_lists_in_place() -> None:
    row = scale_row(
        make=lambda device, generator: {"tensors": [torch.randn(4, generator=generator) for _ in range(3)]},
        ours=doubled_,
        torch=doubled_,
        # State after two calls: the result of the second one is compared, and it is not poisoned.
        exact=lambda tensors: tensors[0].double() * 4,
    )
    got = measured([row], ["torch"])["rows"][0]
    assert got["dtype"] == "float32"
    assert got["error_ours"] == got["error_torch"] == got["peer_errors"]["torch"] == 0


def test_inductor_leaves_long_lists_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    prepare = peers.torch_peers(scale_row(torch=doubled_), None)["inductor"]
    prepare(tensors=[torch.ones(1)] * 64)()
    with pytest.raises(peers.Absent, match="65 tensors"):
        prepare(tensors=[torch.ones(1)] * 65)


def test_large_rows_run_on_one_copy() -> None:
    results = []

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        results.append(generator)
        return {"x": torch.ones(4), "by": 2.0}

    bench_with(FakeTimer(), []).row(scale_row(make=make), None, 1.0)
    assert len(results) == run.COPIES
    bench = bench_with(FakeTimer(), [])
    bench._copy = lambda nbytes: 1.0
    bench.row(scale_row(make=make, bytes=run.ROTATED_BYTES + 1), None, 1.0)
    assert len(results) == run.COPIES + 1


class WaitingTimer(FakeTimer):
    def measure(self, calls: list[Any], iterations: int | None = None) -> Timing:
        if any(call() is None for call in calls):
            raise TimingError("does it synchronise?")
        return super().measure(calls, iterations)

    def measure_waiting(self, calls: list[Any], iterations: int | None = None) -> Timing:
        return Timing((77.0,))


def test_peer_that_synchronises_is_timed_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.ADAPTERS, "scale_fwd", {"liger": lambda x, by: lambda: None})
    got = measured([scale_row()], ["liger", "torch"], WaitingTimer())
    assert got["rows"][0]["peers"] == {"torch": 10.0, "liger": 77.0}
    assert got["rows"][0]["peers_waiting"] == ["liger"]
    text = report.markdown(got)
    assert "liger 77.0*" in text and "This peer synchronises" in text


def test_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**inputs: Any) -> Any:
        raise RuntimeError("wrong signature")

    def uninstalled(**inputs: Any) -> Any:
        import a_library_that_is_not_here  # noqa: F401

    halves = lambda x, by: peers.Compared(lambda: (x * by).chunk(2), torch.cat)  # noqa: E731
    adapters = {"liger": broken, "liger_ab": halves, "quack": uninstalled, "linghe": lambda x, by: lambda: x}
    monkeypatch.setitem(peers.ADAPTERS, "scale_fwd", adapters)
    lines: list[str] = []
    rows = [scale_row(), backward_row()]
    bench = run.Bench(FakeTimer(), "cpu", cli.CHECKED, log=lines.append)
    assert run.check(rows, bench, rows)
    first = [line for line in lines if "scale_fwd 8x16" in line]
    assert [line.split()[0] for line in first] == ["ok", "ok", "error", "ok", "absent", "ok"]
    assert first[0].split(": ")[1] == "ours" and "e-0" in first[0]
    assert first[2] == "error  scale_fwd 8x16: liger: RuntimeError: wrong signature"
    assert "liger_ab" in first[3] and "differs" not in first[3] and "a_library_that_is_not_here" in first[4]
    assert first[5].endswith("linghe: 6.7e-01 (differs)")
    assert any(line.startswith("ok     scale_bwd 8x16: torch: ") for line in lines)
    assert not any("inductor" in line for line in lines)


@pytest.mark.parametrize("wrong", ["raises", "unfinished", "unmade"])
def test_check_fails_with_ours(wrong: str) -> None:
    def raises(**inputs: Any) -> Any:
        raise RuntimeError("no kernel")

    changes = {
        "raises": {"ours": raises},
        "unfinished": {"ours": lambda x, by: x * float("nan")},
        "unmade": {"make": lambda device, generator: raises()},
    }
    lines: list[str] = []
    rows = [scale_row(**changes[wrong]), scale_row(name="other_fwd")]
    assert not run.check(rows, run.Bench(FakeTimer(), "cpu", ["torch"], log=lines.append), rows)
    assert lines[0].startswith("error  scale_fwd 8x16: ours: ")
    # The other rows are still checked.
    assert any(line.startswith("ok     other_fwd 8x16: ours") for line in lines)


def test_libraries_asked_for_by_name_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.util, "find_spec", lambda module: None if module == "linghe" else module)
    assert peers.not_installed(None) == []
    assert peers.not_installed(["inductor", "liger_ab", "torch_fused"]) == []
    assert peers.not_installed(["linghe", "liger"]) == ["linghe"]
    assert peers.not_installed(["linghe_atomic"]) == ["linghe"]
