"""Device time of a call, with the host's share kept out and the L2 cache flushed before every call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FLUSH_BYTES = 256 << 20
MAX_RETRIES = 8
ENOUGH = 3  # samples of a call that takes seconds

Call = Callable[[], Any]


class TimingError(RuntimeError):
    """A call whose device time cannot be separated from the host's."""


@dataclass(frozen=True)
class Timing:
    """Samples in µs, summarised."""

    samples: tuple[float, ...]

    def _quantile(self, q: float) -> float:
        ordered = sorted(self.samples)
        at = q * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (at - low)

    @property
    def us(self) -> float:
        return self._quantile(0.5)

    @property
    def p20(self) -> float:
        return self._quantile(0.2)

    @property
    def p80(self) -> float:
        return self._quantile(0.8)

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.samples + other.samples)


class Device(Protocol):
    """The timer's interface to a device; tests use a simulated one."""

    def spin(self, us: float) -> None: ...
    def flush(self) -> None: ...
    def event(self) -> Any: ...
    def reached(self, event: Any) -> bool: ...
    def elapsed_us(self, start: Any, end: Any) -> float: ...
    def sync(self) -> None: ...


class CudaDevice:
    """The current CUDA device, through torch."""

    def __init__(self, device: str = "cuda") -> None:
        import torch

        self._torch = torch
        self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._cycles_per_us = 1000.0
        self.spin(20_000)  # wakes the clocks before they are read
        start = self.event()
        self.spin(10_000)
        end = self.event()
        self.sync()
        self._cycles_per_us *= 10_000 / self.elapsed_us(start, end)

    def spin(self, us: float) -> None:
        self._torch.cuda._sleep(int(us * self._cycles_per_us))

    def flush(self) -> None:
        self._buffer.zero_()

    def event(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, event: Any) -> bool:
        return event.query()

    def elapsed_us(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) * 1000.0

    def sync(self) -> None:
        self._torch.cuda.synchronize()


class Timer:
    """Times calls in batches that are queued whole behind a spin kernel.

    Every batch is: synchronise, spin, then per iteration flush L2, event, call, event. A batch counts only if
    the spin is still running when its last event has been queued, so no launch can have waited for the host.
    That one check also catches a full launch queue (about 1024 entries: the host would block until the spin
    ends). A batch that fails it is dropped and repeated, half as long behind a spin twice as long.

    Args:
        device: Where events, spins and flushes go.
        iterations: Samples per measurement.
        batch: Iterations queued at once; 10 keeps even calls of 80 kernels under the launch queue's depth.
        warm_us: Time spent calling before the first sample, so that clocks and caches are as under load.
        patience_us: Time after which a measurement is content with three samples, as of a peer that takes seconds.
    """

    def __init__(
        self,
        device: Device,
        iterations: int = 100,
        batch: int = 10,
        warm_us: float = 20_000.0,
        clock: Callable[[], float] = time.perf_counter,
        patience_us: float = 3_000_000.0,
    ) -> None:
        self.device = device
        self.iterations = iterations
        self.batch = batch
        self.warm_us = warm_us
        self.patience_us = patience_us
        self._clock = clock

    def measure(self, calls: Sequence[Call], iterations: int | None = None) -> Timing:
        """Time ``calls`` in rotation and return one sample per iteration.

        Args:
            calls: The same operation on different copies of its inputs.
            iterations: Samples to take; the timer's own number when None.

        Raises:
            TimingError: The host never got ahead, as with a call that synchronises.
        """
        wanted = iterations or self.iterations
        ends = self._ends()
        host_us = self._warm(calls)
        batch = self.batch if self._clock() < ends else 1
        spin_us = 500.0 + 2.0 * batch * host_us
        samples: list[float] = []
        retries = 0
        while len(samples) < wanted and not (len(samples) >= ENOUGH and self._clock() > ends):
            got = self._batch(calls, len(samples), min(batch, wanted - len(samples)), spin_us)
            if got is not None:
                samples += got
                continue
            retries += 1
            if retries > MAX_RETRIES or self._clock() > ends:
                raise TimingError("the host cannot queue this call ahead of the device; does it synchronise?")
            batch = max(1, batch // 2)
            spin_us = min(2.0 * spin_us, 200_000.0)
        return Timing(tuple(samples))

    def measure_waiting(self, calls: Sequence[Call], iterations: int | None = None) -> Timing:
        """Time ``calls`` that synchronise, one at a time: a sample holds the gaps in which the device waits.

        For peers only: next to calls of many hundred µs the gaps are small, but they do count against the peer.
        """
        wanted = iterations or min(self.iterations, 30)
        ends = self._ends()
        self._warm(calls)
        samples: list[float] = []
        for i in range(wanted):
            if len(samples) >= ENOUGH and self._clock() > ends:
                break
            start, end = self._queue(calls[i % len(calls)])
            self.device.sync()
            samples.append(self.device.elapsed_us(start, end))
        return Timing(tuple(samples))

    def _ends(self) -> float:
        return self._clock() + self.patience_us / 1e6

    def _warm(self, calls: Sequence[Call]) -> float:
        """Call until ``warm_us`` have passed; return the host's µs per iteration."""
        ends = self._ends()
        for call in calls:
            call()
        self.device.sync()
        start = self._clock()
        host: list[float] = []
        while (self._clock() - start) * 1e6 < self.warm_us or len(host) < ENOUGH:
            if host and self._clock() > ends:
                break
            before = self._clock()
            self._queue(calls[len(host) % len(calls)])
            host.append((self._clock() - before) * 1e6)
            self.device.sync()
        return sorted(host)[len(host) // 2]

    def _queue(self, call: Call) -> tuple[Any, Any]:
        self.device.flush()
        start = self.device.event()
        call()
        return start, self.device.event()

    def _batch(self, calls: Sequence[Call], first: int, count: int, spin_us: float) -> list[float] | None:
        self.device.sync()
        self.device.spin(spin_us)
        gate = self.device.event()
        pairs = [self._queue(calls[(first + i) % len(calls)]) for i in range(count)]
        queued = not self.device.reached(gate)
        self.device.sync()
        return [self.device.elapsed_us(start, end) for start, end in pairs] if queued else None


def copy_calls(nbytes: int, device: str, copies: int = 3) -> list[Call]:
    """Device-to-device copies that move ``nbytes`` in all: half read, half written, random data.

    Rounded up to whole 64 KiB: sizes that are no multiple of a few KiB copy up to 15 % slower.
    """
    import torch

    size = -(-max(1, nbytes // 2) // 65536) * 65536

    def one() -> Call:
        source = torch.empty(size, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return [one() for _ in range(copies)]
