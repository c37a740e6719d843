"""Write ``docs/api/``: one page per family of ops, from the docstrings of its public functions.

``python docs/make_api.py`` writes the pages anew; a test fails where they are not what the docstrings say.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from rtkernels import _public  # noqa: E402

NOTE = "<!-- Written by docs/make_api.py from the docstrings. -->"
WIDTH = 100
PACKAGES = ("losses", "models", "nn", "optim")  # whose public names are not in the package itself
OTHER = "Switches, records, tools and errors."


def families() -> dict[str, list[tuple[str, str]]]:
    """Return every page's public names with the module of each."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, module in _public.OPS.items():
        found.setdefault(module.split(".")[1], []).append((name, module))
    for page in PACKAGES:
        names = importlib.import_module(f"rtkernels.{page}").__all__
        found[page] = [(f"{page}.{name}", page) for name in names]
    found["other"] = list(_public.OTHERS.items())
    return {page: sorted(names) for page, names in sorted(found.items())}


def signature(name: str, function: object) -> str:
    """Return a signature as source code, one argument per line where it is long."""
    about = inspect.signature(function)
    parts, starred = [], False
    for parameter in about.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        starred = starred or stars == "*"
        hint = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)  # of a NamedTuple
        annotation = "" if parameter.annotation is parameter.empty else f": {hint}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{stars}{parameter.name}{annotation}{default}")
    unsaid = inspect.isclass(function) or about.return_annotation is about.empty
    result = "" if unsaid else f" -> {about.return_annotation}"
    line = f"{name}({', '.join(parts)}){result}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def docstring(function: object) -> str:
    """Return a docstring as Markdown: its sections as paragraphs, their entries as lists."""
    lines, section = [], False
    for line in _markdown(function.__doc__).splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if stripped in ("Args:", "Returns:", "Raises:", "Attributes:", "Yields:", "Example:") and not indent:
            section = True
            lines += [f"**{stripped[:-1]}**", ""]
        elif section and indent == 4 and stripped:
            name, colon, rest = stripped.partition(": ")
            named = colon and all(part.strip("*, ").isidentifier() for part in name.split(","))
            if named:
                lines.append(f"- `{name}`: {rest}")
            else:
                lines.append(f"  {stripped}" if _goes_on(lines) else f"- {stripped}")
        elif section and indent > 4:
            lines.append(f"  {stripped}")
        else:
            section = section and (bool(indent) or not stripped)
            lines.append(line)
    return "\n".join(lines).strip()


def _markdown(text: str | None) -> str:
    """Return text of a docstring with its code in single backquotes and its tables in Markdown's form."""
    return re.sub(r":(?:func|class|meth):(?=`)", "", _with_tables(inspect.cleandoc(text or "")).replace("``", "`"))


def _with_tables(text: str) -> str:
    """Return text with tables between rulers of ``=`` as tables of pipes, which sites and GitHub render."""
    lines, given = [], iter(text.splitlines())
    for line in given:
        if not re.fullmatch(r"=+(?: +=+)+", line):
            lines.append(line)
            continue
        starts = [found.start() for found in re.finditer("=+", line)]
        head, body = _rows(given, line, starts, joined=True), _rows(given, line, starts, joined=False)
        if lines and lines[-1]:
            lines.append("")
        lines += [f"| {' | '.join(cells)} |" for cells in (*head, ["---"] * len(starts), *body)]
        lines.append("")
    return "\n".join(lines)


def _rows(given: Iterator[str], ruler: str, starts: list[int], joined: bool) -> list[list[str]]:
    """Return the cells of the lines up to the next ruler; lines without a first cell, or all if `joined`, go on.

    Text that crosses a border between columns, and lines that continue it, are one cell, the second.
    """
    rows: list[list[str]] = []
    crosses = False
    for line in given:
        if line == ruler:
            return rows
        begins = not joined and bool(line[: starts[1]].strip())
        crosses = (crosses and not begins) or any(line[start - 1 : start].strip() for start in starts[2:])
        ends = [starts[1], None, *(0 for _ in starts[2:])] if crosses else [*starts[1:], None]
        cells = [line[start:end].strip().replace("|", "\\|") for start, end in zip(starts, ends, strict=True)]
        if rows and (joined or not cells[0]):
            rows[-1] = [f"{one} {more}".strip() for one, more in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    raise ValueError(f"a table has no last ruler: {ruler}")


def _goes_on(lines: list[str]) -> bool:
    """Whether the line before belongs to an entry of the section."""
    return bool(lines) and lines[-1].startswith(("- ", "  "))


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def page(family: str, names: list[tuple[str, str]]) -> str:
    """Return the text of one page."""
    if family == "other":
        about = OTHER
    else:
        about = importlib.import_module(f"rtkernels.{family if family in PACKAGES else f'ops.{family}'}").__doc__
    about = _markdown(about)
    parts = [NOTE, f"# {family}", about.partition("\n\n")[0] if family == "models" else about]  # its modules follow
    for name, module in names:
        value = getattr(importlib.import_module(f"rtkernels.{module}"), name.rpartition(".")[2])
        shown = f"rtkernels.{name}"
        code = f"class {shown}({value.__base__.__name__})" if _is_error(value) else signature(shown, value)
        parts += [f"## {name.rpartition('.')[2]}", f"```python\n{code}\n```", docstring(value)]
    return "\n\n".join(parts) + "\n"


def file_of(family: str) -> str:
    """Return the name of a family's page; index.md would be the index of the folder on a site."""
    return "indexing.md" if family == "index" else f"{family}.md"


def summary(function: object) -> str:
    """Return the first paragraph of a docstring up to the end of its first sentence, for a cell of a table."""
    first = " ".join(_markdown(function.__doc__).partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:]) (?=[A-Z`])", first)[0]
    return sentence.rstrip(".:").replace("|", "\\|")


def pages() -> dict[str, str]:
    """Return all pages by file name."""
    about = (
        "Every op, module and optimizer, by family. The pages have shapes, dtypes, strides and rounding, as the "
        "docstrings state them."
    )
    texts, index = {}, [NOTE, "# API", about]
    for family, names in families().items():
        rows = ["| name | what it does |", "|---|---|"]
        for name, module in names:
            bare = name.rpartition(".")[2]
            value = getattr(importlib.import_module(f"rtkernels.{module}"), bare)
            rows.append(f"| [`{bare}`]({file_of(family)}#{bare.lower()}) | {summary(value)} |")
        index += [f"## [{family}]({file_of(family)})", "\n".join(rows)]
        texts[file_of(family)] = page(family, names)
    return {"README.md": "\n\n".join(index) + "\n", **texts}


def main() -> None:
    """Write the pages and remove those of families that are gone."""
    folder = DOCS / "api"
    folder.mkdir(exist_ok=True)
    texts = pages()
    for path in folder.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
