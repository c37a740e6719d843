"""Measuring rows: ours, the copy of the same bytes, the error against fp64, and the peers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from bench import meta, peers
from bench.timing import Call, Timer, Timing, copy_calls
from rtkernels.testing import Row

COPIES = 3
PEAK_BYTES = 4 << 30


class DeviceLost(RuntimeError):
    """The device no longer answers (a kernel faulted); nothing more can be measured in this process."""


def all_rows() -> list[Row]:
    """The rows of every registered op."""
    from rtkernels import _registry

    return [row for op in _registry.ops() for row in op.rows()]


def select(rows: Iterable[Row], pattern: str | None) -> list[Row]:
    """Rows whose ``name shape`` contains a match of ``pattern``; all of them without one."""
    return [row for row in rows if pattern is None or re.search(pattern, row.label)]


def forward_of(row: Row, rows: Iterable[Row]) -> Row | None:
    """The ``_fwd`` row that belongs to a ``_bwd`` row: same op, same shape."""
    if not row.name.endswith("_bwd"):
        return None
    name = row.name.removesuffix("_bwd") + "_fwd"
    return next((other for other in rows if (other.name, other.shape) == (name, row.shape)), None)


def tensors(out: Any) -> list[torch.Tensor]:
    """The tensors of an op's result, in order."""
    if isinstance(out, torch.Tensor):
        return [out]
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        out = [getattr(out, field.name) for field in dataclasses.fields(out)]
    if isinstance(out, dict):
        out = list(out.values())
    return [t for item in out for t in tensors(item)] if isinstance(out, (list, tuple)) else []


def relative_error(out: Any, reference: Any) -> float:
    """Largest ``||out - ref|| / ||ref||`` over the reference's tensors, in fp64.

    Raises:
        ValueError: Too few outputs, another shape, or a result that is not finite.
    """
    got, want = tensors(out), tensors(reference)
    if not want or len(got) < len(want):
        raise ValueError(f"{len(got)} output tensors, the reference has {len(want)}")
    worst = 0.0
    for a, b in zip(got, want, strict=False):
        if a.shape != b.shape:
            raise ValueError(f"shape {tuple(a.shape)}, the reference has {tuple(b.shape)}")
        a, b = a.to(torch.float64), b.to(torch.float64)
        error = (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp_min(1e-300)).item()
        if not math.isfinite(error):
            raise ValueError("not finite")
        worst = max(worst, error)
    return worst


def _clone(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def _double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v.to(torch.float64) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }


def _poisoned(row: Row, inputs: dict[str, Any]) -> Any:
    """Result of ours in memory that held 0xFF bytes (NaN in every float type) before the call."""
    given = {v.untyped_storage().data_ptr() for v in inputs.values() if isinstance(v, torch.Tensor)}
    for out in tensors(row.ours(**inputs)):
        if out.untyped_storage().data_ptr() not in given:
            out.untyped_storage().fill_(255)
    # The allocator hands the freed blocks out again.
    return row.ours(**inputs)


