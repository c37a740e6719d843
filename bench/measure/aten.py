"""``python -m bench aten``: torch's operators on our kernels, beside torch eager, FlagGems and inductor, on FlagGems'
core shapes.

Three times per case, as FlagGems takes them: *kernel* (events around the call, L2 flushed, median), *operator* (wall
clock over 100 calls with one synchronisation at the end) and *submit* (the same without it: the host's share).
Speed-ups are torch's time over the other's; summaries are geometric means over shapes (FlagGems' own charts show
arithmetic ones). Losses are shown.

A case follows from a row of the table: tensors of the core shape for the schema's tensors, ``VALUES`` for its other
arguments, or ``CASES`` where the operator wants something special.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import rtkernels
from bench.measure import aten_file, aten_flaggems
from bench.measure.aten_bounds import bounds
from bench.measure.aten_cases import FAMILY_CASES
from bench.measure.timing import Timer, TimingError
from rtkernels.aten import table

SHAPES = {
    "ew": [(1 << 30,), (64, 64), (4096, 4096), (64, 512, 512), (1024, 1024, 1024)],
    "red": [(1 << 20,), (64, 64), (4096, 4096), (64, 512, 512), (1024, 1024, 1024)],
    "generic": [(64, 64), (256, 256), (1024, 1024), (4096, 4096), (1024, 65536)],
    "norm": [(4, 16, 64, 4), (16, 16, 8, 48), (16, 16, 8, 88), (16, 16, 128), (20, 6, 65536)],
    "concat": [(64, 64), (256, 256), (512, 512), (512, 1024), (512, 2048)],
}
SHAPES_OF = {"ew": "ew", "copy": "generic", "red": "red", "row": "norm"}
DTYPES = (torch.float16, torch.float32, torch.bfloat16)
_INTEGER = re.compile(r"bitwise|shift")
WAYS = ("torch", "rtkernels", "flaggems", "inductor")

# Arguments that are no tensors, by their names in schemas; a case whose schema needs another one is in CASES.
VALUES: dict[str, Any] = {
    "alpha": 1, "approximate": "none", "beta": 1, "dim": 1, "exponent": 3, "input_scale": 1, "is_result": False,
    "max": 0.5, "memory_format": torch.contiguous_format, "min": -0.5, "other": 0.5, "repeats": (2, 2),
    "rounding_mode": "floor", "scale": 1, "self": 2, "threshold": 0.1, "value": 0.5, "weight": 0.3, "diagonal": 0,
}  # fmt: skip

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _dense(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.randint(0, 2 if dtype == torch.bool else 30, shape, device=device).to(dtype)


def _mask(shape: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.rand(shape, device=device) > 0.5


CASES: dict[str, Callable[[tuple[int, ...], torch.dtype, str], Arguments]] = {
    "where.self": lambda s, t, d: ((_mask(s, d), _dense(s, t, d), _dense(s, t, d)), {}),
    "masked_fill.Scalar": lambda s, t, d: ((_dense(s, t, d), _mask(s, d), 0.5), {}),
    "masked_fill.Tensor": lambda s, t, d: ((_dense(s, t, d), _mask(s, d), torch.tensor(0.5, dtype=t, device=d)), {}),
    "fill.Tensor": lambda s, t, d: ((_dense(s, t, d), torch.tensor(0.5, dtype=t, device=d)), {}),
    "cat": lambda s, t, d: (([_dense(s, t, d) for _ in range(3)],), {}),
    "stack": lambda s, t, d: (([_dense(s, t, d) for _ in range(3)],), {}),
    "flip": lambda s, t, d: ((_dense(s, t, d), [0]), {}),
    "clone": lambda s, t, d: ((_dense(s, t, d).mT,), {"memory_format": torch.contiguous_format}),
    "_to_copy": lambda s, t, d: (
        (_dense(s, t, d),), {"dtype": torch.float32 if t != torch.float32 else torch.bfloat16},
    ),
    "copy_": lambda s, t, d: ((_dense(s, t, d), _dense(s, t, d).mT.contiguous().mT), {}),
    "repeat": lambda s, t, d: ((_dense(s, t, d), (2, 2)), {}),
    "diag_embed": lambda s, t, d: ((_dense(s[-1:], t, d),), {}),
    "constant_pad_nd": lambda s, t, d: ((_dense(s, t, d), (1, 1), 0.5), {}),
    "slice_scatter": lambda s, t, d: ((_dense(s, t, d), _dense((s[0] // 2, *s[1:]), t, d), 0, 0, s[0] // 2), {}),
    "select_scatter": lambda s, t, d: ((_dense(s, t, d), _dense(s[1:], t, d), 0, 1), {}),
    "addr": lambda s, t, d: ((_dense(s, t, d), _dense(s[:1], t, d), _dense(s[1:], t, d)), {}),
    "elu_backward": lambda s, t, d: ((_dense(s, t, d), 1.0, 1, 1, False, _dense(s, t, d)), {}),
    "softplus_backward": lambda s, t, d: ((_dense(s, t, d), _dense(s, t, d), 1, 20), {}),
    "log_sigmoid_backward": lambda s, t, d: (
        (_dense(s, t, d), _dense(s, t, d), _dense(s if d == "cpu" else (0,), t, d)), {},
    ),
    "glu_backward": lambda s, t, d: ((_dense((*s[:-1], s[-1] // 2), t, d), _dense(s, t, d), -1), {}),
    "clamp.Tensor": lambda s, t, d: ((_dense(s, t, d), _dense(s, t, d), _dense(s, t, d)), {}),
    "clamp": lambda s, t, d: ((_dense(s, t, d), -0.5, 0.5), {}),
}  # fmt: skip
CASES |= FAMILY_CASES
_TWO_DIMENSIONS = {"addr", "triu", "tril", "clone", "copy_", "repeat", "constant_pad_nd", "diag_embed"}


def arguments(row: table.Overload, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Arguments | None:
    """Return arguments for one case; None where the table does not say enough for one."""
    if _INTEGER.search(row.name):
        dtype = torch.int32 if dtype == torch.float32 else torch.int16
    if (functional := row.name.replace("_.", ".").removesuffix("_")) in CASES or row.name in CASES:
        return CASES[row.name if row.name in CASES else functional](shape, dtype, device)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in table.schema_of(row.name).arguments:
        kind = str(argument.type)
        if argument.name == "out" or kind.startswith("List"):
            return None
        if argument.has_default_value():
            continue
        if kind == "Tensor":
            value = _dense(shape, dtype, device)
        elif argument.name in VALUES:
            value = VALUES[argument.name]
            if not dtype.is_floating_point and isinstance(value, float):
                value = 3
        else:
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return (tuple(args), kwargs) if any(isinstance(value, torch.Tensor) for value in args) else None


def cases(pattern: str = "", limit: int | None = None) -> Iterator[tuple[table.Overload, tuple[int, ...], torch.dtype]]:
    """Yield every row whose name or family matches, with the core shapes of its family and FlagGems' dtypes.

    Args:
        pattern: Regular expression on "family overload".
        limit: Leave out shapes with more elements.
    """
    for row in table.table().values():
        if not re.search(pattern, f"{row.family} {row.name}"):
            continue
        group = "concat" if row.name in ("cat", "stack") else SHAPES_OF.get(row.family, "generic")
        for shape in SHAPES[group]:
            if limit is not None and math.prod(shape) > limit:
                continue
            if row.name in _TWO_DIMENSIONS and len(shape) != 2:
                continue
            for dtype in DTYPES:
                yield row, shape, dtype


# ---- measuring ------------------------------------------------------------------------------------------------------

# With `quick`: sizes around those where the time of the host ends to count, two dtypes, and, for plain pointwise
# operators and copies, two shapes of bfloat16.
_QUICK_SHAPES = {
    "red": [(64, 64), (1 << 20,), (4096, 4096), (64, 512, 512), (1024, 1024, 1024)],
    "ew": [(64, 64), (1024, 1024), (4096, 4096), (64, 512, 512), (1024, 1024, 1024)],
}
_QUICK_OTHERS = [(64, 64), (4096, 4096)]
_QUICK_ORDER = ("row", "scan", "sort", "idx", "win", "copy", "ew", "rng", "red")
_LARGE = 1 << 28  # elements from which on one dtype will do, and no kernel is timed apart


def quick_cases(pattern: str = "") -> Iterator[tuple[table.Overload, tuple[int, ...], torch.dtype]]:
    """Yield the cases of a run of about a minute: candidates for the default set first, then the others."""
    rows = [row for row in table.table().values() if re.search(pattern, f"{row.family} {row.name}")]
    for row in sorted(rows, key=lambda row: (not is_candidate(row), _QUICK_ORDER.index(row.family))):
        group = "concat" if row.name in ("cat", "stack") else SHAPES_OF.get(row.family, "generic")
        candidate = is_candidate(row)
        shapes = _QUICK_SHAPES.get(group, SHAPES[group]) if candidate else _QUICK_OTHERS
        for shape in shapes:
            if row.name in _TWO_DIMENSIONS and len(shape) != 2:
                continue
            both = candidate and math.prod(shape) < _LARGE
            for dtype in (torch.float32, torch.bfloat16) if both else (torch.bfloat16,):
                yield row, shape, dtype


def is_candidate(row: table.Overload) -> bool:
    """Return True for an overload that may be faster than torch's: all but plain pointwise operators and copies."""
    return row.family not in ("ew", "copy", "rng") or row.name in EXPECTED


