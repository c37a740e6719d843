"""The benchmark's own logic, on the CPU: fake rows, reports and result files."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import pieces

import rtkernels
from bench import __main__ as cli
from bench import meta, peers
from bench.measure import host, host_calls, run
from bench.measure.timing import Timer, Timing
from bench.report import accepted, readme
from bench.report import tables as report
from bench.rows.row import Row
from rtkernels.errors import ArgumentError
from rtkernels.runtime.operator import registry
from rtkernels.runtime.progress import Bar


class FakeDevice:
    def sync(self) -> None:
        pass


class FakeTimer:
    """Calls everything once and reports times from a list, then 10 µs each."""

    def __init__(self, times: tuple[float, ...] = ()) -> None:
        self.times = list(times)
        self.device = FakeDevice()

    def measure(self, calls: list[Any], iterations: int | None = None) -> Timing:
        for call in calls:
            call()
        return Timing((self.times.pop(0) if self.times else 10.0,))


def scale_row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "name": "scale_fwd",
        "shape": "8x16",
        "make": lambda device, generator: {
            "x": torch.randn(8, 16, generator=generator).bfloat16(),
            "by": 3.0,
        },
        "ours": lambda x, by: (x.float() * by).bfloat16(),
        "torch": lambda x, by: x * by,
        "bytes": 512,
    }
    return Row(**{**fields, **changes})


def backward_row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "name": "scale_bwd",
        "make": lambda device, generator: {
            "dy": torch.randn(8, 16, generator=generator),
            "x": torch.randn(8, 16, generator=generator),
            "by": 3.0,
        },
        "ours": lambda dy, x, by: dy * by,
        "torch": lambda dy, x, by: dy * by,
    }
    return scale_row(**{**fields, **changes})


def bench_with(timer: FakeTimer, wanted: list[str] | None) -> run.Bench:
    return run.Bench(timer, "cpu", wanted, log=lambda text: None)


def measured(rows: list[Row], wanted: list[str], timer: FakeTimer | None = None, **options: Any) -> dict[str, Any]:
    bench = bench_with(timer or FakeTimer(), wanted)
    return run.run(rows, bench, pool=rows, peak_bytes=1 << 16, **options)


def test_a_bar_counts_the_rows() -> None:
    stream = io.StringIO()
    bench = run.Bench(FakeTimer(), "cpu", [], log=lambda text: None, bar=Bar(0, "rows", stream))
    rows = [scale_row(shape=f"8x{16 + i}") for i in range(3)]
    earlier = {"rows": [{"row": "scale_fwd", "shape": "8x16", "failed": "device lost"}]}
    run.run(rows, bench, pool=rows, peak_bytes=1 << 16, earlier=earlier)
    assert [line.partition(",")[0] for line in stream.getvalue().splitlines()] == ["1/2 rows", "2/2 rows"]


def test_row_is_checked() -> None:
    with pytest.raises(ArgumentError, match="bytes is 0"):
        scale_row(bytes=0)
    with pytest.raises(ArgumentError, match="must not be empty"):
        scale_row(shape="")


def test_row_numbers() -> None:
    # copy, ours, torch, ours, copy
    got = bench_with(FakeTimer((9.0, 10.0, 40.0, 14.0, 8.0)), ["torch"]).row(scale_row(), None, peak_gbps=1.0)
    assert set(meta.ROW_KEYS) <= set(got)
    assert got["us"] == pytest.approx(12.0)
    assert got["passes_us"] == [10.0, 14.0]
    assert got["copy_us"] == 8.0
    assert got["efficiency"] == pytest.approx(8 / 12)
    assert got["floor_us"] == pytest.approx(0.512)
    assert got["dtype"] == "bfloat16"
    assert got["peers"] == {"torch": 40.0}
    assert 0 < got["error_ours"] < 1e-2
    assert got["peer_errors"]["torch"] == got["error_torch"]


def test_errors_of_a_wrong_op_are_told_not_raised() -> None:
    got = measured([scale_row(ours=lambda x, by: torch.full_like(x, float("nan")))], [])["rows"][0]
    assert got["error_ours"] == {"error": "ValueError: not finite"}
    got = measured([scale_row(ours=lambda x, by: x[:2])], [])["rows"][0]
    assert "shape (2, 16)" in got["error_ours"]["error"]


def test_unwritten_output_is_found() -> None:
    kept: list[torch.Tensor] = []

    def forgets(x: torch.Tensor, by: float) -> torch.Tensor:
        # Stands for an allocator that hands the same block out again.
        if not kept:
            kept.append((x.float() * by).bfloat16())
        return kept[0]

    assert "error" in measured([scale_row(ours=forgets)], [])["rows"][0]["error_ours"]


def test_exact_and_results_of_any_kind() -> None:
    row = scale_row(
        ours=lambda x, by: {"y": x * by, "extra": (x, None)},
        exact=lambda x, by: [x.double() * by],
        torch=lambda x, by: x,
    )
    got = measured([row], [])["rows"][0]
    assert got["error_ours"] < 1e-2 < got["error_torch"]


def test_failing_row_and_failing_peer_do_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**inputs: Any) -> Any:
        raise RuntimeError("kernel is upset\nlong trace")

    def uninstalled(**inputs: Any) -> Any:
        import a_library_that_is_not_here  # noqa: F401

    def unsupported(**inputs: Any) -> Any:
        raise peers.Absent("no such activation")

    adapters = {"liger": broken, "quack": uninstalled, "linghe": unsupported}
    monkeypatch.setitem(peers.ADAPTERS, "scale_fwd", adapters)
    failing = scale_row(name="other_fwd", ours=broken)
    got = measured([failing, scale_row()], ["liger", "quack", "linghe", "flaggems", "torch"])
    assert got["complete"]
    assert got["rows"][0]["failed"] == "RuntimeError: kernel is upset"
    found = got["rows"][1]["peers"]
    assert found["torch"] == 10.0
    assert found["liger"] == {"error": "RuntimeError: kernel is upset"}
    assert "a_library_that_is_not_here" in found["quack"]["absent"]
    assert found["linghe"] == {"absent": "Absent: no such activation"}
    assert found["flaggems"] == {"absent": "no adapter for scale_fwd"}
    text = report.markdown(got)
    assert "liger, error: RuntimeError: kernel is upset (scale_fwd 8x16)" in text
    assert "kernel is upset" in text.splitlines()[4]


def test_peers_without_an_adapter_take_one_line() -> None:
    """Rows of 200 ops for which a peer has nothing: no news, and in one short line; other reasons are written out."""
    peer = {"fla": {"absent": "no adapter for x"}, "quack": {"absent": "Absent: only bf16"}}
    rows = [{"row": f"op{i // 2}_fwd", "shape": f"{i}", "peers": peer} for i in range(400)]
    for row in rows:
        row["peers"] = {**peer, "fla": {"absent": f"no adapter for {row['row']}"}}
    *others, line = report.missing({"rows": rows})
    assert len(others) == 1 and "only bf16" in others[0] and "op199_fwd 399" in others[0]
    assert line.startswith("- fla, no adapter for op0_fwd, op1_fwd, ") and line.endswith(" ...") and len(line) == 300
    assert report.missing({"rows": rows[:2]})[1] == "- fla, no adapter for op0_fwd"


def test_lost_device_ends_the_run_and_keeps_what_was_measured(tmp_path: Path) -> None:
    timer = FakeTimer()

    def faulting(**inputs: Any) -> Any:
        def sync() -> None:
            raise RuntimeError("illegal memory access")

        timer.device.sync = sync
        raise RuntimeError("illegal memory access")

    path = tmp_path / "r.json"
    rows = [scale_row(), scale_row(name="bad_fwd", ours=faulting), scale_row(name="never_fwd")]
    measured(rows, ["torch"], timer, path=path)
    got = meta.load(path)
    assert not got["complete"]
    assert [row["row"] for row in got["rows"]] == ["scale_fwd", "bad_fwd"]
    assert "illegal memory access" in got["rows"][1]["failed"]


def test_backward_is_timed_through_the_forward_row(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = scale_row(fused=lambda x, by: x.mul(by)), backward_row()
    assert run.forward_of(backward, [forward, backward]) is forward
    assert run.forward_of(backward_row(shape="9x9"), [forward]) is None
    assert run.forward_of(forward, [forward]) is None
    prepare = peers.torch_peers(backward, forward)
    assert list(prepare) == ["torch", "inductor", "inductor_math", "torch_fused"]
    inputs = backward.make("cpu", torch.Generator().manual_seed(0))
    call = prepare["torch"](**inputs)
    for _ in range(2):  # the graph is kept
        (dx,) = call()
        assert torch.equal(dx, inputs["dy"] * 3)
    # Inputs that only the backward takes do not reach the forward.
    prepare["torch_fused"](rstd=torch.ones(8), **inputs)()
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    got = measured([backward], ["torch", "inductor"])["rows"][0]
    assert got["peers"] == {"torch": 10.0, "inductor": 10.0}
    got = run.run([backward], bench_with(FakeTimer(), ["torch"]), pool=[forward, backward], peak_bytes=1 << 16)
    assert got["rows"][0]["peers"] == {"torch": 10.0, "torch_fused": 10.0}


def test_select_rows_and_peers() -> None:
    rows = [scale_row(), scale_row(shape="8x32"), backward_row()]
    assert run.select(rows, "fwd") == rows[:2]
    assert run.select(rows, "fwd 8x32") == rows[1:2]
    assert run.select(rows, None) == rows
    assert peers.selected("liger_ab", ["liger"]) and peers.selected("torch", None)
    assert not peers.selected("liger", ["linghe"]) and not peers.selected("torch", [])


def test_failing_host_rows_keep_the_device_rows() -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("no clock")

    got = measured([scale_row()], [], host=fails)
    assert got["host"] == {"failed": "RuntimeError: no clock"}
    assert "RuntimeError: no clock" in report.markdown(got)


def test_result_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.json"
    got = measured([scale_row()], ["torch"], path=path, host=lambda: {"us_per_call": {}})
    assert set(got) == {*meta.TOP_KEYS, "peak_tflops"}
    assert {"gpu", "driver", "torch", "cupy", "nvrtc", "triton", "commit", "dirty", "date"} <= set(got["environment"])
    assert meta.load(path) == got
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "schema None"),
        ('{"schema": 99}', "schema 99, this version reads schema 1"),
        ('{"schema": 1, "rows": []}', "lacks environment"),
        (None, "cannot be read"),
    ],
)
def test_bad_result_files(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(meta.ResultError, match=message):
        meta.load(path)
    assert cli.main(["report", str(path)]) == 2
    assert message in capsys.readouterr().err


HOST = {
    "us_per_call": {"torch x*2": 5.0, "rms_norm no_grad": 4.0, "rope no_grad": 8.0, "glu": {"error": "broken"}},
    "first_use": {
        "rms_norm": {
            "cold": {"first_call_ms": 250.0, "second_call_ms": 0.1, "import_cupy_ms": 300.0},
            "warm": {"error": "no such op"},
        }
    },
    "import_ms": 12.5,
}


def test_report_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timer = FakeTimer((1.0, 9.0, 10.0, 40.0, 10.0, 8.0))
    got = measured([scale_row()], ["torch"], timer)
    got["host"] = HOST
    path = tmp_path / "r.json"
    meta.save(got, path)
    assert cli.main(["report", str(path)]) == 0
    text = capsys.readouterr().out
    assert "| row | shape | dtype | MB | ours |" in text
    line = next(line for line in text.splitlines() if line.startswith("| scale_fwd"))
    assert "| 10.0 | 10.0-10.0 | 8.0 |" in line and "| 0.80 |" in line and "| 4.00 | torch 40.0 |" in line
    assert "| rms_norm no_grad | 4.00 | 0.80 | 1.0 |" in text and "| torch x*2 | 5.00 | 1.00 | - |" in text
    assert "| rope no_grad | 8.00 | 1.60 | 1.5, over |" in text
    assert "| glu | broken | - | - |" in text
    assert "| rms_norm | cold | 250.0 | 0.1 | 300.0 |" in text
    assert "| rms_norm | warm | no such op | - | - |" in text
    assert "beyond `import torch`: 12.5 ms" in text


@pytest.mark.one_in(1000)
def test_report_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path, image = tmp_path / "r.json", tmp_path / "r.png"
    meta.save(measured([scale_row()], ["torch"]), path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert cli.main(["report", str(path), "--plot", str(image)]) == 2
        assert "rtkernels[bench]" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert cli.main(["report", str(path), "--plot", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")


def test_run_without_a_gpu_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("run", "check"):
        assert cli.main([command]) == 2
        assert "nothing is measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["run", "--rows", "("], ["run", "--peers", "liger,nobody"], ["check", "--rows", "("], ["nothing"]],
)
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err


def test_report_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "a.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    meta.save(measured([scale_row()], []), tmp_path / "a.json")
    assert cli.main(["report", str(tmp_path / "a.json")]) == 0


def test_record_takes_a_run_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta, "RESULTS", tmp_path)
    result = measured([scale_row()], [])
    result["environment"]["gpu"] = "NVIDIA H200"
    meta.save(result, tmp_path / "a.txt")
    assert cli.main(["record", str(tmp_path / "a.txt")]) == 0
    assert [row["row"] for row in accepted.load(tmp_path / "h200.json")["rows"]] == [scale_row().name]


def test_host_modes() -> None:
    modes = host._gradient_modes(lambda x, w: lambda: x * w, [torch.ones(4), torch.full((4,), 2.0)])
    assert list(modes) == ["inference", "grad", "grad_backward"]
    assert not modes["inference"]().requires_grad and modes["grad"]().requires_grad
    assert len(modes["grad_backward"]()) == 2


@pytest.mark.every_op
def test_every_public_function_has_a_host_row() -> None:
    measured = {name.partition(" ")[0] for name in host_calls.calls(rtkernels, "cpu")}
    owners = {name: op.name for op in registry.ops() for name in op.public if name.islower()}
    problems = [pieces.host_call(name, owners[name], measured | host_calls.WITHOUT_ROW) for name in sorted(owners)]
    assert not any(problems), next(filter(None, problems))
    gone = measured - owners.keys()
    assert not gone, f"a host row is named {', '.join(sorted(gone))}; expected the name of a public function"


@pytest.mark.slow
def test_the_calls_of_host_rows_work() -> None:
    for _, make in host_calls.calls(rtkernels, "cpu").values():
        make()()


def test_neighbours_times_every_point_on_a_simulated_device() -> None:
    from bench.measure import neighbours

    class Device:
        def __init__(self) -> None:
            self.now = 0.0

        def spin(self, us: float) -> None:
            pass

        def flush(self) -> None:
            pass

        def event(self) -> float:
            self.now += 5.0
            return self.now

        def reached(self, event: float) -> bool:
            return False

        def elapsed_us(self, start: float, end: float) -> float:
            return end - start

        def sync(self) -> None:
            pass

    names = {point.name for point in neighbours.points("cpu")}
    losses = {"cross_entropy_fwd", "cross_entropy_fwdbwd", "cross_entropy_autograd"}
    assert {"rms_norm_bwd", "layer_norm_bwd", "gate_bwd", "softmax_bwd", "rms_norm_fp8_both", *losses} <= names
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "points", _few_points)
        rows = neighbours.measure(
            Timer(Device(), 2, 2, 0.0), "cpu", lambda text: None, lambda name: name != "rms_norm_bwd"
        )
    norms = {"rms_norm_fwd", "layer_norm_fwd", "layer_norm_bwd", "gate_fwd", "gate_bwd"}
    assert {row["row"] for row in rows} == norms | losses
    assert all(row["us"] > 0 and row["copy_us"] > 0 and row["peak_extra_bytes"] is None for row in rows)


def _few_points(device: str):
    from bench.measure import neighbours

    yield from neighbours._norms(4, 64, device)
    yield from neighbours._losses(4, 100, device)
    yield from neighbours._autograd(4, 100, device)


def _measured(us: float, date: str, **times: float) -> dict[str, Any]:
    row = {"row": "rms_norm_fwd", "shape": "8192x2048", "us": us, "efficiency": 0.5, "peers": times}
    return {"environment": {"date": date}, "copy_peak_gbps": 1.0, "rows": [row], "host": None}


def test_a_measurement_is_recorded_unless_it_leaves_out_the_fastest_peer(tmp_path: Path) -> None:
    def after(us: float, **times: float) -> float:
        numbers = accepted.empty()
        assert accepted.record(numbers, _measured(20.0, "2026-01-01", liger=25.0, torch=90.0)) == []
        refused = accepted.record(numbers, _measured(us, "2026-01-02", **times))
        assert refused == ([] if numbers["rows"][0]["us"] == us else ["rms_norm_fwd 8192x2048"])
        accepted.save(numbers, tmp_path / "gpu.json")
        again = accepted.load(tmp_path / "gpu.json")
        assert again["rows"] == numbers["rows"] and len(again["runs"]) == 1 and again["rows"][0]["run"] == 0
        return again["rows"][0]["us"]

    assert after(19.0, liger=26.0) == 19.0
    assert after(19.0, torch=90.0) == 20.0
    assert after(19.0, inductor=24.0) == 19.0
    (tmp_path / "other.json").write_text('{"schema": 1}')
    with pytest.raises(meta.ResultError, match="schema 1; expected 2"):
        accepted.load(tmp_path / "other.json")


def test_a_result_that_cannot_be_compared_is_not_recorded() -> None:
    numbers, other = accepted.empty(), _measured(18.0, "2026-01-03")
    other["rows"][0]["error_ours"] = {"error": "ValueError: shape (2, 2), the reference has (2, 4)"}
    assert accepted.record(numbers, other) == ["rms_norm_fwd 8192x2048"] and numbers["rows"] == []


def test_sweeps_and_layers_are_recorded_as_a_whole() -> None:
    numbers, sweep = accepted.empty(), _measured(18.0, "2026-01-03")
    sweep["rows"][0]["peak_extra_bytes"] = 0
    assert accepted.record(numbers, sweep) == [] and numbers["rows"] == []
    assert numbers["sweep"]["rows"][0]["us"] == 18.0
    accepted.record(numbers, {"environment": {"date": ""}, "layers": {"decoder": {"rows": []}}})
    assert numbers["layers"]["decoder"] == {"run": 1, "measured": {"rows": []}}


def test_tables_of_the_readme_and_of_the_page() -> None:
    rows = [SimpleNamespace(name=name, shape="8192x2048") for name in ("rms_norm_fwd", "topk", "rope_fwd", "absent")]
    row = _measured(20.04, "", liger=25.0, torch=90.0)["rows"][0]
    fresh = readme.tables({(r.name, r.shape): row for r in rows[:3]}, rows)
    assert fresh[0][2] == "| `rms_norm` forward | 20.0 (0.50); liger 25.0 | - | - |"
    assert fresh[1][2:] == ["| rope_fwd | 8192x2048 | 20.0 (0.50) | liger 25.0 |"]
    assert fresh[2][2:] == ["| topk | 8192x2048 | 20.0 (0.50) | liger 25.0 |"]
    old = "text\n| on one NVIDIA H200 | old |\n|---|\nmore"
    assert readme.rewritten(old, ["| new |"]).split("\n") == ["text", "| new |", "more"]
    with pytest.raises(meta.ResultError, match="no table that begins with"):
        readme.rewritten("nothing", ["| new |"])


def test_gains_name_the_fastest_peer_and_the_date() -> None:
    from bench.report import headline

    row = {"row": "rms_norm_bwd", "shape": "8192x4096", "us": 20.0, "peers": {"liger": 25.0, "torch": 40.0}, "run": 0}
    layer = {"ours_fused": {"forward_and_backward_ms": 10.0}, "fp8_fused": {"forward_and_backward_ms": 8.0}}
    layer |= {"liger": {"forward_and_backward_ms": 12.0}, "compile": {"forward_and_backward_ms": 11.0}}
    accepted = {"rows": [row], "runs": [{"date": "2026-01-02T03:04:05"}]}
    accepted["layers"] = {"layer_dense": {"run": 0, "measured": {"rows": [layer]}}}
    lines = headline.headline(accepted, {}, {})
    assert lines[0].startswith(headline.HEAD) and len(lines) == 5
    assert lines[2].endswith("| 10.0 ms | torch.compile 11.0 ms | 1.10 x | 2026-01-02 |")
    assert lines[4].endswith("| 20.0 µs | Liger 25.0 µs | 1.25 x | 2026-01-02 |")


def test_readme_has_what_was_recorded() -> None:
    assert cli.main(["readme", "--check"]) == 0


def test_rows_of_products_have_their_rate() -> None:
    from bench.report import tables

    row = {
        "row": "scaled_mm", "shape": "4096x4096x4096_bf16", "dtype": "bfloat16", "bytes": 10**8, "us": 200.0,
        "p20": 199.0, "p80": 201.0, "copy_us": 40.0, "floor_us": 30.0, "efficiency": 0.2, "error_ours": 1e-3,
        "error_torch": 1e-3, "peers": {}, "flops": 2 * 4096**3, "tflops": 2 * 4096**3 / 200 / 1e6,
    }  # fmt: skip
    other = {key: value for key, value in row.items() if key not in ("flops", "tflops")}
    lines = tables.row_table({"rows": [row, other]})
    assert "TFLOP/s" in lines[0] and "| 687 |" in lines[2] and "| - |" in lines[3]
    assert "TFLOP/s" not in tables.row_table({"rows": [other]})[0]
