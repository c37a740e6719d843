"""The kernel cache: keys, hits, trust, modes, eviction, and everything that may damage it.

Most tests replace NVRTC by a stub that counts, so that they test the cache and not the compiler. Attacks by other
processes are in ``test_cache_processes.py``.
"""
