"""Pictures of the documentation: they show what bench/results has, and are small."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import meta
from bench.report import accepted, headline, html, pictures, svg

SVG = "{http://www.w3.org/2000/svg}"
needs_results = pytest.mark.skipif(not any(meta.RESULTS.glob("*.json")), reason="an sdist has no results")


def row(name: str, nbytes: int, us: float, flops: int = 0, **peers: float) -> dict[str, Any]:
    return {
        "row": name,
        "shape": str(nbytes),
        "us": us,
        "bytes": nbytes,
        "flops": flops,
        "copy_us": nbytes / 4e6,
        "peers": peers,
    }


def numbers(*rows: dict[str, Any]) -> dict[str, Any]:
    runs = [{"gpu": "NVIDIA X1", "date": "2026-01-02T03", "peak_tflops": {"bf16": 900.0, "fp8": 1800.0}}]
    return {"runs": runs, "rows": list(rows), "sweep": None}


def dots(panel: svg.Panel, colour: str) -> list[tuple[float, float]]:
    return [point for group in panel.dots if group.colour == colour for point in group.points]


def test_a_panel_has_ours_peers_and_the_limit() -> None:
    rows = [row("a_fwd", 10**6 * i, 0.5 * i, torch=2.0 * i, torch_fused=1.0 * i, liger_x=4.0) for i in (1, 10, 100)]
    found = pictures.points(numbers(*rows), ())
    (panel,) = pictures._panels(found, {}, pictures.copy_curve(found))
    assert (panel.title, panel.x_title, panel.y_title) == ("a_fwd", "MB moved", "GB/s")
    assert dots(panel, svg.OURS) == [(1.0, 2000.0), (10.0, 2000.0), (100.0, 2000.0)]
    assert [y for _, y in dots(panel, pictures.LIBRARIES["torch"][1])] == [1000.0] * 3, "the faster of the two"
    assert len(dots(panel, pictures.LIBRARIES["liger"][1])) == 3
    assert panel.limits == [[(1.0, 4000.0), (10.0, 4000.0), (100.0, 4000.0)]]


def test_products_are_drawn_beside_the_peak() -> None:
    rows = [row("mm", 10**6, 1.0 * i, flops=7 * 10**8 * i) for i in (1, 2, 3)]
    (panel,) = pictures._panels(pictures.points(numbers(*rows), ()), {"bf16": 900.0, "fp8": 1800.0}, [])
    assert (panel.x_title, panel.y_title) == ("GFLOP", "TFLOP/s")
    assert [y for _, y in dots(panel, svg.OURS)] == pytest.approx([700.0] * 3)
    assert [line[0][1] for line in panel.limits] == [900.0], "the peak of fp8 is far from these"
    (far,) = pictures._panels(pictures.points(numbers(row("slow", 10**6, 100.0)), ()), {}, [(1.0, 4000.0)])
    assert not far.limits, "a copy says nothing about it"


def test_rows_of_few_sizes_share_a_panel() -> None:
    rows = [row("many", 10**6 * i, 1.0) for i in range(1, 5)] + [row("one", 10**6, 1.0), row("two", 2 * 10**6, 1.0)]
    panels = pictures._panels(pictures.points(numbers(*rows), ()), {}, [])
    assert [panel.title for panel in panels] == ["many", "other rows"] and len(dots(panels[1], svg.OURS)) == 2


def test_a_dot_is_where_its_numbers_say() -> None:
    panel = svg.Panel("t", "x", "y", [svg.Dots(svg.OURS, [(10.0, 50.0)])], [[(1.0, 100.0), (100.0, 100.0)]])
    root = ElementTree.fromstring(svg.picture(300, 180, svg.panel(panel, 0, 0, 300, 180), "title"))
    (circle,) = root.iter(f"{SVG}circle")
    x0, x1, y0, y1 = 40, 280, 152, 20
    assert float(circle.get("cx")) == (x0 + x1) / 2, "10 is half way from 1 to 100"
    assert float(circle.get("cy")) == (y0 + y1) / 2, "50 is half of 100"


@pytest.mark.parametrize("top", (0.3, 1.0, 1.1, 7.0, 99.0, 100.0, 4272.0, 5001.0))
def test_axes_end_at_round_numbers(top: float) -> None:
    end, step = svg._nice(top)
    assert top <= end <= 2 * top and math.isclose(end / step, round(end / step)) and 2 <= round(end / step) <= 5


@needs_results
def test_every_family_with_records_has_a_picture() -> None:
    (file,) = meta.RESULTS.glob("*.json")
    found, owners = accepted.load(file), html.owners()
    families = {owners[r["row"]][0] for r in found["rows"] if r["row"] in owners}
    assert {path.stem for path in pictures.FOLDER.glob("*.svg")} == {*families, "models"}
    page = (meta.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert all(f"(pictures/{family}.svg)" in page for family in families)
    shown = pictures.points(found, ())
    for family in families:
        root = ElementTree.fromstring((pictures.FOLDER / f"{family}.svg").read_text(encoding="utf-8"))
        groups = [group for group in root.iter(f"{SVG}g") if group.get("fill") == svg.OURS]
        members = {(p.row, p.size, p.us) for p in shown if owners.get(p.row, ("",))[0] == family}
        assert sum(len(group) for group in groups) >= 0.9 * len(members), "equal points are drawn once"


@needs_results
def test_bars_are_the_recorded_models() -> None:
    e2e, policy = headline.recorded()
    text = (pictures.FOLDER / "models.svg").read_text(encoding="utf-8")
    for arm in e2e["results"]["train dense"]["arms"].values():
        assert f">{arm['step_ms']:.1f} ms<" in text and f">{arm['peak_mib'] / 1024:.1f} GiB<" in text
    assert f">{policy['rows']['rtkernels fp8']['ms']:.1f} ms<" in text and policy["date"] in text
    assert "docs/pictures/models.svg" in (meta.ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", [p for p in (meta.ROOT / "docs").rglob("*") if p.suffix in (".svg", ".png")], ids=lambda path: path.name
)
def test_pictures_are_small(path: Path) -> None:
    assert path.stat().st_size < 60_000
