"""Products under the names and in the argument order of other libraries: ``compat.gn``, ``compat.aten``.

Each function is a call of ``scaled_mm`` or ``grouped_mm``; docs/how_to/migrate.md has the calls themselves.
"""

from __future__ import annotations

from rtkernels.compat import aten as aten
from rtkernels.compat import gn as gn

__all__ = ["aten", "gn"]
