"""quack and FlashAttention 4 in docs/performance.md and in the README's table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import meta
from bench.report import accepted, headline, strong_peers

RUN = {
    "gpu": "NVIDIA H200", "date": "2026-11-17", "commit": "abc", "torch": "2", "peers": {"quack": "0.6", "fa4": "4"},
    "rows": [
        {"row": "rmsnorm_bwd", "shape": "8192x4096", "us": 50.0, "peers": {"quack": 60.0, "torch": 55.0}},
        {"row": "attn_causal_fwd", "shape": "b2s4096q32kv8d128", "us": 40.0, "peers": {"fa4": 30.0}},
        {"row": "attn_decode", "shape": "alone", "us": 1.0, "peers": {}},
    ],
}  # fmt: skip


def test_section_of_the_page(tmp_path: Path) -> None:
    assert strong_peers.lines("NVIDIA H200", tmp_path) == [] and strong_peers.recorded("h200", tmp_path) is None
    for folder in ("peers", "sweep"):
        (tmp_path / folder).mkdir()
    (tmp_path / "peers" / "h200.json").write_text(json.dumps(RUN))
    numbers = {"count": 3, "geometric_mean": 0.9, "p5": 0.8, "minimum": 0.7, "best_peers": {"fa4": 2, "quack": 1}}
    environment = {"peers": {"fa4": "4", "quack": None}, "date": "2026-11-18T00", "commit": "0123456789"}
    sweep: dict[str, Any] = {"seed": 5, "environment": environment, "families": {"attention_fwd": numbers}}
    (tmp_path / "sweep" / "h200.json").write_text(json.dumps(sweep))
    page = "\n".join(strong_peers.lines("NVIDIA H200", tmp_path))
    assert "| rmsnorm_bwd | 8192x4096 | 50 | 60 | - | **55** | 1.10 |" in page and "attn_decode" not in page
    assert "| attention_fwd | 3 | 0.90 | 0.80 | 0.70 | FlashAttention 4 2, quack 1 |" in page


def test_the_readme_names_the_strongest_peer() -> None:
    numbers = accepted.empty()
    numbers["runs"] = [{"date": "2026-11-15"}]
    row = {"row": "rms_norm_bwd", "shape": "8192x4096", "us": 50.0, "peers": {"liger": 80.0}, "run": 0}
    numbers["rows"] = [row]
    lines = headline.headline(numbers, {}, {})
    assert "Liger 80.0 µs | 1.60 x | 2026-11-15" in lines[2] and len(lines) == 3
    lines = headline.headline(numbers, {}, {}, RUN)
    assert "torch 55.0 µs | 1.10 x | 2026-11-17" in lines[2] and "FlashAttention 4 30.0 µs | 0.75 x" in lines[3]
    row["peers"]["liger"] = 52.0
    assert "Liger 52.0 µs | 1.04 x" in headline.headline(numbers, {}, {}, RUN)[2]


def test_recorded_runs_are_shown() -> None:
    run = strong_peers.recorded("h200")
    assert run is not None and len(run["rows"]) > 50
    page = (meta.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert "\n".join(strong_peers.lines("NVIDIA H200")) in page
