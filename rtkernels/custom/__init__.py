"""Operators that users define: ``rtkernels.pointwise``, from C expressions."""
