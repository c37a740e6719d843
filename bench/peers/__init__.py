"""Other libraries' kernels for the same rows.

``ADAPTERS[row][peer]``, where row is a row's name or whole label, is called as ``prepare(**inputs)`` with what the
row's ``make`` gives, and returns the call to time: what a backward needs from its forward (1/rms, a graph) and another
layout of an input are prepared in advance. Libraries are imported while preparing, before anything else is done, so
that one which is not installed costs nothing and is reported as absent. The first tensor a call returns is compared
with the row's first output.

One file per library; ``torch_peers`` makes torch's own competitors from the row itself.
"""

from __future__ import annotations

import argparse
from importlib import util
from typing import Any

from bench.peers import fa4, fla, flaggems, heads, liger, linghe, others, quack
from bench.peers.base import NO_ADAPTER, Absent, Call, Compared, Prepare, Table
from bench.peers.torch import torch_peers

__all__ = [
    "ADAPTERS",
    "DISTRIBUTIONS",
    "FAMILIES",
    "NO_ADAPTER",
    "Absent",
    "Call",
    "Compared",
    "Prepare",
    "adapters_of",
    "families",
    "not_installed",
    "selected",
    "torch_peers",
]

FAMILIES = (
    "torch", "inductor", "liger", "quack", "fa4", "linghe", "flaggems", "deepgemm", "fla", "torchao", "trl", "verl",
    "thinkingmachines",
)  # fmt: skip
DISTRIBUTIONS = {
    "liger": "liger-kernel",
    "quack": "quack-kernels",
    "linghe": "linghe",
    "flaggems": "flag-gems",
    "fa4": "flash-attn-4",
    "deepgemm": "deep-gemm",
    "fla": "flash-linear-attention",
    "torchao": "torchao",
    "trl": "trl",
    "verl": "verl",
    "thinkingmachines": "batch-invariant-ops",
}
_MODULES = {
    "liger": "liger_kernel",
    "quack": "quack",
    "linghe": "linghe",
    "flaggems": "flag_gems",
    "fa4": "flash_attn",
    "deepgemm": "deep_gemm",
    "fla": "fla",
    "torchao": "torchao",
    "trl": "trl",
    "verl": "verl",
    "thinkingmachines": "batch_invariant_ops",
}


def not_installed(wanted: list[str] | None) -> list[str]:
    """Libraries among the wanted families that cannot be imported; None, which wants what there is, misses none."""
    return [
        name for name, module in _MODULES.items()
        if wanted and any(item.split("_")[0] == name for item in wanted) and util.find_spec(module) is None
    ]  # fmt: skip


def families(text: str) -> list[str]:
    """Return the families that a comma-separated option names; none for "none"."""
    names = [name for name in text.split(",") if name and name != "none"]
    known = {*FAMILIES, "torch_fused", *(n for table in ADAPTERS.values() for n in table)}
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown peer {name!r}; known: {', '.join(sorted(known))}, none")
    return names


def selected(peer: str, wanted: list[str] | None) -> bool:
    """Whether ``peer`` (``liger_ab``) belongs to one of the wanted families (``liger``); None wants all."""
    return wanted is None or any(peer == item or peer.startswith(item + "_") for item in wanted)


def adapters_of(row: Any) -> dict[str, Prepare]:
    """The other libraries' adapters for a row, by peer."""
    return {**ADAPTERS.get(row.name, {}), **ADAPTERS.get(row.label, {})}


def _merged(*tables: Table) -> Table:
    found: Table = {}
    for table in tables:
        for row, adapters in table.items():
            found.setdefault(row, {}).update(adapters)
    return found


ADAPTERS = _merged(
    *(library.ADAPTERS for library in (liger, quack, fa4, fla, linghe, flaggems, others, heads)),
)
