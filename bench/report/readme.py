"""The README's tables, from the result files: of every row its newest measurement counts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from bench import meta
from bench.report import tables as report
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
_HEADS = ("| op, bf16 |", "| op | shape |", "| mixture of experts |")


def newest(results: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The last measurement of every (row, shape) that worked.

    One without the peer that was fastest before, or a faster one, does not count: a run may be asked for some peers
    only. Sweeps have none.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for result in sorted(results, key=lambda result: result["environment"]["date"]):
        for row in result["rows"] if result["copy_peak_gbps"] else ():
            key = row["row"], row["shape"]
            if "failed" not in row and _as_strict(row, found.get(key)):
                found[key] = row
    return found


def _as_strict(row: dict[str, Any], before: dict[str, Any] | None) -> bool:
    fastest = report.ranked(before)[:1] if before else []
    peers = report.ranked(row)
    return all(name in dict(peers) or (peers and peers[0][1] <= us) for name, us in fastest)


def _ours(row: dict[str, Any]) -> str:
    return f"{row['us']:.1f} ({row['efficiency']:.2f})"


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
        measured: What `newest` gives.
        rows: All declared rows; one that was never measured is left out.
    """
    wide = {f"8192x{times}{cols}": cols for cols in _WIDTHS for times in ("", "2x")}
    titles = {name: title for title, name in _BY_WIDTH}
    by_width: dict[str, dict[int, dict[str, Any]]] = {}
    others: list[list[str]] = []
    experts: list[list[str]] = []
    for declared in rows:
        row = measured.get((declared.name, declared.shape))
        if row is None:
            continue
        if declared.name in titles and declared.shape in wide:
            by_width.setdefault(declared.name, {})[wide[declared.shape]] = row
        else:
            table = experts if _EXPERTS.search(declared.name) else others
            table.append([declared.name, declared.shape, _ours(row), _fastest(row)])
    lines = [[titles[n], *(_cell(by_width[n].get(cols)) for cols in _WIDTHS)] for n in titles if n in by_width]
    tail = ["shape", "µs (efficiency)", "fastest peer, µs"]
    return [
        report.table(["op, bf16", *(f"8192x{cols}" for cols in _WIDTHS)], lines),
        report.table(["op", *tail], others),
        report.table(["mixture of experts", *tail], experts),
    ]


def rewritten(text: str, fresh: list[list[str]]) -> str:
    """The README's text with its tables replaced, each found by its first line.

    Raises:
        ResultError: A table is not there.
    """
    lines = text.split("\n")
    for head, table in zip(_HEADS, fresh, strict=True):
        first = next((i for i, line in enumerate(lines) if line.startswith(head)), None)
        if first is None:
            raise meta.ResultError(f"README.md has no table that begins with {head!r}.")
        last = first
        while last < len(lines) and lines[last].startswith("|"):
            last += 1
        lines[first:last] = table
    return "\n".join(lines)
