"""``python -m bench aten``: torch's operators on our kernels, beside torch eager, FlagGems and inductor, on FlagGems'
shapes. Here are the cases and the times of one of them; ``aten_run`` measures all.

Three times per case, as FlagGems takes them: *kernel* (events around the call, L2 flushed, median), *operator* (wall
clock over 100 calls with one synchronisation at the end) and *submit* (the same without it: the host's share).
Speed-ups are torch's time over the other's; summaries are geometric means over shapes (FlagGems' own charts show
arithmetic ones). Losses are shown.

A case follows from a row of the table: tensors of the core shape for the schema's tensors, ``VALUES`` for its other
arguments, or ``CASES`` where the operator needs something special.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import rtkernels
from bench.measure import aten_flaggems
from bench.measure.aten_cases import FAMILY_CASES
from bench.measure.timing import Device, Timer, TimingError
from rtkernels.aten import measured, table

SHAPES = {
    "ew": [(1 << 30,), (64, 64), (4096, 4096), (64, 512, 512), (1024, 1024, 1024)],
    "red": [(1 << 20,), (64, 64), (4096, 4096), (64, 512, 512), (1024, 1024, 1024)],
    "generic": [(64, 64), (256, 256), (1024, 1024), (4096, 4096), (1024, 65536)],
    "norm": [(4, 16, 64, 4), (16, 16, 8, 48), (16, 16, 8, 88), (16, 16, 128), (20, 6, 65536)],
    "concat": [(64, 64), (256, 256), (512, 512), (512, 1024), (512, 2048)],
}
# What FlagGems' level "comprehensive" measures besides these: also sizes that are no powers of two.
MORE_SHAPES = {
    "ew": [*((1024, 1 << i) for i in range(0, 17, 4)), *((64, 64, 1 << i) for i in range(0, 13, 4))],
    "red": [
        (1025 * 1024,), (1 << 30,), *((1024, 1 << i) for i in range(0, 21, 4)),
        *((64, 1 << i, 64) for i in range(0, 13, 4)),
    ],
    "generic": [(10000, 1 << i) for i in (0, 8, 16)],
    "norm": [(16, 16, 64), (16, 16, 1024), (16, 16, 4098), (1, 8, 4, 4), (16, 8, 128, 128)],
    "concat": [],
}  # fmt: skip
SHAPES_OF = {"ew": "ew", "copy": "generic", "red": "red", "row": "norm"}
DTYPES = (torch.float16, torch.float32, torch.bfloat16)
_INTEGER = re.compile(r"bitwise|shift")
WAYS = ("torch", "rtkernels", "flaggems", "inductor")

# Arguments other than tensors, by their names in schemas; operators that need others are in CASES.
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
_HALVED = {"glu", "glu_backward"}  # the last dimension is halved
_TWO_DIMENSIONS = {"addr", "triu", "tril", "clone", "copy_", "repeat", "constant_pad_nd", "diag_embed"}


def arguments(row: table.Overload, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Arguments | None:
    """Return arguments for one case; None if the table does not determine them."""
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


def cases(
    pattern: str = "", limit: int | None = None, level: str = "core"
) -> Iterator[tuple[table.Overload, tuple[int, ...], torch.dtype]]:
    """Yield every row whose name or family matches, with the shapes of its family and FlagGems' dtypes.

    Args:
        pattern: Regular expression on "family overload".
        limit: Leave out shapes with more elements.
        level: "core", or "comprehensive" for FlagGems' other shapes as well.
    """
    for row in table.table().values():
        if not re.search(pattern, f"{row.family} {row.name}"):
            continue
        group = "concat" if row.name in ("cat", "stack") else SHAPES_OF.get(row.family, "generic")
        for shape in SHAPES[group] + (MORE_SHAPES[group] if level == "comprehensive" else []):
            if limit is not None and math.prod(shape) > limit:
                continue
            if row.name in _TWO_DIMENSIONS and len(shape) != 2:
                continue
            if row.name in _HALVED and shape[-1] % 2:
                continue
            for dtype in DTYPES:
                yield row, shape, dtype


# ---- measuring ------------------------------------------------------------------------------------------------------

# With `quick`: sizes around those where host time stops mattering, two dtypes, and, for plain pointwise operators and
# copies, two shapes of bfloat16.
_QUICK_SHAPES = {
    "red": [(64, 64), (1 << 20,), (4096, 4096), (64, 512, 512), (1024, 1024, 1024)],
    "ew": [(64, 64), (1024, 1024), (4096, 4096), (64, 512, 512), (1024, 1024, 1024)],
}
_QUICK_OTHERS = [(64, 64), (4096, 4096)]
_QUICK_ORDER = ("row", "scan", "sort", "idx", "win", "copy", "ew", "rng", "red")
_LARGEST = 1 << 30
_LARGE = 1 << 28  # from this size on one dtype is enough, and kernels are not timed separately


def quick_cases(
    pattern: str = "", level: str = "core"
) -> Iterator[tuple[table.Overload, tuple[int, ...], torch.dtype]]:
    """Yield the cases of a run of about a minute: candidates for the default set first, then the others.

    Of the level "comprehensive" the default set alone, in bfloat16, at the shapes that "core" does not have.
    """
    if level != "core":
        known = set(cases(pattern))
        for case in cases(pattern, _LARGEST, level):
            if case[0].name in measured.DEFAULT and case[2] == torch.bfloat16 and case not in known:
                yield case
        return
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
    return is_candidate_of(row.family, row.name)


def is_candidate_of(family: str, overload: str) -> bool:
    """The same for names."""
    return family not in ("ew", "copy", "rng") or overload in EXPECTED


# Pointwise operators and copies for which torch launches several kernels, or a slow one.
EXPECTED = {
    "isinf", "isfinite", "isclose", "pow.Scalar", "glu", "glu_backward", "addr", "fill.Tensor", "fill_.Tensor",
    "masked_fill.Scalar", "masked_fill.Tensor", "masked_fill_.Scalar", "masked_fill_.Tensor", "native_dropout",
    "cat", "stack", "clone", "triu", "tril", "repeat", "flip", "_to_copy",
}  # fmt: skip


def timer(device: Device, quick: bool) -> Timer:
    """Return the timer of device time."""
    return Timer(device, iterations=10, warm_us=500.0) if quick else Timer(device, iterations=50)


def operator_of(row: table.Overload) -> Any:
    """Return torch's function of an overload."""
    base, _, overload = row.name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


