"""Whole models, trained and run on text that every machine has: ``python -m bench e2e`` (docs/benchmarks.md)."""