# Of the pointwise operators and copies those that torch does by several kernels, or by a slow one.
EXPECTED = {"isinf", "isfinite", "isclose", "cat", "stack", "clone", "glu_backward", "triu", "tril", "native_dropout"}


@contextlib.contextmanager
def _way(name: str, row: table.Overload) -> Iterator[None]:
    if name == "rtkernels":
        limits = dict(table.MIN_ELEMENTS)  # which follow from what is measured here
        table.MIN_ELEMENTS.update(dict.fromkeys(limits, 0))
        try:
            with rtkernels.use(row.name):
                yield
        finally:
            table.MIN_ELEMENTS.update(limits)
    elif name == "flaggems":
        with aten_flaggems.in_use(row.name):
            yield
    else:
        yield


def _wall_us(call: Callable[[], Any], most: int, budget_us: float) -> dict[str, float]:
    """Return µs per call with one synchronisation at the end, and without it; up to `most` calls in the budget."""
    call()
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    call()
    torch.cuda.synchronize()
    count = max(3, min(most, int(budget_us / ((time.perf_counter() - start) / 2 * 1e6))))
    found = []
    for _ in range(1 if count == 3 else 2):  # the better of two: a host has other things to do now and then
        start = time.perf_counter()
        for _ in range(count):
            call()
        submitted = time.perf_counter()
        torch.cuda.synchronize()
        found.append(((time.perf_counter() - start) / count * 1e6, (submitted - start) / count * 1e6))
    return dict(zip(("operator", "submit"), min(found), strict=True))


