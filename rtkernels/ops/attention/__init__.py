"""Attention: exact forward and backward, packed sequences, decoding from a cache, merging of parts."""
