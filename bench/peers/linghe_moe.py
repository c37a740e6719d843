"""linghe's kernels around the permutation of routed tokens."""

from __future__ import annotations

from typing import Any

from bench.peers.base import Call, Compared, Table

_MULTIPLE = 16  # what the rows pad to


def _row_id_map(routing_map: Any, **_: Any) -> Call:
    from linghe.utils.gather import triton_make_row_id_map

    return lambda: triton_make_row_id_map(routing_map, _MULTIPLE)


def _moe_index(routing: Any, experts: int, rows: int, **_: Any) -> Call:
    """From a routing map, which is built beforehand, to a dense map and the token of each row."""
    from linghe.utils.gather import triton_make_row_id_map_and_index

    routing_map = routing.new_zeros((routing.shape[0], experts), dtype=bool).scatter_(1, routing, True)
    return Compared(
        lambda: triton_make_row_id_map_and_index(routing_map, rows, _MULTIPLE),
        lambda result: result[0].gather(1, routing),
    )


def _index_select(x: Any, indices: Any, **_: Any) -> Call:
    from linghe.utils.gather import triton_index_select

    return lambda: triton_index_select(x, indices)


def _scatter_add(x: Any, indices: Any, rows: int, **_: Any) -> Call:
    """Sorts the indices with torch; every row of the result gets the same number of rows, as here."""
    from linghe.utils.scatter import triton_aligned_scatter_add

    return lambda: triton_aligned_scatter_add(x, x.new_empty(rows, x.shape[1]), indices)


def _scatter_add_atomic(x: Any, indices: Any, rows: int, **_: Any) -> Call:
    from linghe.utils.scatter import triton_scatter_add

    return lambda: triton_scatter_add(x, x.new_empty(rows, x.shape[1]), indices)


def _sort_chunks(x: Any, counts: Any, order: Any, **_: Any) -> Call:
    from linghe.utils.rearange import triton_sort_chunks_by_index

    return lambda: triton_sort_chunks_by_index(x, counts, order)[0]


ADAPTERS: Table = {
    "row_id_map": {"linghe": _row_id_map},
    "moe_index": {"linghe": _moe_index},
    "index_select": {"linghe": _index_select},
    "scatter_add": {"linghe": _scatter_add, "linghe_atomic": _scatter_add_atomic},
    "sort_chunks": {"linghe": _sort_chunks},
}
