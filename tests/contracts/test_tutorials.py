"""Code on the pages: tutorials run from top to bottom, and calls elsewhere have arguments that exist.

In a tutorial all blocks of Python share one namespace and run on the CPU in an empty folder. A block after
``<!-- gpu -->`` is compiled only, and one of text after ``<!-- output -->`` is what the block before it prints.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import rtkernels
import rtkernels.compat.transformer_engine  # also named on pages
import rtkernels.nn.parallel
import rtkernels.nn.symmetric

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_FILES = "write_a_kernel.md"  # its files are run by test_custom_kernels.py


class Block(NamedTuple):
    """A block of code, what kind of text it is, the mark before it, and its first line on the page."""

    language: str
    mark: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"(?:<!-- ([^\n]+?) -->\n)?```(\w*)\n(.*?)```", text, re.DOTALL):
        yield Block(found[2], found[1] or "", found[3], text.count("\n", 0, found.start(3)))


@pytest.mark.parametrize("page", [p for p in TUTORIALS if p.name != OTHER_FILES], ids=lambda path: path.stem)
@pytest.mark.one_in(3)
def test_tutorials_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names: dict[str, Any] = {"__name__": page.stem}
    printed, ran = "", 0
    for block in blocks(page):
        if block.language == "python":
            code = compile("\n" * block.line + block.text, str(page), "exec")
            if block.mark != "gpu":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(code, names)
                printed, ran = out.getvalue(), ran + 1
        elif block.mark == "output":
            assert [line.rstrip() for line in printed.strip().splitlines()] == block.text.strip().splitlines(), page
    assert ran >= 3


def _calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """Return the functions of the package that are called, with the names of keywords."""
    with contextlib.suppress(SyntaxError):  # a line of a table, say
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and re.match(r"(rtkernels|rtk)\.[\w.]+$", ast.unparse(node.func)):
                yield ast.unparse(node.func), [keyword.arg for keyword in node.keywords if keyword.arg]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_blocks_are_python_and_calls_have_their_arguments(page: Path) -> None:
    found = [block for block in blocks(page) if block.language == "python"]
    for block in found if "api" not in page.parts else ():  # signatures there
        ast.parse(block.text)
    spans = re.findall(r"`((?:rtkernels|rtk)\.[^`]+)`", page.read_text(encoding="utf-8"))
    for text in [block.text for block in found] + [span.replace("…", "") for span in spans]:
        for name, keywords in _calls(text):
            if name.startswith(("rtkernels.jax", "rtkernels.squared_relu", "rtkernels.my_")):
                continue
            function = functools.reduce(getattr, name.split(".")[1:], rtkernels)
            parameters = inspect.signature(function).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                assert set(keywords) <= set(parameters), f"{page.name}: {name}"


def test_the_lines_of_the_readme_run(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from support.tiny_models import build

    (text,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    code = text.replace('"cuda"', '"cpu"').replace("1000, (2, 512)", "64, (2, 8)")
    assert code != text and len([line for line in text.splitlines() if line.strip()]) <= 12
    model = build("qwen3")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name, dtype: model)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
    assert rtkernels.models.report(model).replaced["norm"] > 0 and names["y"].shape == (64, 1024)