@contextlib.contextmanager
def way_in_use(name: str, row: table.Overload) -> Iterator[None]:
    """Route this overload to one of ``WAYS``."""
    if name == "rtkernels":
        limits = dict(table.MIN_ELEMENTS)  # which follow from these measurements
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


def wall_us(call: Callable[[], Any], max_calls: int, budget_us: float) -> dict[str, float]:
    """Return µs per call with one synchronisation at the end, and without it; up to `max_calls` calls in the budget."""
    call()
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    call()
    torch.cuda.synchronize()
    count = max(3, min(max_calls, int(budget_us / ((time.perf_counter() - start) / 2 * 1e6))))
    start = time.perf_counter()
    for _ in range(count):
        call()
    submitted = time.perf_counter()
    torch.cuda.synchronize()
    operator_us = (time.perf_counter() - start) / count * 1e6
    return {"operator": operator_us, "submit": (submitted - start) / count * 1e6}


def _waits(call: Callable[[], Any]) -> bool:
    """Return True for a call in which torch waits for the device: its kernels cannot be timed by themselves."""
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
    row: table.Overload, shape: tuple[int, ...], dtype: torch.dtype, clock: Timer, ways: tuple[str, ...],
    quick: bool = False, compared: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the three times of every way, in µs; a way that fails has its error instead.

    Args:
        row: The overload.
        shape: Of its largest tensor.
        dtype: Of its tensors.
        clock: For times of the device alone.
        ways: Of ``WAYS``.
        quick: Take fewer calls, and times of the device for candidates and `compared` cases of middle size only.
        compared: A peer is measured for this case too.
    """
    try:
        given = arguments(row, shape, dtype, "cuda")
    except RuntimeError as error:  # no memory
        return {way: {"error": f"{type(error).__name__}: {error}"[:200]} for way in ways}
    if given is None:
        return {}
    args, kwargs = given
    op = operator_of(row)
    on_device = not quick or ((compared or is_candidate(row)) and 1 << 20 <= math.prod(shape) < _LARGE)
    max_calls, budget_us = (80, 1_000) if quick else (100, 200_000)
    ways = tuple(way for way in ways if way != "flaggems" or row.name in aten_flaggems.overloads())
    functions = {way: torch.compile(op, dynamic=False) if way == "inductor" else op for way in ways}
    found: dict[str, Any] = {}
    # The better of two rounds, because the host is sometimes busy; ways alternate, because clocks drift.
    for way in (*ways, *ways):
        times = found.get(way)
        if times is not None and times.get("operator", math.inf) > budget_us / 3:
            continue

        def call(function: Any = functions[way]) -> Any:
            return function(*args, **kwargs)

        try:
            rtkernels.aten.reset()
            with way_in_use(way, row), torch.no_grad():
                taken = wall_us(call, max_calls, budget_us)
                if times is None and on_device and not (quick and _waits(call)):
                    with contextlib.suppress(TimingError):  # it waits for the device: its shape depends on values
                        taken["kernel"] = clock.measure([call]).us
            if way == "rtkernels":
                reported = rtkernels.report(as_rows=True)
                taken["why"] = next((r["why"] for r in reported if r["overload"] == row.name), {})
            if times is None:
                found[way] = taken
            elif taken["operator"] < times["operator"]:
                times |= taken
        except Exception as error:
            if times is None:  # otherwise the first round's are kept
                found[way] = {"error": f"{type(error).__name__}: {error}"[:200]}
    return found
