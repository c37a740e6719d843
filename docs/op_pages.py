"""A page per op for the site: signatures, an example, error bounds and measured rows; a hook of mkdocs.

Nothing here is written to disk, so nothing can be out of date. The sources are pages and files of this repository, read
without importing the package: the builder of the site needs neither torch nor numpy.

=====================  =================================================================================
part of a page         source
=====================  =================================================================================
functions of an op     ``Op(..., public=...)`` in ``rtkernels/ops``
signature, summary     ``docs/api/<family>.md``, which ``docs/make_api.py`` writes
example                ``docs/op_examples.md``; for a newer op, ``CALLS`` in ``tests/contracts/samples``
error bounds           the table of ``docs/numerics.md``, and the errors of measured rows
measured rows          the data of ``docs/performance.html``, which ``python -m bench readme`` writes
=====================  =================================================================================
"""

from __future__ import annotations

import ast
import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FOLDER = "ops"
SOURCE = "https://github.com/rtkernels/rtkernels/blob/main"


class OpOf(NamedTuple):
    """An op with public functions."""

    name: str
    family: str
    public: tuple[str, ...]

    @property
    def api(self) -> str:
        """The page of its family in ``docs/api``."""
        return "indexing.md" if self.family == "index" else f"{self.family}.md"


@functools.cache
def ops() -> dict[str, OpOf]:
    """Return all ops with public functions, by name."""
    found = {}
    for path in sorted((ROOT / "rtkernels" / "ops").glob("*/*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "Op(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Op" and node.args:
                public = next((ast.literal_eval(k.value) for k in node.keywords if k.arg == "public"), ())
                if public:
                    name = ast.literal_eval(node.args[0])
                    found[name] = OpOf(name, path.parent.name, tuple(public))
    return found


# ---- signatures -----------------------------------------------------------------------------------------------------


@functools.cache
def _sections(page: str) -> dict[str, str]:
    """Return the sections of a page by heading."""
    parts = re.split(r"^## (.+)$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def signature(op: OpOf, name: str) -> tuple[str, str]:
    """Return a function's signature as a block of code, and the first paragraph of its description."""
    block, text = re.match(r"\s*(```python\n.*?\n```)\s*(.*)", _sections(f"api/{op.api}")[name], re.DOTALL).groups()
    return block, text.partition("\n\n")[0]


# ---- examples -------------------------------------------------------------------------------------------------------


def example(op: OpOf) -> str:
    """Return the code of an example that calls every function of an op."""
    section = _sections("op_examples.md").get(op.name)
    if section is not None:
        return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    return _from_samples(op)


def _from_samples(op: OpOf) -> str:
    """Return the calls by which the contracts try an op, as an example.

    Raises:
        ValueError: There are none.
    """
    contracts = ROOT / "tests" / "contracts"
    for path in (contracts / "samples" / op.family / f"{op.name}.py", contracts / "test_dynamic_rows.py"):
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
        named = {name: node for node in tree.body for name in _defined(node)}
        table = named["CALLS"].value if "CALLS" in named else ast.Dict([], [])
        labelled = zip(table.keys, table.values, strict=True)
        calls = [call for key, call in labelled if key and ast.literal_eval(key).partition(",")[0] in op.public]
        if calls:
            texts = [ast.unparse(c.body) if isinstance(c, ast.Lambda) else f"{ast.unparse(c)}(x, ids)" for c in calls]
            inputs = ["x = torch.randn(8, 256)", "ids = torch.rand(8, 8).topk(2).indices"]
            before = ["import torch, rtkernels", *_parts(calls, named), "", *inputs]
            return "\n".join([*before, *(f"out = {text}" for text in texts), ""])
    raise ValueError(f"docs/op_examples.md has no example of {op.name}, and tests/contracts/samples no calls")


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        return [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return []


def _parts(nodes: list[ast.AST], named: dict[str, ast.stmt]) -> list[str]:
    """Return the statements of a module that some nodes need, in their order."""
    wanted: dict[int, ast.stmt] = {}
    while nodes:
        for name in {n.id for n in ast.walk(nodes.pop()) if isinstance(n, ast.Name)} - {"torch", "rtkernels"}:
            if name in named and id(named[name]) not in wanted:
                wanted[id(named[name])] = named[name]
                nodes.append(named[name])
    return [ast.unparse(node) for node in sorted(wanted.values(), key=lambda node: node.lineno)]


# ---- error bounds and measured rows ---------------------------------------------------------------------------------


@functools.cache
def _bounds() -> tuple[tuple[frozenset[str], str, str], ...]:
    """Return the rows of the table of errors: the functions that a row is about, the result, the bound."""
    found, names = [], frozenset()
    for line in _sections("numerics.md")["Errors"].splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and not cells[1].startswith("--"):
            names = frozenset(re.findall(r"`(\w+)`", cells[0])) if cells[0] else names
            found.append((names, cells[1], cells[2]))
    return tuple(found)


def bounds(op: OpOf) -> list[tuple[str, str, str]]:
    """Return the bounds that docs/numerics.md states for an op: functions, result, bound."""
    return [
        (", ".join(f"`{name}`" for name in op.public if name in names), result, bound)
        for names, result, bound in _bounds() if names & {*op.public, op.name}
    ]  # fmt: skip


@functools.cache
def _measured() -> tuple[dict[str, Any], ...]:
    text = (DOCS / "performance.html").read_text(encoding="utf-8")
    return tuple(json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]))


# Ops of rows named after none: those of ``bench/rows/gemm/invariant.py``, which measures calls at a level of batch
# invariance, and the products of Muon.
_OWNERS = {
    "invariant_mm": "scaled_mm",
    "invariant_wgrad": "scaled_mm",
    "invariant_decode": "decode",
    "symmetric_mm": "scaled_mm",
}


def owner(row: dict[str, Any]) -> str | None:
    """Return the op of a measured row; of kernels without public functions, the op whose function names the row."""
    if row["op"] in ops():
        return row["op"]
    if row["row"] in _OWNERS:
        return _OWNERS[row["row"]]
    named = [(len(name), op.name) for op in ops().values() for name in op.public if row["row"].startswith(name)]
    return max(named)[1] if named else None


def measured(op: OpOf) -> list[dict[str, Any]]:
    """Return the measured rows of an op, by name."""
    return sorted((row for row in _measured() if owner(row) == op.name), key=lambda row: row["row"])


def tests(op: OpOf) -> list[Path]:
    """Return the files of tests of an op: those named after it, and not after an op with a longer name."""
    names = sorted(ops(), key=len, reverse=True)
    files = sorted((ROOT / "tests" / "ops" / op.family).glob(f"test_{op.name}*.py"))
    return [path for path in files if next(n for n in names if path.stem.startswith(f"test_{n}")) == op.name]


# ---- pages ----------------------------------------------------------------------------------------------------------


def _table(head: list[str], body: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body))


def _errors(op: OpOf) -> list[str]:
    found = bounds(op)
    if found:
        parts = ["u is one rounding to the result's type; [numerics](../numerics.md#errors) explains the terms."]
        parts.append(_table(["function", "result", "error"], [list(row) for row in found]))
    else:
        parts = ["The [general rules](../numerics.md#arithmetic) hold: fp32 arithmetic, one rounding per result."]
    rows = [row for row in measured(op) if isinstance(row["error"], float) and isinstance(row["error_torch"], float)]
    if rows:
        worst = max(rows, key=lambda row: row["error"])
        parts.append(
            f"Largest measured error against fp64, relative in the Frobenius norm: {worst['error']:.1e} "
            f"(`{worst['row']}` {worst['shape']}, {worst['date']}); that of plain torch in the same row is "
            f"{worst['error_torch']:.1e}."
        )
    links = ", ".join(f"[{path.name}]({SOURCE}/{path.relative_to(ROOT).as_posix()})" for path in tests(op))
    return [*parts, *([f"Checked by {links}."] if links else [])]


def _rows(op: OpOf) -> list[str]:
    rows = measured(op)
    if not rows:
        return ["No row of this op has a record yet."]
    body = []
    for row in rows:
        peer = "-" if row["peer"] is None else f"{row['peer']} {row['peer_us']:.1f}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        speed = f"{row['efficiency']:.2f}" if row["tflops"] is None else f"{row['tflops']:.0f} TFLOP/s"
        where = [row["gpu"].removeprefix("NVIDIA "), f"`{row['commit'][:8]}`", row["date"]]
        body.append([f"`{row['row']}`", row["shape"], f"{row['us']:.1f}", peer, ratio, speed, *where])
    head = ["row", "shape", "ours, µs", "fastest peer, µs", "ratio", "efficiency or rate", "GPU", "commit", "date"]
    return [
        "Medians with a flushed L2 cache and without host time. The ratio is the peer's time divided by ours: below 1, "
        f"the peer is faster. [All rows of the family, with their history](../performance.html#family={op.family}).",
        _table(head, body),
    ]


def page(op: OpOf) -> str:
    """Return the page of an op as Markdown."""
    parts = [f"# {op.name}", f"An op of the family [{op.family}](../api/{op.api})."]
    for name in op.public:
        block, summary = signature(op, name)
        parts += [f"## {name}", block, summary, f"[All arguments](../api/{op.api}#{name.lower()})"]
    parts += ["## Example", f"```python\n{example(op)}```"]
    parts += ["## Error bounds", *_errors(op), "## Measured rows", *_rows(op)]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """Return the page that lists all ops."""
    parts = ["# Ops", "A page per op: signatures, an example, error bounds and measured rows."]
    for family in sorted({op.family for op in ops().values()}):
        body = [
            [f"[{op.name}]({op.name}.md)", ", ".join(f"`{name}`" for name in op.public), f"{len(measured(op))}"]
            for op in ops().values() if op.family == family
        ]  # fmt: skip
        parts += [f"## {family}", _table(["op", "functions", "measured rows"], body)]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Return all pages by their path in ``docs``."""
    return {f"{FOLDER}/index.md": index(), **{f"{FOLDER}/{name}.md": page(op) for name, op in ops().items()}}


# ---- hooks ----------------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the site."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Link functions on the pages of the API to their op's page."""
    if not page.file.src_uri.startswith("api/"):
        return markdown
    for op in ops().values():
        for name in op.public if page.file.src_uri == f"api/{op.api}" else ():
            link = f"[Example, error bounds, measured rows](../{FOLDER}/{op.name}.md)"
            markdown = markdown.replace(f"\n## {name}\n", f"\n## {name}\n\n{link}\n", 1)
    return markdown