def _waits(call: Callable[[], Any]) -> bool:
    """Return True for a call in which torch waits for the device: its kernels cannot be timed apart from the host."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" in str(error):
            return True
        raise
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def measure_case(
    row: table.Overload, shape: tuple[int, ...], dtype: torch.dtype, timer: Timer, ways: tuple[str, ...],
    quick: bool = False,
) -> dict:  # fmt: skip
    """Return the three times of every way, in µs; a way that fails has its error instead."""
    given = arguments(row, shape, dtype, "cuda")
    if given is None:
        return {}
    args, kwargs = given
    base, _, overload = row.name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    found: dict[str, Any] = {}
    for way in ways:
        if way == "flaggems" and row.name not in aten_flaggems.overloads():
            continue
        function = torch.compile(op, dynamic=False) if way == "inductor" else op

        def call(function: Any = function) -> Any:
            return function(*args, **kwargs)

        try:
            rtkernels.aten.reset()
            with _way(way, row), torch.no_grad():
                found[way] = _wall_us(call, 80 if quick else 100, 2_000 if quick else 200_000)
                compared = (is_candidate(row) or "flaggems" in ways) and 1 << 20 <= math.prod(shape) < _LARGE
                if not quick or (compared and not _waits(call)):
                    with contextlib.suppress(TimingError):  # it waits for the device: its shape depends on values
                        found[way]["kernel"] = timer.measure([call]).us
            if way == "rtkernels":
                found[way]["why"] = next(
                    (r["why"] for r in rtkernels.report(as_rows=True) if r["overload"] == row.name), {}
                )
        except Exception as error:
            found[way] = {"error": f"{type(error).__name__}: {error}"[:200]}
    return found


def warm(listed: list[tuple[table.Overload, tuple[int, ...], torch.dtype]], threads: int = 16) -> None:
    """Call every case one time, in threads: kernels are compiled there, several at a time. Those of the largest shapes
    are the same.
    """

    def one(case: tuple[table.Overload, tuple[int, ...], torch.dtype]) -> None:
        row, shape, dtype = case
        base, _, overload = row.name.partition(".")
        with contextlib.suppress(Exception), torch.no_grad():  # the measurement says what failed
            given = arguments(row, shape, dtype, "cuda")
            if given is not None:
                getattr(getattr(torch.ops.aten, base), overload or "default")(*given[0], **given[1])

    limits = dict(table.MIN_ELEMENTS)
    table.MIN_ELEMENTS.update(dict.fromkeys(limits, 0))
    try:
        with rtkernels.use("all"), ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, [case for case in listed if math.prod(case[1]) <= 1 << 26]))
    finally:
        table.MIN_ELEMENTS.update(limits)
    torch.cuda.synchronize()


def run(
    pattern: str, out: Path, *, ways: tuple[str, ...], limit: int | None, quick: bool, resume: bool = False,
    seconds: float | None = None, host: dict[str, float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure all cases and return what the file has then. Each finished case is in it at once.

    Args:
        pattern: Regular expression on "family overload".
        out: The file.
        ways: Of ``WAYS``.
        limit: Leave out shapes with more elements.
        quick: The cases of ``quick_cases``, and few calls of each; FlagGems on two sizes of each.
        resume: Keep what the file has, and measure the other cases.
        seconds: Begin no case after this time.
        host: What ``host_times`` and ``enable_times`` gave, if that is known.
    """
    from bench import meta
    from bench.measure.timing import CudaDevice

    begun = time.perf_counter()
    result = aten_file.load(out) if resume else None
    timer = Timer(CudaDevice(), iterations=10, warm_us=500.0) if quick else Timer(CudaDevice(), iterations=50)
    if result is None:
        result = {
            "environment": meta.environment(), "quick": quick, "complete": False,
            "host": host or host_times() | enable_times(), "bounds": bounds(timer) if "rtkernels" in ways else {},
            "cases": [],
        }  # fmt: skip
    aten_file.save(result, out)
    measured = {_name(case["overload"], case["shape"], case["dtype"]): case for case in result["cases"]}
    wanted = []
    for row, shape, dtype in quick_cases(pattern) if quick else cases(pattern, limit):
        is_peers = not quick or aten_flaggems.is_representative(shape, dtype)
        case_ways = tuple(way for way in ways if is_peers or way != "flaggems")
        found = measured.get(_name(row.name, shape, dtype), {})
        if missing := tuple(way for way in case_ways if way not in found.get("ways", ())):
            wanted.append((row, shape, dtype, missing))
    if quick:
        wanted = _compiled(wanted, begun, seconds)
    for row, shape, dtype, case_ways in wanted:
        if seconds is not None and time.perf_counter() - begun > seconds:
            break
        case = measured.get(_name(row.name, shape, dtype))
        if case is None:
            case = {"overload": row.name, "family": row.family, "shape": list(shape), "dtype": _dtype_name(dtype)}
            result["cases"].append(case)
            measured[_name(row.name, shape, dtype)] = case
        started = time.perf_counter()
        case |= measure_case(row, shape, dtype, timer, case_ways, quick)
        case["ways"] = [*case.get("ways", ()), *case_ways]  # asked for; one that FlagGems lacks has no times
        case["seconds"] = case.get("seconds", 0.0) + time.perf_counter() - started
        aten_file.append(case, out)
        if not quick:
            print(aten_file.line(case), flush=True)
        if math.prod(shape) > 1 << 26:
            torch.cuda.empty_cache()
    else:
        result["complete"] = True
    aten_file.save(result, out)
    print(aten_file.summary(result["cases"]))
    if any("kernel" in case.get("torch", {}) for case in result["cases"]):
        print(aten_file.summary(result["cases"], "kernel"))
    if "flaggems" in ways:
        print(aten_file.against_flaggems(result["cases"]))
    return result


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(overload: str, shape: Sequence[int], dtype: torch.dtype | str) -> tuple[str, tuple[int, ...], str]:
    return overload, tuple(shape), dtype if isinstance(dtype, str) else _dtype_name(dtype)


