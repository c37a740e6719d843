"""Whole models, trained on text that every machine has: ``python -m bench e2e train`` (docs/benchmarks.md)."""
