"""Write ``docs/notebooks/``: the tutorials as notebooks.

``python docs/make_notebooks.py`` writes them again; a test fails where they are not what the tutorials say. Blocks of
Python become cells, files that a page names are written by ``%%writefile``, and the output that a page shows is that of
the cell before it. Blocks for GPUs run where there is one.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "notebooks"
PAGES = {
    "first_steps": "first_steps",
    "train": "patch_and_train",
    "serve": "serve",
    "write_a_kernel": "write_an_op",
}
SETUP = """\
import os
import re
import shutil
import subprocess

# Kernels need compute capability 8.0. Older GPUs, such as the T4 of Colab's free tier (7.5), are hidden here, so that
# everything below runs on the CPU.
if shutil.which("nvidia-smi"):
    asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    found = re.findall(r"\\d+\\.\\d+", subprocess.run(asked, capture_output=True, text=True).stdout)
    if any(float(capability) < 8.0 for capability in found):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
"""
_BLOCK = re.compile(r"(?:<!-- ([^\n]+?) -->\n)?```(\w*)\n(.*?)```\n?", re.DOTALL)


def _cell(kind: str, text: str, number: int) -> dict[str, Any]:
    lines = text.strip("\n").splitlines(keepends=True)
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines}
    return cell | {"execution_count": None, "outputs": []} if kind == "code" else cell


def _linked(text: str) -> str:
    """Return text with links to other tutorials that work from the folder of notebooks."""
    return re.sub(r"\]\(([\w-]+\.md)", r"](../tutorials/\1", text)


def notebook(page: Path) -> dict[str, Any]:
    """Return the notebook of a tutorial."""
    text, cells, at = page.read_text(encoding="utf-8"), [], 0

    def add(kind: str, source: str) -> None:
        if source.strip():
            cells.append(_cell(kind, source, len(cells)))

    def prose(part: str) -> None:
        add("markdown", _linked(part))

    for block in _BLOCK.finditer(text):
        prose(text[at : block.start()])
        if not at:
            prose(f"Written by `docs/make_notebooks.py` from [the tutorial]({page.name}); install rtkernels first.")
            add("code", SETUP)
        at = block.end()
        mark, language, code = block[1] or "", block[2], block[3]
        if mark.startswith("file: "):
            add("code", f"%%writefile {mark.removeprefix('file: ')}\n{code}")
        elif mark == "output":
            lines = code.splitlines(keepends=True)
            last = next(cell for cell in reversed(cells) if cell["cell_type"] == "code")
            last["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}]
        elif language == "python" and mark == "gpu":
            add("code", "if torch.cuda.is_available():\n" + textwrap.indent(code, "    "))
        elif language == "python":
            add("code", code)
        else:
            prose(block[0])
    prose(text[at:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def notebooks() -> dict[str, str]:
    """Return all notebooks as text, by file name."""
    pages = {f"{name}.ipynb": DOCS / "tutorials" / f"{page}.md" for page, name in PAGES.items()}
    return {
        name: json.dumps(notebook(path), indent=1, ensure_ascii=False) + "\n" for name, path in pages.items()
    }  # fmt: skip


def main() -> None:
    """Write the notebooks."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in notebooks().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