Wanted = tuple[table.Overload, tuple[int, ...], torch.dtype, tuple[str, ...]]


def _compiled(wanted: list[Wanted], begun: float, seconds: float | None) -> list[Wanted]:
    """Compile what the cases need, ours and FlagGems' (for up to a third of the time), and return the cases, those
    with FlagGems first; without it where its kernel was not compiled in time.
    """
    peers = [_name(row.name, shape, dtype) for row, shape, dtype, ways in wanted if "flaggems" in ways]
    worked: set[Any] = set()
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(aten_flaggems.compile_cases, peers, seconds=(seconds or 180.0) / 3) if peers else None
        if any("rtkernels" in ways for *_, ways in wanted):
            warm([case[:3] for case in wanted])
            print(f"kernels compiled after {time.perf_counter() - begun:.0f} s", flush=True)
        if made is not None:
            aten_flaggems.library()
            worked = made.result()
            print(
                f"FlagGems: {len(worked)} of {len(peers)} cases after {time.perf_counter() - begun:.0f} s", flush=True
            )
    kept = []
    for row, shape, dtype, ways in wanted:
        if _name(row.name, shape, dtype) not in worked:
            ways = tuple(way for way in ways if way != "flaggems")
        if ways:
            kept.append((row, shape, dtype, ways))
    return sorted(kept, key=lambda case: "flaggems" not in case[3])


