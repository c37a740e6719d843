"""Write the table of public functions in ``rtkernels/_public.py``: ``python docs/make_public.py``.

Each op says which functions it offers (``Op(public=...)``); the table says which module to import for a name, so that
``rtkernels.<name>`` imports its own family only. Lines that are there stay where they are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PATH = ROOT / "rtkernels" / "_public.py"
_TABLE = re.compile(r"(?<=^OPS = \{\n).*?(?=^\}$)", re.MULTILINE | re.DOTALL)


def table(listed: dict[str, str], public: dict[str, str]) -> dict[str, str]:
    """Return the table anew: without names that are gone, new ones behind those of their family.

    Args:
        listed: The table as it is.
        public: Every public function with the module of its op, ``ops.<family>.<op>``.
    """
    found = [(name, module) for name, module in listed.items() if name in public]
    for name in sorted(public.keys() - listed.keys()):
        family = public[name].rpartition(".")[0]
        places = [i for i, (_, module) in enumerate(found, 1) if module.rpartition(".")[0] == family]
        found.insert(max(places, default=len(found)), (name, public[name]))
    return dict(found)


def modules() -> dict[str, str]:
    """Return every public function with the module of its op."""
    from rtkernels.runtime.operator import registry

    ops = registry.ops()
    names = {module.OP.name: name for name, module in list(sys.modules.items()) if _is_an_op(name, module)}
    return {name: names[op.name].removeprefix("rtkernels.") for op in ops for name in op.public}


def _is_an_op(name: str, module: object) -> bool:
    return name.startswith("rtkernels.ops.") and hasattr(module, "OP")


def text() -> str:
    """Return what the file has to be."""
    from rtkernels import _public

    lines = [f'    "{name}": "{module}",\n' for name, module in table(_public.OPS, modules()).items()]
    return _TABLE.sub("".join(lines), PATH.read_text(encoding="utf-8"), count=1)


def main() -> None:
    """Write the table anew."""
    PATH.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
