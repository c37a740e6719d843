"""Measure the candidates of a problem on this machine's GPU, and keep the best one for later plans.

Nothing is ever measured during a call: ``tune`` writes a table to the cache directory, and a plan reads it when it is
made (``Backends.choose``). Levels of batch invariance ignore the table.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from rtkernels.errors import ArgumentError, RtkError, UnsupportedDeviceError
from rtkernels.ops.shared.backend import Backends, problem_key, recording
from rtkernels.ops.shared.explain import Explanation
from rtkernels.runtime.launch import tuned
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.operator import registry
from rtkernels.runtime.operator.plan import StepPlan, Steps

_MAX_PER_BACKEND = 8  # candidates of one backend that are measured: those it expects to be fastest
_ROUNDS = 15
_WARM_UP = 2
_FLUSHED = 256 << 20  # bytes that are written between two measurements, so that operands come from memory
_MIN_GAIN = 0.02  # part of the time that another choice must save; else what "auto" takes without a table stays


class Tuned(NamedTuple):
    """The measurement of one problem.

    Attributes:
        title: Sizes and types.
        backend: The backend that is taken from now on.
        options: What it is told: tile, sharing blocks.
        us: Its time in microseconds, operands in memory.
        default: The backend that "auto" takes without measurements, and what it is told.
        default_us: Its time.
        measured: Every candidate with its time, the fastest first.
    """

    title: str
    backend: str
    options: dict[str, Any]
    us: float
    default: tuple[str, dict[str, Any]]
    default_us: float
    measured: tuple[tuple[str, dict[str, Any], float], ...]

    def __str__(self) -> str:
        told = "".join(f", {name} {value}" for name, value in self.options.items())
        saved = f"{self.default_us:.1f} us before" if self.us < self.default_us else "as before"
        return f"{self.title}: {self.backend}{told}, {self.us:.1f} us ({saved}; {len(self.measured)} candidates)"


@contextlib.contextmanager
def record_problems() -> Iterator[list[Any]]:
    """Collect the matrix products that a program computes, each one once, for ``tune``.

    ``with rtkernels.record_problems() as problems: model(x)``, then ``rtkernels.tune(problems)``. Plans that exist are
    forgotten at the beginning, because products are seen when their plans are made. Products whose backend the caller
    names, and those of batch-invariant calls, are left out. Calls of all threads are collected.

    Returns:
        A context manager whose value is a list, complete when it ends.
    """
    if recording.problems is not None:
        raise ArgumentError("problems are being recorded already; expected one record_problems() at a time")
    seen: list[tuple[Backends[Any], Any]] = []
    problems: list[Any] = []
    Plans.forget_all()
    recording.problems = seen
    try:
        yield problems
    finally:
        recording.problems = None
        problems += dict.fromkeys(problem for family, problem in seen if family.tensors is not None)


def tune(problems: Any, *, device: int | None = None, progress: Callable[[Tuned], None] | None = None) -> list[Tuned]:
    """Measure every candidate for problems on a GPU, and keep the fastest ones in the cache directory.

    Later plans for the same sizes, strides and types on a GPU of the same name take these choices, in this process and
    in others that start afterwards. They hold until the kernels change with a new version. ``rtkernels warm --out``
    copies them for other machines. Inside of ``batch_invariant`` they are not used.

    Args:
        problems: What ``explain`` returned for a matrix product (``scaled_mm``, ``gated_mm``, ``grouped_mm``,
            ``grouped_mm_masked``, ``grouped_wgrad``), its ``problem``, or a list of these, as from ``record_problems``.
        device: CUDA ordinal. Default: the current device.
        progress: Called with each result.

    Returns:
        A ``Tuned`` for each problem: choice, time, and time of what would have been taken otherwise.

    Raises:
        ArgumentError: One of `problems` is something else.
        UnsupportedDeviceError: There is no GPU.
        RtkError: The cache directory cannot be written.
    """
    wanted = list(dict.fromkeys(_problems(problems)))
    if device is None:
        if not torch.cuda.is_available():
            raise UnsupportedDeviceError("there is no GPU to measure on; expected a machine with the GPU to tune for")
        device = torch.cuda.current_device()
    info = device_info(device)
    store = tuned.writable()
    results, choices = [], {}
    for family, problem in wanted:
        result = _measured(family, problem, device, info)
        results.append(result)
        choices.setdefault(family, {})[problem_key(problem)] = {
            "backend": result.backend, "options": result.options, "us": round(result.us, 2),
            "default": list(result.default), "default_us": round(result.default_us, 2), "title": result.title,
        }  # fmt: skip
        if progress is not None:
            progress(result)
    table: dict[str, Any] = {}
    for family, found in choices.items():
        table.setdefault(tuned.source(family.what, family.units), {})[family.what] = found
    tuned.add(store, info.name, table)
    return results


def _problems(given: Any) -> Iterator[tuple[Backends[Any], Any]]:
    if isinstance(given, Explanation):
        given = given.problem
    if not hasattr(given, "title") and isinstance(given, Iterable) and not isinstance(given, (str, torch.Tensor)):
        for each in given:
            yield from _problems(each)
        return
    registry.ops()  # every family is imported, and known
    for family in Backends.known:
        if family.tensors is not None and family.is_problem(given):
            yield family, given
            return
    raise ArgumentError(
        f"problems has {given!r}; expected what rtkernels.explain returns for a matrix product, or a list from "
        "rtkernels.record_problems()"
    )


def candidates(family: Backends[Any], problem: Any, info: DeviceInfo) -> list[tuple[Any, dict[str, Any]]]:
    """Return what is measured: of every backend that can run a problem those it expects to be fastest."""
    found, count = [], {}
    for backend, options in family.candidates(problem, info):
        count[backend.name] = count.get(backend.name, 0) + 1
        if count[backend.name] <= _MAX_PER_BACKEND:
            found.append((backend, options))
    return found


def _measured(family: Backends[Any], problem: Any, device: int, info: DeviceInfo) -> Tuned:
    found = candidates(family, problem, info)
    if not found:
        raise UnsupportedDeviceError(f"no kernel for {problem.title} on {info.target}")
    place = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    tensors = family.tensors(problem, place)
    times = measure([_run(b.steps(problem, device, **o), tensors, device) for b, o in found], device)
    ranked = sorted(((b.name, o, us) for (b, o), us in zip(found, times, strict=True)), key=lambda each: each[2])
    default, default_options = found[0]
    best = ranked[0] if ranked[0][2] < times[0] * (1 - _MIN_GAIN) else (default.name, default_options, times[0])
    return Tuned(problem.title, *best, (default.name, default_options), times[0], tuple(ranked))


def _run(steps: Steps, tensors: dict[str, Any], device: int) -> Callable[[], Any]:
    """Return a function that launches the steps of a problem."""
    plan = StepPlan("tune", [*tensors], (), {}, "tuple", steps, device)
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    return lambda: plan.run(*addresses)


def measure(functions: Sequence[Callable[[], Any]], device: int) -> list[float]:
    """Return the median time of each function in microseconds; they take turns, so that clocks are the same for all."""
    if device < 0:
        raise RtkError("an emulated GPU has no times")
    samples: list[list[float]] = [[] for _ in functions]
    with torch.cuda.device(device):
        flushed = torch.empty(_FLUSHED, dtype=torch.uint8, device="cuda")
        for round_ in range(_WARM_UP + _ROUNDS):
            events = []
            for run in functions:
                flushed.zero_()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                run()
                end.record()
                events.append((start, end))
            torch.cuda.synchronize()
            if round_ >= _WARM_UP:
                for sample, (start, end) in zip(samples, events, strict=True):
                    sample.append(start.elapsed_time(end) * 1e3)
    return [statistics.median(sample) for sample in samples]
