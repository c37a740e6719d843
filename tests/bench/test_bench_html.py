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

import pytest

from bench import meta
from bench.report import html

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
    """The cells of the table's body, and the text of the count."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = ""
        self.count = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        if tag == "tr" and ("id", "head") not in attrs:
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "td":
            self.rows[-1][-1] += data
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
    assert (first[5], first[10:]) == (entry["peer"] or "", ["H200", entry["commit"], entry["date"]])
    table = shown("losses=1&peer=torch", tmp_path)
    assert table.rows and all(float(row[7]) < 1 and row[5] == "torch" for row in table.rows)
