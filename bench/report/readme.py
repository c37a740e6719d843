"""docs/performance.md from the accepted numbers, and the place of the README's table (``headline``)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from bench import meta
from bench.report import strong_peers
from bench.report import tables as report
from bench.report.headline import HEAD
from bench.rows.row import Row

# Ops with the same shapes: a line each, a column per number of columns.
_WIDTHS = (2048, 4096, 8192)
_BY_WIDTH = (
    ("`rms_norm` forward", "rms_norm_fwd"),
    ("`rms_norm` backward", "rms_norm_bwd"),
    ("`layer_norm` forward", "layer_norm_fwd"),
    ("`layer_norm` backward", "layer_norm_bwd"),
    ("`glu` forward (merged)", "glu_fwd"),
    ("`glu` backward", "glu_bwd"),
    ("`quantize_fp8` tensor, static", "quantize_fp8_static"),
    ("`quantize_fp8` tensor, dynamic", "quantize_fp8_tensor"),
    ("`quantize_fp8` row", "quantize_fp8_row"),
    ("`quantize_fp8` 1x128", "quantize_fp8_group"),
    ("`quantize_fp8` 128x1, transposed", "quantize_fp8_group_t"),
    ("`quantize_fp8` 128x128", "quantize_fp8_block"),
    ("`quantize_fp8` 1x128 and 128x1 at once", "quantize_fp8_group_both"),
    ("`quantize_fp8` 128x128, both layouts", "quantize_fp8_block_both"),
    ("`dequantize_fp8` 1x128", "dequantize_fp8_group"),
    ("`rms_norm_fp8` rows", "rms_norm_fp8_row"),
    ("`rms_norm_fp8` transposed", "rms_norm_fp8_t"),
    ("`rms_norm_fp8` both", "rms_norm_fp8_both"),
    ('`rms_norm_fp8` both, `scale_layout="column"`', "rms_norm_fp8_both_column"),
)
_EXPERTS = re.compile(r"moe_|row_id|permute|router|z_loss|balance_loss|index_select|scatter_add|sort_chunks|topk")
_BALANCE = 150  # operations per byte from which on the tensor cores are the limit, about


def _speed(row: dict[str, Any]) -> str:
    """Operations per second of a product that memory does not bound; else the efficiency."""
    bound_by_products = row.get("flops", 0) > _BALANCE * row.get("bytes", 0)
    return f"{row['tflops']:.0f} TFLOP/s" if bound_by_products else f"{row['efficiency']:.2f}"


def _ours(row: dict[str, Any]) -> str:
    return f"{row['us']:.1f} ({_speed(row)})"


def _fastest(row: dict[str, Any]) -> str:
    peers = report.ranked(row)
    return f"{peers[0][0]} {peers[0][1]:.1f}" if peers else "-"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return _ours(row) + (f"; {_fastest(row)}" if report.ranked(row) else "")


def tables(measured: dict[tuple[str, str], dict[str, Any]], rows: Iterable[Row]) -> list[list[str]]:
    """The lines of the three tables; rows in the order of the ops that declare them.

    Args:
        measured: The accepted rows by name and shape.
        rows: All declared rows; one that was never measured is left out.
    """
    cols_of = {f"8192x{times}{cols}": cols for cols in _WIDTHS for times in ("", "2x")}
    titles = {name: title for title, name in _BY_WIDTH}
    by_width: dict[str, dict[int, dict[str, Any]]] = {}
    others: list[list[str]] = []
    experts: list[list[str]] = []
    for declared in rows:
        row = measured.get((declared.name, declared.shape))
        if row is None:
            continue
        if declared.name in titles and declared.shape in cols_of:
            by_width.setdefault(declared.name, {})[cols_of[declared.shape]] = row
        else:
            table = experts if _EXPERTS.search(declared.name) else others
            share = f"{row['of_peak']:.2f}" if "of_peak" in row else "-"
            table.append([declared.name, declared.shape, _ours(row), share, _fastest(row)])
    lines = [[titles[n], *(_cell(by_width[n].get(cols)) for cols in _WIDTHS)] for n in titles if n in by_width]
    return [
        report.table(["op, bf16", *(f"8192x{cols}" for cols in _WIDTHS)], lines),
        _with_peak("op", others),
        _with_peak("mixture of experts", experts),
    ]


def _with_peak(first: str, body: list[list[str]]) -> list[str]:
    """Return a table; the column of the tensor cores' peak is left out while no row has it."""
    head = [first, "shape", "µs (efficiency, or rate)", "of the peak", "fastest peer, µs"]
    if all(cells[3] == "-" for cells in body):
        head, body = [*head[:3], head[4]], [[*cells[:3], cells[4]] for cells in body]
    return report.table(head, body)


def rewritten(text: str, fresh: list[str]) -> str:
    """The README's text with its table replaced.

    Raises:
        ResultError: The table is not there.
    """
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if line.startswith(HEAD)), None)
    if first is None:
        raise meta.ResultError(f"README.md has no table that begins with {HEAD!r}.")
    last = first
    while last < len(lines) and lines[last].startswith("|"):
        last += 1
    lines[first:last] = fresh
    return "\n".join(lines)


_INTRODUCTION = """\
# Performance

Written by `python -m bench readme` from `bench/results/{name}.json`. How the numbers are taken:
[benchmarks.md](benchmarks.md). [performance.html](performance.html), in a browser, sorts and filters the rows of ops.

{gpu}, bf16 unless a row says otherwise. Times are median µs with the L2 cache flushed before each call and without
host time. In brackets is the efficiency: the time of a plain copy of the same number of bytes, measured in the same
run, divided by ours (1.00 is copy speed); for rows limited by matrix products, the rate instead. Then follows the
fastest peer of the same run, among torch, its fused ops, torch.compile (not for all rows){peers}.{peak} \
Rows that must read their input twice (dynamic tensor scales) count both reads. `linear_cross_entropy`,
`router_gemm` and `lightning_attention` are limited by matrix products, and rows of about 10 µs by the launch."""


