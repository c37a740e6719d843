"""Check a built site: tables are tables, every op has a page, and the search finds it.

``python .ci/check_site.py build/site``. Needs nothing but Python, like the build of the site itself.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def check(site: Path) -> list[str]:
    """Return what is wrong with a site."""
    spec = importlib.util.spec_from_file_location("op_pages", ROOT / "docs" / "op_pages.py")
    op_pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(op_pages)
    searched = {entry["location"] for entry in json.loads((site / "search" / "search_index.json").read_text())["docs"]}
    wrong = []
    for name in op_pages.ops():
        page = site / op_pages.FOLDER / name / "index.html"
        if not page.is_file():
            wrong.append(f"{op_pages.FOLDER}/{name} has no page")
        elif f"{op_pages.FOLDER}/{name}/" not in searched:
            wrong.append(f"{op_pages.FOLDER}/{name} is not in the index of the search")
    for page in sorted(site.rglob("*.html")):
        text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        if found := re.search(r"^(?:<p>)?(?:\|.*\||=+ +=+.*)$", text, re.MULTILINE):
            wrong.append(f"{page.relative_to(site)}: a table that was not rendered: {found[0][:80]}")
    if not (site / "performance.html").is_file():
        wrong.append("performance.html, the page of benchmarks, is missing")
    return wrong


def main(arguments: list[str]) -> int:
    """Print what is wrong and return the exit status."""
    if len(arguments) != 1:
        print("usage: check_site.py SITE", file=sys.stderr)
        return 2
    wrong = check(Path(arguments[0]))
    print("\n".join(wrong) or f"{arguments[0]}: tables, pages of ops and search are complete")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
