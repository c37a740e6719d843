"""Benchmark of rtkernels: ``python -m bench run`` measures, ``python -m bench report`` shows.

Not part of the wheel. docs/benchmarks.md says how the numbers are taken.
"""
