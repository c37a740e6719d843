"""Timing of draws, and the result file that a sweep keeps while it runs and continues from."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench import meta, peers
from bench.measure import peak
from bench.measure.run import DIFFERS, DeviceLost, _say, tensors
from bench.measure.timing import Call, Timer, TimingError
from bench.sweep import families, statistics
from rtkernels.runtime.progress import Bar

SCHEMA = 1
SAMPLES, MIN_SAMPLES = 30, 8
BUDGET_US = 40_000.0  # of a measurement: long calls get fewer samples
SAVE_SECONDS = 5.0
FATAL = "did not return, or broke the device, in an earlier process"
MAX_FATAL = 2  # of a peer, after which its family is measured without it
DEFAULT_PEERS = ["torch", "liger", "quack", "linghe", "fa4", "deepgemm"]
# Peers that measure many candidates at their first call of a shape.
TUNED = frozenset({"quack_tuned"})
_BYTES_PER_US, _FLOPS_PER_US = 3.5e6, 5e8


def samples_of(draw: families.Draw) -> int:
    """Return how many samples are taken of a call, by an estimate of its time."""
    row = draw.row
    us = max(5.0, row.bytes / _BYTES_PER_US, row.flops / _FLOPS_PER_US)
    return int(max(MIN_SAMPLES, min(SAMPLES, BUDGET_US / us)))


def plan(names: list[str], draws: int) -> Iterator[tuple[str, int]]:
    """Yield (family, index) with the families in turn, so that a run that is cut off covers all of them."""
    for index in range(draws):
        for family in names:
            yield family, index


class Budget:
    """Limits of the peers that compile at their first call: the first draws of a family, and seconds of first calls."""

    def __init__(self, draws: int, seconds: float) -> None:
        self.draws, self.seconds = draws, seconds
        self.spent: dict[tuple[str, str], float] = {}

    def check(self, family: str, index: int, peer: str) -> None:
        """Raise Absent if a peer is not to be measured."""
        if peer.split("_")[0] == "torch":
            return
        if index >= self.draws:
            raise peers.Absent(f"peers that compile are measured in the first {self.draws} draws")
        if self.spent.get((family, peer), 0.0) > self.seconds:
            raise peers.Absent(f"its first calls took more than {self.seconds:g} s in this family")

    def spend(self, family: str, peer: str, seconds: float) -> None:
        key = (family, peer)
        self.spent[key] = self.spent.get(key, 0.0) + seconds


def _difference(got: Any, wanted: Any) -> float | None:
    """Return ``||a - b|| / ||b||`` of the first tensors in fp32; None where they are not comparable."""
    a, b = tensors(got)[:1], tensors(wanted)[:1]
    if not a or not b or a[0].shape != b[0].shape or not b[0].numel():
        return None
    a, b = a[0].float(), b[0].float()
    error = (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp_min(1e-30)).item()
    return error if error == error and error != float("inf") else 1e9  # JSON has neither


def _release(limit: int) -> None:
    """Hand cached memory back if it is more than a limit."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > limit:
        torch.cuda.empty_cache()