# After the list of peers.
_PEAK = """ *Of the peak*
is the rate over that of a plain loop of wgmma instructions, which is measured in the same run."""
_LIBRARIES = {
    "liger": "Liger-Kernel",
    "quack": "quack",
    "fa4": "FlashAttention 4",
    "linghe": "linghe",
    "flaggems": "FlagGems",
    "deepgemm": "DeepGEMM",
    "fla": "fla",
    "torchao": "TorchAO",
}


def _libraries(runs: list[dict[str, Any]]) -> str:
    """Return the libraries that were installed in one of the runs, as the end of a list of peers."""
    found = [title for name, title in _LIBRARIES.items() if any(run["peers"].get(name) for run in runs)]
    return "".join(f", {title}" for title in found[:-1]) + "".join(f" and\n{title}" for title in found[-1:])


_PICTURES = """\
Rates over size, one picture per family. Blue is ours, other colours are peers of the same runs. Dashed lines are the
machine's limits: a copy of the same number of bytes, or the measured peak of the tensor cores (bf16, and above it fp8
and int8). Points are the rows below, those of `python -m bench neighbours` and the draws of `python -m bench sweep`.
Panels of rows whose operations are not counted, such as `fp8_linear`, have no limit if they are far from a copy."""


def _pictures(names: Iterable[str]) -> list[str]:
    lines = ["## By family", "", _PICTURES, ""]
    for name in names:
        if name != "models.svg":
            family = name.removesuffix(".svg")
            lines += [f"### {family}", "", f"![{family}: ours, peers and the limit over size](pictures/{name})", ""]
    return lines


def page(accepted: dict[str, Any], rows: Iterable[Row], pictures: Iterable[str] = ()) -> str:
    """The text of docs/performance.md; `pictures`: file names in docs/pictures."""
    rows = list(rows)
    measured = {(row["row"], row["shape"]): row for row in accepted["rows"]}
    gpu = accepted["runs"][0]["gpu"]
    measured_peak = any("of_peak" in row for row in accepted["rows"])
    texts = {"peers": _libraries(accepted["runs"]), "peak": _PEAK if measured_peak else ""}
    lines = [_INTRODUCTION.format(name=meta.short_name(gpu), gpu=gpu, **texts), ""]
    lines += _pictures(pictures) if pictures else ()
    for title, fresh in zip(("By width", "Other ops", "Mixture of experts"), tables(measured, rows), strict=True):
        lines += [f"## {title}", "", *fresh, ""]
    lines += strong_peers.lines(gpu) + _gaps(accepted, rows)
    if accepted["layers"]:
        lines += ["## Whole layers", "", *_layers(accepted["layers"]), ""]
    if accepted["host"]:
        lines += ["## Host time", "", *report.host_table(accepted["host"]), ""]
    lines += ["## Runs", ""]
    for number, run in enumerate(accepted["runs"]):
        count = sum(row["run"] == number for row in accepted["rows"])
        peers = ", ".join(f"{name} {version}" for name, version in run["peers"].items() if version)
        lines.append(
            f"- {run['date'][:10]}, commit {(run['commit'] or 'unknown')[:12]}, torch {run['torch']}, "
            f"driver {run['driver']}{', ' + peers if peers else ''}: {count} rows"
        )
    return "\n".join([*lines, ""])


_UNRECORDED = """\
Rows that no run of `python -m bench run` has measured; `--missing` measures them. Tuning scripts measured some of these
ops: [decisions](decisions/README.md)."""
_WITHOUT_PEAK = """\
Rows of products and attention whose run did not measure the peak of the tensor cores; `--without-peak` adds it."""


def _gaps(accepted: dict[str, Any], rows: list[Row]) -> list[str]:
    """Return a list of the rows without a record, and one of those whose record lacks the share of the peak."""
    commits = {(r["row"], r["shape"]) for r in accepted["rows"] if accepted["runs"][r["run"]].get("commit")}
    shares = {(r["row"], r["shape"]): "of_peak" in r for r in accepted["rows"]}
    unrecorded = [row for row in rows if (row.name, row.shape) not in commits]
    without = [row for row in rows if row.flops and shares.get((row.name, row.shape)) is False]
    lines = []
    for title, text, found in (
        ("Rows without a record", _UNRECORDED, unrecorded),
        ("Rows without the peak of their run", _WITHOUT_PEAK, without),
    ):
        shapes: dict[str, list[str]] = {}
        for row in found:
            shapes.setdefault(row.name, []).append(row.shape)
        body = [[name, str(len(of_name)), "; ".join(of_name)] for name, of_name in shapes.items()]
        if found:
            lines += [f"## {title}", "", text, "", *report.table(["row", "count", "shapes"], body), ""]
    return lines


def _layers(layers: dict[str, Any]) -> list[str]:
    body = []
    for name, entry in layers.items():
        for row in entry["measured"]["rows"]:
            what = ", ".join(f"{key} {value}" for key, value in row.items() if isinstance(value, int | str))
            for library, found in row.items():
                if isinstance(found, dict) and "peak_mib" in found:
                    times = {k.removesuffix("_ms").replace("_", " "): v for k, v in found.items() if k.endswith("_ms")}
                    cells = ", ".join(f"{key} {value}" for key, value in times.items())
                    body.append([name, what, library, cells, f"{found['peak_mib']}"])
    return report.table(["layer", "size", "library", "ms", "peak MiB"], body)
