"""The benchmark's timer against a simulated device with its own clock and launch queue."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.measure import host
from bench.measure.timing import Timer, Timing, TimingError


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


def test_timer_takes_a_call_that_synchronises_one_by_one() -> None:
    device = SimulatedDevice()

    def synchronising() -> None:
        device.launch(100.0)
        device.sync()
        device.launch(100.0)

    timing = timer_on(device).measure_waiting([synchronising])
    assert len(timing.samples) == 30
    # Both kernels and the launch that the device waited for.
    assert timing.us == pytest.approx(205.0)


@pytest.mark.parametrize("synchronises", [False, True])
def test_timer_takes_little_time_for_a_call_of_seconds(synchronises: bool) -> None:
    device, calls = SimulatedDevice(), []

    def call() -> None:
        calls.append(device.launch(700_000.0))
        if synchronises:
            device.sync()

    timer = timer_on(device)
    if synchronises:
        with pytest.raises(TimingError):
            timer.measure([call] * 3)
        assert len(calls) <= 6
        calls.clear()
    timing = (timer.measure_waiting if synchronises else timer.measure)([call] * 3)
    assert len(timing.samples) < 30 and len(calls) < 20
    assert len(timing.samples) >= 3 and timing.us == pytest.approx(700_000.0, rel=1e-3)


def test_quantiles() -> None:
    timing = Timing((4.0, 1.0, 3.0, 2.0, 5.0)) + Timing((6.0,))
    assert (timing.us, timing.p20, timing.p80) == pytest.approx((3.5, 2.0, 5.0))


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
