"""The site's page of each op: its functions, an example that runs, bounds and rows of measurements."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import rtkernels
from rtkernels.runtime.operator import registry

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("op_pages", ROOT / "docs" / "op_pages.py")
    module = sys.modules["op_pages"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


op_pages = load()
OPS = op_pages.ops()


@pytest.mark.every_op
def test_every_op_has_a_page() -> None:
    assert {name: op.public for name, op in OPS.items()} == {op.name: op.public for op in registry.ops() if op.public}
    pages = op_pages.pages()
    assert set(pages) == {"ops/index.md", *(f"ops/{name}.md" for name in OPS)}
    for name, op in OPS.items():
        page = pages[f"ops/{name}.md"]
        assert f"[{name}]({name}.md)" in pages["ops/index.md"]
        for part in ("## Example", "## Error bounds", "## Measured rows", *(f"rtkernels.{f}(" for f in op.public)):
            assert part in page, f"{name}: {part}"
        for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table


@pytest.mark.parametrize("name", sorted(OPS))
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", op_pages.page(OPS[name])):
        target, _, anchor = link.partition("#")
        if target.startswith(op_pages.SOURCE):
            assert (ROOT / target.removeprefix(f"{op_pages.SOURCE}/")).is_file(), link
            continue
        path = (ROOT / "docs" / "ops" / target).resolve()
        assert path.is_file(), link
        if path.suffix == ".md" and anchor:
            assert anchor in {
                title.lower() for title in re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
            }


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", sorted(OPS))
def test_examples_run(name: str) -> None:
    code = op_pages.example(OPS[name])
    if name in op_pages._sections("op_examples.md"):
        missing = [function for function in OPS[name].public if not re.search(rf"rtkernels\.{function}\(", code)]
        assert not missing, f"docs/op_examples.md: the example of {name} does not call {', '.join(missing)}"
    exec(compile(code, f"example of {name}", "exec"), {})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ("rms_norm", "glu", "quantize_fp8"))
def test_examples_run_in_the_emulator(name: str) -> None:
    with rtkernels.emulate("sm_80"):
        exec(compile(op_pages.example(OPS[name]), f"example of {name}", "exec"), {})


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", sorted(OPS))
def test_a_newer_op_has_the_calls_of_the_contracts(name: str) -> None:
    try:
        code = op_pages._from_samples(OPS[name])
    except ValueError as error:
        assert "no calls" in str(error) and name in op_pages._sections("op_examples.md")
        return
    assert any(re.search(rf"\b{function}\(", code) for function in OPS[name].public)
    exec(compile(code, f"calls of {name}", "exec"), {})


def test_examples_are_those_of_ops() -> None:
    assert set(op_pages._sections("op_examples.md")) <= set(OPS)


def test_bounds_are_about_functions_that_exist() -> None:
    others = {"AdamW", "Lion", "Muon", "clip_grad_norm_"}
    names = set().union(*(names for names, _, _ in op_pages._bounds())) - others
    unknown = names - {function for op in OPS.values() for function in op.public}
    assert len(names) > 80 and not unknown, f"docs/numerics.md has errors of {', '.join(unknown)}, which no op offers"
    (first, *_) = op_pages.bounds(OPS["rms_norm"])
    assert first == ("`rms_norm`", "y", "u \\|y\\| + a few 2^-24 \\|y\\|")
    assert [row[1] for row in op_pages.bounds(OPS["cross_entropy"])] == ["loss, log-sum-exp", "dlogits"]


def test_every_measured_row_is_on_a_page() -> None:
    text = (ROOT / "docs" / "performance.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    on_pages = [row for op in OPS.values() for row in op_pages.measured(op)]
    of_layers = [row for row in data if op_pages.owner(row) is None]  # several ops together
    assert {row["family"] for row in of_layers} <= {"stacks"}
    assert len(on_pages) == len(data) - len(of_layers) > 300
    row = next(row for row in on_pages if (row["row"], row["shape"]) == ("rms_norm_fwd", "8192x4096"))
    line = next(line for line in op_pages.page(OPS["rms_norm"]).splitlines() if "`rms_norm_fwd` | 8192x4096" in line)
    assert f"| {row['us']:.1f} |" in line and row["date"] in line and row["commit"][:8] in line
    assert op_pages.owner({"op": "norm_modulated", "row": "rms_norm_residual_style_fp8"}) == "rms_norm"


def test_the_hook_links_pages_of_the_api() -> None:
    text = (ROOT / "docs" / "api" / "norm.md").read_text(encoding="utf-8")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="api/norm.md"))
    linked = op_pages.on_page_markdown(text, page=page, config=None, files=None)
    links = re.findall(r"^## (\w+)\n\n\[.*\]\(\.\./ops/(\w+)\.md\)$", linked, re.MULTILINE)
    assert dict(links) == {f: op.name for op in OPS.values() if op.family == "norm" for f in op.public}
    page.file.src_uri = "models.md"
    assert op_pages.on_page_markdown(text, page=page) == text


def test_the_hook_adds_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    added = []
    files = ModuleType("mkdocs.structure.files")
    files.File = SimpleNamespace(generated=lambda config, path, content: added.append((path, content)) or path)
    for name in ("mkdocs", "mkdocs.structure"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "mkdocs.structure.files", files)
    assert op_pages.on_files(["README.md"], config=None) == ["README.md", *op_pages.pages()]
    assert dict(added) == op_pages.pages()
