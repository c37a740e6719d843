"""The documents say what the code does: pages from docstrings, environment variables, links, the README's length."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import rtkernels
from rtkernels import __main__ as cli
from rtkernels.runtime import env

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.every_op
def test_the_api_pages_are_those_of_the_docstrings() -> None:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    written = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md")}
    expected = make_api.pages()
    stale = [name for name in {**written, **expected} if written.get(name) != expected.get(name)]
    assert not stale, f"docs/api/{', '.join(stale)} is out of date. It is generated: run python docs/make.py"


def test_a_page_lists_every_environment_variable() -> None:
    text = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(RTKERNELS_\w+)` \|", text, re.MULTILINE)
    assert rows == [variable.name for variable in env.VARIABLES]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, heading = link.partition("#")
        if target.startswith("http"):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {link}"
        if heading and path.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{page.name} links to {link}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "decisions").glob("[!R]*.md")), ids=lambda path: path.stem)
def test_decisions_begin_with_what_holds_now(page: Path) -> None:
    titles = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert titles[:2] == ["What holds now", "History"]


def test_the_index_of_decisions_names_every_page() -> None:
    folder = ROOT / "docs" / "decisions"
    linked = re.findall(r"\]\((\w+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(path.name for path in folder.glob("[!R]*.md"))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_index_names_every_page() -> None:
    folder = ROOT / "docs"
    linked = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", _page("README.md"))}
    pages = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")} - {"README.md"}
    assert not {page for page in pages - linked if not page.startswith(("api/", "decisions/"))}


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def _after(mark: str, text: str) -> str:
    """Return the paragraph or table behind a mark."""
    return text.split(f"<!-- {mark} -->\n")[1].split("\n\n")[0]


def test_functions_without_out_are_named() -> None:
    named = set(re.findall(r"`(\w+)`", _after("without out", _page("how_to/inference.md")))) - {"_"}
    functions = {name: getattr(rtkernels, name) for name in rtkernels._public.OPS if not name.endswith("_")}
    without = {name for name, f in functions.items() if "out" not in inspect.signature(f).parameters}
    without -= {"check_labels", "nvfp4_scale_bytes", "tensor_list"}  # which return no tensor
    assert named == without


def test_functions_that_work_in_place_by_out() -> None:
    named = re.findall(r"`(\w+)`", _after("over an argument", _page("how_to/inference.md")))
    extra = {"add_residual": [torch.ones(4, 8)], "add_bias": [torch.ones(8)], "euler_step": [torch.ones(4, 8), 0.5]}
    extra |= {"glu": [torch.ones(4, 8)], "act": ["silu"], "channel_mul": [torch.ones(8)]}
    extra |= {"cfg_combine": [torch.ones(4, 8), torch.ones(4, 8), 0.5]}
    outs = {name: re.search(r"^    out: (?:.|\n {8})*", _doc(name), re.MULTILINE) for name in rtkernels._public.OPS}
    documented = {name for name, out in outs.items() if out and re.search(r"\bmay be\b", out[0], re.IGNORECASE)}
    assert {*named} - {"out"} == documented - {"attention", "attention_varlen"}  # those take q, of 16 bits
    for name in set(named) - {"out"}:
        x, more = torch.randn(4, 8), extra.get(name, [])
        expected = getattr(rtkernels, name)(x.clone(), *more)
        assert getattr(rtkernels, name)(x, *more, out=x) is x, name
        assert torch.equal(x, expected), name


def _doc(name: str) -> str:
    return inspect.getdoc(getattr(rtkernels, name)) or ""


def test_survivors_of_mutation_are_those_recorded() -> None:
    record = json.loads((ROOT / "tests" / "mutation" / "recorded.json").read_text(encoding="utf-8"))
    command, family, survived = (len(record[key]) for key in ("command", "family", "survived"))
    judged, page = command + family + survived, _page("mutation.md")
    assert f"({command / judged:.0%} are recorded)".replace("%", " %") in page
    killed = f"{(command + family) / judged:.1%}".replace("%", " %")
    assert f"({killed} are recorded; {survived} of {judged:,} survive)" in page


def test_reasons_are_those_of_the_code() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "rtkernels" / "models").glob("*.py"))
    table = _after("reasons", _page("how_to/patch_a_model.md")).splitlines()[2:]
    for reason in [reason for line in table for reason in re.findall(r"`([^`]+)`", line.split(" | ")[0])]:
        assert reason in code, reason


def test_the_command_line_has_these_commands() -> None:
    table = _after("commands", _page("command_line.md")).splitlines()[2:]
    rows = dict(re.findall(r"^\| `(\w+)(.*?)` \|", "\n".join(table), re.MULTILINE))
    (commands,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert rows.keys() == commands.choices.keys()
    for name, options in rows.items():
        known = {option for action in commands.choices[name]._actions for option in action.option_strings}
        assert set(re.findall(r"--[\w-]+", options)) <= known, name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_times_of_models_are_those_measured(page: Path) -> None:
    measured = _page("measured_models.md")
    for paragraph in page.read_text(encoding="utf-8").split("\n\n"):
        if re.search(r"measured \d{4}-\d\d-\d\d\]\([./]*measured_models\.md", paragraph):
            for number in re.findall(r"([\d.]+) ms", paragraph):
                assert re.search(rf"\| {re.escape(number)} [(|]", measured), number


def test_layers_on_pages_are_those_recorded() -> None:
    recorded = json.loads((ROOT / "bench" / "results" / "h200.json").read_text(encoding="utf-8"))
    layers, rows = recorded["layers"], recorded["rows"]
    (experts,), (decoder,) = (layers[name]["measured"]["rows"] for name in ("fp8_moe", "decoder_4096"))
    times = [f"{experts[way]['forward_and_backward_ms']:.1f} ms" for way in ("fp8", "fixed")]
    assert f"({times[0]} against {times[1]}, `fp8_moe`" in _page("how_to/train_in_fp8.md")
    peaks = [f"{decoder[way]['peak_mib']} MiB" for way in ("reuse", "rtkernels")]
    assert f"needs {peaks[0]} with `reuse` and {peaks[1]} without" in _page("how_to/save_memory.md")
    for recipe, error in {"block": 0.037, "row": 0.037, "tensor": 0.059}.items():
        found = [row["error_ours"] for row in rows if row["row"] == f"fp8_linear_{recipe}"]
        assert found and all(abs(value - error) < 0.001 for value in found), recipe


# Of operators, of examples that a reader writes, and of what needs a package that may not be installed.
OTHER_NAMES = (
    *("rtkernels.rms_norm_fwd", "rtkernels.squared_relu", "rtkernels.ops.act.squared_relu", "rtkernels.my_softsign"),
    "rtkernels.scaled",
    "rtkernels.jax",
    "rtkernels.integrations.openrlhf",
    "rtkernels.integrations.torchtitan",
    "rtkernels.integrations.verl",
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_and_files_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for found in {f"rtkernels.{rest}" for rest in re.findall(r"\b(?:rtkernels|rtk)\.([a-zA-Z_][\w.]*\w)", text)}:
        if not found.startswith(OTHER_NAMES):
            pkgutil.resolve_name(found)
    for path in re.findall(r"`((?:tests|cuda_src|bench|rtkernels|docs|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ((?:rtkernels|bench)[\w.]*)", text):
        assert importlib.util.find_spec(module) is not None, module
    for test in re.findall(r"`(test_\w+)`", text):
        assert any(test in code for code in _tests()), test


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_that_are_quoted_are_those_of_the_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path, number, line in re.findall(r" at (cuda_src/[\w/.]+):(\d+)\n\2\t(.+)", text):
        assert (ROOT / path).read_text(encoding="utf-8").splitlines()[int(number) - 1] == line


@functools.cache
def _tests() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
