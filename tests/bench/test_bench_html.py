"""docs/performance.html: its data is that of bench/results, and a browser shows it sorted and filtered."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from bench import meta
from bench.report import history, html

pytestmark = pytest.mark.skipif(not any(meta.RESULTS.glob("*.json")), reason="an sdist has no results")
PAGE = meta.ROOT / "docs" / "performance.html"


def results() -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(meta.RESULTS.glob("*.json"))]


class Scripts(HTMLParser):
    """Collects scripts with their attributes, and everything that would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "script":
            self.scripts.append((given, ""))
        if given.get("src") or (tag == "link" and given.get("href")):
            self.loaded.append(given.get("src") or given["href"])

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            about, text = self.scripts[-1]
            self.scripts[-1] = about, text + data


def read() -> tuple[list[dict[str, Any]], Scripts]:
    parser = Scripts()
    parser.feed(PAGE.read_text(encoding="utf-8"))
    (data,) = (text for about, text in parser.scripts if about.get("id") == "data")
    return json.loads(data), parser


def test_data_is_that_of_the_results() -> None:
    found, parser = read()
    assert not parser.loaded and "@import" not in PAGE.read_text(encoding="utf-8"), "nothing comes from elsewhere"
    measured = {
        (row["row"], row["shape"], result["runs"][row["run"]]["gpu"]): (row, result["runs"][row["run"]])
        for result in results() for row in result["rows"]
    }  # fmt: skip
    assert len(found) == len(measured) > 300
    for entry in found:
        row, run = measured[entry["row"], entry["shape"], entry["gpu"]]
        assert (entry["us"], entry["efficiency"], entry["dtype"]) == (row["us"], row["efficiency"], row["dtype"])
        times = {name: us for name, us in row["peers"].items() if isinstance(us, (int, float))}
        assert entry["peers"] == times and entry["peer_us"] == min(times.values(), default=None)
        assert entry["peer"] is None or times[entry["peer"]] == entry["peer_us"]
        assert entry["ratio"] == (None if not times else round(min(times.values()) / row["us"], 4))
        assert run["commit"].startswith(entry["commit"]) and run["date"].startswith(entry["date"])


def test_losses_come_first_and_families_are_known() -> None:
    found, _ = read()
    ratios = [entry["ratio"] for entry in found if entry["ratio"] is not None]
    assert ratios == sorted(ratios) and None not in [entry["ratio"] for entry in found[: len(ratios)]]
    folders = {path.name for path in (meta.ROOT / "bench" / "rows").iterdir() if path.is_dir()}
    assert {entry["family"] for entry in found} <= folders


def test_text_cannot_end_the_script() -> None:
    text = html.page([{"row": "</script><b>"}])
    assert "</script><b>" not in text and json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])[0] == {
        "row": "</script><b>"
    }


def browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Table(HTMLParser):
    """The cells of the table's body, of an open history and of the releases, and the text of the count."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, list[list[str]]] = {"body": [], "releases": [], "earlier": []}
        self.part = self.inside = self.count = ""

    @property
    def rows(self) -> list[list[str]]:
        return self.parts["body"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.inside = {"button": self.inside, "a": self.inside}.get(tag, tag)
        if tag == "tbody" and given.get("id"):
            self.part = given["id"]
        elif tag == "tr" and given.get("class") == "earlier":
            self.part = "earlier"
        elif tag == "tr" and self.part:
            self.parts[self.part].append([])
        elif tag == "td" and self.part and self.parts[self.part]:
            self.parts[self.part][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""
        if tag == "table":
            self.part = "body" if self.part == "earlier" else ""

    def handle_data(self, data: str) -> None:
        if self.inside == "td" and self.part:
            self.parts[self.part][-1][-1] += data
        elif self.inside == "output":
            self.count += data


def shown(address: str, folder: Path) -> Table:
    """Return the table that a browser shows at the page's address with this fragment."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
    command = [browser(), *flags, f"--user-data-dir={folder}", f"{PAGE.as_uri()}#{address}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(folder)}, check=True
    )
    table = Table()
    table.feed(done.stdout)
    return table


@pytest.mark.skipif(browser() is None, reason="no chromium here: the page is not opened")
def test_a_browser_filters_and_sorts(tmp_path: Path) -> None:
    data, _ = read()
    table = shown("", tmp_path)
    losses = sum(entry["ratio"] is not None and entry["ratio"] < 1 for entry in data)
    assert table.count == f"{len(data)} rows, {losses} losses" and len(table.rows) == len(data)
    table = shown("family=norm&sort=us&descending=1&text=rms_norm", tmp_path)
    wanted = [entry for entry in data if entry["family"] == "norm" and "rms_norm" in f"{entry['row']} {entry['shape']}"]
    wanted.sort(key=lambda entry: -entry["us"])
    assert len(table.rows) == len(wanted) > 5
    assert [row[4] for row in table.rows] == [f"{entry['us']:.2f}" for entry in wanted]
    first, entry = table.rows[0], wanted[0]
    assert first[:4] == [entry["row"], entry["shape"], entry["dtype"], "norm"]
    release, records = entry["release"], str(len(entry["earlier"]) + 1)
    assert (first[5], first[10:]) == (
        entry["peer"] or "", ["H200", entry["commit"], entry["date"], release, records]
    )  # fmt: skip
    table = shown("losses=1&peer=torch", tmp_path)
    assert table.rows and all(float(row[7]) < 1 and row[5] == "torch" for row in table.rows)


