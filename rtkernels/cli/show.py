"""Show the kernels and variants of an op, their resources, PTX and source."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rtkernels.errors import ArgumentError, RtkError
from rtkernels.runtime import targets
from rtkernels.runtime import warm as warming
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime.build import nvrtc, sources
from rtkernels.runtime.suggest import did_you_mean
from rtkernels.runtime.targets import Target

if TYPE_CHECKING:
    from rtkernels.runtime.warm import Job


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows as aligned text columns; columns of numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(parts).rstrip()

    return "\n".join(line(row) for row in [list(header), *cells])


_RESOURCES = ("registers", "spill_stores", "spill_loads", "stack", "shared")


# ---- list --------------------------------------------------------------------------------------------------


def inventory(
    archs: Sequence[str] | None = None, ops: Sequence[str] | None = None, tiers: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return one entry per variant and target: op, kernel, tier, expression, target and whether it is cached.

    Args:
        archs: Targets; by default those of this machine, or every one that CI compiles when it has no GPU.
        ops: Names of ops; all by default.
        tiers: Only kernels of these tiers; all by default.
    """
    try:
        chosen = warming.targets(archs)
    except ArgumentError:
        if archs is not None:
            raise
        chosen = [targets.parse(name) for name in targets.CI_TARGETS]
    numbers: dict[tuple[str, str], int] = {}
    rows = []
    for job in warming.plan(warming.select(ops), chosen, tiers):
        place = (job.kernel.name, job.target.name)
        number = numbers[place] = numbers.get(place, -1) + 1
        rows.append(
            {
                "op": job.op.name,
                "functions": list(job.op.public),
                "kernel": job.kernel.name,
                "unit": job.kernel.unit,
                "tier": job.kernel.tier,
                "target": job.target.name,
                "variant": number,
                "expression": job.expression,
                "cached": _is_cached(job),
            }
        )
    return rows


def _is_cached(job: Job) -> bool | None:
    """Return whether the cache has an entry; None if NVRTC, whose version is part of the key, cannot be loaded."""
    try:
        return build_cache.peek(*job.entry, op=job.kernel.op) is not None
    except RtkError:
        return None


def render_inventory(rows: Sequence[dict[str, Any]]) -> str:
    """Return the inventory as text: one line per kernel, ``cached/variants`` per target."""
    names = list(dict.fromkeys(row["target"] for row in rows))
    grouped: dict[tuple[str, ...], dict[str, list[bool | None]]] = {}
    for row in rows:
        kernel = grouped.setdefault((row["op"], row["kernel"], row["unit"], row["tier"]), {})
        kernel.setdefault(row["target"], []).append(row["cached"])
    lines = [[*place, *(_share(found.get(name)) for name in names)] for place, found in grouped.items()]
    functions = {row["op"]: row["functions"] for row in rows}
    text = table(["op", "kernel", "unit", "tier", *names], lines)
    cached = sum(bool(row["cached"]) for row in rows)
    summary = f"{len(functions)} ops, {len(grouped)} kernels, {len(rows)} variants, {cached} in the cache"
    if any(row["cached"] is None for row in rows):
        summary += " (unknown: NVRTC cannot be loaded, see `rtkernels doctor`)"
    called = "\n".join(f"{name}: {', '.join(public) or 'part of others'}" for name, public in functions.items())
    return f"{text}\n\n{called}\n\n{summary}"


def _share(found: list[bool | None] | None) -> str:
    if found is None:
        return "-"
    return f"{'?' if None in found else sum(map(bool, found))}/{len(found)}"


# ---- show --------------------------------------------------------------------------------------------------


def _jobs(op: str, target: Target, kernel: str | None, variant: int | None) -> list[tuple[int, Job]]:
    """Return the selected variants of an op, each with its number within its kernel."""
    by_kernel: dict[str, list[Job]] = {}
    for job in warming.plan(warming.select([op]), [target]):
        by_kernel.setdefault(job.kernel.name, []).append(job)
    if not by_kernel:
        needs = sorted({need for record in warming.select([op])[0].kernels for need in record.needs})
        raise ArgumentError(f"{op} has no kernel for {target}: its kernels need {', '.join(needs)}")
    if kernel is not None:
        if kernel not in by_kernel:
            meant = did_you_mean(kernel, by_kernel) or f"; it has {', '.join(by_kernel)}"
            raise ArgumentError(f"{op} has no kernel {kernel!r} for {target}{meant}")
        by_kernel = {kernel: by_kernel[kernel]}
    chosen = []
    for name, jobs in by_kernel.items():
        if variant is not None and not 0 <= variant < len(jobs):
            raise ArgumentError(f"{name} has variants 0 to {len(jobs) - 1} for {target}, not {variant}")
        chosen += [(i, job) for i, job in enumerate(jobs) if variant is None or i == variant]
    return chosen


def resources(op: str, target: Target, kernel: str | None = None, variant: int | None = None) -> list[dict[str, Any]]:
    """Return the resources of each variant of an op's kernels on a target; compiles variants that are not cached.

    Registers are per thread, everything else is in bytes; empty for a PTX target, where the driver decides.
    """
    rows = []
    for number, job in _jobs(op, target, kernel, variant):
        entry = build_cache.load(*job.entry, op=job.kernel.op)
        used = entry.meta["resources"].get(job.expression, {})
        rows.append(
            {
                "variant": number,
                "kernel": job.kernel.name,
                "expression": job.expression,
                "target": target.name,
                "max_registers": job.kernel.max_registers,
                **{name: used.get(name, "") for name in _RESOURCES},
                "image": len(entry.image),
            }
        )
    return rows


def render_resources(rows: Sequence[dict[str, Any]]) -> str:
    """Return resources as a table."""
    columns = {
        "variant": "variant", "kernel": "kernel", "target": "target", "registers": "regs",
        "max_registers": "ceiling", "spill_stores": "spill st", "spill_loads": "spill ld",
        "stack": "stack", "shared": "shared", "image": "image", "expression": "expression",
    }  # fmt: skip
    return table(list(columns.values()), [[row[name] for name in columns] for row in rows])


def ptx(op: str, target: Target, kernel: str | None = None, variant: int | None = None) -> str:
    """Return the PTX of one variant per kernel (the first, unless another is named)."""
    parts = []
    for _, job in _jobs(op, target, kernel, 0 if variant is None else variant):
        parts.append(f"// {job}\n{nvrtc.ptx(*job.entry)}")
    return "\n\n".join(parts)


def source(op: str, kernel: str | None = None) -> str:
    """Return the units of an op's kernels, each with its own headers in place of their first include."""
    kernels = [record for record in warming.select([op])[0].kernels if kernel in (None, record.name)]
    if not kernels:
        names = [record.name for record in warming.select([op])[0].kernels]
        meant = did_you_mean(kernel or "", names) or f"; it has {', '.join(names)}"
        raise ArgumentError(f"{op} has no kernel {kernel!r}{meant}")
    units = dict.fromkeys(record.unit for record in kernels)
    return "\n".join(f"// ==== {unit}\n{sources.flatten(sources.closure(unit))}" for unit in units)


def written_calls(op: str) -> str:
    """Return the generated Python code of the operators of an op: their calls and their plan lookups."""
    parts = []
    for operator in warming.select([op])[0].torch_ops:
        names = (f"<rtkernels {operator.name}>", f"<rtkernels plans of {operator.name}>")
        text = "".join(line for name in names for line in linecache.getlines(name))
        parts.append(f"# ==== {operator.name}\n{text.strip()}")
    return "\n\n".join(parts) or f"# {op} has no operators of its own"
