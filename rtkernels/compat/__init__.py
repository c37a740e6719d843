"""Products with the names and argument orders of other libraries: ``compat.gn``, ``compat.aten``.

Each function calls ``scaled_mm`` or ``grouped_mm``; docs/how_to/migrate.md lists these calls.
"""

from __future__ import annotations

from rtkernels.compat import aten as aten
from rtkernels.compat import gn as gn

__all__ = ["aten", "gn"]
