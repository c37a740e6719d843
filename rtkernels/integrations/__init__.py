"""Adapters for other libraries, one module each, which imports that library: nothing else here imports them."""
