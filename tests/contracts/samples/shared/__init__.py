"""Samples of ``ops/shared``."""