def _say(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


class Bench:
    """One run on one device.

    Args:
        timer: Takes the samples.
        device: torch device the inputs are made on.
        wanted: Peer families to measure; None for all.
        log: Receives one line per measurement.
    """

    def __init__(
        self, timer: Timer, device: str, wanted: list[str] | None = None, log: Callable[[str], None] = print
    ) -> None:
        self.timer, self.device, self.wanted, self.log = timer, device, wanted, log

    def peak_gbps(self, nbytes: int = PEAK_BYTES) -> float:
        """Bandwidth of a large copy, bytes read plus bytes written, in GB/s."""
        timing = self.timer.measure(copy_calls(nbytes, self.device, copies=1), 30)
        return nbytes / timing.us / 1e3

    def _copy(self, nbytes: int) -> float:
        return self.timer.measure(copy_calls(nbytes, self.device)).us

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

    def row(self, row: Row, forward: Row | None, peak_gbps: float) -> dict[str, Any]:
        """Measure one row: copy, ours, the peers, ours again, copy again.

        The two passes of ours are pooled; of the two copies the faster counts, which is the stricter for us.
        """
        made = [row.make(self.device, self._generator(i)) for i in range(COPIES)]
        reference = row.exact(**made[0]) if row.exact else row.torch(**_double(made[0]))
        error_ours = self._error(lambda: _poisoned(row, made[0]), reference)
        error_torch = self._error(lambda: row.torch(**made[0]), reference)

        calls: list[Call] = [lambda inputs=inputs: row.ours(**inputs) for inputs in made]
        copies = [self._copy(row.bytes)]
        passes = [self.timer.measure(calls)]
        first = tensors(reference)[:1]
        times, errors = self._peers(row, forward, made, first)
        passes.append(self.timer.measure(calls))
        copies.append(self._copy(row.bytes))

        ours = passes[0] + passes[1]
        x = made[0].get("x", next((v for v in made[0].values() if isinstance(v, torch.Tensor)), None))
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
        }

    def _generator(self, i: int) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(1234 + i)

    def _peers(
        self, row: Row, forward: Row | None, made: list[dict[str, Any]], first: list[torch.Tensor]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        adapters = peers.ADAPTERS.get(row.name, {})
        prepare = {**peers.torch_peers(row, forward), **adapters}
        times: dict[str, Any] = {}
        errors: dict[str, Any] = {}
        for name, make_call in prepare.items():
            if not peers.selected(name, self.wanted):
                continue
            try:
                timing, errors[name] = self._peer(make_call, made, first)
                times[name] = timing.us
            except (ImportError, peers.Absent) as error:
                times[name] = {"absent": _say(error)}
            except Exception as error:
                self._check_alive()
                times[name] = {"error": _say(error)}
            self.log(f"  {name}: {times[name]}")
        for family in peers.FAMILIES:
            if peers.selected(family, self.wanted) and not any(peers.selected(n, [family]) for n in prepare):
                times[family] = {"absent": f"no adapter for {row.name}"}
        return times, errors

    def _peer(
        self, make_call: peers.Prepare, made: list[dict[str, Any]], first: list[torch.Tensor]
    ) -> tuple[Timing, float | dict[str, str]]:
        import torch._dynamo
        import torch._functorch.config

        # Recompile limits count per function over all rows; a fresh start keeps them out of reach.
        torch._dynamo.reset()
        # A compiled graph that frees its buffers in the backward could run it only once.
        with torch._functorch.config.patch(donated_buffer=False):
            calls = [make_call(**_clone(inputs)) for inputs in made]
            # Before any timing: some peers overwrite their inputs.
            error = self._error(lambda: tensors(calls[0]())[:1], first)
            return self.timer.measure(calls), error


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
) -> dict[str, Any]:
    """Measure ``rows`` and return the result, saved to ``path`` after every row.

    Args:
        rows: What to measure.
        bench: How.
        pool: Every known row; forward partners of backward rows are looked up in it.
        path: Result file; None keeps the result in memory.
        host: Measures the host rows, or None to leave them out.
        peak_bytes: Size of the copy that gives the peak bandwidth.
    """
    result: dict[str, Any] = {
        "schema": meta.SCHEMA,
        "environment": meta.environment(),
        "copy_peak_gbps": bench.peak_gbps(peak_bytes) if rows else None,
        "rows": [],
        "host": None,
        "complete": False,
    }
    try:
        for row in rows:
            bench.log(row.label)
            try:
                done = bench.row(row, forward_of(row, pool), result["copy_peak_gbps"])
            except DeviceLost:
                raise
            except Exception as error:
                bench._check_alive()
                done = {"row": row.name, "shape": row.shape, "failed": _say(error)}
            result["rows"].append(done)
            if path:
                meta.save(result, path)
        if host:
            result["host"] = _host(host)
        result["complete"] = True
    except DeviceLost as error:
        result["rows"].append({"row": row.name, "shape": row.shape, "failed": f"device lost: {error}"})
    if path:
        meta.save(result, path)
    return result
