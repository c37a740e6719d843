"""Measuring and checking rows: ours, the copy of the same bytes, the error against fp64, and the peers."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench import meta, peers
from bench.measure import peak
from bench.measure.timing import Call, Timer, TimingError, copy_calls
from bench.measure.values import _clone, _double, _storages, relative_error, tensors
from bench.rows.row import Row
from rtkernels.runtime.progress import Bar

COPIES = 3
# Above this a row uses one copy of its inputs: no cache keeps any of it between calls, and three copies do not fit.
ROTATED_BYTES = 2 << 30
PEAK_BYTES = 4 << 30
# Relative error of a first output above which `check` says that a peer computes something else.
DIFFERS = 0.05


class DeviceLost(RuntimeError):
    """The device no longer answers (a kernel faulted); nothing more can be measured in this process."""


def select(rows: Iterable[Row], pattern: str | None) -> list[Row]:
    """Rows whose ``name shape`` contains a match of ``pattern``; all of them without one."""
    return [row for row in rows if pattern is None or re.search(pattern, row.label)]


def forward_of(row: Row, rows: Iterable[Row]) -> Row | None:
    """The ``_fwd`` row that belongs to a ``_bwd`` row: same op, same shape."""
    if not row.name.endswith("_bwd"):
        return None
    name = row.name.removesuffix("_bwd") + "_fwd"
    return next((other for other in rows if (other.name, other.shape) == (name, row.shape)), None)


def _reference(row: Row, inputs: dict[str, Any]) -> Any:
    """The row's fp64 results; the inputs are unchanged."""
    return row.exact(**_clone(inputs)) if row.exact else row.torch(**_double(inputs))


def _poisoned(row: Row, inputs: dict[str, Any]) -> Any:
    """Result of ours in memory that held 0xFF bytes (NaN in every float type) before the call."""
    given = _storages(inputs)
    for out in tensors(row.ours(**inputs)):
        storage = out.untyped_storage()
        if storage.data_ptr() in given:
            continue
        if storage.nbytes() == out.nbytes:
            storage.fill_(255)
        elif out.is_contiguous():  # the storage holds more than this result, so it must not be overwritten
            out.reshape(-1).view(torch.uint8).fill_(255)
    # The allocator hands the freed blocks out again.
    return row.ours(**inputs)


def _result(call: Call, in_place: bool) -> Any:
    """Result of a call to compare: of the second one where inputs are updated in place, as with ours."""
    if in_place:
        call()
    return call()


