"""Write ``docs/api/``: one page per family of ops, from the docstrings of its public functions.

``python docs/make_api.py`` writes the pages anew; a test fails where they are not what the docstrings say.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from rtkernels import _public  # noqa: E402

NOTE = "<!-- Written by docs/make_api.py from the docstrings. -->"
WIDTH = 100


def families() -> dict[str, list[tuple[str, str]]]:
    """Return every page's public names with the module of each."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, module in _public.OPS.items():
        found.setdefault(module.split(".")[1], []).append((name, module))
    others = {"nn": "rtkernels.nn", "optim": "rtkernels.optim"}
    for page, module in others.items():
        names = importlib.import_module(module).__all__
        found[page] = [(f"{page}.{name}", page) for name in names]
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
        annotation = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
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
    """Return text of a docstring with its code in single backquotes."""
    return re.sub(r":(?:func|class|meth):(?=`)", "", inspect.cleandoc(text or "").replace("``", "`"))


def _goes_on(lines: list[str]) -> bool:
    """Whether the line before belongs to an entry of the section."""
    return bool(lines) and lines[-1].startswith(("- ", "  "))


def page(family: str, names: list[tuple[str, str]]) -> str:
    """Return the text of one page."""
    package = importlib.import_module(f"rtkernels.{family}" if family in ("nn", "optim") else f"rtkernels.ops.{family}")
    parts = [NOTE, f"# {family}", _markdown(package.__doc__)]
    for name, module in names:
        value = getattr(importlib.import_module(f"rtkernels.{module}"), name.rpartition(".")[2])
        shown = f"rtkernels.{name}"
        parts += [f"## {name.rpartition('.')[2]}", f"```python\n{signature(shown, value)}\n```", docstring(value)]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Return all pages by file name."""
    about = "One page per family of ops: shapes, dtypes, strides and rounding, as the docstrings state them."
    table = ["| page | names |", "|---|---|"]
    texts = {}
    for family, names in families().items():
        bare = [name.rpartition(".")[2] for name, _ in names]
        shown = ", ".join(f"[`{name}`]({family}.md#{name.lower()})" for name in bare)
        table.append(f"| [{family}]({family}.md) | {shown} |")
        texts[f"{family}.md"] = page(family, names)
    return {"README.md": "\n\n".join([NOTE, "# API", about, "\n".join(table)]) + "\n", **texts}


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
