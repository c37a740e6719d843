"""What an op declares about itself for the benchmark and the tests.

Importing it costs nothing: no torch, no device.
"""

from rtkernels.testing.rows import Row

__all__ = ["Row"]
