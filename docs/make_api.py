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
PACKAGES = ("models", "nn", "optim")  # whose public names are not in the package itself
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
    """Return text of a docstring with its code in single backquotes."""
    return re.sub(r":(?:func|class|meth):(?=`)", "", inspect.cleandoc(text or "").replace("``", "`"))


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
            rows.append(f"| [`{bare}`]({family}.md#{bare.lower()}) | {summary(value)} |")
        index += [f"## [{family}]({family}.md)", "\n".join(rows)]
        texts[f"{family}.md"] = page(family, names)
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
