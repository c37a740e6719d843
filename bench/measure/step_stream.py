"""A prototype of a persistent decoding kernel: all products of 24 layers in one launch (``step_stream.cu``).

    python -m bench.measure.step_stream     # a GPU of sm_90: checks every sum, then the time beside a copy

The result decides whether a whole step as one kernel is built: it must reach 85 % of what reading the weights at the
rate of a copy takes. ``docs/decisions/gemm.md`` has the numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.measure.timing import CudaDevice, Timer
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel

UNIT, PAGE_UNITS, WORDS = 1536, 4, 2304  # as in step_stream.cu
RESULTS, PARTS, THIRDS = (2560, 1536, 1536, 4608, 1536), (1, 0, 1, 2, 1), (1, 1, 1, 1, 3)  # of the five stages
THREADS = 544
MODES = {"no waits": 0, "counters": 1, "tagged words": 2}
PAGES = (8, 15)
KERNEL = Kernel(
    Path(__file__).resolve().parents[1] / "cuda" / "step_stream.cu", "step_stream", template="PAGES",
    needs=("cluster",),
    args="weights:ptr words:ptr counters:ptr launches:ptr block_bytes:i64 layers:i64 mode:i64",
    variants=[(pages,) for pages in PAGES], max_registers=112,
)  # fmt: skip
KERNEL.op = "bench_step_stream"


def firsts(stage: int, blocks: int) -> list[int]:
    """Return the first result of each block, and the end."""
    return [2 * (RESULTS[stage] // 2 * block // blocks) for block in range(blocks + 1)]


def packed(weights: list[list[Tensor | None]], blocks: int) -> Tensor:
    """Return ``[blocks, elements]``: the units of each block in the order in which it reads them.

    Args:
        weights: For each layer and stage ``[units of a result, results, k]``.
        blocks: Of the launch.
    """
    count = [0] * blocks
    for stage in range(5):
        ends = firsts(stage, blocks)
        for block in range(blocks):
            count[block] += (ends[block + 1] - ends[block]) * PARTS[stage] * THIRDS[stage]
    like = next(w for w in weights[0] if w is not None)
    out = like.new_zeros(blocks, len(weights) * max(count) * UNIT)
    at = [0] * blocks
    for layer in weights:
        for stage, weight in enumerate(layer):
            if weight is None:
                continue
            ends = firsts(stage, blocks)
            for third in range(THIRDS[stage]):
                part = weight[:, :, third * UNIT : (third + 1) * UNIT].transpose(0, 1)  # [results, units, k]
                for block in range(blocks):
                    own = part[ends[block] : ends[block + 1]].reshape(-1)
                    out[block, at[block] : at[block] + own.numel()] = own
                    at[block] += own.numel()
    return out


def make(layers: int, blocks: int, device: str) -> dict[str, Any]:
    """Return random weights, packed and plain, and the memory of a launch."""
    generator = torch.Generator(device).manual_seed(0)
    weights: list[list[Tensor | None]] = []
    for _ in range(layers):
        layer: list[Tensor | None] = []
        for parts, results, thirds in zip(PARTS, RESULTS, THIRDS, strict=True):
            k = UNIT * thirds
            matrix = torch.randn(parts, results, k, generator=generator, device=device) * k**-0.5 if parts else None
            layer.append(None if matrix is None else matrix.bfloat16())
        weights.append(layer)
    words = torch.zeros(5 * layers + 1, WORDS, 2, dtype=torch.int32, device=device)
    x = torch.randn(UNIT, generator=generator, device=device).bfloat16()
    words[0, : UNIT // 2, 0] = x.view(torch.int32)
    return {
        "weights": weights,
        "packed": packed(weights, blocks),
        "words": words,
        "counters": torch.zeros(5 * layers, dtype=torch.int32, device=device),
        "launches": torch.zeros(blocks, dtype=torch.int32, device=device),
    }


def error(given: dict[str, Any]) -> float:
    """Return the largest error of a result over what fp32 sums of its own input and one rounding may have."""
    words, worst = given["words"], 0.0
    for i in range(len(words) - 1):
        stage, weight = i % 5, given["weights"][i // 5][i % 5]
        x = words[i, : UNIT * THIRDS[stage] // 2, 0].contiguous().view(torch.bfloat16).double()
        got = words[i + 1, : RESULTS[stage] // 2, 0].contiguous().view(torch.bfloat16).double()
        if weight is None:
            exact, slack = x, torch.zeros_like(x)
        else:
            factor = 0.5**0.5 if PARTS[stage] == 2 else 1.0
            exact = factor * (weight.double() @ x).sum(0)
            slack = factor * 2.0**-20 * (weight.double().abs() @ x.abs()).sum(0)
        allowed = slack + exact.abs() * torch.finfo(torch.bfloat16).eps * 0.51 + 1e-30
        worst = max(worst, float(((got - exact).abs() / allowed).nan_to_num(1e30).max()))
    return worst


def nbytes(given: dict[str, Any]) -> int:
    """Return the bytes of all weights."""
    return sum(w.nbytes for layer in given["weights"] for w in layer if w is not None)


def measure(timer: Timer, layers: int = 24, samples: int = 30) -> dict[str, Any]:
    """Return microseconds by mode and pages, the error of each mode that waits, and the rate of a copy."""
    info = device_info(0)
    blocks = info.sm_count
    given = make(layers, blocks, "cuda")
    pointers = [given[name].data_ptr() for name in ("packed", "words", "counters", "launches")]
    large = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(large)
    copy = timer.measure([lambda: other.copy_(large)], samples).us
    found: dict[str, Any] = {"copy_tb_s": 2 * large.nbytes / copy / 1e6, "bytes": nbytes(given), "rows": {}}
    for name, mode in MODES.items():
        for pages in PAGES:
            launch = KERNEL.bind((pages,), 0, blocks, THREADS, pages * PAGE_UNITS * 2 * UNIT, resident=True)
            arguments = (*pointers, given["packed"].shape[1] * 2, layers, mode)
            given["counters"].zero_()
            given["launches"].zero_()
            given["words"][1:] = -1  # no number of a launch
            launch(*arguments)
            wrong = error(given) if mode else None
            us = timer.measure([lambda launch=launch, arguments=arguments: launch(*arguments)], samples).us
            found["rows"][f"{name}, {pages} pages"] = {"us": us, "error": wrong, "tb_s": found["bytes"] / us / 1e6}
            if wrong is not None:  # also after many launches
                found["rows"][f"{name}, {pages} pages"]["error_after"] = error(given)
    return found


def main() -> None:
    """Print the table."""
    found = measure(Timer(CudaDevice()))
    floor = found["bytes"] / found["copy_tb_s"] / 1e6
    print(f"weights {found['bytes'] / 1e9:.2f} GB, copy {found['copy_tb_s']:.2f} TB/s: floor {floor:.0f} us")
    for name, row in found["rows"].items():
        checked = "" if row["error"] is None else f"  error {max(row['error'], row['error_after']):.2f} of allowed"
        print(
            f"{name:24} {row['us']:8.1f} us  {row['tb_s']:.2f} TB/s  {floor / row['us']:.0%} of a copy's rate{checked}"
        )


if __name__ == "__main__":
    main()
