"""Write the table of bytes in ``docs/how_to/several_gpus.md``: ``python docs/make_several_gpus.py``.

Formulas give the bytes that one GPU sends in a training step of one layer. ``tests/nn/test_parallel_bytes.py`` counts
what two processes really send and compares. Times are computed from nominal bandwidths and peaks, not measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parent / "how_to" / "several_gpus.md"
BEGIN, END = "<!-- begin: written by docs/make_several_gpus.py -->\n", "<!-- end -->"

NODE = 8  # GPUs that NVLink connects
NVLINK, NETWORK = 450e9, 50e9  # bytes per second and direction of a GPU: NVLink 4, one adapter of 400 Gbit/s each
REACHED = 0.8  # of these
FLOPS = 0.5 * 989e12  # half of the dense bf16 peak of an H100 or H200


# ---- bytes that one process sends -----------------------------------------------------------------------------------


def ring_attention(size: int, keys: int, width: int) -> tuple[float, float]:
    """Return the bytes of a forward and a backward pass: `keys` of this process, `width` over all heads of keys."""
    tensor = keys * width
    forward = (size - 1) * 2 * tensor * 2  # k and v in 16 bits
    return forward, forward + size * 2 * tensor * 4  # and sums of their gradients in fp32, which return to their owner


def gated_delta_rule(
    size: int, heads: int, d_k: int, d_v: int, parts: int = 2, wants_state: bool = False
) -> tuple[float, float]:
    """Return the bytes of a forward and a backward pass: all-gathers of an fp32 matrix and a state of each part.

    `heads` are of values and of all sequences; `parts`, of a sequence on one process: two with zigzag. With
    `wants_state` members exchange gradients of the last state, too.
    """
    exchange = (size - 1) * parts * heads * d_k * (d_k + d_v) * 4
    return exchange, exchange + (size - 1) * heads * d_k * d_v * 4 * wants_state


def expert_parallel(size: int, rows: int, width: int, experts: int, element: int = 2) -> tuple[float, float]:
    """Return the bytes of a forward and a backward pass: `rows` are tokens times choices, evenly over processes."""
    others = (size - 1) / size
    exchange = rows * others * width * element
    return 2 * exchange + experts * others * 4, 2 * exchange


def cross_entropy(size: int, tokens: int) -> tuple[float, float]:
    """Return the bytes of a forward and a backward pass: an all-gather of 20 bytes per token."""
    return (size - 1) * 20 * tokens, 0


def linear_cross_entropy(size: int, tokens: int, width: int) -> tuple[float, float]:
    """Return the bytes of a forward and a backward pass: the all-gather, and an all-reduce of fp32 gradients."""
    return (size - 1) * 20 * tokens + 2 * (size - 1) / size * tokens * width * 4, 0


def fsdp(size: int, parameters: float, gathered: int = 2) -> tuple[float, float]:
    """Return the bytes of a forward and a backward pass of FSDP2: weights are gathered twice, fp32 gradients once."""
    others = (size - 1) / size
    return others * parameters * gathered, others * parameters * (gathered + 4)


# ---- the table ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line: a call in a training step, its bytes, and its floating-point operations on one GPU."""

    name: str
    group: int
    sent: float
    overlapping: float  # bytes in flight while the GPU computes
    computed: float


def rows(gpus: int) -> list[Row]:
    """Return the lines of a number of GPUs: one layer, 8,192 tokens on each GPU; FSDP2 of 8 billion weights."""
    tokens, node = 8192, min(gpus, NODE)
    forward, backward = ring_attention(gpus, tokens, 8 * 128)
    block = 4 * tokens**2 * 64 * 128 / 2  # with zigzag, half of a block's scores are computed
    found = [Row("`ring_attention`", gpus, forward + backward, 2 * forward, gpus * 3.5 * block)]
    sent = sum(gated_delta_rule(gpus, 32, 128, 128))
    passes, rule = 7, tokens * 32 * 2 * (4 * 64 * 128 + 3 * 128 * 128)  # three forward, two backward of twice as much
    found.append(Row("`gated_delta_rule`", gpus, sent, 0, passes * rule))
    size = min(gpus, 256)
    sent = sum(expert_parallel(size, tokens * 8, 7168, 256))
    found.append(Row("`expert_parallel`", size, sent, 0, 3 * tokens * 8 * 6 * 7168 * 2048))
    sent = sum(linear_cross_entropy(node, tokens, 8192))
    found.append(Row("`linear_cross_entropy`", node, sent, 0, 6 * tokens * 8192 * 128256 / node))
    for name, gathered in (("FSDP2", 2), ("FSDP2, `gather_in_fp8`", 1)):
        sent = sum(fsdp(gpus, 8e9, gathered))
        found.append(Row(name, gpus, sent, sent, 6 * 8e9 * tokens))
    return found


def _bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| call | GPUs | in a group | a GPU sends | in | and computes for | hidden | exposed |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for gpus in (8, 64, 1024):
        for row in rows(gpus):
            rate = REACHED * (NVLINK if row.group <= NODE else NETWORK)
            whole, computes = row.sent / rate, row.computed / FLOPS
            hidden = min(row.overlapping / rate, computes)
            lines.append(
                f"| {row.name} | {gpus:,} | {row.group:,} | {_bytes(row.sent)} | {_time(whole)} | {_time(computes)} | "
                f"{100 * hidden / whole:.0f} % | {_time(whole - hidden)} |"
            )
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with a new table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