def _release() -> None:
    """Hand freed device memory back: rows differ in the sizes they allocate, and the largest need it whole."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _say(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


class Bench:
    """One run on one device.

    Args:
        timer: Takes the samples.
        device: torch device of the inputs.
        wanted: Peer families to measure; None for all.
        log: Receives one line per measurement.
        bar: Counts rows.
    """

    def __init__(
        self,
        timer: Timer,
        device: str,
        wanted: list[str] | None = None,
        log: Callable[[str], None] = print,
        bar: Bar | None = None,
    ) -> None:
        self.timer, self.device, self.wanted, self.log = timer, device, wanted, log
        self.bar = bar

    def counted(self, rows: list[Row]) -> Iterator[Row]:
        """Yield the rows, each of which the bar counts when it is done."""
        if self.bar is None:
            yield from rows
            return
        with self.bar:
            self.bar.total = len(rows)
            yield from self.bar.over(rows)

    def peak_gbps(self, nbytes: int = PEAK_BYTES) -> float:
        """Bandwidth of a large copy, bytes read plus bytes written, in GB/s."""
        timing = self.timer.measure(copy_calls(nbytes, self.device, copies=1), 30)
        return nbytes / timing.us / 1e3

    def _copy(self, nbytes: int) -> float:
        copies = COPIES if nbytes <= ROTATED_BYTES else 1
        return self.timer.measure(copy_calls(nbytes, self.device, copies)).us

    def _check_alive(self) -> None:
        try:
            self.timer.device.sync()
        except Exception as error:
            raise DeviceLost(_say(error)) from error

    def _error(self, out: Callable[[], Any], reference: Any) -> float | dict[str, str]:
        try:
            return relative_error(out(), reference)
        except Exception as error:
            self._check_alive()
            return {"error": _say(error)}

    def _ours(self, row: Row, inputs: dict[str, Any], reference: Any) -> tuple[float | dict[str, str], bool]:
        """Error of ours, and whether it updates one of its inputs in place."""
        found = []
        error = self._error(lambda: found.append(_poisoned(row, inputs)) or found[0], reference)
        return error, bool(found and _storages(tensors(found[0])[:1]) & _storages(inputs))

    def row(self, row: Row, forward: Row | None, peak_gbps: float) -> dict[str, Any]:
        """Measure one row: copy, ours, the peers, ours again, copy again.

        The two passes of ours are pooled; of the two copies the faster counts, which is the stricter for us.
        """
        copy_count = COPIES if row.bytes <= ROTATED_BYTES else 1
        # Kept unused: peers get the same inputs, whatever ours does to its own.
        input_sets = [row.make(self.device, self._generator(i)) for i in range(copy_count)]
        reference = _reference(row, input_sets[0])
        mine = [_clone(inputs) for inputs in input_sets]
        error_ours, in_place = self._ours(row, mine[0], reference)
        error_torch = self._error(
            lambda: _result(functools.partial(row.torch, **_clone(input_sets[0])), in_place), reference
        )
        first = tensors(reference)[:1]
        del reference

        calls: list[Call] = [lambda inputs=inputs: row.ours(**inputs) for inputs in mine]
        copies = [self._copy(row.bytes)]
        passes = [self.timer.measure(calls)]
        times, errors, waiting = self._peers(row, forward, input_sets, first, in_place)
        passes.append(self.timer.measure(calls))
        copies.append(self._copy(row.bytes))

        ours = passes[0] + passes[1]
        x = input_sets[0].get("x", next(iter(tensors(input_sets[0])), None))
        return {
            "row": row.name,
            "shape": row.shape,
            "dtype": str(x.dtype).removeprefix("torch.") if x is not None else "none",
            "us": ours.us,
            "p20": ours.p20,
            "p80": ours.p80,
            "passes_us": [timing.us for timing in passes],
            "bytes": row.bytes,
            "copy_us": min(copies),
            "copies_us": copies,
            "floor_us": row.bytes / peak_gbps / 1e3,
            "efficiency": min(copies) / ours.us,
            "error_ours": error_ours,
            "error_torch": error_torch,
            "peers": times,
            "peer_errors": errors,
            "peers_waiting": waiting,
            **({"flops": row.flops, "tflops": row.flops / ours.us / 1e6} if row.flops else {}),
        }

    def warm(self, row: Row, forward: Row | None) -> None:
        """Call ours and every peer once, which compiles them; errors are told by the measurement."""
        inputs = row.make(self.device, self._generator(0))
        calls = {"ours": lambda **given: lambda: row.ours(**given)}
        calls |= {**peers.torch_peers(row, forward), **peers.adapters_of(row)}
        for name, make_call in calls.items():
            if name != "ours" and not peers.selected(name, self.wanted):
                continue
            try:
                with self._peer(make_call, [inputs], [], False):
                    self._check_alive()
            except DeviceLost:
                raise
            except Exception:
                self._check_alive()

    def _generator(self, i: int) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(1234 + i)

    def _peers(
        self,
        row: Row,
        forward: Row | None,
        input_sets: list[dict[str, Any]],
        first: list[torch.Tensor],
        in_place: bool,
    ) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        prepare = {**peers.torch_peers(row, forward), **peers.adapters_of(row)}
        times: dict[str, Any] = {}
        errors: dict[str, Any] = {}
        waiting: list[str] = []
        for name, make_call in prepare.items():
            if not peers.selected(name, self.wanted):
                continue
            try:
                with self._peer(make_call, input_sets, first, in_place) as (calls, error):
                    errors[name] = error
                    try:
                        times[name] = self.timer.measure(calls).us
                    except TimingError:
                        times[name] = self.timer.measure_waiting(calls).us
                        waiting.append(name)
            except (ImportError, peers.Absent) as error:
                times[name] = {"absent": _say(error)}
            except Exception as error:
                self._check_alive()
                times[name] = {"error": _say(error)}
            self.log(f"  {name}: {times[name]}")
        for family in peers.FAMILIES:
            if peers.selected(family, self.wanted) and not any(peers.selected(n, [family]) for n in prepare):
                times[family] = {"absent": f"{peers.NO_ADAPTER} {row.name}"}
        return times, errors, waiting

    @contextlib.contextmanager
    def _peer(
        self,
        make_call: peers.Prepare,
        input_sets: list[dict[str, Any]],
        first: list[torch.Tensor],
        in_place: bool,
    ) -> Iterator[tuple[list[Call], float | dict[str, str]]]:
        """A peer's calls, one per copy of the inputs, and the error of its first output."""
        import torch._dynamo
        import torch._functorch.config

        # Recompile limits count per function over all rows; a fresh start keeps them out of reach.
        torch._dynamo.reset()
        # A compiled graph that frees its buffers in the backward could run it only once.
        with torch._functorch.config.patch(donated_buffer=False):
            calls = [make_call(**_clone(inputs)) for inputs in input_sets]
            compare = getattr(calls[0], "compare", lambda out: out)
            # Before any timing: some peers overwrite their inputs.
            yield calls, self._error(lambda: tensors(compare(_result(calls[0], in_place)))[:1], first)

    def check(self, row: Row, forward: Row | None) -> Iterator[tuple[str, str, str]]:
        """Call ours and every peer once, untimed; yield (name, ok | absent | error, what to say)."""
        inputs = row.make(self.device, self._generator(0))
        reference = _reference(row, inputs)
        error, in_place = self._ours(row, _clone(inputs), reference)
        yield "ours", *_verdict(error)
        prepare = {**peers.torch_peers(row, forward), **peers.adapters_of(row)}
        first = tensors(reference)[:1]
        for name, make_call in prepare.items():
            if not peers.selected(name, self.wanted):
                continue
            try:
                with self._peer(make_call, [inputs], first, in_place) as (_, error):
                    yield name, *_verdict(error)
            except (ImportError, peers.Absent) as missing:
                yield name, "absent", _say(missing)
            except Exception as raised:
                self._check_alive()
                yield name, "error", _say(raised)


