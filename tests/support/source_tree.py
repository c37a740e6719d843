"""The device sources with some files changed or added, for tests that compile modified sources."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rtkernels.emulator import _build
from rtkernels.runtime.build import sources


@contextmanager
def source_tree(files: Mapping[str, str]) -> Iterator[Path]:
    """Make kernels come from a temporary tree: links to all device sources, and these files in their place.

    Args:
        files: Name relative to ``cuda_src`` -> text.
    """
    before = sources._root_override
    with tempfile.TemporaryDirectory(prefix="rtkernels-sources-") as folder:
        tree = Path(folder) / "cuda_src"
        shutil.copytree(sources.root(), tree, copy_function=os.symlink)
        for name, text in files.items():
            (tree / name).unlink(missing_ok=True)
            (tree / name).write_text(text)
        sources._root_override = tree
        _build._built.clear()  # it knows files by name, not by tree
        try:
            yield tree
        finally:
            sources._root_override = before
            _build._built.clear()