def records_of(entry: dict[str, Any]) -> list[list[Any]]:
    last = [entry[key] for key in ("date", "release", "us", "peer", "peer_us", "commit")]
    return [*entry["earlier"], last]


@pytest.mark.skipif(browser() is None, reason="no chromium here: the page is not opened")
def test_a_browser_shows_the_history(tmp_path: Path) -> None:
    data, _ = read()
    entry = max(data, key=lambda entry: len(entry["earlier"]))
    wanted = records_of(entry)
    assert len(wanted) > 5
    address = urlencode({"open": f"{entry['row']} {entry['shape']} {entry['gpu']}", "history": "1"})
    table = shown(address, tmp_path)
    assert len(table.rows) == len(data), "the history is no row of the table"
    shown_records = [cells for cells in table.parts["earlier"] if cells]
    assert [[c[0], c[1], c[2], c[3], c[6]] for c in shown_records] == [
        [day, release, f"{us:.2f}", peer or "", commit] for day, release, us, peer, _, commit in wanted
    ]
    days = {(record[1], record[0]) for other in data for record in records_of(other)}
    assert {(cells[0], cells[1]) for cells in table.parts["releases"]} == days
    (line,) = (c for c in table.parts["releases"] if c[1] == max(day for _, day in days))
    assert int(line[2]) == sum(other["date"] == line[1] for other in data)


def test_histories_are_those_recorded() -> None:
    found, _ = read()
    known = history.releases((meta.ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    recorded = {}
    for path in sorted(history.FOLDER.glob("*.json")):
        for record in history.load(path):
            recorded.setdefault((path.stem, record["row"], record["shape"]), []).append(record)
    assert sum(map(len, recorded.values())) > 800
    for entry in found:
        records = recorded.pop((meta.short_name(entry["gpu"]), entry["row"], entry["shape"]), [])
        assert [r["date"] for r in records] == sorted(r["date"] for r in records), "oldest first"
        assert entry["earlier"] == [
            [r["date"][:10], history.release_of(r["date"], known), r["us"], r["peer"], r["peer_us"], r["commit"]]
            for r in records
        ]
    assert not recorded, "of rows that are gone"


def test_releases_are_headings_of_the_changelog() -> None:
    known = history.releases("# Changelog\n\n## 0.3.0 (unreleased)\n\n## 0.2.0 (2027-02-01)\n\n## 0.1.0 (2026-12-24)\n")
    assert known == [("0.1.0", "2026-12-24"), ("0.2.0", "2027-02-01"), ("0.3.0", None)]
    days = {
        "2026-11-18T01:02:03": "0.1.0",
        "2026-12-24": "0.1.0",
        "2026-12-25": "0.2.0",
        "2027-03-01": "0.3.0 (unreleased)",
    }
    assert {day: history.release_of(day, known) for day in days} == days
    assert history.release_of("2027-03-01", known[:2]) == "next"


def test_a_measurement_that_is_replaced_is_kept(tmp_path: Path) -> None:
    def numbers(date: str, **times: float) -> dict[str, Any]:
        rows = [
            {
                "run": 0,
                "row": name,
                "shape": "1",
                "us": us,
                "efficiency": 1.0,
                "peers": {"torch": 9.0, "a": {"absent": ""}},
            }
            for name, us in times.items()
        ]
        return {"runs": [{"date": date, "commit": "c" * 40}], "rows": rows}

    both = numbers("2026-01-02", x=2.0)
    both["rows"] += [{**row, "run": 1} for row in numbers("2026-01-01", y=3.0)["rows"]]
    both["runs"].append({"date": "2026-01-01", "commit": None})
    replaced = history.replaced(numbers("2026-01-01", x=1.0, y=3.0), both)
    assert [(r["row"], r["us"], r["peer"], r["peer_us"], r["commit"]) for r in replaced] == [
        ("x", 1.0, "torch", 9.0, "c" * 12)
    ]
    history.save([*replaced, *replaced], tmp_path / "a" / "gpu.json")
    assert history.load(tmp_path / "a" / "gpu.json") == replaced and history.load(tmp_path / "none.json") == []
    (tmp_path / "a" / "gpu.json").write_text('{"schema": 9}')
    with pytest.raises(meta.ResultError, match="schema 9; expected 1"):
        history.load(tmp_path / "a" / "gpu.json")
