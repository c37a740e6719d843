"""Write the table of promises into ``docs/how_to/batch_invariance.md``: ``python docs/make_invariance.py``."""

from __future__ import annotations

from pathlib import Path

from rtkernels.ops.shared.batch_invariance import table

PAGE = Path(__file__).parent / "how_to" / "batch_invariance.md"
START, END = "<!-- promises -->\n", "<!-- end of promises -->\n"


def main() -> None:
    """Replace what is between the marks."""
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}{table()}{END}{after}")


if __name__ == "__main__":
    main()