def _verdict(error: float | dict[str, str]) -> tuple[str, str]:
    if isinstance(error, dict):
        return "error", error["error"]
    return "ok", f"{error:.1e}" + (" (differs)" if error > DIFFERS else "")


def check(rows: list[Row], bench: Bench, pool: list[Row]) -> bool:
    """Call ours and every peer of ``rows`` once, log one line each, and return whether all of ours worked."""
    good = True
    for row in bench.counted(rows):
        try:
            for name, verdict, text in bench.check(row, forward_of(row, pool)):
                bench.log(f"{verdict:6} {row.label}: {name}: {text}")
                good &= name != "ours" or verdict == "ok"
        except DeviceLost as error:
            bench.log(f"error  {row.label}: device lost: {error}")
            return False
        except Exception as error:
            bench.log(f"error  {row.label}: ours: {_say(error)}")
            good = False
        _release()
    return good


def _host(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return measure()
    except Exception as error:
        return {"failed": _say(error)}


def run(
    rows: list[Row],
    bench: Bench,
    *,
    pool: list[Row],
    path: Path | None = None,
    host: Callable[[], dict[str, Any]] | None = None,
    peak_bytes: int = PEAK_BYTES,
    earlier: dict[str, Any] | None = None,
    ends: float = math.inf,
) -> dict[str, Any]:
    """Measure ``rows`` and return the result, saved to ``path`` after every row.

    Args:
        rows: What to measure.
        bench: How.
        pool: Every known row; forward partners of backward rows are looked up in it.
        path: Result file; None keeps the result in memory.
        host: Measures the host rows, or None to leave them out.
        peak_bytes: Size of the copy that gives the peak bandwidth.
        earlier: Result of an interrupted run, whose rows are kept, except for those that failed without breaking the
            device.
        ends: No row begins after this time of ``time.monotonic()``.
    """
    result: dict[str, Any] = {
        "schema": meta.SCHEMA,
        "environment": meta.environment(),
        "copy_peak_gbps": bench.peak_gbps(peak_bytes) if rows else None,
        "peak_tflops": peak.try_measure(bench.timer) if any(row.flops for row in rows) else {},
        "rows": [row for row in (earlier or {}).get("rows", ()) if "device lost" in row.get("failed", "device lost")],
        "host": (earlier or {}).get("host"),
        "complete": False,
    }
    kept = {(row["row"], row["shape"]) for row in result["rows"]}
    try:
        for row in bench.counted([row for row in rows if (row.name, row.shape) not in kept]):
            if time.monotonic() > ends:
                if path:
                    meta.save(result, path)
                return result
            bench.log(row.label)
            try:
                done = bench.row(row, forward_of(row, pool), result["copy_peak_gbps"])
            except DeviceLost:
                raise
            except Exception as error:
                bench._check_alive()
                done = {"row": row.name, "shape": row.shape, "failed": _say(error)}
            if (of_peak := peak.share(done, result["peak_tflops"])) is not None:
                done["of_peak"] = of_peak
            bench.log(f"  ours: {done.get('us') or done['failed']}")
            result["rows"].append(done)
            _release()
            if path:
                meta.save(result, path)
        if host and result["host"] is None:
            result["host"] = _host(host)
        result["complete"] = True
    except DeviceLost as error:
        result["rows"].append({"row": row.name, "shape": row.shape, "failed": f"device lost: {error}"})
    if path:
        meta.save(result, path)
    return result