class Sweep:
    """One process that measures draws.

    Args:
        timer: Takes the samples.
        device: torch device of the inputs.
        seed: Of the draws.
        wanted: Peers, or families of peers.
        budget: Limits of peers that compile.
        mark: Told the draw and what is about to be called, so that a call that never returns can be named.
    """

    def __init__(
        self, timer: Timer, device: str, seed: int, wanted: list[str], budget: Budget,
        mark: Callable[[str, int, str], None] = lambda family, index, name: None,
    ) -> None:  # fmt: skip
        self.timer, self.device, self.seed, self.wanted, self.budget, self.mark = (
            timer, device, seed, wanted, budget, mark,
        )  # fmt: skip
        self._peak: dict[str, Any] | None = None

    def alive(self) -> None:
        """Raise DeviceLost if the device no longer answers."""
        try:
            self.timer.device.sync()
        except Exception as error:
            raise DeviceLost(_say(error)) from error

    def measure(self, family: str, index: int, fatal: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return a measured draw; `fatal` names what ended a process that measured this draw before."""
        record: dict[str, Any] = {"family": family, "index": index}
        try:
            drawn = families.draw(family, self.seed, index)
            record |= {"row": drawn.row.name, "shape": drawn.row.shape}
            if "ours" in fatal:
                return {**record, "failed": FATAL}
            return record | self._measured(drawn, family, index, fatal)
        except DeviceLost:
            raise
        except Exception as error:
            self.alive()
            return {**record, "failed": _say(error)}

    def _generator(self, index: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed * 100_003 + index)

    def _measured(self, drawn: families.Draw, family: str, index: int, fatal: frozenset[str]) -> dict[str, Any]:
        self.mark(family, index, "ours")
        inputs = drawn.row.make(self.device, self._generator(index))
        samples = samples_of(drawn)

        def ours() -> Any:
            return drawn.row.ours(**inputs)

        with drawn.ours():
            result = ours()
            passes = [self.timer.measure([ours], samples)]
        times: dict[str, Any] = {}
        waiting: list[str] = []
        error: float | None = None
        for name, prepare in self._peers(drawn).items():
            self.mark(family, index, name)
            try:
                if name in fatal:
                    raise RuntimeError(FATAL)
                self.budget.check(family, index, name)
                start = time.perf_counter()
                call = prepare(**inputs)
                other = call()
                self.timer.device.sync()
                self.budget.spend(family, name, time.perf_counter() - start)
                compare = getattr(call, "compare", lambda out: out)
                if error is None or error > DIFFERS:  # one peer that agrees is enough
                    found = _difference(result, compare(other))
                    error = found if error is None else min(error, found if found is not None else error)
                del other
                times[name] = self._time(call, samples, name, waiting)
                del call
            except (ImportError, peers.Absent) as reason:
                times[name] = {"absent": _say(reason)}
            except Exception as reason:
                self.alive()
                times[name] = {"error": _say(reason)}
        self.mark(family, index, "ours")
        with drawn.ours():
            passes.append(self.timer.measure([ours], samples))
        both = passes[0] + passes[1]
        found = {"us": both.us, "passes_us": [one.us for one in passes], "peers": times, "error": error}
        return found | self._of_peak(drawn, inputs, both.us) | ({"waiting": waiting} if waiting else {})

    def _of_peak(self, drawn: families.Draw, inputs: dict[str, Any], us: float) -> dict[str, Any]:
        """Return the rate of a product over the peak of the tensor cores, which is measured before the first one."""
        if not drawn.row.flops:
            return {}
        if self._peak is None:
            self._peak = peak.try_measure(self.timer)
        x = inputs.get("x", next(iter(tensors(inputs)), None))
        found = {"dtype": str(x.dtype).removeprefix("torch."), "tflops": drawn.row.flops / us / 1e6}
        share = peak.share(found, self._peak)
        return found | ({} if share is None else {"of_peak": share})

    def _time(self, call: Call, samples: int, name: str, waiting: list[str]) -> float:
        try:
            return self.timer.measure([call], samples).us
        except TimingError:
            waiting.append(name)
            return self.timer.measure_waiting([call], MIN_SAMPLES).us

    def _peers(self, drawn: families.Draw) -> dict[str, peers.Prepare]:
        found = {**peers.torch_peers(drawn.row, drawn.forward), **peers.adapters_of(drawn.row)}
        if "torch_fused" in found:  # faster than the same in several kernels
            found.pop("torch", None)
        return {
            name: prepare for name, prepare in found.items()
            if peers.selected(name, self.wanted) and name not in drawn.leave_out and name not in TUNED
        }  # fmt: skip

    def try_warm(self, family: str, index: int) -> None:
        """Call ours and every peer of a draw once, which compiles them for the processes that come after.

        Errors are those of the measurement, which tells them.
        """
        try:
            self._warm(family, index)
        except DeviceLost:
            raise
        except Exception:
            self.alive()
        _release(4 << 30)  # other processes need it, too

    def _warm(self, family: str, index: int) -> None:
        drawn = families.draw(family, self.seed, index)
        inputs = drawn.row.make(self.device, self._generator(index))
        prepare = self._peers(drawn) if index < self.budget.draws else {}
        for name, make in {"ours": lambda **given: lambda: drawn.row.ours(**given), **prepare}.items():
            try:
                self.budget.check(family, index, name if name != "ours" else "torch")
                with drawn.ours() if name == "ours" else contextlib.nullcontext():
                    make(**inputs)()
            except Exception:
                self.alive()
        self.timer.device.sync()


# ---- the result file -------------------------------------------------------------------------------------------------


class File:
    """The result of a sweep on disk: continued if it exists and has the same seed.

    Args:
        path: Where it is.
        seed: Of the draws.
        after_loss: The last process hung or lost the device in the call that its marker names.

    Raises:
        ResultError: The file holds something else, or draws of another seed.
    """

    def __init__(self, path: Path, seed: int, after_loss: bool = False) -> None:
        self.path, self.marker = path, path.with_suffix(path.suffix + ".running")
        self._saved = 0.0
        self.result: dict[str, Any] = {
            "schema": SCHEMA, "kind": "sweep", "seed": seed, "environment": meta.environment(), "draws": [],
            "fatal": [], "complete": False,
        }  # fmt: skip
        if path.exists():
            self.result = self._earlier(seed)
        self.done = {(draw["family"], draw["index"]) for draw in self.result["draws"]}
        self._take_marker(after_loss)

    def _earlier(self, seed: int) -> dict[str, Any]:
        earlier = load(self.path)
        if earlier["seed"] != seed:
            raise meta.ResultError(f"{self.path}: seed {earlier['seed']}; expected {seed}, or another --out.")
        meta.check_source(earlier["environment"], self.path)
        return earlier

    def _take_marker(self, after_loss: bool) -> None:
        """Remove the marker; keep what it names if that broke the last process, which was not just cut off."""
        try:
            entry = json.loads(self.marker.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        self.marker.unlink(missing_ok=True)
        if after_loss and tuple(entry[:2]) not in self.done:
            self.result["fatal"].append(entry)
            self.save()

    def fatal(self, family: str, index: int) -> frozenset[str]:
        """Return what ended processes that measured this draw, and peers that ended several of this family."""
        here = frozenset(name for *draw, name in self.result["fatal"] if draw == [family, index])
        often = Counter(name for of, _, name in self.result["fatal"] if of == family and name != "ours")
        return here | {name for name, count in often.items() if count >= MAX_FATAL}

    def mark(self, family: str, index: int, name: str) -> None:
        """Write down what is about to be called."""
        self.marker.write_text(json.dumps([family, index, name]), encoding="utf-8")

    def add(self, draw: dict[str, Any]) -> None:
        """Append a draw; the file is written every few seconds."""
        self.result["draws"].append(draw)
        self.done.add((draw["family"], draw["index"]))
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def save(self, complete: bool = False) -> None:
        """Write the file, with the statistics of what it holds."""
        self.result["complete"] = complete
        self.result["families"] = statistics.summary(self.result["draws"])
        self.result["absent_peers"] = statistics.absent_peers(self.result["draws"])
        meta.save(self.result, self.path)
        self._saved = time.monotonic()

    def finish(self) -> None:
        """Remove the marker: nothing is being called any more."""
        self.marker.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Read a result file of a sweep.

    Raises:
        ResultError: It is none.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise meta.ResultError(f"{path}: cannot be read ({error}).") from error
    if not isinstance(result, dict) or (result.get("kind"), result.get("schema")) != ("sweep", SCHEMA):
        raise meta.ResultError(f"{path}: not the result of a sweep of schema {SCHEMA}.")
    return result


def run(sweep: Sweep, file: File, names: list[str], draws: int, ends: float, log: Callable[[str], None]) -> bool:
    """Measure what the file does not have yet and return whether it is complete.

    Args:
        sweep: Measures draws.
        file: Keeps them.
        names: Families.
        draws: Per family.
        ends: No draw begins after this time of ``time.monotonic()``.
        log: Receives one line per draw.

    Raises:
        DeviceLost: The marker names the call, and another process can continue.
    """
    todo = [drawn for drawn in plan(names, draws) if drawn not in file.done]
    with Bar(len(todo), "draws") as bar:
        for family, index in bar.over(todo):
            if time.monotonic() > ends:
                file.save()
                file.finish()
                return False
            try:
                done = sweep.measure(family, index, file.fatal(family, index))
            except DeviceLost:
                file.save()
                raise
            file.add(done)
            value, us = statistics.ratio(done), done.get("us")
            said = done.get("failed") or (f"{us:.1f} µs, {value:.2f}" if value else f"{us:.1f} µs, no peer")
            bar.around(log)(f"{family} {index} {done.get('row')} {done.get('shape')}: {said}")
            _release(48 << 30)
    file.save(complete=True)
    file.finish()
    return True
