"""docs/adding_an_op.md: its five files, put into a copy of the repository, are an op that passes the contracts."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreter import run_python
from support.places import emulated

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "adding_an_op.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.+?\n)```", GUIDE, re.DOTALL))
GENERATED = {"rtkernels/_public.py", "rtkernels/__init__.pyi", "docs/api/README.md", "docs/api/act.md"}


def test_the_guide_has_five_files() -> None:
    """Those of the table at its top, and the module is short."""
    listed = [path for path in re.findall(r"^\| `(\S+)` \|", GUIDE, re.MULTILINE) if "<op>" in path]
    assert [path.replace("<family>", "act").replace("<op>", "squared_relu") for path in listed] == list(FILES)
    lines = {name: len(text.splitlines()) for name, text in FILES.items()}
    assert lines.pop("rtkernels/ops/act/squared_relu.py") <= 75
    assert max(lines.values()) <= 45


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the repository with the files of the guide."""
    for folder in ("rtkernels", "cuda_src", "bench", "tests", "docs"):
        unused = shutil.ignore_patterns("__pycache__", "results", "*.png")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unused)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def _run(tree: Path, *arguments: str) -> str:
    own = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    done = run_python(*arguments, cwd=tree, env={**own, "PYTHONPATH": str(tree)})
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@emulated
@pytest.mark.one_in(1000)
def test_the_example_of_the_guide_works(tree: Path) -> None:
    _run(tree, "-m", "docs.make_public")
    assert '"squared_relu": "ops.act.squared_relu",' in (tree / "rtkernels/_public.py").read_text(encoding="utf-8")
    tests = ("tests/contracts/test_registry.py", "tests/ops/act/test_squared_relu.py")
    some = "not float16 and not cuda and not unknown"
    printed = _run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--op", "squared_relu", *tests, "-k", some)
    assert int(re.search(r"(\d+) passed", printed)[1]) > 20


def _is_python(name: str) -> bool:
    return name.endswith(".py")


@emulated
@pytest.mark.slow
def test_the_example_of_the_guide_passes_all_contracts(tree: Path) -> None:
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    _run(tree, "-m", "docs.make")
    changed = {path.relative_to(tree).as_posix() for path, text in before.items() if path.read_bytes() != text}
    assert changed == GENERATED
    if importlib.util.find_spec("ruff") is not None:
        subprocess.run([sys.executable, "-m", "ruff", "check", *filter(_is_python, FILES)], cwd=tree, check=True)
    printed = _run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--op", "squared_relu")
    assert int(re.search(r"(\d+) passed", printed)[1]) > 80
