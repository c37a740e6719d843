"""The benchmark's own logic, on the CPU: a simulated device, fake rows, reports and result files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import __main__ as cli
from bench import host, meta, peers, report, run
from bench.timing import Timer, Timing, TimingError
from rtkernels.errors import ArgumentError
from rtkernels.testing import Row


class SimulatedDevice:
    """A device and a host with clocks in µs; the host blocks when the launch queue is full."""

    def __init__(self, host_us: float = 5.0, depth: int = 1024) -> None:
        self.now = self.free = 0.0
        self.host_us, self.depth = host_us, depth
        self.pending: list[float] = []
        self.flushes = 0

    def launch(self, device_us: float) -> float:
        self.now += self.host_us
        self.pending = [end for end in self.pending if end > self.now]
        if len(self.pending) >= self.depth:
            self.now = self.pending[0]
        self.free = max(self.free, self.now) + device_us
        self.pending.append(self.free)
        return self.free

    def spin(self, us: float) -> None:
        self.launch(us)

    def flush(self) -> None:
        self.flushes += 1
        self.launch(64.0)

    def event(self) -> float:
        return self.launch(0.0)

    def reached(self, event: float) -> bool:
        return self.now >= event

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def sync(self) -> None:
        self.now = max(self.now, self.free)

    def clock(self) -> float:
        return self.now / 1e6


def timer_on(device: SimulatedDevice, **options: Any) -> Timer:
    return Timer(device, **{"iterations": 30, "warm_us": 500.0, "clock": device.clock, **options})


@pytest.mark.parametrize("host_us", [1.0, 50.0, 2000.0])
def test_timer_sees_device_time_only(host_us: float) -> None:
    device = SimulatedDevice(host_us)
    timing = timer_on(device).measure([lambda: device.launch(20.0), lambda: device.launch(20.0)])
    assert len(timing.samples) == 30
    assert timing.us == pytest.approx(20.0)
    assert (timing.p20, timing.p80) == pytest.approx((20.0, 20.0))
    assert device.flushes >= 30


def test_timer_rotates_its_calls() -> None:
    device = SimulatedDevice()
    timing = timer_on(device).measure([lambda: device.launch(10.0), lambda: device.launch(30.0)])
    assert sorted(timing.samples) == pytest.approx([10.0] * 15 + [30.0] * 15)


def test_timer_shortens_a_batch_that_fills_the_launch_queue() -> None:
    device = SimulatedDevice(host_us=0.5)

    def many_kernels() -> None:
        for _ in range(150):
            device.launch(0.01)

    timing = timer_on(device).measure([many_kernels])
    assert timing.us == pytest.approx(1.5)


def test_timer_refuses_a_call_that_synchronises() -> None:
    device = SimulatedDevice()

    def synchronising() -> None:
        device.launch(5.0)
        device.sync()

    with pytest.raises(TimingError, match="synchronise"):
        timer_on(device).measure([synchronising])


def test_quantiles() -> None:
    timing = Timing((4.0, 1.0, 3.0, 2.0, 5.0)) + Timing((6.0,))
    assert (timing.us, timing.p20, timing.p80) == pytest.approx((3.5, 2.0, 5.0))


class FakeTimer:
    """Calls everything once and reports times from a list, then 10 µs each."""

    def __init__(self, times: tuple[float, ...] = ()) -> None:
        self.times = list(times)
        self.device = SimulatedDevice()

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


def measured(
    rows: list[Row], wanted: list[str], timer: FakeTimer | None = None, **options: Any
) -> dict[str, Any]:
    bench = bench_with(timer or FakeTimer(), wanted)
    return run.run(rows, bench, pool=rows, peak_bytes=1 << 16, **options)


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
    got = run.run(
        [backward], bench_with(FakeTimer(), ["torch"]), pool=[forward, backward], peak_bytes=1 << 16
    )
    assert got["rows"][0]["peers"] == {"torch": 10.0, "torch_fused": 10.0}


def test_every_adapter_of_a_missing_library_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("liger_kernel", "quack", "linghe", "flag_gems"):
        monkeypatch.setitem(sys.modules, name, None)
    given = {
        "x": torch.ones(2, 8),
        "dy": torch.ones(2, 8),
        "weight": torch.ones(8),
        "eps": 1e-6,
        "act": "silu",
    }
    for adapters in peers.ADAPTERS.values():
        for prepare in adapters.values():
            with pytest.raises(ImportError):
                prepare(**given)


def test_select_rows_and_peers() -> None:
    rows = [scale_row(), scale_row(shape="8x32"), backward_row()]
    assert run.select(rows, "fwd") == rows[:2]
    assert run.select(rows, "fwd 8x32") == rows[1:2]
    assert run.select(rows, None) == rows
    assert peers.selected("liger_ab", ["liger"]) and peers.selected("torch", None)
    assert not peers.selected("liger", ["linghe"]) and not peers.selected("torch", [])


def test_result_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.json"
    got = measured([scale_row()], ["torch"], path=path, host=lambda: {"us_per_call": {}})
    assert set(got) == set(meta.TOP_KEYS)
    assert {"gpu", "driver", "torch", "cupy", "nvrtc", "triton", "commit", "dirty", "date"} <= set(
        got["environment"]
    )
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
    "us_per_call": {"torch x*2": 5.0, "rms_norm no_grad": 4.0, "glu": {"error": "broken"}},
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
    assert "| rms_norm no_grad | 4.00 | 0.80 |" in text
    assert "| glu | broken | - |" in text
    assert "| rms_norm | cold | 250.0 | 0.1 | 300.0 |" in text
    assert "| rms_norm | warm | no such op | - | - |" in text
    assert "beyond `import torch`: 12.5 ms" in text


def test_report_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert cli.main(["run"]) == 2
    assert "nothing is measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["run", "--rows", "("], ["run", "--peers", "liger,nobody"], ["nothing"]]
)
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err


def test_report_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta, "RESULTS", tmp_path)
    assert cli.main(["report"]) == 2
    meta.save(measured([scale_row()], []), tmp_path / "a.json")
    assert cli.main(["report"]) == 0


def test_host_time_per_call() -> None:
    device = SimulatedDevice(host_us=5.0)

    def two_launches() -> None:
        assert torch.is_inference_mode_enabled()
        device.launch(1.0)
        device.launch(1.0)

    found = {"one": lambda: device.launch(1.0), "two inference": two_launches, "three": "why not"}
    got = host.per_call(found, device.sync, rounds=3, chunk=4, clock=device.clock)
    assert got == {
        "one": pytest.approx(5.0),
        "two inference": pytest.approx(10.0),
        "three": {"error": "why not"},
    }
    assert json.loads(json.dumps(got["three"])) == {"error": "why not"}


def test_host_modes() -> None:
    modes = host._modes(lambda x, w: x * w, [torch.ones(4), torch.full((4,), 2.0)], True)
    assert list(modes) == ["no_grad", "inference", "grad", "grad_backward"]
    assert not modes["no_grad"]().requires_grad and modes["grad"]().requires_grad
    assert len(modes["grad_backward"]()) == 2
    assert list(host._modes(lambda x: x, [torch.ones(4)], False)) == ["no_grad", "inference"]