_ENABLE = (
    "import time, torch, rtkernels; torch.cuda.init(); t = time.perf_counter(); "
    "rtkernels.enable({}); print((time.perf_counter() - t) * 1e3)"
)


def host_times() -> dict[str, float]:
    """Return the host's µs of small calls: torch's own, through an override that gives them back, and our kernels'."""
    x = torch.randn(64, 64, device="cuda")
    calls = {
        "sum.dim_IntList": lambda: torch.ops.aten.sum.dim_IntList(x, [1]),
        "_softmax": lambda: torch.ops.aten._softmax.default(x, 1, False),
        "abs": lambda: torch.ops.aten.abs.default(x),
        "add.Tensor": lambda: torch.ops.aten.add.Tensor(x, x),
    }
    found: dict[str, float] = {}
    for name, call in calls.items():
        found[f"torch {name}"] = min(_wall_us(call, 300, 1e6)["submit"] for _ in range(5))
        with rtkernels.use(name):
            found[f"given back {name}"] = min(_wall_us(call, 300, 1e6)["submit"] for _ in range(5))
        with _way("rtkernels", table.table()[name]):
            found[f"rtkernels {name}"] = min(_wall_us(call, 300, 1e6)["submit"] for _ in range(5))
    return found


def enable_times() -> dict[str, float]:
    """Return what ``enable`` takes in a fresh process, in ms."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:  # for byte code, as an installed package has it
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for name, include in (("default", "None"), ("default", "None"), ("all", "'all'")):
            command = [sys.executable, "-c", _ENABLE.format(include)]
            printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False).stdout
            found[f"enable {name} ms"] = float(printed or "nan")
    return found
