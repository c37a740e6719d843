"""Scans: running sums and extremes along a dimension, and what a scan of flags gives: compaction, repeated indices.
Device code: ``cuda_src/scan/``. Uses no other family.
"""
