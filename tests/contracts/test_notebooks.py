"""docs/notebooks: as generated from the tutorials, and their cells run from top to bottom on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import pytest
from support.interpreter import run_python

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_notebooks", ROOT / "docs" / "make_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load()

# What a notebook server does with cells, as far as these have any use for it.
RUNNER = """
import io, contextlib, json, pathlib, sys, torch
torch.cuda.is_available = lambda: False
sys.path.insert(0, "")
names, ran = {"__name__": "__main__"}, 0
for cell in json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))["cells"]:
    if cell["cell_type"] != "code":
        continue
    text = "".join(cell["source"])
    if text.startswith("%%writefile "):
        name, _, rest = text.removeprefix("%%writefile ").partition("\\n")
        pathlib.Path(name).write_text(rest + "\\n", encoding="utf-8")
        continue
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(text, cell["id"], "exec"), names)
    ran += 1
    for output in cell["outputs"]:
        shown, printed = "".join(output["text"]).split(), out.getvalue().split()
        assert shown == printed, (cell["id"], shown, printed)
print(ran, "cells")
"""


@pytest.mark.parametrize("name", make.notebooks())
def test_notebooks_are_those_of_the_tutorials(name: str) -> None:
    path = make.FOLDER / name
    assert path.read_text(encoding="utf-8") == make.notebooks()[name], "run python docs/make_notebooks.py"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells) and cells[0]["source"][0].startswith("# ")
    assert "8.0" in "".join(cells[2]["source"]), "the first code says which GPUs work"


# The code of two of them takes seconds, and test_tutorials.py runs it from the pages; that of another one compiles.
MARKS = {
    "patch_and_train.ipynb": [pytest.mark.slow],
    "serve.ipynb": [pytest.mark.slow],
    "write_an_op.ipynb": [pytest.mark.one_in(3)],
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in make.notebooks()])
def test_notebooks_run(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python("-c", RUNNER, str(make.FOLDER / name), cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-2]) >= 2
