"""Functions with the names and argument orders of other libraries: ``compat.gn``, ``compat.aten``, ``compat.flaggems``.

Each function calls public ones, such as ``scaled_mm``; docs/how_to/migrate.md lists these calls.
"""

from __future__ import annotations

from rtkernels.compat import aten as aten
from rtkernels.compat import flaggems as flaggems
from rtkernels.compat import gn as gn

__all__ = ["aten", "flaggems", "gn"]
